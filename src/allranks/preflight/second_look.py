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
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from allranks.model.pair import FULL, Effort, PairResult

QUIET = Effort(num_ports=1, large_bytes=96 << 10, num_datagrams=200, has_mtu_probe=False)
"""One pair at a time: 2 x 96 KiB and 200 datagrams stay below MAX_PAIR_BYTES."""
HEAVY_LOSS = 0.08
MIN_LOST = 3
CONFIRM_S = 2.5
QUIET_S = 3.0
MAX_FAILED = 512
"""More failed pairs need not be tried again: it is no accident."""
MAX_SUSPECTS = 8
WITNESSES = 3
"""With how many others a suspect is tried."""
SLOW_FACTOR = 4.0
"""How much less than usual is slow: shared links and busy switches stay above."""
FAST_ENOUGH_MBIT_S = 2000.0
"""What so small a payload can measure: a faster link is never called slow (the card says its speed)."""
MIN_PAIRS = 2


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
    pairs = [(each.source, each.target) for each in results if has_failed(each) and not is_proven(each)]
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


def is_proven(result: PairResult) -> bool:
    """Whether no busy machine explains what failed: a second try would only cost time."""
    if is_heavy_loss(result):
        return True
    if any(why.startswith("connected, ") for why in (*result.closed.values(), result.store or "")):
        return False
    is_stalled = result.large_sent > 0 and result.large_s is None
    is_large_lost = not all(result.datagrams.values())
    if is_stalled != is_large_lost and result.num_open:
        return False
    return bool(result.closed or result.store or is_stalled)


def is_heavy_loss(result: PairResult) -> bool:
    """Whether so many datagrams are lost that closed ports and stalled transfers follow by themselves."""
    sent, lost = result.datagrams_sent, result.datagrams_lost
    return bool(sent) and lost >= MIN_LOST and HEAVY_LOSS <= lost / sent < 1


@dataclass(frozen=True, slots=True)
class Slow:
    """A node that carries much less than the others."""

    mbit_s: float
    """The best that came from it, or to it, whichever is less."""
    usual_mbit_s: float
    """What the middle one of the others' pairs carries."""


def slow_nodes(results: Iterable[PairResult]) -> dict[int, Slow]:
    """Return the nodes from which, or to which, nothing goes faster than a fraction of what is usual.

    The best of all pairs of a node counts, in each direction, so that one transfer that met a busy moment says nothing.
    With fewer than MIN_PAIRS pairs in a direction nothing is concluded.
    """
    rates = {(each.source, each.target): each.delivery_mbit_s for each in results if each.delivery_mbit_s}
    best: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for (source, target), rate in rates.items():
        best[source, True].append(rate)
        best[target, False].append(rate)
    slow: dict[int, Slow] = {}
    for node in {node for pair in rates for node in pair}:
        others = [rate for pair, rate in rates.items() if node not in pair]
        known = [max(best[node, way]) for way in (True, False) if len(best[node, way]) >= MIN_PAIRS]
        if not known or not others:
            continue
        usual = statistics.median(others)
        if min(known) < min(usual / SLOW_FACTOR, FAST_ENOUGH_MBIT_S):
            slow[node] = Slow(min(known), usual)
    return slow


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
