"""From lines to facts: each line that matches a sign of the book states the fact that the sign names. Pure.

    lines = FactReader(logs)
    facts = [*lines.read(), *...]

The readings (readings/) use the same reader for what several lines together state: it knows who wrote a line, when, and
in which start of the job.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause, Family, Sign, Trait
from allranks.facts.fact import NEVER_SAID, NOBODY, START, Fact, FactKind, Place, Said, When, Who
from allranks.model.errors import Exit, name_signal
from allranks.model.finding import Confidence
from allranks.why.attempts import Attempts
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.other_jobs import find_own_words, find_unowned
from allranks.why.people import People, differ, named, own_rank, peer_of
from allranks.why.summaries import SummaryEntry, read_summaries
from allranks.why.times import Times
from allranks.why.writers import find_uncaught

_GOES_ON = re.compile(
    r"(?i)\b(?:(?P<sure>retrying|skipping|will retry|ignoring it)|ran out of memory with exception)\b"
)
"""An error whose own line says that its process goes on; the last one is fairseq's, which tries to recover."""
_OF_ITS_OWN = frozenset((Family.NODE, Family.GPU, Family.STATE))
"""What a process can overcome alone; who tries again to connect has not."""
_BEGINS = re.compile(r"NCCL (?:error|communicator)|ncclUniqueId")
_GOES_ON_BELOW = tuple(map(re.compile, ("nccl[A-Z][A-Za-z]{2,30}: ", "Last error:", r"(?!\[|\w{1,40}: error)")))
"""How the lines below torch's report of an error of NCCL begin: its name, an announcement, and NCCL's own words."""
_INDENTED = re.compile(r"\s+[\w.]*[a-z](?:Error|Exception): ")
"""An exception in torchrun's summary; whatever precedes all lines may hide it from its mark."""
_OF_AGENTS = "static_tcp_rendezvous"
ENTRY_LINES = 1000
"""Number of lines of one worker's traceback in torchrun's summary, at most."""
CLIENTS = " clients joined"
"""Which the store's host counts: rank 0."""
MAX_ALIKE = 8
"""Number of facts of one sign that are kept of one writer in one file."""
MAX_RAISED = 1024
"""Number of equal errors in one file that may be of as many processes."""
_SUFFERED = frozenset((FactKind.PEER_LOST, FactKind.STORE_GONE))
_FATAL = frozenset((FactKind.RAISED, FactKind.STORE_GONE, FactKind.LINK_FAULT))
_COMES_AND_GOES = frozenset((FactKind.LINK_FAULT, FactKind.RECOVERED, FactKind.SCHEDULER_END))
REPORT_S = 1.0
"""A report of who is missing may stand so long below the timeout of who waited, as NCCL's desync report does."""
MAX_INFERRED = 64
"""Number of processes of one inference that get a fact of their own."""


def place_of(line: Line) -> Place:
    """Return the place of a line."""
    return Place(line.source.shown, line.number, line.text)


