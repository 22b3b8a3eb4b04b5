"""Which nodes and links, at the least cost, explain every failed pair of a mesh? Pure.

    >>> star = {0: {1, 2, 3}, 1: {0}, 2: {0}, 3: {0}}
    >>> find_cover(star, dict.fromkeys(star, 50)).nodes
    {0}

It is a vertex cover with a way out: a failed pair is explained by one of its nodes, which pays for all pairs of that
node at once, or by its link, which costs LINK_COST. What is in every cheapest set is taken outright; what is left falls
into parts that are solved apart, by branch and bound.

Limits: the set is the cheapest one where at most EXACT_NODES nodes are entangled after the obvious culprits are taken
out (and within MAX_BRANCHES steps), else it is found greedily.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

EXACT_NODES = 24
"""Entangled nodes up to which every choice is tried."""
MAX_BRANCHES = 300
"""Choices tried before the first one is taken."""
LINK_COST = 20
"""Costs are in twentieths of a failed link: whole numbers, so that a tie is a tie."""

Pair = tuple[int, int]
"""Two nodes, the smaller number first."""
Graph = dict[int, set[int]]
"""With whom a node has something; both ends know it."""


def pair_of(a: int, b: int) -> Pair:
    """Return two nodes as a pair."""
    return (a, b) if a < b else (b, a)


@dataclass(slots=True)
class Cover:
    """The cheapest culprits: those in every cheapest set, and those in some of them (`maybe`)."""

    cost: int = 0
    nodes: set[int] = field(default_factory=set)
    links: set[Pair] = field(default_factory=set)
    maybe_nodes: set[int] = field(default_factory=set)
    maybe_links: set[Pair] = field(default_factory=set)

    def add(self, other: Cover) -> None:
        """Take in the culprits of failures that are independent of these."""
        self.cost += other.cost
        self.nodes |= other.nodes
        self.links |= other.links
        self.maybe_nodes |= other.maybe_nodes
        self.maybe_links |= other.maybe_links

    def either(self, other: Cover) -> Cover:
        """Return the cheaper of two covers of the same failures, or what they have in common."""
        if self.cost != other.cost:
            return min(self, other, key=lambda cover: cover.cost)
        nodes, links = self.nodes & other.nodes, self.links & other.links
        maybe_nodes = (self.nodes | other.nodes | self.maybe_nodes | other.maybe_nodes) - nodes
        maybe_links = (self.links | other.links | self.maybe_links | other.maybe_links) - links
        return Cover(self.cost, nodes, links, maybe_nodes, maybe_links)


def find_cover(failed: Mapping[int, set[int]], costs: Mapping[int, int]) -> Cover:
    """Return the cheapest culprits of all failed pairs.

    Args:
        failed: with whom each node fails; nodes that fail with nobody are not in it.
        costs: of each of these nodes.
    """
    return _solve(failed, costs, set(), [MAX_BRANCHES])


def areas_of(graph: Mapping[int, Iterable[int]], nodes: Iterable[int]) -> Iterator[list[int]]:
    """Yield the connected parts of a graph, each sorted."""
    seen: set[int] = set()
    for start in nodes:
        if start in seen:
            continue
        part = [start]
        seen.add(start)
        for node in part:
            new = [other for other in graph[node] if other not in seen]
            seen.update(new)
            part += new
        yield sorted(part)


def _solve(failed: Mapping[int, set[int]], costs: Mapping[int, int], innocent: set[int], budget: list[int]) -> Cover:
    """Take what is forced, then solve every connected rest on its own."""
    graph = {node: set(others) for node, others in failed.items()}
    cover = Cover()
    _take_forced(graph, costs, innocent, cover)
    for part in areas_of(graph, sorted(graph)):
        rest = {node: graph[node] for node in part}
        while len(rest) > EXACT_NODES:
            _take(rest, _most_wanted(rest, costs, innocent), costs, cover)
            _take_forced(rest, costs, innocent, cover)
        for smaller in areas_of(rest, sorted(rest)):
            cover.add(_branch({node: rest[node] for node in smaller}, costs, innocent, budget))
    return cover


def _branch(graph: Graph, costs: Mapping[int, int], innocent: set[int], budget: list[int]) -> Cover:
    """Try the most wanted node as a culprit, and as none."""
    node = _most_wanted(graph, costs, innocent)
    budget[0] -= 1
    guilty = Cover()
    without = {a: set(others) for a, others in graph.items()}
    _take(graph, node, costs, guilty)
    guilty.add(_solve(graph, costs, set(innocent), budget))
    if budget[0] <= 0:
        return guilty
    return guilty.either(_solve(without, costs, innocent | {node}, budget))


def _most_wanted(graph: Graph, costs: Mapping[int, int], innocent: set[int]) -> int:
    """The node that explains most failures for its cost."""
    return max((n for n in graph if n not in innocent), key=lambda n: (len(graph[n]) * LINK_COST / costs[n], -n))


def _take_forced(graph: Graph, costs: Mapping[int, int], innocent: set[int], cover: Cover) -> None:
    """Take the nodes and links that are in every cheapest set; what is left has a choice."""
    waiting = sorted(graph)
    while waiting:
        node = waiting.pop()
        others = graph.get(node)
        if others is None:
            continue
        if node not in innocent and costs[node] > len(others) * LINK_COST:
            innocent.add(node)  # its links are cheaper
            waiting += sorted(others)
        if node in innocent:
            for other in sorted(others & innocent):
                cover.links.add(pair_of(node, other))
                cover.cost += LINK_COST
                _remove(graph, node, other)
        elif len(others & innocent) * LINK_COST > costs[node]:
            waiting += sorted(others)
            _take(graph, node, costs, cover)


def _take(graph: Graph, node: int, costs: Mapping[int, int], cover: Cover) -> None:
    cover.nodes.add(node)
    cover.cost += costs[node]
    for other in list(graph[node]):
        _remove(graph, node, other)


def _remove(graph: Graph, a: int, b: int) -> None:
    """Take out one failed link, and the nodes that have none left."""
    for here, there in ((a, b), (b, a)):
        graph[here].remove(there)
        if not graph[here]:
            del graph[here]
