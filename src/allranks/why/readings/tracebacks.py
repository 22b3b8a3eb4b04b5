"""Python's tracebacks in the logs: which exception was raised, and where in the user's files? Pure.

Lines of ranks are interleaved, so a traceback is collected from the frames of one writer up to its next exception. An
exception that a sign explains (out of memory, a lost connection) belongs to that cause; all others are errors of the
user's code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.facts.fact import Fact, FactKind
from allranks.model.finding import Confidence
from allranks.model.raised import is_wrapper
from allranks.why.facts_of_lines import MAX_RAISED, FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import differ
from allranks.why.readings.progress import NO_FAILURES, find_last_steps

_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3(?:\.\d+)?[/\\]|[/\\]allranks[/\\]join[/\\]|^<|^torch/"
    r"|[/\\]bin[/\\][^/\\]+$|^(?:torchrun|<frozen)|[/\\]torch[/\\](?:distributed|nn|utils|autograd)[/\\]|\.p(?:yx|xd|xi)$"
)
_COMMUNICATION = re.compile(r"[/\\]torch[/\\](?:distributed[/\\]\w+|nn[/\\]parallel[/\\]distributed)\.py$")
"""Files that call a backend, DDP's among them. DTensor, FSDP and checkpoints are below."""
_BRANCHES = frozenset(("AttributeError", "IndexError", "KeyError", "StopAsyncIteration", "StopIteration"))
"""Exceptions by which programs branch: what is raised while one is handled is an error of its own."""
_GOES_ON = frozenset(("_run_finalizers",))
"""Functions that print an exception and continue: those of multiprocessing, for cleanup at exit."""
_PARTS = frozenset(("traceback", "frame", "exception", "chained", "ignored"))
"""Marks that make up a traceback."""
_REACH = 10
"""Number of lines after an exception's first line that belong to its message."""


@dataclass(frozen=True, slots=True)
class Traceback:
    """One exception that was not caught."""

    kind: str
    """Name of its class without the module."""
    text: str
    frames: tuple[LogEvent, ...]
    line: Line
    """Line of the exception itself."""
    is_explained: bool
    """Whether a sign of another cause explains it."""
    is_known: bool = False
    """Whether a sign knows it as an error of the script's: a module that is missing."""
    is_consequence: bool = False
    """Whether such exceptions are consequences, or no errors: the mark of exceptions knows their names."""

    @property
    def headline(self) -> str:
        """`KeyError: 17`."""
        return f"{self.kind}: {self.text}" if self.text else self.kind

    @property
    def user_frame(self) -> LogEvent | None:
        """The last frame in a file of the user's."""
        mine = [frame for frame in self.frames if not _LIBRARY.search(frame.values["file"])]
        return mine[-1] if mine else None

    @property
    def is_of_communication(self) -> bool:
        """Whether a call of torch.distributed failed: a backend that no sign knows may have raised it."""
        last = self.frames[-1].values["file"] if self.frames else ""
        return self.kind == "RuntimeError" and _COMMUNICATION.search(last) is not None

    @property
    def is_of_command(self) -> bool:
        """Whether the script itself ran a command that failed: git, a compiler. A launcher's commands are ranks."""
        return self.kind == "CalledProcessError" and self.user_frame is not None


_Stated = Mapping[tuple[str, int], Sequence[LogEvent]]
"""What lines state, by their places."""


def read_tracebacks(logs: Logs) -> list[Traceback]:
    """Return all exceptions, by writer, in their order, except those after which Python says that it continues."""
    parts: defaultdict[object, list[LogEvent]] = defaultdict(list)
    stated: defaultdict[tuple[str, int], list[LogEvent]] = defaultdict(list)
    for event in logs.of(*_PARTS):
        parts[event.line.writer].append(event)
    for event in logs.events if parts else ():
        if event.states not in NO_FAILURES:
            stated[event.line.at].append(event)
    return [traceback for own in parts.values() for traceback in _of_writer(own, stated)]


def _of_writer(parts: Iterable[LogEvent], stated: _Stated) -> list[Traceback]:
    found: list[Traceback] = []
    frames: list[LogEvent] = []
    begun: Line | None = None
    link = ""  # to the exception before
    is_ignored = False
    for event in parts:
        if event.kind == "traceback":
            frames, begun = [], event.line
        elif event.kind == "ignored":
            is_ignored = True
        elif event.kind == "chained":
            link = event.line.text
        elif event.kind == "frame":
            frames.append(event)
        else:
            one = Traceback(
                event.values["type"].rpartition(".")[2],
                event.values.get("text", ""),
                tuple(frames),
                event.line,
                _is_explained(event.line, stated),
                any(Trait.ERROR_OF_SCRIPT in sign.traits for sign in stated.get(event.line.at, ())),
                "consequence" in event.values,
            )
            goes_on = is_ignored or (one.frames and one.frames[0].values.get("function") in _GOES_ON)
            linked, link, is_ignored, frames, begun = link, "", False, [], None
            if goes_on:
                continue
            if linked and found:
                # Python prints the reason first. But programs branch by exceptions, and libraries raise one for the
                # script.
                last = found[-1]
                is_better = linked.startswith("During handling") and last.kind in _BRANCHES
                is_better |= one.user_frame is not None and last.user_frame is None
                if one.is_explained or not is_better:
                    continue
                found.pop()
            if one.frames and found and is_wrapper(found[-1].headline):  # it stands in the text of the last one
                one = replace(one, frames=(*found.pop().frames, *one.frames))
            found.append(one)
    ends = frames[-1].line if frames else begun
    if ends is not None and not is_ignored:  # the log ends before the exception
        found.append(Traceback("", "", tuple(frames), ends, _is_explained(ends, stated)))
    return found