class FactReader:
    """Makes facts from lines."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        summaries = read_summaries(logs)
        self.people = People(logs, [entry.event.who for entry in summaries])
        self.times = Times(logs)
        self._exceptions = {event.line.at for event in logs.of("exception")}
        self._unowned = find_unowned(logs)
        self._own_words = find_own_words(logs)
        frames = [event for event in logs.of("frame") if _OF_AGENTS in event.values["file"]]
        self.agents_meet = {frame.line.source.shown for frame in frames}
        """Files in which the store's clients are torchrun's agents, one a node."""
        self.attempts = Attempts(logs, self.times)
        self.attempt_of = self.attempts.attempt_of
        self._uncaught = find_uncaught(logs)
        self._entries: defaultdict[str, list[SummaryEntry]] = defaultdict(list)
        """The workers of torchrun's summaries, by file."""
        for entry in summaries:
            self._entries[entry.when.source.shown].append(entry)
        lines = (event.line for event in logs.events if event.sign)
        self._headers = {line.at: line for line in lines if _BEGINS.search(line.text)}
        """The first lines of torch's reports of errors of NCCL, by their places."""

    def entry_of(self, line: Line) -> SummaryEntry | None:
        """Return the worker of torchrun's summary whose exception this line is; None: its process wrote it."""
        if not (line.text[:1].isspace() and (line.at in self._exceptions or _INDENTED.match(line.text))):
            return None
        entries = self._entries.get(line.source.shown, ())
        index = bisect_left(entries, line.number, key=lambda entry: entry.when.number) - 1
        is_its = index >= 0 and line.number - entries[index].when.number <= ENTRY_LINES
        return entries[index] if is_its else None

    def may_end(self, line: Line) -> bool:
        """Whether an exception may have ended a process, as far as its frames tell."""
        return (line.writer, line.text) in self._uncaught

    def state(self, kind: FactKind, line: Line, *, more: Iterable[Line] = (), **about: Any) -> Fact:
        """Return a fact that a line states, and `more` of them; its writer is `who`, unless `about` has another."""
        speaker = self.people.speaker(line)
        about.setdefault("who", speaker)
        about.setdefault("when", self.times.of(line))
        return Fact(
            kind=kind,
            speaker=speaker,
            places=tuple(map(place_of, (line, *more))),
            attempt=self.attempt_of(line),
            **about,
        )

    def infer(
        self,
        kind: FactKind,
        cause: str,
        lines: Sequence[Line],
        told: str,
        *,
        ranks: Iterable[int] = (),
        who: Iterable[Who] = (),
        confidence: Confidence = Confidence.LIKELY,
        said: Said = Said.INFERRED,
        **about: Any,
    ) -> Iterator[Fact]:
        """Return what follows from several lines, the most telling one first; it was before them.

        A fact for each process that it is about, by rank or by what else is known of it; `told` is the message, `about`
        has other fields.
        """
        about.setdefault("when", self.before(lines))
        about.setdefault("alternatives", find_cause(cause).also)
        all_of_them = [*(Who(rank=rank) for rank in ranks), *who] or [NOBODY]
        for one in all_of_them[:MAX_INFERRED]:
            yield self.state(
                kind,
                lines[0],
                more=lines[1:],
                who=self.people.know(one),
                cause=cause,
                told=told,
                confidence=confidence,
                said=said,
                **about,
            )

    def behind(self, lines: Sequence[Line], told: str, **about: Any) -> Iterator[Fact]:
        """Return who kept the others waiting, as infer does."""
        return self.infer(FactKind.MISSING, "straggler-rank", lines, told, **about)

    def before(self, lines: Iterable[Line]) -> When:
        """Return when something was that these lines show: before the first of them."""
        whens = [when for line in lines if (when := self.times.of(line)).clock and when.latest_s is not None]
        clocks = {when.clock for when in whens}
        if len(clocks) != 1:
            return NEVER_SAID
        return When(None, min(when.latest_s or 0.0 for when in whens), clocks.pop())

    def read(self) -> Iterator[Fact]:
        """Return the facts of all lines that match a sign; of equal ones of one writer and start, the first."""
        alike: defaultdict[tuple[object, ...], list[LogEvent]] = defaultdict(list)
        supported: set[str] = set()
        for event in self.logs.events:
            if event.sign is None or event.cause is None:
                continue
            if event.sign.fact is None:
                supported.add(event.cause.name)
                continue
            if Trait.ERROR_OF_SCRIPT in event.traits and event.line.at in self._exceptions:
                continue  # told with its place in the script (readings/tracebacks.py)
            entry = self.entry_of(event.line)
            start = self.attempt_of(event.line)
            same = alike[event.cause.id, event.sign.pattern, *event.line.writer, start, entry and entry.when.number]
            is_new = event.sign.fact in _COMES_AND_GOES or all(other.values != event.values for other in same)
            if len(same) < (MAX_ALIKE if is_new else MAX_RAISED * self._may_be_anothers(event)):
                same.append(event)
        by_line: defaultdict[tuple[object, ...], list[Fact]] = defaultdict(list)
        for events in alike.values():
            for event in events:
                for fact in self._facts(event):
                    by_line[event.line.at, event.sign.pattern if event.sign else ""].append(fact)
        for facts in by_line.values():  # of what the same words may mean, what other lines point to
            cause = next((fact.cause for fact in facts if fact.cause in supported), facts[0].cause)
            yield from (fact for fact in facts if fact.cause == cause)

    def _may_be_anothers(self, event: LogEvent) -> bool:
        """Whether a line may be another process's: an error that ends one, in a file that does not tell its writers."""
        assert event.sign is not None
        assert event.cause is not None
        is_exception = event.line.at in self._exceptions
        is_plain = event.cause.exit_code is Exit.USER_CODE or event.sign.said is Said.LAUNCHER
        is_error = self.may_end(event.line) if is_exception else is_plain
        return event.sign.fact is FactKind.RAISED and is_error and not self.speaker_of(event.line).is_process

    def _facts(self, event: LogEvent) -> Iterator[Fact]:
        assert event.sign is not None
        assert event.cause is not None
        kind, said, traits, at = event.sign.fact, event.sign.said, event.cause.traits, event.line.at
        if kind is None or kind is FactKind.ENQUEUED:  # numbers are read together (readings/watchdogs.py)
            return
        confidence = event.sign.confidence
        is_raised = at in self._exceptions
        if is_raised and kind is FactKind.SETTING:  # the words of a warning, and it gave up because of it
            kind, said = FactKind.RAISED, Said.SELF
        elif Trait.JOB_MAY_GO_ON in traits and confidence is not Confidence.CERTAIN:
            confidence = Confidence.UNDECIDED
        if Trait.FOLLOWS_A_DEATH in traits and kind is FactKind.STORE_GONE:  # why its host ended, it does not say
            confidence = Confidence.UNDECIDED
        goes_on = _GOES_ON.search(event.line.text) if kind is FactKind.RAISED else None
        if goes_on:
            confidence = Confidence.UNDECIDED
        peer = peer_of(event, self.people)
        names, things = named(event)
        if said is Said.SELF and "rank" in event.values and own_rank(event) is None:
            names = [who for name in names if (who := replace(name, rank=None))]
        if at in self._unowned and not names and confidence is Confidence.CERTAIN:  # perhaps another job's
            confidence = Confidence.LIKELY
        is_start = kind is FactKind.MISSING and Trait.ALL_MEET in traits
        ending = read_ending(event.sign, event.values)
        is_own_word = kind is FactKind.RAISED and Trait.ERROR_OF_SCRIPT in traits  # it says best what it is
        about: dict[str, Any] = {
            "said": said,
            "cause": event.cause.name,
            "confidence": confidence,
            "peer": peer,
            "group": event.values.get("group"),
            "seq": START if is_start else event.number("seq"),
            "op": event.values.get("op"),
            "code": ending.code,
            "signal": ending.signal,
            "alternatives": () if is_own_word or event.sign.confidence is Confidence.CERTAIN else event.cause.also,
            "told": event.line.text.strip()[:300] if is_own_word else tell(event.cause, event.values, ending.signal),
            "things": things,
            "interface": event.values.get("interface"),
            "is_of_job": at in self._own_words,
            "is_fatal": kind in _FATAL and goes_on is None and is_raised and self.may_end(event.line),
            "is_caught": kind is FactKind.RAISED and is_raised and not self.may_end(event.line),
            "is_overcome": goes_on is not None and bool(goes_on["sure"]) and event.cause.family in _OF_ITS_OWN,
        }
        if kind in _SUFFERED:  # whom it names is whom its writer lost
            about["peer"] = about["peer"] or (self.people.know(names[0]) if names else NOBODY)
            names, about["said"] = [], Said.SELF
        if kind is FactKind.NODE_LOST:  # who tells it notices some minutes later
            when = self.times.of(event.line)
            about["when"] = When(None, when.latest_s, when.clock)
        elif kind is FactKind.MISSING and (when := self.times.of(event.line)).earliest_s is not None:
            about["when"] = When(when.earliest_s - REPORT_S, when.latest_s, when.clock)
        for who in self._who(event.line, about["said"], names):
            yield self.state(kind, event.line, who=who, **about)

    def speaker_of(self, line: Line) -> Who:
        """Return the writer of a line of a worker; if the line does not tell, whom its parent announced before it."""
        if (entry := self.entry_of(line)) is not None:
            return self.people.know(entry.event.who)
        speaker = self.people.speaker(line)
        if speaker.rank is not None:
            return speaker
        for distance, begins in enumerate(_GOES_ON_BELOW, start=1):  # torch writes an error of NCCL as several lines
            above = self._headers.get((line.source.shown, line.number - distance))
            if above is not None and above.local_rank == line.local_rank and begins.match(line.text):
                return self.people.speaker(above) | speaker
        if speaker.local_rank is not None:
            return speaker
        counts = CLIENTS in line.text and line.source.shown not in self.agents_meet
        if (announced := self.people.announced(line)) or counts:
            return self.people.know(announced or Who(rank=0))
        return speaker

    def _who(self, line: Line, said: Said, names: Sequence[Who]) -> list[Who]:
        """Return whom a line is about: what it names, which its writer completes if it speaks of itself."""
        if said is Said.SELF:
            speaker = self.speaker_of(line)
        else:  # kernels and launchers speak of processes on their own node
            is_there = said in {Said.KERNEL, Said.LAUNCHER}
            node = self.people.node_of(line)
            speaker = Who(node=node) if is_there and node else NOBODY
            if not names and is_there and (dead := self.people.announced(line, is_caller=False)):
                return [self.people.know(dead)]
        whos = (who if differ(who, speaker) else who | speaker for who in names)
        return [*map(self.people.know, whos)] or [speaker]


