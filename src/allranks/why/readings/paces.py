"""How long did each rank take, according to a list? The others wait for a rank that took much longer. Pure.

    Rank 4: 409.17ms            rank   data_time   step_time
    Rank 5: 2031.12ms            144     332.459      48.455
    Rank 6: 412.36ms             160       0.053     381.009

A list is a group of consecutive lines. What the numbers mean is unknown, so the conclusion is a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

LEAST = 4
"""Minimum number of ranks in a list."""
MUCH = 3.0
"""Minimum factor to the longest of the others."""
_TOOK = re.compile(r"\brank\W{1,3}(\d{1,6})\W{1,4}(\d+(?:\.\d+)?) ?(ms|s|sec|seconds)\b", re.IGNORECASE)
_HEAD = re.compile(r"^\s*rank\s+\w*time\b", re.IGNORECASE)
_ROW = re.compile(r"^\s*(\d{1,6})\s+(\d+\.\d+)\b")


@dataclass(frozen=True, slots=True)
class _Pace:
    """One line of a list."""

    rank: int
    took: float
    line: Line


def conclude_paces(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the ranks that took much longer than the others, in the first such list."""
    for tail in logs.tails:
        for paces in (*_lists(tail.lines), *_tables(tail.lines)):
            slow = _slow(paces)
            if slow:
                yield Conclusion(
                    cause=find_cause("straggler-rank"),
                    role=Role.LIKELY,
                    confidence=Confidence.UNDECIDED,
                    culprit=Culprit(ranks=tuple(sorted(pace.rank for pace in slow))),
                    message=f"{fold_ranks(pace.rank for pace in slow)} took at least {MUCH:g} times as long as others",
                    evidence=tuple(pace.line for pace in slow[:3]),
                    ask="the GPU's clocks and the data loader of those ranks: nvidia-smi -q -d CLOCK,PERFORMANCE",
                )
                return


def _slow(paces: Sequence[_Pace]) -> list[_Pace]:
    """Return those above half of the longest, if all others are far below."""
    if len({pace.rank for pace in paces}) < max(LEAST, len(paces)):  # too few, or several steps
        return []
    longest = max(pace.took for pace in paces)
    slow = [pace for pace in paces if pace.took > longest / 2]
    others = [pace.took for pace in paces if pace not in slow]
    return slow if others and max(others) * MUCH <= min(pace.took for pace in slow) else []


def _lists(lines: Iterable[Line]) -> Iterator[list[_Pace]]:
    paces: list[_Pace] = []
    for line in lines:
        if "rank" in line.text.lower() and (match := _TOOK.search(line.text)):  # most lines: this is the faster test
            paces.append(_Pace(int(match[1]), float(match[2]), line))
        elif paces:
            yield paces
            paces = []
    yield paces


def _tables(lines: Iterable[Line]) -> Iterator[list[_Pace]]:
    paces: list[_Pace] = []
    is_table = False
    for line in lines:
        if is_table and (match := _ROW.match(line.text)):
            paces.append(_Pace(int(match[1]), float(match[2]), line))
            continue
        if paces:
            yield paces
            paces = []
        is_table = _HEAD.match(line.text) is not None
    yield paces
