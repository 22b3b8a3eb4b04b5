"""What of the first pair tests must be looked at again, and how? Pure.

All nodes test at the same time, on machines that are busy starting a job: a port may answer late, a datagram may be
dropped by a full queue, a transfer may wait for a core. So nothing is concluded from the first look alone:

    what failed           is tried again, all at the same time
    what lost datagrams   is tried again one by one, with as many datagrams as show a loss of 1 %
    what was slow         is tried again one by one, beside pairs that were not
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from allranks.model.pair import FULL, Effort, PairResult

QUIET = Effort(num_ports=1, large_bytes=96 << 10, num_datagrams=200, has_mtu_probe=False)
"""One pair at a time: 2 x 96 KiB and 200 datagrams stay below MAX_PAIR_BYTES."""
CONFIRM_S = 2.5
QUIET_S = 3.0
MAX_FAILED = 512
"""More failed pairs need not be tried again: it is no accident."""
MAX_SUSPECTS = 8
WITNESSES = 3
"""With how many others a suspect is tried."""
SLOW_FACTOR = 2.0
"""A node whose best transfer takes so much longer than the other nodes' is looked at again."""
SLOW_FLOOR_S = 0.001


@dataclass(slots=True)
class Look:
    """One more round of tests."""

    pairs: list[tuple[int, int]]
    effort: Effort
    within_s: float
    is_one_by_one: bool
    reason: str
    results: list[PairResult] = field(default_factory=list)


def plan_confirmation(results: Iterable[PairResult]) -> Look | None:
    """Return the tests that repeat what failed outright; None where nothing did."""
    pairs = [(each.source, each.target) for each in results if has_failed(each)]
    if not pairs or len(pairs) > MAX_FAILED:
        return None
    return Look(pairs, FULL, CONFIRM_S, is_one_by_one=False, reason=f"{len(pairs)} pairs failed")


def plan_quiet_look(results: Sequence[PairResult]) -> Look | None:
    """Return the tests that tell loss and slowness from a busy machine; None where there is no sign of either."""
    working = [each for each in results if not has_failed(each)]
    losing = _count(each for each in working if each.datagrams_lost)
    slow = slow_nodes(working)
    suspects = sorted({*losing, *slow}, key=lambda node: (-losing.get(node, 0), node))[:MAX_SUSPECTS]
    if not suspects:
        return None
    known = {(each.source, each.target) for each in working}
    others = [node for node in sorted({node for pair in known for node in pair}) if node not in suspects]
    pairs: dict[tuple[int, int], None] = {}
    for position, suspect in enumerate(suspects):
        candidates = others[position:] + others[:position] + [node for node in suspects if node != suspect]
        met = [node for node in candidates if (suspect, node) in known or (node, suspect) in known]
        for witness in met[:WITNESSES]:
            pairs |= {(suspect, witness): None, (witness, suspect): None}
    for first, second in itertools.pairwise(others[: WITNESSES + 1]):
        pairs |= {(first, second): None}  # what is usual here
    reason = f"datagrams lost at {len(losing)}, slow at {len(slow)} nodes"
    return Look(list(pairs), QUIET, QUIET_S, is_one_by_one=True, reason=reason)


def has_failed(result: PairResult) -> bool:
    """Whether something did not come through at all: a port, the leader's port, a large packet, everything."""
    return bool(
        result.closed
        or result.store
        or (result.datagrams_sent and result.datagrams_lost == result.datagrams_sent)
        or not all(result.datagrams.values())
        or (result.large_sent and result.large_s is None)
    )


def slow_nodes(results: Iterable[PairResult]) -> list[int]:
    """Nodes all of whose transfers took much longer than the best ones of the others."""
    best: dict[int, float] = {}
    for each in results:
        if each.large_s is not None:
            for node in (each.source, each.target):
                best[node] = min(best.get(node, each.large_s), each.large_s)
    if len(best) < 3:
        return []
    usual = statistics.median(best.values())
    return [node for node, time_s in best.items() if time_s > max(SLOW_FACTOR * usual, SLOW_FLOOR_S)]


def merge(first: Iterable[PairResult], *looks: Look | None) -> list[PairResult]:
    """Return the results with those of a confirmation in the place of what they repeat."""
    latest = {(each.source, each.target): each for each in first}
    for look in looks:
        if look is not None:
            latest |= {(each.source, each.target): each for each in look.results}
    return list(latest.values())


def _count(results: Iterable[PairResult]) -> dict[int, int]:
    counted: dict[int, int] = defaultdict(int)
    for each in results:
        for node in (each.source, each.target):
            counted[node] += each.datagrams_lost
    return dict(counted)
