"""Where did a script, or the scheduler, begin the job again in one file, though no launcher says so? Pure.

What a process prints once at its start stands there again, below the end of the job, and steps of the same training
follow. The end of one task is none of the job: its summary is, the scheduler's word, or the ends of all known tasks.
A script's own words may have been buffered, and count only if they are dated later than that end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from allranks.causes.cause import Trait
from allranks.facts.fact import Said
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import MAX_RANKS, parse_ranks
from allranks.why.step_lines import NUMBER, is_of_training
from allranks.why.times import Times

REQUEUE = re.compile(r"DUE TO (?:JOB REQUEUE|PREEMPTION)")
"""The scheduler begins the same script again."""
_STARTS = frozenset(("started", "world"))
_ENDS = ("failures", "task-end", Trait.ENDS_FROM_OUTSIDE)
_LIBRARY = re.compile(r"-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|[/\\]bin[/\\]|^<|(?:^|[/\\])torch[/\\]|^torchrun$")
_NO_WORDS = re.compile(r"\d[\d.]*(?:e[-+]?\d+)?|[^A-Za-z]")
_SIGNALS = ("Signal", "KeyboardInterrupt")
"""How exceptions begin that tell of a signal."""


class Loops:
    """The further starts that only repeated lines tell of, in files other than those in which a launcher told them."""

    def __init__(self, logs: Logs, times: Times, told: Collection[str]) -> None:
        self.starts: list[tuple[str | None, Line]] = []
        """Nodes, None where the lines of a file name none, and where they began again."""
        self.nodes: set[tuple[str, str | None]] = set()
        """Files and nodes with a line of a start."""
        self.requeued: dict[str, int] = {}
        """Files in which something fails below the line of a requeue, and no line tells of a start: that line."""
        self.goes_back = False
        """Whether the steps of a writer begin again below the end of a process, in a file without a line of a start."""
        marks: defaultdict[str, list[LogEvent]] = defaultdict(list)
        for event in logs.of(*_STARTS, *_ENDS):
            marks[event.line.source.shown].append(event)
        ends = (shown for shown, events in marks.items() if any(event.kind not in _STARTS for event in events))
        ended = dict.fromkeys(shown for shown in ends if shown not in told)
        others: defaultdict[str, list[LogEvent]] = defaultdict(list)
        for event in logs.events if ended else ():
            if event.line.source.shown in ended:
                others[event.line.source.shown].append(event)
        lines = {tail.source.shown: tail.lines for tail in logs.tails if tail.source.shown in ended}
        for shown in ended:
            file = _File(marks[shown], others[shown], lines.get(shown, ()))
            starts = file.find_starts(times)
            self.starts += starts
            self.nodes |= {(shown, node) for node in file.nodes}
            last = max((line.number for _, line in starts), default=0)
            if (number := file.find_requeue()) > last:
                self.requeued[shown] = number
            self.goes_back |= not starts and file.goes_back()


class _File:
    """What one file tells of starts and ends."""

    def __init__(self, told: Sequence[LogEvent], events: Sequence[LogEvent], lines: Sequence[Line]) -> None:
        self._told, self._events, self._lines = told, events, lines
        self._steps = [line for line in lines if is_of_training(line.text)]
        self._repeated: int | None = None
        """The first line of a start that is there again and may be one."""
        self.nodes = {event.line.node for event in told if event.kind in _STARTS}

    def find_starts(self, times: Times) -> list[tuple[str | None, Line]]:
        """Return where the job began again, on each node that its lines name."""
        found: list[tuple[str | None, Line]] = []
        if not self.nodes:
            return found
        seen: set[tuple[object, ...]] = set()
        begun: dict[str | None, int] = {}
        over: dict[str | None, Line] = {}
        gone: set[int] = set()
        tasks = self._list_tasks()
        refuted: dict[Line | None, bool] = {}
        """By the end above: each rank's line of a start asks the same."""
        for event in self._told:
            line = event.line
            if event.kind == "task-end":
                gone.update(parse_ranks(event.values["ranks"]))
                if gone >= tasks:
                    over[None] = line
            elif event.kind not in _STARTS:
                if event.sign is None or event.sign.said is Said.SCHEDULER:
                    over[line.node] = line
            elif (key := (line.rank, line.local_rank, line.node, event.values.get("what"))) not in seen:
                seen.add(key)
            else:
                ends = [end for node in {line.node, None} if (end := over.get(node))]
                end = max(ends, key=lambda end: end.number, default=None)
                if (end or gone) and end not in refuted:
                    refuted[end] = self._is_refuted(line, end)
                if not refuted.get(end, True):
                    is_new = end is not None and end.number > begun.get(line.node, 0)
                    if end is not None and is_new and self._is_followed(line, end, event.kind, times):
                        found.append((line.node, line))
                        begun[line.node] = line.number
                        gone.clear()
                    elif self._repeated is None:
                        self._repeated = line.number
        return found

    def find_requeue(self) -> int:
        """Return the last line of a requeue below which something fails; 0: there is none."""
        requeues = [event.line.number for event in self._told if REQUEUE.search(event.line.text)]
        if not requeues:
            return 0
        errors = [event for event in self._events if event.kind == "exception"]
        errors = [event for event in errors if not event.values["type"].rpartition(".")[2].startswith(_SIGNALS)]
        last = max(requeues)
        return last if any(event.line.number > last for event in errors) else 0

    def goes_back(self) -> bool:
        """Whether the steps of a writer begin again below the end of a process.

        Late output of another rank does so, too: a writer without a rank counts only where a line of a start is there
        again.
        """
        end = min(event.line.number for event in self._told if event.kind not in _STARTS)
        last: dict[object, tuple[int, int | None]] = {}
        for line in self._steps:
            if (match := NUMBER.search(line.text)) is None:
                continue
            who, number = (line.rank, line.local_rank, line.node), int(match[1])
            if line.number < end:
                last[who] = number, line.pid
                continue
            before, pid = last.get(who, (number, None))
            is_known = line.rank is not None or line.local_rank is not None
            is_known = is_known or (self._repeated is not None and self._repeated < line.number)
            if is_known and number < before and (pid is None or pid != line.pid):
                return True
        return False

    def _list_tasks(self) -> set[int]:
        """Return all tasks or ranks that are known."""
        said = [event.line for event in self._events]
        known = {line.rank for line in (*said, *self._lines) if line.rank is not None}
        for event in self._told:
            if event.kind == "task-end":
                known.update(parse_ranks(event.values["ranks"]))
            elif event.kind == "world" and (world := event.number("world")) is not None:
                known.update(range(min(world, MAX_RANKS)))
        return known

    def _is_refuted(self, line: Line, end: Line | None) -> bool:
        """Whether a rank writes on, or another script is started."""
        writers: defaultdict[bool, set[object]] = defaultdict(set)
        last = end.number if end is not None else line.number
        for other in (*(event.line for event in self._events), *self._lines):
            is_between = last <= other.number <= line.number
            is_rank = other.rank is not None or other.local_rank is not None
            if is_rank and other.pid is not None and not other.is_of_pod and not is_between:
                writers[other.number > line.number].add((other.node, other.rank, other.local_rank, other.pid))
        return bool(writers[True] & writers[False]) or not self._is_same_script(line.number)

    def _is_same_script(self, number: int) -> bool:
        """Whether the same training is above and below a line, by its names, or else by the words of its steps."""
        names = {
            kind: _part(number, ((event.line, name) for event in self._events if (name := _script(event, kind))))
            for kind in ("failed-script", "frame")
        }
        above, below = names["failed-script"]
        if above and below:
            return bool(above & below)
        above, below = names["frame"]
        if above & below:
            return True
        above, below = _part(number, ((line, _NO_WORDS.sub("", line.text)) for line in self._steps))
        return not above or not below or bool(above & below)

    def _is_followed(self, line: Line, end: Line, kind: str, times: Times) -> bool:
        """Whether steps follow, or a requeue was before; and whether it was later."""
        is_requeue = REQUEUE.search(end.text) is not None
        if not is_requeue and (not self._steps or self._steps[-1].number < line.number):
            return False
        when, before = times.of(line), times.of(end)
        return before.is_before(when) or (kind == "started" and not when.is_before(before))


def _script(event: LogEvent, kind: str) -> str:
    """Return the name of the script, or of a file of the user's, that a line of this kind names; empty: none."""
    if event.kind != kind:
        return ""
    path = event.values["script" if kind == "failed-script" else "file"]
    return "" if _LIBRARY.search(path) else path.rpartition("/")[2]


def _part(number: int, named: Iterable[tuple[Line, str]]) -> tuple[set[str], set[str]]:
    """Return what is named above a line, and what below it."""
    above: set[str] = set()
    below: set[str] = set()
    for line, name in named:
        (above if line.number < number else below).add(name)
    return above, below
