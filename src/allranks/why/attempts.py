"""In which start of the job was a line written? Pure.

A launcher tells that it starts its workers again. A script that loops, or a job that is requeued into the same file,
only prints again what is printed once at a start: below the scheduler's word, or below a launcher's summary if the same
script fails again, or steps follow. Where less tells it, nothing above is certain.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from allranks.causes.cause import Trait
from allranks.facts.fact import Place, Said, When
from allranks.why.appended import REQUEUE, FurtherRun, find_further_runs
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.step_lines import NUMBER, is_of_training
from allranks.why.times import Times

RESTART = re.compile(r"(?:\d+/\d+ attempts left; +)?will restart worker group|restart_count=[1-9]\d*")
"""How torchrun's agent tells that it starts its workers again."""
ANEW = "elastic-no-resume"
_STARTS = frozenset(("started", "world"))
_LIBRARY = re.compile(r"-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|[/\\]bin[/\\]|^<|(?:^|[/\\])torch[/\\]|^torchrun$")


class Attempts:
    """The starts of the job."""

    def __init__(self, logs: Logs, times: Times) -> None:
        self._logs, self._times = logs, times
        self._begun: dict[tuple[str, str | None], list[int]] = {}
        """By file and node; of no node: where the first of its nodes began."""
        self._starts: list[When] = []
        """The earliest that is known of each further start of the job."""
        self._runs: defaultdict[str, list[int]] = defaultdict(list)
        """By file: where another run was appended that tells nothing at its start."""
        self._unsure: dict[str, int] = {}
        """By file: the last line of what may be a further start."""
        self._last_runs: dict[str, FurtherRun] = {}
        """By file, the last of these."""
        told = self._read_launchers()
        marks: defaultdict[str, list[LogEvent]] = defaultdict(list)
        for event in logs.of(*_STARTS, "failures", "task-end", Trait.ENDS_FROM_OUTSIDE):
            marks[event.line.source.shown].append(event)
        lines = {tail.source.shown: tail.lines for tail in logs.tails if tail.source.shown in marks}
        for shown, events in marks.items():
            if shown not in told and any(event.kind not in _STARTS for event in events):  # nothing begins again unended
                self._read_file(shown, events, [line for line in lines.get(shown, ()) if is_of_training(line.text)])
        runs = find_further_runs(logs, told)
        self._add_runs(run for run in runs if run.first.source.shown in told or not self._has_begun(run.first))

    def doubt(self, places: Sequence[Place]) -> str | None:
        """Return why what these lines show may be of another start than the last; None: nothing says so."""
        if any(place.line < self._unsure.get(place.source, 0) for place in places):
            return "the job begins again below it: these may be logs of several starts"
        run = self._find_run(places)
        if run is None or run.is_sure:
            return None
        return f"a process ended above it: {run.above}; if both are ranks of one job, begin there"

    def tell_above(self, places: Sequence[Place]) -> str | None:
        """Return how the run ended to whose output that of these lines was appended; None: there is none."""
        run = self._find_run(places)
        return f"an earlier run, or part, of the job ended above it: {run.above}" if run is not None else None

    def _find_run(self, places: Sequence[Place]) -> FurtherRun | None:
        return next((self._last_runs[place.source] for place in places if place.source in self._last_runs), None)

    def attempt_of(self, line: Line) -> int:
        """Return in which start of the job a line was written; where its file tells of none, the last that may be."""
        if line.source.attempt is not None:
            return line.source.attempt
        shown = line.source.shown
        if self._starts and not self._has_begun(line) and shown not in self._runs:
            when = self._times.of(line)
            return sum(not when.is_before(start) for start in self._starts)
        begun = self._begun.get((shown, line.node), self._begun.get((shown, None), ()))
        return bisect_right(begun, line.number) + bisect_right(self._runs.get(shown, ()), line.number)

    def _has_begun(self, line: Line) -> bool:
        """Whether its file tells that the job begins again."""
        return (line.source.shown, None) in self._begun

    def _add_runs(self, runs: Iterable[FurtherRun]) -> None:
        """Note where further runs begin; in several files the same ones do."""
        starts: list[When] = []
        for run in runs:
            line = run.first
            own = self._runs[line.source.shown]
            self._last_runs[line.source.shown] = run
            _date(starts, len(own), self._times.of(line))
            own.append(line.number)
            self._unsure.pop(line.source.shown, None)
        self._starts += starts

    def _read_launchers(self) -> set[str]:
        """Note the starts of which launchers tell, and return the files in which they do."""
        left: dict[tuple[str, str | None], str] = {}  # by file and node
        begun: set[str] = set()
        for event in self._logs.of("begun", ANEW):
            line, again = event.line, RESTART.search(event.line.text)
            shown, agent = line.source.shown, line.node
            is_told = again is not None and left.get((shown, agent)) == again[0]  # each node's agent tells it
            if (again and not is_told) or (event.kind == "begun" and shown in begun):
                self._note(line, agent)
            if again:
                left[shown, agent] = again[0]
            if again or event.kind == "begun":
                begun.add(shown)
        return begun

    def _read_file(self, shown: str, events: Sequence[LogEvent], steps: Sequence[Line]) -> None:
        """Note the starts that lines of one file repeat, those of each node for themselves."""
        seen: set[tuple[object, ...]] = set()
        ended: dict[str | None, Line] = {}
        over: dict[str | None, Line] = {}
        """Per node, the last end of a process, and that of the job."""
        repeated = sys.maxsize
        for event in events:
            line, key = event.line, (event.line.rank, event.line.local_rank, event.line.node, event.values.get("what"))
            if event.kind not in _STARTS:
                ended[line.node] = line
                is_told = event.sign is not None and event.sign.said is Said.SCHEDULER
                if event.kind == "failures" or is_told:
                    over[line.node] = line
                # After a time limit nothing begins the job again by itself.
                if is_told and "DUE TO TIME LIMIT" not in line.text and self._is_run_below(line, steps):
                    self._unsure[shown] = line.number + 1
            elif key not in seen:
                seen.add(key)
            elif ended:
                begun = max(self._begun.get((shown, line.node), (0,)))
                end = _last(over, line.node, begun)
                is_requeue = end is not None and REQUEUE.search(end.text) is not None
                fails_again, is_other = self._fails_again(line), self._fails_otherwise(line)
                goes_on = bool(steps) and steps[-1].number > line.number and not is_other
                if end is not None and (is_requeue or fails_again or goes_on) and self._is_later(event, end):
                    self._note(line, line.node)
                elif _last(ended, line.node, begun) is not None:
                    repeated = repeated if is_other else min(repeated, line.number)
                    if fails_again and not self._is_of_another_file(line):
                        self._unsure[shown] = line.number
        first = min((event.line.number for event in events if event.kind not in _STARTS), default=sys.maxsize)
        if (shown, None) not in self._begun and (number := _find_fall(steps, first, repeated)) is not None:
            self._unsure[shown] = number
        if (shown, None) in self._begun:  # whoever has not begun again still belongs to the first start
            for event in events:
                if event.kind in _STARTS:
                    self._begun.setdefault((shown, event.line.node), [])

    def _is_run_below(self, line: Line, steps: Sequence[Line]) -> bool:
        """Whether something of the user's runs below a line; a last step, of a handler of SIGTERM, does not count."""
        if self._fails_again(line) or self._fails_otherwise(line):
            return True
        return _find_fall(steps, line.number, 0) is not None and not self._is_of_another_file(steps[-1])

    def _is_later(self, event: LogEvent, end: Line) -> bool:
        """Whether a line of a start was written after an end; a script's own words may have been buffered."""
        is_later = self._times.of(end).is_before(self._times.of(event.line)) or event.kind == "started"
        return is_later and (REQUEUE.search(end.text) is not None or not self._is_of_another_file(event.line))

    def _is_of_another_file(self, line: Line) -> bool:
        """Whether several files stand one behind the other: times go back there, or other nodes' launchers report."""
        when = self._times.of(line)
        numbers, latest = self._latest.get((line.source.shown, when.clock), ((), ()))
        if (above := bisect_left(numbers, line.number)) and when.is_before(latest[above - 1]):
            return True
        hosts: tuple[set[str], set[str]] = set(), set()
        for told in self._logs.of("failure-host"):
            if told.line.source == line.source:
                hosts[told.line.number > line.number].add(told.values["node"])
        return all(hosts) and hosts[0].isdisjoint(hosts[1])

    @cached_property
    def _latest(self) -> dict[tuple[str, str], tuple[list[int], list[When]]]:
        """By file and clock: the numbers of the lines that are later than all above them, and their times."""
        found: dict[tuple[str, str], tuple[list[int], list[When]]] = {}
        for line in sorted((event.line for event in self._logs.events), key=lambda line: line.number):
            when = self._times.of(line)
            numbers, latest = found.setdefault((line.source.shown, when.clock), ([], []))
            if when.earliest_s is not None and (not latest or when.earliest_s > (latest[-1].earliest_s or 0.0)):
                numbers.append(line.number)
                latest.append(when)
        return found

    def _fails_otherwise(self, line: Line) -> bool:
        """Whether another script, or file of the user's, fails below a line."""
        return any(first > line.number for first, _ in self._failing.get(line.source.shown, {}).values())

    def _fails_again(self, line: Line) -> bool:
        """Whether one script, or file of the user's, fails above and below a line."""
        return any(first < line.number < last for first, last in self._failing.get(line.source.shown, {}).values())

    @cached_property
    def _failing(self) -> dict[str, dict[str, tuple[int, int]]]:
        """By file: the first and the last line of each failed script; where none is named, of each file in frames."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for kind, group in (("failed-script", "script"), ("frame", "file")):
            names: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
            for event in self._logs.of(kind):
                if not _LIBRARY.search(path := event.values[group]):
                    own, name = names[event.line.source.shown], path.rpartition("/")[2]
                    own[name] = own.get(name, (event.line.number,))[0], event.line.number
            found = names | found
        return found

    def _note(self, line: Line, node: str | None = None) -> None:
        shown, when = line.source.shown, self._times.of(line)
        begun = self._begun.setdefault((shown, node), [])
        begun.append(line.number)
        whole = self._begun.setdefault((shown, None), [])
        if len(begun) > len(whole):
            whole.append(line.number)
        _date(self._starts, len(begun) - 1, when)


def _date(starts: list[When], index: int, when: When) -> None:
    """Note the earliest that is known of a start."""
    if index == len(starts):
        starts.append(when)
    elif when.is_before(starts[index]):
        starts[index] = when


def _find_fall(steps: Sequence[Line], end: int, repeated: int) -> int | None:
    """Return the last line below an end in which a rank makes a lower step than above it; None: there is none.

    Late output of another rank does so, too: a writer without a rank counts only below a repeated line of a start.
    """
    last: dict[object, tuple[int, int | None]] = {}
    found: int | None = None
    for line in steps:
        is_known = (line.rank, line.local_rank) != (None, None) or not end < line.number < repeated
        if (match := NUMBER.search(line.text)) is None or not is_known:
            continue
        who, number = (line.rank, line.local_rank, line.node), int(match[1])
        before, pid = last.get(who, (number, None))
        if line.number > end and number < before and (pid is None or pid != line.pid):
            found = line.number
        if line.number < end or found is not None:
            last[who] = number, line.pid
    return found


def _last(ends: Mapping[str | None, Line], node: str | None, begun: int) -> Line | None:
    """Return the last end that a node, or the writer of no node, tells below a line."""
    own = [ends[name] for name in {node, None} & ends.keys() if ends[name].number > begun]
    return max(own, key=lambda line: line.number, default=None)
