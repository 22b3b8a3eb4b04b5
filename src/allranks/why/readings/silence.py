"""If no line shows a failure: did the job end well, or does it hang without a message? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.facts.fact import NOBODY, Place, Who
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion, describe
from allranks.why.facts_of_lines import place_of
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import People
from allranks.why.readings.arrivals import read_members
from allranks.why.step_lines import SLURM, is_step

LAST_LINES = 5
LONG_S = 1200.0
"""Time without progress while other lines continue: a checkpoint or an evaluation takes minutes."""
LEAST_BEATS = 3
"""Number of equal lines."""
_ASK = "allranks stack JOB while it hangs; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL for the next run"
_FROM_OUTSIDE = "the job was ended from outside; no earlier line reports a failure or what it waited for"
"""Somebody ended it because it hung."""
_GOES_ON = re.compile(
    r"(?i)\b(?:it(?:eration)?|steps?|epochs?|batch)\b\W{0,12}\d|\d(?:\.\d{1,12})?\s?(?:it/s|s/it|examples/s|tokens?/s|samples/s)"
    r"|\bloss\b\W{0,4}\d|Init COMPLETE|\b100%\||completed|finished|successfully|training (?:done|complete)"
    r"|out-of-place|# Avg bus bandwidth|NCCL INFO .{0,40}\bConnected (?:all|after) "
)
_EXCEPTION = re.compile(r"^[\w.]*[a-z](?:Error|Exception): ")
"""Its text may have a command with `'--epochs', '180'` in it."""
_INTERRUPTED = re.compile(r"(?:^|\^C)KeyboardInterrupt\b|^\^C|\^C\s*$")
_NCCL = re.compile(
    r"NCCL WARN (?!Failed to open lib|Could not find a path for pattern)"
    r"|NCCL INFO [\w./+-]+:\d+ (?:\(\S{1,80}\) )?-> [1-9]"
)
"""NCCL's complaints other than those about optional parts, or the source lines through which an error passed."""
_ALARM = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|FAILED)\b|\b[A-Z]\w*(?:Error|Exception)\b(?!s|\()|\[E \w|\b[EF]\d{3,4} \d\d:\d\d"
    r"|(?i:(?:^|[\s:\]])(?:fatal|error)(?::| [0-9]| in\b)|core dumped|unhandled|\bfailed (?:to|with)\b"
    r"|(?:: |with )failed\b)"
)
"""Words of a failure. Healthy runs have them, too: they count only if no progress follows."""
_HARMLESS = re.compile(
    r"NCCL WARN |\b(?:INFO|DEBUG|WARNING|[a-zA-Z]*Warning)\b|NCCL TRACE|\[W\d{3,4} |\[W \w|^[IW]\d{4} "
)
"""Lines that say themselves that they are no failure."""
_BEGUN = re.compile(r"NCCL INFO .{0,200}- Init START$")
_MADE = re.compile(r"Init COMPLETE|NCCL INFO Connected all|NCCL WARN ")
_DIALS = re.compile(r"returned Connection refused, retrying")
"""Normal while other ranks start, and overcome then."""
_COMPLAINS = re.compile(r"(?i)\b(?:fail(?:ed|ure)?|not ready|unable|retry(?:ing)?|timed? ?outs?|refused|unreachable)\b")
"""What a log waits for in vain if it ends with this line repeatedly."""
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_STUCK = re.compile(
    r"(?i)\b(?:hangs?|hung|stuck|freezes|frozen) (?:here|there|forever|at this|for (?:hours|minutes))\b"
)


@dataclass(frozen=True)
class _Ending:
    """How logs end that report no failure."""

    logs: Logs
    people: People

    @cached_property
    def lines(self) -> list[Line]:
        """All that was kept of them."""
        return [line for tail in self.logs.tails for line in tail.lines]

    @cached_property
    def last(self) -> list[Line]:
        """The last few of each."""
        return [line for tail in self.logs.tails for line in tail.lines[-LAST_LINES:]]

    @cached_property
    def goes(self) -> list[Line]:
        """Those that show progress."""
        return [line for line in self.lines if _goes_on(line)]


def conclude_silence(logs: Logs, people: People, found: Sequence[Conclusion]) -> Iterator[Conclusion]:
    """Return healthy or silent-hang, if no line reports a failure."""
    ending = _Ending(logs, people)
    finished = [event.line for event in logs.of("healthy")]
    outside = [conclusion for conclusion in found if Trait.ENDS_FROM_OUTSIDE in conclusion.cause.traits]
    failures = [conclusion for conclusion in found if conclusion.is_failure] or ([] if finished else outside)
    if ending.last and not failures:
        hang = None if finished else next((hang for check in _CHECKS if (hang := check(ending))), None)
        sureness = Confidence.LIKELY if ending.goes else Confidence.UNDECIDED
        yield hang or _tell(
            "healthy",
            "these logs show no failure",
            finished[:1] or ending.goes[-1:] or ending.last[-1:],
            confidence=Confidence.CERTAIN if finished else sureness,
        )


def _tell(
    cause: str,
    message: str,
    evidence: Iterable[Line | Place],
    *,
    confidence: Confidence = Confidence.UNDECIDED,
    speaker: Who = NOBODY,
    ask: str = "",
) -> Conclusion:
    places = tuple(place_of(line) if isinstance(line, Line) else line for line in evidence)
    return Conclusion(find_cause(cause), confidence, describe(speaker), message, places, ask=ask)


def _hang(message: str, evidence: Iterable[Line | Place], **about: Any) -> Conclusion:
    return _tell("silent-hang", message, evidence, ask=_ASK, **about)


def _stops(ending: _Ending) -> Conclusion | None:
    """Somebody says that it hangs, or other programs went on for long after the last progress."""
    goes = ending.goes[-1:]
    silent_s = _span_s(ending.lines[ending.lines.index(goes[0]) + 1 :]) if goes else 0.0
    if silent_s < LONG_S and not any(_STUCK.search(line.text) for line in ending.lines):
        return None
    others = f"; others continue for {silent_s / 60:.0f} minutes" if silent_s >= LONG_S else ""
    message = f"the job's own output stops without a reason{others}"
    return _hang(message, [*goes, ending.last[-1]], confidence=Confidence.LIKELY)


def _only_beats(ending: _Ending) -> Conclusion | None:
    """A log repeats lines at its end for long, except for their numbers: metrics, a heartbeat."""
    for tail in ending.logs.tails:
        usual = {_NUMBERS.sub("", line.text) for line in tail.lines[-2:]}
        beats: list[Line] = []
        for line in reversed(tail.lines):
            if _NUMBERS.sub("", line.text) not in usual or _goes_on(line):
                break
            beats.insert(0, line)
        if LEAST_BEATS <= len(beats) < len(tail.lines) and (span_s := _span_s(beats)) >= LONG_S:
            message = (
                f"for {span_s / 60:.0f} minutes, only another program repeated the same lines; the job printed nothing"
            )
            return _hang(message, [beats[0], beats[-1]], confidence=Confidence.LIKELY)
    return None


def _all_announced(ending: _Ending) -> Conclusion | None:
    """All ranks reported their start, and the log ends with that."""
    members, last = read_members(ending.logs), ending.last[-1]
    wanted = max((event.number("wanted") or 0 for event in members), default=0)
    ends = any((event.line.source, event.line.number) == (last.source, last.number) for event in members)
    if not ends or not len({event.values["rank"] for event in members}) == wanted > 1:
        return None
    message = f"all {wanted} ranks reported their start, then the log ends: they wait for each other in "
    return _hang(message + "init_process_group, or the log was saved too early", [last])


def _half_made(ending: _Ending) -> Conclusion | None:
    """NCCL began a communicator, and no line says that one was completed."""
    begun = [line for line in ending.lines if _BEGUN.search(line.text)]
    if not begun or any(_MADE.search(line.text) for line in ending.lines):
        return None
    message = (
        "the log ends while NCCL creates a communicator: the ranks wait for each other, or the log was saved too early"
    )
    return _hang(message, [begun[-1], ending.last[-1]])


def _interrupted(ending: _Ending) -> Conclusion | None:
    """Somebody pressed Ctrl-C."""
    stopped = [line for line in ending.lines if _INTERRUPTED.search(line.text)]
    has_begun = any(is_step(line.text) for line in ending.lines)
    sureness = Confidence.UNDECIDED if has_begun else Confidence.LIKELY
    return _hang(_FROM_OUTSIDE, stopped[-1:], confidence=sureness) if stopped else None


def _dials(ending: _Ending) -> Conclusion | None:
    """A rank still connects to another one."""
    dials = [line for line in ending.last if _DIALS.search(line.text) and line not in ending.goes]
    message = "the log ends while a rank still connects to another one, which does not listen"
    ask = "the log of that other rank: did it start, and on which address does it listen?"
    speaker = ending.people.speaker(dials[-1]) if dials else NOBODY
    return _tell("peer-connection-lost", message, dials[-1:], speaker=speaker, ask=ask) if dials else None


def _complains_again(ending: _Ending) -> Conclusion | None:
    """A log ends with the same complaint at least three times, except for its numbers.

    A line that matches a sign is judged by its sign: torch's sockets complain about IPv6 in healthy jobs.
    """
    known = {event.line.at for event in ending.logs.events}
    for tail in ending.logs.tails:
        texts = [_NUMBERS.sub("", line.text) for line in tail.lines[-2 * LAST_LINES :]]
        for line in tail.lines[-2:]:
            is_new = line.at not in known and line not in ending.goes
            if is_new and texts.count(_NUMBERS.sub("", line.text)) >= LEAST_BEATS and _COMPLAINS.search(line.text):
                message = "the log ends with the same complaint, repeated: the job waits for something that does not "
                return _hang(message + "happen", [line], speaker=ending.people.speaker(line))
    return None


def _alarms(ending: _Ending) -> Conclusion | None:
    """Lines have words of a failure, after which no line of the same source shows progress; no sign explains them.

    NCCL complains about a pair of ranks, others about themselves.
    """
    last = {line.source.shown: line.number for line in ending.goes}
    alarms = [
        line
        for line in ending.lines
        if line.number > last.get(line.source.shown, 0)
        and (_NCCL.search(line.text) or (_ALARM.search(line.text) and not _HARMLESS.search(line.text)))
        and (_EXCEPTION.search(line.text) or not _GOES_ON.search(line.text))
    ]
    if not alarms:
        return None
    nccl = [line for line in alarms if _NCCL.search(line.text)]
    return _tell(
        "nccl-pair-failed" if nccl else "user-code-error",
        "these lines report a failure that allranks does not know",
        (nccl or alarms)[:3],
        speaker=ending.people.speaker((nccl or alarms)[0]),
        ask="the lines before these, and the logs of the other ranks",
    )


_CHECKS = (_stops, _only_beats, _all_announced, _half_made, _interrupted, _dials, _complains_again, _alarms)
"""Order matters: the surest first."""


def _goes_on(line: Line) -> bool:
    """Whether it shows progress; SLURM's steps are not training steps, and neither is a quotation in an exception."""
    return bool(_GOES_ON.search(line.text)) and not SLURM.search(line.text) and not _EXCEPTION.search(line.text)


def _span_s(lines: Sequence[Line]) -> float:
    """Return the time between the first and the last of these lines, in seconds."""
    dated = [line for line in lines if line.time is not None and line.has_date]
    # A time without a year cannot be compared with one that has a year.
    times = [line.time or 0.0 for line in dated if line.has_year == dated[0].has_year]
    return max(times) - min(times) if times else 0.0
