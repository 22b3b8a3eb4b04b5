"""Which pairs of nodes are tested: all while that is cheap, then a sparse set that crosses any split of the nodes.

    >>> choose_pairs(3, seed=0)
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]

A pair is (source, target). Pure; the leader chooses, and the same seed gives the same pairs.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection

MAX_PER_SUSPECT = 8
_WITNESSES = 2
"""With one, a second broken node would look like proof."""
MAX_FOLLOW_UPS = 1024
"""About a tenth of the first round of 1024 nodes, and a second's work: bounded, whatever is broken."""


def choose_pairs(num_nodes: int, *, full_up_to: int = 64, seed: int) -> list[tuple[int, int]]:
    """Return the directed pairs of the first round, sorted.

    Up to `full_up_to` nodes: all of them. Above: the nodes are put into a circle in random order, and each tries those
    1, 2, 4, 8, ... places on, up to half the circle. So every node is floor(log2 n) times a source and as often a
    target, always with others, and n floor(log2 n) pairs are tried. This graph looks the same from every node, and
    such a connected graph is as hard to cut as its degree says (Mader 1971): whatever group of nodes a broken link
    splits off, at least 2 floor(log2 n) - 1 pairs cross the cut. The order is random, so that a rack is not a run of
    neighbours: of the pairs, half are expected to cross a cut into halves.
    """
    if num_nodes <= max(full_up_to, 2):
        return [(source, target) for source in range(num_nodes) for target in range(num_nodes) if source != target]
    circle = _circle(num_nodes, seed)
    steps = [1 << k for k in range(num_nodes.bit_length()) if 2 << k <= num_nodes]
    return sorted((circle[i], circle[(i + step) % num_nodes]) for i in range(num_nodes) for step in steps)


def choose_ring(num_nodes: int, *, seed: int) -> list[tuple[int, int]]:
    """Return a part of the pairs that `choose_pairs` chooses above `full_up_to`: each node with the next in the circle.

    Every node is once a source and once a target, with two others: what costs too much for all pairs can be tried here.
    """
    circle = _circle(num_nodes, seed)
    return sorted((circle[i - 1], circle[i]) for i in range(num_nodes))


def follow_up(
    failed: Collection[tuple[int, int]],
    done: Collection[tuple[int, int]],
    num_nodes: int,
    *,
    seed: int,
    per_suspect: int = MAX_PER_SUSPECT,
    at_most: int = MAX_FOLLOW_UPS,
) -> list[tuple[int, int]]:
    """Return further pairs that tell which end of a failing pair is to blame, sorted; none that is in `done`.

    Every node of a failing pair is a suspect, a node that failed in nothing is a witness. In this order, while there
    is room: a quarter of a suspect's pairs are the failing ones the other way round; then each suspect with two
    witnesses, both ways; then suspects with each other, both ways.

    Args:
        done: pairs tried before; those that failed are among them or not.
        per_suspect: pairs at most in which one suspect takes part.
        at_most: pairs at most altogether; suspects that failed most go first.
    """
    seen = {*done, *failed}
    num_failed = Counter(node for pair in failed for node in pair)
    suspects = sorted(num_failed, key=lambda node: (-num_failed[node], node))
    witnesses = [node for node in range(num_nodes) if node not in num_failed]
    rng = random.Random(seed)
    chosen: set[tuple[int, int]] = set()
    used: Counter[int] = Counter()

    def choose(*pairs: tuple[int, int], room: int) -> bool:
        """Take those of these pairs that are new, all or none; whether any was taken."""
        new = [pair for pair in pairs if pair not in seen and pair not in chosen]
        ends = Counter(node for pair in new for node in pair)
        if not new or len(chosen) + len(new) > at_most:
            return False
        if any(used[node] + count > room for node, count in ends.items() if node in num_failed):
            return False
        chosen.update(new)
        used.update(ends)
        return True

    def has_room() -> bool:
        """Whether a pair can be taken both ways; where thousands of nodes fail, the rest is not gone through."""
        return len(chosen) + 2 <= at_most

    for source, target in sorted(failed):
        choose((target, source), room=per_suspect // 4)
    for _ in range(_WITNESSES):
        # Those with the least to do are asked first.
        rng.shuffle(witnesses)
        witnesses.sort(key=used.__getitem__)
        for suspect in itertools.takewhile(lambda _: has_room(), suspects):
            for place, witness in enumerate(witnesses):
                if choose((suspect, witness), (witness, suspect), room=per_suspect):
                    witnesses.append(witnesses.pop(place))
                    break
    for first, second in itertools.takewhile(lambda _: has_room(), itertools.combinations(suspects, 2)):
        choose((first, second), (second, first), room=per_suspect)
    return sorted(chosen)


def _circle(num_nodes: int, seed: int) -> list[int]:
    circle = list(range(num_nodes))
    random.Random(seed).shuffle(circle)
    return circle
