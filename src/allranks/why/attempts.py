"""In which start of the job was a line written? Pure.

A launcher tells that it starts its workers again. A script that loops, or a job that is requeued into the same file,
only prints again what is printed once at a start (loops.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Sequence

from allranks.facts.fact import Place, When
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.loops import REQUEUE, Loops
from allranks.why.times import Times

RESTART = re.compile(r"(?:\d+/\d+ attempts left; +)?will restart worker group|restart_count=[1-9]\d*")
"""How torchrun's agent tells that it starts its workers again."""
ANEW = "elastic-no-resume"


class Attempts:
    """The starts of the job."""

    def __init__(self, logs: Logs, times: Times) -> None:
        self._times = times
        self._begun: dict[tuple[str, str | None], list[int]] = {}
        """By file and node; of no node: where the first of its nodes began."""
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
        self._loops = Loops(logs, times, told=begun)
        for node, line in self._loops.starts:
            self._note(line, node)
        sources = {line.source.shown for _, line in self._loops.starts}
        for at in self._loops.nodes:
            if at[0] in sources:  # whoever has not begun again still belongs to the first start
                self._begun.setdefault(at, [])

    def doubt(self, places: Sequence[Place]) -> str:
        """Return why what these lines show may be of another start than the last; empty: nothing says so."""
        if self._loops.goes_back:
            return "steps begin again below the end of a process: these may be logs of several starts"
        requeued = self._loops.requeued
        if any(place.line < requeued.get(place.source, 0) and not REQUEUE.search(place.text) for place in places):
            return "the job was requeued below it: what follows may be of its next start"
        return ""

    def _note(self, line: Line, node: str | None = None) -> None:
        shown, when = line.source.shown, self._times.of(line)
        begun = self._begun.setdefault((shown, node), [])
        insort(begun, line.number)
        attempt = len(begun) - 1
        whole = self._begun.setdefault((shown, None), [])
        if attempt == len(whole):
            whole.append(line.number)
        if attempt == len(self._starts):
            self._starts.append(when)
        elif attempt < len(self._starts) and when.is_before(self._starts[attempt]):
            self._starts[attempt] = when

    def attempt_of(self, line: Line) -> int:
        """Return in which start of the job a line was written; where its file tells of none, the last that may be."""
        if line.source.attempt is not None:
            return line.source.attempt
        shown = line.source.shown
        if self._starts and (shown, None) not in self._begun:
            when = self._times.of(line)
            return sum(not when.is_before(start) for start in self._starts)
        begun = self._begun.get((shown, line.node), self._begun.get((shown, None), ()))
        return bisect_right(begun, line.number)