class _Values(dict[str, object]):
    """The value from a line; if it is missing, a word that fits the sentence."""

    def __missing__(self, key: str) -> str:
        return {"node": "that node", "interface": "that interface", "rank": "that rank"}.get(key, "it")


def tell(cause: Cause, values: Mapping[str, str], signum: int | None = None) -> str:
    """Return the message of a cause with the values of a line, and the signal that ended a process."""
    of = "" if signum is None else f" of {name_signal(signum)}"
    return (cause.told or cause.title.rstrip(".")).format_map(_Values(values, of=of))


# --- How a process ended ----------------------------------------------------------------------------------------------

_OF_A_SHELL = 128
"""A shell adds the signal's number to it for the exit code; the status of wait() has it for a core dump."""
_WORDS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Trace/breakpoint trap": 5, "Aborted": 6,
    "Bus error": 7, "Floating point exception": 8, "Killed": 9, "Out Of Memory": 9, "User defined signal 1": 10,
    "Segmentation fault": 11, "User defined signal 2": 12, "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15,
    "CPU time limit exceeded": 24, "File size limit exceeded": 25,
}  # fmt: skip
"""glibc's strsignal, and SLURM's."""


class HowEnded(NamedTuple):
    """How a process ended, as far as a line says so."""

    signal: int | None = None
    code: int | None = None
    """Its exit code where no signal ended it."""


def read_ending(sign: Sign | None, values: Mapping[str, str]) -> HowEnded:
    """Return how a process ended, by what the groups of a sign, or of a mark (None), say."""
    number = _read_signal(values["signal"]) if values.get("signal") else (sign.signal if sign else None)
    if number is not None or not values.get("code"):
        return HowEnded(number)
    code = int(values["code"])
    ended_by = -code if code < 0 else code - _OF_A_SHELL
    return HowEnded(ended_by) if 0 < ended_by < signal.NSIG else HowEnded(code=code)


def _read_signal(text: str) -> int | None:
    """Return the number of `9`, `SIGKILL`, `KILL` or `Killed`; 139 is 11 with a core dump; None if it is none."""
    if text.isdecimal():
        return int(text) % _OF_A_SHELL
    return _WORDS.get(text, getattr(signal, f"SIG{text.removeprefix('SIG')}", None))