def list_raised(reader: FactReader) -> Iterator[Fact]:
    """Return the exceptions of the user's code: the first one of each process.

    Exceptions that nobody caught come first, then those with a frame in the user's files: a logger may print others. A
    script may go on without a module. One without its message says nothing. Several processes may have written the same
    one into a file that does not tell who wrote what, with the lines of their frames mixed. Who raised another one
    below had caught it.
    """
    tracebacks = read_tracebacks(reader.logs)
    ends = (one for one in tracebacks if one.frames and reader.may_end(one.line))
    last = {_name_process(one.line, reader): one for one in ends}
    is_only_begun = not any(one.frames for one in tracebacks)  # or frames are another program's: IPython's
    own = [one for one in tracebacks if not one.is_explained and (one.kind or one.user_frame or is_only_begun)]
    own = [one for one in own if one.is_known or one.is_of_command or not one.is_consequence]
    steps = find_last_steps(reader.logs) if own else {}

    def order(one: Traceback) -> tuple[bool, ...]:
        """Prefer what ended a process, below the last steps of its file, in the script's own code."""
        is_above = one.line.number < steps.get(one.line.source.shown, 0)
        return not one.kind, not reader.may_end(one.line), is_above, one.user_frame is None, one.is_known

    own.sort(key=order)
    has_ends = next(reader.logs.of("agent-failed", "failures", "launcher-failed", "task-end"), None) is not None
    by_writer: dict[object, list[Traceback]] = {}
    for traceback in own:
        line = traceback.line
        who = reader.speaker_of(line)
        same = by_writer.setdefault(process := _name_process(line, reader), [])
        if same and (same[0].headline != traceback.headline or len(same) == MAX_RAISED):
            continue
        same.append(traceback)
        known = same[0]
        frame = known.user_frame or (known.frames[-1] if known.frames else None)
        where = f"{frame.values['file'].rpartition('/')[2]}:{frame.values['line']}" if frame else ""
        text = known.headline or "an exception; the log does not have its text"
        final = last.get(process, traceback)
        is_followed = who.is_process and final.line.number > line.number and final.headline != traceback.headline
        is_told = (known.user_frame is not None or known.is_known) and not known.is_of_command
        may_end, has_steps_below = reader.may_end(line), line.number < steps.get(line.source.shown, 0)
        has_gone_on = has_steps_below and known.user_frame is None  # a library logged it
        seems_to_go_on = has_steps_below and not has_ends
        may_go_on = has_gone_on or (seems_to_go_on and not may_end)
        is_last_word = may_end or (bool(who) and not seems_to_go_on)
        is_sure = is_told and is_last_word and not (has_gone_on or is_followed or known.is_of_communication)
        cause = find_cause("user-code-error")
        confidence = Confidence.CERTAIN if is_sure else Confidence.UNDECIDED if has_gone_on else Confidence.LIKELY
        yield reader.state(
            FactKind.RAISED,
            line,
            more=[frame.line] if frame else [],
            who=who,
            when=reader.times.of(line),
            cause=cause.name,
            confidence=confidence if known.kind else Confidence.UNDECIDED,
            alternatives=() if is_sure else cause.also,
            told=(f"{where}: " if where else "") + text[:300],
            is_generic=not (known.is_known and may_end),
            is_fatal=may_end and not may_go_on,
            is_caught=not may_end,
            things=(where,) if where else (),
        )


def _name_process(line: Line, reader: FactReader) -> object:
    """Return what tells the processes of exceptions apart."""
    entry = reader.entry_of(line)
    return line.writer, reader.people.announced(line), entry.when.number if entry else 0, reader.attempt_of(line)


def _is_explained(line: Line, stated: _Stated) -> bool:
    """Whether what it says, or its message on the lines below, states a fact."""
    for number in range(line.number, line.number + _REACH + 1):
        for event in stated.get((line.source.shown, number), ()):
            if number == line.number and Trait.ERROR_OF_SCRIPT in event.traits:
                continue
            is_others = event.is_loss or Trait.REPORTED_BY_WATCHERS in event.traits or differ(event.line, line)
            if number == line.number or not is_others:
                return True
    return False
