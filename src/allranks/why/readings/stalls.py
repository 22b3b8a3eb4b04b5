"""Which ranks do the others wait for in Horovod? Reads its stall inspector's lists of ready or missing ranks. Pure.

Up to 0.17 an operation names its ranks, `grad_1 [ready ranks: 0, 2]` or `[missing ranks: 1]`, several in one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.causes.book import find_cause
from allranks.causes.cause import Role, Trait
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People, missing_of, parse_ranks

_READY = re.compile(r"\[ready ranks: ?([0-9]+(?:, ?[0-9]+)*)\]")


def conclude_stalls(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the ranks that are ready for nothing, or for other operations than most."""
    lines = [event.line for event in logs.of(Trait.OTHERS_WAIT_FOR_IT) if "ready ranks:" in event.line.text]
    sets = {frozenset(parse_ranks(ready)) for line in lines for ready in _READY.findall(line.text)}
    if not sets:
        return
    ready = frozenset[int]().union(*sets)
    if missing := missing_of(ready, people.world):
        yield Conclusion(
            cause=find_cause("straggler-rank"),
            role=Role.LIKELY,
            confidence=Confidence.LIKELY,
            culprit=Culprit(ranks=missing),
            message=f"{fold_ranks(missing)} did not enter a collective for which {fold_ranks(ready)} were ready",
            evidence=tuple(lines[:2]),
            victims=ready,
            weight=1,
        )
        return
    fewest = min(sets, key=len)
    others = [ranks for ranks in sets if not ranks & fewest]
    most = max(others, key=lambda other: len(other), default=fewest)
    if len(fewest) < len(most):
        yield Conclusion(
            cause=find_cause("collective-mismatch"),
            role=Role.LIKELY,
            confidence=Confidence.LIKELY,
            culprit=Culprit(ranks=tuple(sorted(fewest))),
            message=f"{fold_ranks(fewest)} wait in a different collective than {fold_ranks(most)}",
            evidence=tuple(lines[:2]),
            weight=1,
        )
