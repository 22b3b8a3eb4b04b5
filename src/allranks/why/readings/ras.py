"""Which ranks have launched fewer collectives than the others, according to NCCL's RAS (`ncclras`)? Pure.

      508 ranks have launched up to operation 6650
      4 ranks have launched up to operation 6649
      Rank 260 -- GPU 0 managed by process 48307 on node 10.64.17.210

After each count, RAS names the ranks that have it if they are few; for a single rank, both are on one line. Source:
NCCL, src/ras/client_support.cc (2.24 and later). If the few ranks are ahead, they are in a different collective
(AR410).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import Culprit, People, named


@dataclass(slots=True)
class _Launched:
    """Ranks of one communicator that have launched the same number of operations."""

    line: Line
    count: int
    culprit: Culprit


def conclude_ras(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the named ranks that are behind all others, at the first report of such ranks."""
    for groups in _read(logs):
        behind, *others = sorted(groups, key=lambda group: group.count)
        if others and behind.count < others[0].count and behind.culprit:
            ranks = fold_ranks(behind.culprit.ranks)
            yield Conclusion(
                cause=find_cause("straggler-rank"),
                role=Role.LIKELY,
                confidence=Confidence.LIKELY,
                culprit=behind.culprit,
                message=f"{ranks} launched {behind.count} operations, the others {others[0].count} and more",
                evidence=(behind.line, others[0].line),
                ask="the stack of those ranks while it hangs: allranks stack JOB",
                weight=1,
            )
            return


def _read(logs: Logs) -> Iterator[list[_Launched]]:
    """Yield the counts of each communicator and kind of operation."""
    groups: list[_Launched] = []
    last: LogEvent | None = None
    for event in logs.of("launched", "launched-rank"):
        line = event.line
        if last is not None and (line.source != last.line.source or line.number != last.line.number + 1):
            yield groups
            groups = []
        last = event
        if event.kind == "launched":
            groups.append(_Launched(line, event.number("count") or 0, named(event)))
        elif groups:
            groups[-1].culprit |= named(event)
    if groups:
        yield groups
