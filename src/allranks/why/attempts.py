"""In which start of the job was a line written? Pure.

A launcher tells that it starts its workers again. A script that loops, or a job that is requeued into the same file,
only prints again what is printed once at a start.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping

from allranks.causes.cause import Trait
from allranks.facts.fact import When
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.step_lines import NUMBER, SLURM, is_step
from allranks.why.times import Times

RESTART = re.compile(r"(?:\d+/\d+ attempts left; +)?will restart worker group|restart_count=[1-9]\d*")
"""How torchrun's agent tells that it starts its workers again."""
ANEW = "elastic-no-resume"


class Attempts:
    """The starts of the job."""

    def __init__(self, logs: Logs, times: Times) -> None:
        self._times = times
        self._begun: defaultdict[str, list[int]] = defaultdict(list)
        self._starts: list[When] = []
        """The earliest that is known of each further start of the job."""
        left: dict[str, str] = {}
        begun: set[str] = set()
        for event in logs.of("begun", ANEW):
            source = event.line.source.shown
            again = RESTART.search(event.line.text)
            is_first = event.kind == "begun" and source not in begun
            if again or event.kind == "begun":
                begun.add(source)
            if not is_first and (event.kind == "begun" or (again and left.get(source) != again[0])):
                self._note(event.line)  # each node's agent tells it
            if again:
                left[source] = again[0]
        for line in list(_find_loops(logs, times)):
            if line.source.shown not in begun:
                self._note(line)
        self.may_be_more = _goes_back(logs, self._begun)
        """Whether the job may have been started more often than any line says."""

    def _note(self, line: Line) -> None:
        begun, when = self._begun[line.source.shown], self._times.of(line)
        insort(begun, line.number)
        attempt = len(begun) - 1
        if attempt == len(self._starts):
            self._starts.append(when)
        elif attempt < len(self._starts) and when.is_before(self._starts[attempt]):
            self._starts[attempt] = when

    def attempt_of(self, line: Line) -> int:
        """Return in which start of the job a line was written; where its file tells of none, the last that may be."""
        if line.source.attempt is not None:
            return line.source.attempt
        if self._starts and line.source.shown not in self._begun:
            when = self._times.of(line)
            return sum(not when.is_before(start) for start in self._starts)
        return bisect_right(self._begun.get(line.source.shown, ()), line.number)


def _find_loops(logs: Logs, times: Times) -> Iterator[Line]:
    """Yield where a script, or the scheduler, began the job again in one file.

    What a process prints once at its start stands there again, below the end of a process, and a step of the training
    follows. A script's own words may have been buffered, and count only if they are dated later than that end.
    """
    steps: dict[str, int] = {}
    for tail in logs.tails:
        own = (line.number for line in tail.lines if is_step(line.text) and not SLURM.search(line.text))
        steps[tail.source.shown] = max(own, default=0)
    seen: set[tuple[object, ...]] = set()
    ended: dict[tuple[str, str | None], Line] = {}
    for event in logs.of("started", "world", "failures", "task-end", Trait.ENDS_FROM_OUTSIDE):
        line = event.line
        source = line.source.shown
        if event.kind not in {"started", "world"}:
            ended[source, line.node] = line
            continue
        key = source, line.rank, line.local_rank, line.node, event.values.get("what")
        end = ended.get((source, line.node)) or ended.get((source, None))  # one file may have the lines of many pods
        if end is None or key not in seen or line.number > steps[source]:
            seen.add(key)
            continue
        when, before = times.of(line), times.of(end)
        if before.is_before(when) or (event.kind == "started" and not when.is_before(before)):
            yield line
            ended = {place: other for place, other in ended.items() if place[0] != source}


def _goes_back(logs: Logs, begun: Mapping[str, object]) -> bool:
    """Whether the steps of a writer begin again below the end of a process, in a file without a line of a start."""
    ended: dict[str, int] = {}
    for event in logs.of("failures", "task-end", Trait.ENDS_FROM_OUTSIDE):
        ended.setdefault(event.line.source.shown, event.line.number)
    for tail in logs.tails:
        end = ended.get(tail.source.shown)
        last: dict[object, int] = {}
        for line in tail.lines if end is not None and tail.source.shown not in begun else ():
            if (match := NUMBER.search(line.text)) is None or not is_step(line.text) or SLURM.search(line.text):
                continue
            who, number = (line.rank, line.local_rank, line.node), int(match[1])
            if end is not None and line.number > end and number < last.get(who, number):
                return True
            if end is None or line.number < end:
                last[who] = number
    return False
