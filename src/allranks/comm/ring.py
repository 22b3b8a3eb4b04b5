"""In which order should the nodes stand in a ring, so that it crosses as few slow links as it can? Pure.

Gloo's ring goes through the ranks in their order. Where two switches share an uplink, each hop between them takes a
part of it: nodes that alternate between the switches cross it at every hop, nodes in order of their switches twice.
`scontrol show topology` says which node is at which switch; else the rates of `allranks bench` tell.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from allranks.model.errors import HostlistError
from allranks.model.hostlist import expand_hosts

GAIN = 0.9
"""Another order is worth it where its hops take less than this part of the time that those in the given order take."""
MAX_NODES = 64
"""Above, only what SLURM says counts: the pairs of a ring are then mostly not measured."""
_FIELD = re.compile(r"(\w+)=(\S+)")


def parse_topology(text: str) -> tuple[frozenset[str], ...]:
    """Return the nodes below each switch, or in each block, of `scontrol show topology`; the smallest sets first.

    >>> [sorted(group) for group in parse_topology("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]")]
    [['n1', 'n2']]
    """
    groups = set()
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        try:
            names = expand_hosts(fields["Nodes"]) if {"SwitchName", "BlockName"} & fields.keys() else ()
        except (KeyError, HostlistError):
            continue
        groups.add(frozenset(names))
    return tuple(sorted(groups - {frozenset()}, key=lambda group: (len(group), sorted(group))))


def order_by_topology(nodes: Sequence[str], groups: Sequence[frozenset[str]]) -> tuple[int, ...] | None:
    """Return the positions of the nodes with those of one switch side by side; None: they stand so already.

    Args:
        nodes: in the order that they have; the first one stays first.
        groups: as `parse_topology` returns them.
    """
    own = [group for group in reversed(groups) if 1 < len(group & set(nodes)) < len(nodes)]
    place = {node: number for number, node in enumerate(nodes)}

    def key(node: str) -> list[int]:
        # Of each switch above the node, the largest first: who of the nodes below it comes first.
        return [
            *(min(place[member] for member in group if member in place) for group in own if node in group),
            place[node],
        ]

    order = tuple(place[node] for node in sorted(nodes, key=key))
    return None if order == tuple(range(len(nodes))) else order


def order_by_rates(nodes: Sequence[str], rates: Mapping[tuple[str, str], float]) -> tuple[int, ...] | None:
    """Return the positions of the nodes in a ring that is faster by the rates; None: there is none, or not by much.

    Args:
        nodes: in the order that they have; the first one stays first.
        rates: Mbit/s from one node to another; for a pair that was not tested, the middle of those that were.
    """
    known = sorted(rate for pair, rate in rates.items() if rate > 0 and set(pair) <= set(nodes))
    if not 3 < len(nodes) <= MAX_NODES or not known:
        return None
    usual = known[len(known) // 2]

    def hop(a: int, b: int) -> float:
        both = (rates.get((nodes[a], nodes[b])) or usual, rates.get((nodes[b], nodes[a])) or usual)
        return 1 / min(both)

    def cost(ring: Sequence[int]) -> float:
        return sum(hop(a, b) for a, b in itertools.pairwise([*ring, ring[0]]))

    first = list(range(len(nodes)))
    near, left = [0], set(first[1:])
    while left:
        near.append(min(left, key=lambda node: (hop(near[-1], node), node)))
        left.remove(near[-1])
    best = min((_uncross(ring, hop) for ring in (first, near)), key=cost)
    return tuple(best) if cost(best) < GAIN * cost(first) else None


def _uncross(ring: list[int], hop: Callable[[int, int], float]) -> list[int]:
    """Turn around the part between two hops as long as that makes the ring faster (2-opt); the first one stays."""
    ring, size, is_better = list(ring), len(ring), True
    while is_better:
        is_better = False
        for i, j in itertools.combinations(range(1, size), 2):
            before, after = ring[i - 1], ring[(j + 1) % size]
            if hop(before, ring[j]) + hop(ring[i], after) < hop(before, ring[i]) + hop(ring[j], after) - 1e-12:
                ring[i : j + 1] = ring[i : j + 1][::-1]
                is_better = True
    return ring
