"""In which start of the job was a line written? Pure.

A launcher tells that it starts its workers again. What a script that loops, a job that is requeued into the same file,
or the next one of `>> train.log` writes is found by where it begins anew (appended.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from allranks.facts.fact import Place, When
from allranks.why.appended import FurtherRun, find_further_runs
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.times import Times

RESTART = re.compile(r"(?:\d+/\d+ attempts left; +)?will restart worker group|restart_count=[1-9]\d*")
"""How torchrun's agent tells that it starts its workers again."""
ANEW = "elastic-no-resume"


class Attempts:
    """The starts of the job."""

    def __init__(self, logs: Logs, times: Times) -> None:
        self._times = times
        self._begun: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
        """By file and node, the lines with which further starts begin; of no node: the first of its nodes' ones."""
        self._starts: list[When] = []
        """The earliest that is known of each further start of the job."""
        self._runs: dict[str, FurtherRun] = {}
        """By file, the last run that was appended and tells nothing at its start."""
        told = self._read_launchers(logs)
        for run in find_further_runs(logs, times, told):
            self._note(run.first)
            self._runs[run.first.source.shown] = run

    def list_quiet(self) -> list[Line]:
        """Return where the last runs of files begin that tell no step."""
        return [run.first for run in self._runs.values() if run.is_quiet]

    def tell_above(self, places: Sequence[Place]) -> str | None:
        """Return how the run ended to whose output that of these lines was appended; None: there is none."""
        run = next((self._runs[place.source] for place in places if place.source in self._runs), None)
        return f"an earlier run, or part, of the job ended above it: {run.above}" if run is not None else None

    def attempt_of(self, line: Line) -> int:
        """Return in which start of the job a line was written; where its file tells of none, the last that may be."""
        if line.source.attempt is not None:
            return line.source.attempt
        shown = line.source.shown
        if (shown, None) in self._begun:
            return bisect_right(self._begun.get((shown, line.node), self._begun[shown, None]), line.number)
        if not self._starts:
            return 0
        when = self._times.of(line)
        return sum(not when.is_before(start) for start in self._starts)

    def _read_launchers(self, logs: Logs) -> set[str]:
        """Note the starts of which launchers tell, each node's agent in its own words, and return their files."""
        told: dict[tuple[str, str | None], str] = {}  # by file and node, the last word
        for event in logs.of("begun", ANEW):
            line, again = event.line, RESTART.search(event.line.text)
            writer, word = (line.source.shown, line.node), again[0] if again else line.text
            if again or event.kind == "begun":
                if told.get(writer) != word and (again or writer in told):
                    self._note(line, line.node)
                told[writer] = word
        return {shown for shown, _ in told}

    def _note(self, line: Line, node: str | None = None) -> None:
        """Note that a start begins with a line; in several files the same ones do."""
        shown, when = line.source.shown, self._times.of(line)
        begun, whole = self._begun[shown, node], self._begun[shown, None]
        begun.append(line.number)
        if len(begun) > len(whole):
            whole.append(line.number)
        index = len(begun) - 1
        if index == len(self._starts):
            self._starts.append(when)
        elif when.is_before(self._starts[index]):
            self._starts[index] = when
