"""How far did each rank get? The others wait for the rank whose steps, or lines, end first. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

STOPPED_S = 30.0
"""A rank's last line must be this much older than all others': writers buffer some seconds."""
_STEP = re.compile(r"(?i)\b(?:global[_ ]?step|step|iteration|iter|batch)s?\b[^\w\n]{1,12}(\d{1,12})")
_DEVICE = re.compile(r"\b(cuda:\d{1,3})\b")
_LEAST = 3
"""Minimum number of ranks with steps: of two, one is always behind."""


@dataclass(frozen=True, slots=True)
class Laggard:
    """The rank that stopped before the others."""

    culprit: Culprit
    message: str
    line: Line


def find_laggard(logs: Logs, people: People) -> Laggard | None:
    """Return the one rank, or device, that stopped before all others; None if there is none."""
    lines = [people.know(line) for tail in logs.tails for line in tail.lines]
    by_rank: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.rank is not None:
            by_rank[f"rank {line.rank}"].append(line)
    if len(by_rank) < _LEAST:
        by_rank.clear()
        for line in lines:
            if device := _DEVICE.search(line.text):
                by_rank[device[1]].append(line)
    errors = {(event.line.source.shown, event.line.number) for event in logs.events if event.cause}
    return _behind(by_rank) or _silent(by_rank, errors)


def conclude_progress(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the rank that stopped first, if others timed out or lost a connection."""
    if next((event for event in logs.events if event.sign and event.sign.role is Role.VICTIM), None) is None:
        return
    laggard = find_laggard(logs, people)
    if laggard is not None:
        yield Conclusion(
            cause=find_cause("straggler-rank"),
            role=Role.LIKELY,
            confidence=Confidence.LIKELY,
            culprit=laggard.culprit,
            message=laggard.message,
            evidence=(laggard.line,),
            ask=f"the stack of {laggard.culprit.words()} while it hangs: allranks stack JOB",
        )


def _behind(by_rank: Mapping[str, list[Line]]) -> Laggard | None:
    """The rank whose last step is lower than that of all others."""
    steps: dict[str, tuple[int, Line]] = {}
    for who, lines in by_rank.items():
        said = [(int(match[1]), line) for line in lines for match in _STEP.finditer(line.text)]
        if said:
            steps[who] = said[-1]
    if len(steps) < _LEAST:
        return None
    (who, (step, line)), (_, (following, _)), *_ = sorted(steps.items(), key=lambda item: item[1][0])
    if step >= following:
        return None
    return Laggard(_name(who), f"{_tell(who)} stopped at step {step}; all others reached at least {following}", line)


def _silent(by_rank: Mapping[str, list[Line]], errors: Collection[tuple[str, int]]) -> Laggard | None:
    """The rank whose last line is older than that of all others, unless that line is an error: then it did not stop.

    Args:
        by_rank: the lines of each rank.
        errors: file and number of lines that report an error.
    """
    last = {
        who: max((line for line in lines if line.time is not None), key=lambda line: line.time or 0.0)
        for who, lines in by_rank.items()
        if any(line.time is not None for line in lines)
    }
    if len(last) < _LEAST or len({(line.has_year, line.has_date) for line in last.values()}) > 1:
        return None
    (who, line), (_, following), *_ = sorted(last.items(), key=lambda item: item[1].time or 0.0)
    gap_s = (following.time or 0.0) - (line.time or 0.0)
    if gap_s < STOPPED_S or (line.source.shown, line.number) in errors:
        return None
    return Laggard(_name(who), f"{_tell(who)} went silent {gap_s:.0f} s before all others", line)


def _name(who: str) -> Culprit:
    return Culprit(ranks=(int(who.split()[1]),)) if who.startswith("rank ") else Culprit(things=(who,))


def _tell(who: str) -> str:
    return fold_ranks([int(who.split()[1])]) if who.startswith("rank ") else who
