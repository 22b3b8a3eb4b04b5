"""What is one round of pair tests, and what is the first one of a roll call? Pure.

Up to FULL_UP_TO nodes every pair is tried, all of it. Above, a part of the pairs is, each with one connection and at
most 4 KiB: too little to find a path that swallows packets of the interface's MTU. So every node sends one such packet
to one other, and gets one back: N packets each way for N nodes, in a ring, so that a node that swallows them fails with
two. What fails is looked at again with large payloads (preflight.second_look), since an agent that waits for a core may
miss a datagram; what passes has passed. Where UDP is closed, or the path between just two nodes is broken that are no
neighbours in the ring, nothing is seen of it above FULL_UP_TO nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.model.pair import FULL, SPARSE, Effort
from allranks.preflight.pairs import choose_pairs, choose_ring

FULL_UP_TO = 64
"""With more nodes not every pair is tried, and each one less."""
TESTS_S = 3.0
"""Deadline of all pair tests of one node, for up to FULL_UP_TO nodes."""
SPARSE_TESTS_S = 6.0


@dataclass(frozen=True, slots=True)
class RoundOfTests:
    """One round of tests."""

    pairs: list[tuple[int, int]]
    """By node index: who tries whom."""
    effort: Effort
    within_s: float
    is_one_by_one: bool
    reason: str
    probed: frozenset[tuple[int, int]] = frozenset()
    """Pairs that also send one packet of their common MTU, although the effort has none."""


def plan_first_look(nodes: Sequence[int], *, seed: int, within_s: float | None = None) -> RoundOfTests:
    """Return the tests that every roll call begins with.

    Args:
        nodes: indices of those that can be tried.
        seed: the same one gives the same pairs.
        within_s: None: TESTS_S, or SPARSE_TESTS_S above FULL_UP_TO nodes.
    """
    is_sparse = len(nodes) > FULL_UP_TO
    pairs = choose_pairs(len(nodes), full_up_to=FULL_UP_TO, seed=seed)
    ring = choose_ring(len(nodes), seed=seed) if is_sparse else []
    return RoundOfTests(
        [(nodes[a], nodes[b]) for a, b in pairs],
        SPARSE if is_sparse else FULL,
        within_s or (SPARSE_TESTS_S if is_sparse else TESTS_S),
        is_one_by_one=False,
        reason="all nodes have joined",
        probed=frozenset((nodes[a], nodes[b]) for a, b in ring),
    )
