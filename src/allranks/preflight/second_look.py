"""What of the first pair tests must be looked at again, and how? Pure.

All nodes test at the same time, on machines that are busy starting a job: a port may answer late, a datagram may be
dropped by a full queue, a transfer may wait for a core. So nothing is concluded from the first look alone:

    what failed           is tried again, all at the same time, unless it is proven: the kernel alone answers a SYN, and
                          one that is silent to ten of them is not merely busy; nor is a path that swallows large
                          datagrams and large segments alike
    what lost datagrams   is tried again one by one, with as many datagrams as show a loss of 1 %
    what was slow         is tried again one by one, beside pairs that were not
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from allranks.model.pair import FULL, Effort, PairResult
from allranks.preflight.symptoms import has_failed, is_heavy_loss, is_proven, is_silent, slow_nodes

QUIET = Effort(num_ports=1, large_bytes=96 << 10, num_datagrams=200, has_mtu_probe=False)
"""One pair at a time: 2 x 96 KiB and 200 datagrams stay below MAX_PAIR_BYTES."""
CONFIRM_S = 2.5
QUIET_S = 3.0
MAX_FAILED = 512
"""More failed pairs need not be tried again: it is no accident."""
MAX_SUSPECTS = 8
WITNESSES = 3
"""With how many others a suspect is tried."""


@dataclass(slots=True)
class Look:
    """One more round of tests."""

    pairs: list[tuple[int, int]]
    effort: Effort
    within_s: float
    is_one_by_one: bool
    reason: str
    results: list[PairResult] = field(default_factory=list)


def plan_confirmation(results: Sequence[PairResult]) -> Look | None:
    """Return the tests that repeat what failed outright; None where nothing did, or what did is proven."""
    # Where much is lost, ARP may be, too, which asks once a second: such a pair is silent for a while.
    losers = {*_cover([each for each in results if is_heavy_loss(each)])}
    pairs = [
        (each.source, each.target)
        for each in results
        if has_failed(each) and (not is_proven(each) or (is_silent(each) and {each.source, each.target} & losers))
    ]
    if not pairs or len(pairs) > MAX_FAILED:
        return None
    return Look(pairs, FULL, CONFIRM_S, is_one_by_one=False, reason=f"{len(pairs)} pairs failed")


def plan_quiet_look(results: Sequence[PairResult]) -> Look | None:
    """Return the tests that tell loss and slowness from a busy machine; None where there is no sign of either."""
    working = [each for each in results if not has_failed(each)]
    slow = slow_nodes(working)
    # Who explains all losses: of a node that loses, all partners lose, too.
    losing = _cover([each for each in working if each.datagrams_lost and not is_heavy_loss(each)])
    suspects = [*losing, *(node for node in sorted(slow) if node not in losing)][:MAX_SUSPECTS]
    if not suspects:
        return None
    heavy = _cover([each for each in results if is_heavy_loss(each)])
    known = {(each.source, each.target) for each in working if not {each.source, each.target} & {*heavy}}
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


def merge(first: Iterable[PairResult], *looks: Look | None) -> list[PairResult]:
    """Return the results with those of a confirmation in the place of what they repeat."""
    latest = {(each.source, each.target): each for each in first}
    for look in looks:
        if look is not None:
            latest |= {(each.source, each.target): each for each in look.results}
    return list(latest.values())


def _cover(results: Sequence[PairResult]) -> list[int]:
    """Nodes that take part in all of these pairs, those with most first."""
    left, chosen = list(results), []
    while left:
        counted = Counter(node for each in left for node in (each.source, each.target))
        node = min(counted, key=lambda each: (-counted[each], each))
        chosen.append(node)
        left = [each for each in left if node not in (each.source, each.target)]
    return chosen
