"""Which of the first pair tests must be repeated, and how? Pure.

All nodes test at the same time, on machines that are busy starting a job: a port may answer late, a datagram may be
dropped by a full queue, a transfer may wait for a core. So nothing is concluded from the first look alone:

    what failed           is tried again, all at the same time, unless it is proven: the kernel alone answers a SYN, and
                          one that is silent to ten of them is not merely busy; nor is a path that swallows large
                          datagrams and large segments alike
    what lost datagrams   is tried again one by one, with as many datagrams as show a loss of 1 %
    what was slow         is tried again one by one, beside nodes that were not, each as often, and where it still is,
                          twice more with four times as much, which alone counts then: a kernel may wait for a core,
                          and a token bucket be full
    large packets         that did not come back where nothing else large was sent are tried again with a large payload,
                          beside pairs that tell which of the two nodes it was
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from allranks.model.pair import FULL, LARGE, Effort, PairResult
from allranks.preflight.look import RoundOfTests
from allranks.preflight.pairs import follow_up
from allranks.preflight.symptoms import (
    has_failed,
    has_large_passed,
    has_tried_large,
    is_heavy_loss,
    is_proven,
    is_silent,
    lost_sizes,
    slow_nodes,
)

QUIET = Effort(num_ports=1, large_bytes=96 << 10, num_datagrams=200, has_mtu_probe=False)
"""One pair at a time: 2 x 96 KiB and 200 datagrams stay below MAX_PAIR_BYTES."""
RATE = Effort(num_ports=1, large_bytes=448 << 10, num_datagrams=0, has_mtu_probe=False)
"""More than a token bucket lets pass at once (128 KB in the lab at 10 Gbit/s): a full one makes a node look fast, and
beside it each that has used up its own looks slow."""
CONFIRM_S = 2.5
QUIET_S = 3.0
MAX_FAILED = 512
"""More failed pairs need not be tried again: it is no accident."""
LOSING_SHARE = 1 / 3
"""Of the pairs of a node, that lost datagrams: of 2 % lost one way, half of the pairs notice."""
MAX_LARGE = 256
"""Of so many pairs that lost large packets the large payload is tried, and of twice as many to tell who it was."""
MAX_SUSPECTS = 8
WITNESSES = 3
"""With how many others a suspect is tried."""
NUM_RATE_LOOKS = 2
"""How often a slow node is measured again before it is called one."""


def plan_confirmation(results: Sequence[PairResult]) -> RoundOfTests | None:
    """Return the tests that repeat what failed outright; None where nothing did, or what did is proven."""
    pairs = [(result.source, result.target) for result in results if has_failed(result) and not is_proven(result)]
    if len(pairs) > MAX_FAILED:
        return None
    # Where packets are lost, ARP may be, too, which asks once a second: two lost answers silence a pair, both ways.
    losers = {*_cover([result for result in results if is_heavy_loss(result)]), *_find_losing(results)}
    silent = [(result.source, result.target) for result in results if is_silent(result)]
    pairs += [pair for pair in silent if losers & {*pair}][: MAX_FAILED - len(pairs)]
    if not pairs:
        return None
    return RoundOfTests(pairs, FULL, CONFIRM_S, is_one_by_one=False, reason=f"{len(pairs)} pairs failed")


def plan_large_look(results: Sequence[PairResult], *, seed: int) -> RoundOfTests | None:
    """Return the tests with a large payload that follow lost packets of the MTU; None where none was lost.

    Only where nothing large was sent beside them: between more than 64 nodes.
    """
    working = [result for result in results if not has_failed(result)]
    nodes = sorted({node for result in working for node in (result.source, result.target)})
    place = {node: number for number, node in enumerate(nodes)}
    lost = [(place[result.source], place[result.target]) for result in working if _is_large_in_doubt(result)]
    if not lost:
        return None
    passed = [(place[result.source], place[result.target]) for result in working if has_large_passed(result)]
    more = follow_up(lost, passed, len(nodes), seed=seed, at_most=2 * MAX_LARGE)
    pairs = [(nodes[a], nodes[b]) for a, b in (*sorted(lost)[:MAX_LARGE], *more)]
    return RoundOfTests(pairs, LARGE, CONFIRM_S, is_one_by_one=False, reason=f"large packets lost in {len(lost)} pairs")


def plan_quiet_look(results: Sequence[PairResult]) -> RoundOfTests | None:
    """Return the tests that tell loss and slowness from a busy machine; None where there is no sign of either."""
    working = [result for result in results if not has_failed(result)]
    slow = slow_nodes(working)
    # Who explains all losses: of a node that loses, all partners lose, too.
    losing = _cover([result for result in working if result.datagrams_lost and not is_heavy_loss(result)])
    suspects = [*losing, *(node for node in sorted(slow) if node not in losing)][:MAX_SUSPECTS]
    if not suspects:
        return None
    heavy = _cover([result for result in results if is_heavy_loss(result)])
    known = {(result.source, result.target) for result in working if not {result.source, result.target} & {*heavy}}
    others = [node for node in sorted({node for pair in known for node in pair}) if node not in suspects]
    pairs: dict[tuple[int, int], None] = {}
    for position, suspect in enumerate(suspects):
        candidates = others[position:] + others[:position] + [node for node in suspects if node != suspect]
        met = [node for node in candidates if (suspect, node) in known or (node, suspect) in known]
        # Each of them as often as the suspect: behind a token bucket, who is tried more often is slower.
        pairs |= dict.fromkeys(itertools.permutations([suspect, *met[:WITNESSES]], 2))
    reason = f"datagrams lost at {len(losing)}, slow at {len(slow)} nodes"
    # Sorted, since the circle of each node (preflight.mesh) then meets no other one: else all try the suspect at once.
    return RoundOfTests(sorted(pairs), QUIET, QUIET_S, is_one_by_one=True, reason=reason)


def plan_rate_look(quiet: Sequence[PairResult]) -> RoundOfTests | None:
    """Return the tests that measure again where the quiet look found slow nodes; None where it found none."""
    slow = slow_nodes(quiet)
    if not slow:
        return None
    pairs = dict.fromkeys((result.source, result.target) for result in quiet)
    return RoundOfTests(list(pairs), RATE, QUIET_S, is_one_by_one=True, reason=f"still slow at {len(slow)} nodes")


def merge(first: Iterable[PairResult], again: Iterable[PairResult]) -> list[PairResult]:
    """Return the results with those of a confirmation in the place of what they repeat."""
    return list({(result.source, result.target): result for result in (*first, *again)}.values())


def _find_losing(results: Sequence[PairResult]) -> Iterator[int]:
    """Yield the nodes that lose packets with many others: a busy one drops a datagram here and there."""
    tried, lost = Counter[int](), Counter[int]()
    for result in results:
        if not is_silent(result):
            for node in (result.source, result.target):
                tried[node] += 1
                lost[node] += result.datagrams_lost > 0
    return (node for node in tried if lost[node] > LOSING_SHARE * tried[node])


def _is_large_in_doubt(result: PairResult) -> bool:
    return not has_tried_large(result) and bool(lost_sizes(result, None))


def _cover(results: Sequence[PairResult]) -> list[int]:
    """Nodes that take part in all of these pairs, those with most first."""
    met: dict[int, Counter[int]] = defaultdict(Counter)
    for result in results:
        met[result.source][result.target] += 1
        met[result.target][result.source] += 1
    # An entry that is out of date has a newer one behind it: where all nodes lose, each pair is looked at once.
    most = [(-others.total(), node) for node, others in met.items()]
    heapq.heapify(most)
    chosen = []
    while most:
        negative, node = heapq.heappop(most)
        if not negative or negative != -met[node].total():
            continue
        chosen.append(node)
        for other in met.pop(node):
            del met[other][node]
            heapq.heappush(most, (-met[other].total(), other))
    return chosen
