"""Python's tracebacks in the logs: which exception was raised, and where in the user's files? Pure.

Lines of ranks are interleaved, so a traceback is collected from the frames of one writer up to its next exception. An
exception that a sign explains (out of memory, a lost connection) belongs to that cause; all others are errors of the
user's code.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.facts.fact import Fact, FactKind
from allranks.model.finding import Confidence
from allranks.model.raised import is_wrapper
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs

_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3(?:\.\d+)?[/\\]|[/\\]allranks[/\\]join[/\\]|^<|^torch/"
    r"|[/\\]bin[/\\][^/\\]+$|^(?:torchrun|<frozen)|[/\\]torch[/\\](?:distributed|nn|utils|autograd)[/\\]"
)
_AGENT = re.compile(r"torch[/\\]distributed[/\\](?:elastic|launcher)[/\\]")
_CONSEQUENCES = frozenset((
    "ActorDiedError", "BdbQuit", "BrokenPipeError", "CalledProcessError", "ChildFailedError",
    "ConnectionRefusedError", "ConnectionResetError", "DistBackendError", "DistNetworkError",
    "DistStoreError", "EOFError", "GeneratorExit", "KeyboardInterrupt", "LustreError",
    "ProcessExitedException", "ProcessRaisedException", "RayActorError", "RayTaskError",
    "RendezvousClosedError", "RendezvousClosedException", "RendezvousConnectionError",
    "RendezvousTimeoutError", "SignalException", "SignalInterrupt", "SystemExit", "TimeoutError",
    "TimeoutExpired", "WorkerCrashedError",
))  # fmt: skip
"""Exceptions that are consequences, or no errors."""
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
    """Whether a sign of a known cause explains it."""

    @property
    def is_wrapper(self) -> bool:
        """Whether it only hands on another one, whose traceback then follows in its text."""
        return is_wrapper(f"{self.kind}: {self.text}")

    @property
    def is_launchers(self) -> bool:
        """Whether it was raised in torchrun's agent."""
        return bool(self.frames) and bool(_AGENT.search(self.frames[-1].values["file"]))

    @property
    def user_frame(self) -> LogEvent | None:
        """The last frame in a file of the user's."""
        mine = [frame for frame in self.frames if not _LIBRARY.search(frame.values["file"])]
        return mine[-1] if mine else None


def read_tracebacks(logs: Logs) -> list[Traceback]:
    """Return all exceptions, in their order, except those after which Python says that it continues."""
    found: list[Traceback] = []
    wrappers: dict[object, int] = {}  # the number of the last one of each writer
    frames: dict[object, list[LogEvent]] = {}
    chains: dict[object, bool] = {}
    ignored: dict[object, bool] = {}  # False: announced, and not begun
    parts = [event for event in logs.events if event.kind in _PARTS]
    explained = _explained_lines(logs, {event.line.source.shown for event in parts})
    for event in parts:
        who = (event.line.source.shown, event.line.rank, event.line.local_rank, event.line.node)
        if event.kind == "traceback":
            frames[who] = []
            if who in ignored:
                if ignored[who] and not chains.get(who):
                    del ignored[who]
                else:
                    ignored[who] = True
        elif event.kind == "ignored":
            ignored[who] = False
        elif event.kind == "chained":
            chains[who] = event.line.text.startswith("During handling")
        elif event.kind == "frame":
            frames.setdefault(who, []).append(event)
        elif event.kind == "exception":
            is_explained = _is_explained(event.line, explained)
            own = frames.pop(who, [])
            if ignored.get(who) or (own and own[0].values.get("function") in _GOES_ON):
                chains.pop(who, None)
                continue
            if (is_handled := chains.pop(who, None)) is not None and found:
                # Python prints the first exception first: it is the reason, unless the script handles it.
                last = found[-1]
                if is_handled and last.kind in _BRANCHES and not last.is_explained and own:
                    found.pop()
                elif last.is_explained or not is_explained:
                    continue
            kind = event.values["type"].rpartition(".")[2]
            one = Traceback(kind, event.values.get("text", ""), tuple(own), event.line, is_explained)
            if (number := wrappers.pop(who, None)) is not None and own:  # it stands in the text of the last one
                outer = found[number]
                found[number] = one if one.user_frame else replace(one, frames=(*one.frames, *outer.frames))
            else:
                number = len(found)
                found.append(one)
            if one.is_wrapper:
                wrappers[who] = number
    for speaking, left in frames.items():
        if left and speaking not in ignored:  # the log ends before the exception
            found.append(Traceback("", "", tuple(left), left[-1].line, _is_explained(left[-1].line, explained)))
    return found


def list_raised(reader: FactReader) -> Iterator[Fact]:
    """Return the exceptions of the user's code: the first one of each process.

    Exceptions with a frame in the user's files come first: a logger may print a library's. A launcher's own exception
    is no error of the user, and one without its message says nothing.
    """
    own = [
        traceback
        for traceback in read_tracebacks(reader.logs)
        if not traceback.is_explained
        and traceback.kind not in _CONSEQUENCES
        and not traceback.is_launchers
        and (traceback.kind or traceback.user_frame)
    ]
    own.sort(key=lambda traceback: (not traceback.kind, traceback.user_frame is None))
    cause = find_cause("user-code-error")
    seen: set[object] = set()
    for traceback in own:
        line = traceback.line
        who = (line.source.shown, line.rank, line.local_rank, line.node)
        if who in seen or (seen and not traceback.kind):
            continue
        seen.add(who)
        frame = traceback.user_frame or (traceback.frames[-1] if traceback.frames else None)
        where = f"{frame.values['file'].rpartition('/')[2]}:{frame.values['line']}" if frame else ""
        text = f"{traceback.kind}: {traceback.text}" if traceback.text else traceback.kind
        text = text or "an exception; the log does not have its text"
        confidence = Confidence.CERTAIN if traceback.user_frame else Confidence.LIKELY
        speaker = reader.speaker_of(line)
        yield reader.state(
            FactKind.RAISED,
            line,
            more=[frame.line] if frame else [],
            who=speaker,
            cause=cause.name,
            confidence=confidence if traceback.kind else Confidence.UNDECIDED,
            alternatives=cause.also,
            told=(f"{where}: " if where else "") + text[:300],
            is_generic=True,
            things=(where,) if where else (),
        )


def _explained_lines(logs: Logs, sources: Collection[str]) -> dict[str, list[tuple[int, bool, Line]]]:
    """Return the lines that explain an exception, by source; True: also one whose first line is above it."""
    lines: dict[str, list[tuple[int, bool, Line]]] = {}
    for event in logs.events:
        source = event.line.source.shown
        if event.sign is None or source not in sources:
            continue
        if event.states is None:
            continue
        # A line with a logger's own header is not part of an exception's message.
        goes_on = not event.is_loss and event.line.time is None and Trait.REPORTED_BY_WATCHERS not in event.traits
        lines.setdefault(source, []).append((event.line.number, goes_on, event.line))
    return lines


def _is_explained(line: Line, explained: dict[str, list[tuple[int, bool, Line]]]) -> bool:
    lines = explained.get(line.source.shown, [])
    for number, goes_on, other in lines[bisect_left(lines, (line.number, False)) :]:
        if number > line.number + _REACH:
            return False
        if number == line.number or (goes_on and not _is_anothers(other, line)):
            return True
    return False


def _is_anothers(other: Line, line: Line) -> bool:
    """Whether two lines name different writers; a line that names none may be of either."""
    own = ((line.node, other.node), (line.rank, other.rank), (line.local_rank, other.local_rank))
    return any(mine is not None and its is not None and mine != its for mine, its in own)
