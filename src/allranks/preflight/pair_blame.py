"""Which nodes, links or partition explain the failed tests between nodes?

    >>> mesh = [Edge(a, b, "node03" not in (a, b)) for a in NODES for b in NODES if a != b]
    >>> [(b.kind, b.groups) for b in blame(mesh)]
    [(<Kind.NODE: 'node'>, (('node03',),))]

A test is a directed edge. What passes exonerates: a node that passes everywhere and a link that passes both ways are
never named. Of all the sets of culprits that explain every failure the cheapest is taken (minimum description length).
Costs are counted in failed links, where a pair of nodes that fails one way or both ways is one failed link:

    1     a link
    0.9   a node that passes with nobody: cheaper than one link, so that a node with a single partner is called first;
          a broken NIC, cable or switch port takes all links of its node, a fault of one link alone is rarer
    2.5   a node that passes with some: it has to explain three failures or more that would be as many links
    2.6   a partition into two groups, 1.5 more for every further one, 0.5 for every pair across that passes all the
          same: it has to explain three failures or more, and a single node that explains the same goes first

Where the cheapest set is not unique, what all cheapest sets share is named and the rest is undecided: two nodes that
know each other only, or a mesh of which nothing passes, unless something is known against one of the nodes.

Limits: how exact the search is says preflight/cover.py, which knows of no partition; each way to split the nodes is
tried around it. A partition that passes more than a quarter of the pairs across is not seen as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from allranks.model.finding import Confidence
from allranks.model.hostlist import fold_hosts
from allranks.preflight.cover import EXACT_NODES, Cover, Graph, Pair, areas_of, find_cover, pair_of

MAX_GROUPS = 8
"""Groups of a partition; where there are more, the largest are looked at."""

# As LINK_COST, in twentieths of a failed link.
_DEAD_NODE = 18
_LOSSY_NODE = 50
_SUSPECT = -1
_PARTITION = 52
_FURTHER_GROUP = 30
_EXCEPTION = 10


@dataclass(frozen=True, slots=True)
class Edge:
    """One test: source tried target."""

    source: str
    target: str
    is_ok: bool


class Kind(StrEnum):
    """What is to blame."""

    NODE = "node"
    LINK = "link"
    """Between two nodes that are fine otherwise."""
    PARTITION = "partition"
    """Groups of nodes that pass among themselves and fail with each other."""
    UNDECIDED = "undecided"
    """One or more of several, which the tests do not tell apart."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One culprit, and the tests that it explains."""

    kind: Kind
    groups: tuple[tuple[str, ...], ...]
    """NODE: `(("node03",),)`. LINK: `(("a",), ("b",))`, the one that cannot send first where only one way fails.
    PARTITION: the groups, largest first. UNDECIDED: the alternatives, each a node `("a",)` or a link `("a", "b")`."""
    is_one_way: bool
    """Only one direction was seen to fail, and the other one to pass."""
    num_failed: int
    """Tests that speak for it."""
    num_passed: int
    """Tests that speak against it: passed although it takes part, in the direction that fails."""
    confidence: Confidence
    """CERTAIN: a node that fails with three others that pass elsewhere, or with the only two there are; a link whose
    ends pass with others and have no other failed link; a partition of more than three pairs that lets none through."""
    would_decide: str
    """What would make it certain, one line; empty where it is, and where nothing simple would."""
    explains: tuple[Edge, ...]
    direction: str = ""
    """`from` or `to` where it is one way: what the first of the groups sends, or what is sent to it, is lost."""

    @property
    def culprit(self) -> str:
        """As a finding names it: `node03`, `a -> b`, `a <-> b`, `a[1-2] | b[1-2]`, `a or b <-> c`."""
        match self.kind:
            case Kind.LINK:
                return f" {'->' if self.is_one_way else '<->'} ".join(group[0] for group in self.groups)
            case Kind.PARTITION:
                return " | ".join(fold_hosts(list(group)) for group in self.groups)
            case Kind.UNDECIDED:
                return " or ".join(" <-> ".join(group) for group in self.groups)
            case _:
                return fold_hosts(list(self.groups[0]))


def blame(edges: Iterable[Edge], *, suspects: Collection[str] = ()) -> tuple[Blame, ...]:
    """Return the smallest set of culprits that explains all failures: what explains most first, undecided ones last.

    Args:
        edges: a test that was done twice fails where it failed once.
        suspects: nodes against which something is known already; of explanations that cost the same, theirs is taken.
    """
    tests = _Tests.of(edges)
    found: list[Blame] = []
    for area in areas_of(tests.tested, range(len(tests.names))):
        if any(tests.failed[node] for node in area):
            found += _judge(tests, area, {node for node in area if tests.names[node] in suspects})

    def order(one: Blame) -> tuple[object, ...]:
        return one.kind is Kind.UNDECIDED, -one.num_failed, [_natural(name) for group in one.groups for name in group]

    return tuple(sorted(found, key=order))


@dataclass(frozen=True, slots=True)
class _Tests:
    """The tests by node number; a pair fails where one of its directions does."""

    names: list[str]  # in natural order, so that numbers sort as names do
    is_ok: dict[tuple[int, int], bool]  # by source and target
    failed: Graph  # with whom a node fails
    passed: Graph
    tested: Graph

    @classmethod
    def of(cls, edges: Iterable[Edge]) -> _Tests:
        known = [edge for edge in edges if edge.source != edge.target]
        names = sorted({name for edge in known for name in (edge.source, edge.target)}, key=_natural)
        numbers = {name: i for i, name in enumerate(names)}
        is_ok: dict[tuple[int, int], bool] = {}
        for edge in known:
            way = numbers[edge.source], numbers[edge.target]
            is_ok[way] = edge.is_ok and is_ok.get(way, True)
        failed, passed, tested = ({i: set[int]() for i in range(len(names))} for _ in range(3))
        for (a, b), way_is_ok in is_ok.items():
            tested[a].add(b)
            tested[b].add(a)
            of_kind = passed if way_is_ok and is_ok.get((b, a), True) else failed
            of_kind[a].add(b)
            of_kind[b].add(a)
        return cls(names, is_ok, failed, passed, tested)

    def ways(self, pairs: Iterable[Pair]) -> list[tuple[int, int]]:
        """Both directions of the pairs, as far as they were tested."""
        return [way for a, b in sorted(pairs) for way in ((a, b), (b, a)) if way in self.is_ok]

    def edges(self, ways: Iterable[tuple[int, int]]) -> tuple[Edge, ...]:
        return tuple(Edge(self.names[a], self.names[b], self.is_ok[a, b]) for a, b in ways)


def _judge(tests: _Tests, area: list[int], suspects: set[int]) -> Iterator[Blame]:
    """Name the culprits of one area: nodes that tests connect."""
    failed = {node: tests.failed[node] for node in area if tests.failed[node]}
    costs = {n: (_LOSSY_NODE if tests.passed[n] else _DEAD_NODE) + (_SUSPECT if n in suspects else 0) for n in failed}
    is_star = any(len(others) * 2 == sum(map(len, failed.values())) for others in failed.values())
    if len(area) > EXACT_NODES and not is_star and not any(tests.passed[node] for node in area):
        # All are alike in having failed everywhere, and too many to try which of them it takes.
        maybe = (set(area) - suspects) or suspects
        return _describe(tests, area, (), set(), Cover(0, set(area) - maybe, set(), maybe))
    best, best_groups, best_across = find_cover(failed, costs), list[list[int]](), set[Pair]()
    best_cost = best.cost
    for groups in _partitions(tests, area):
        member = {node: i for i, group in enumerate(groups) for node in group}
        across = {pair_of(a, b) for a in member for b in tests.tested[a] if member.get(b, member[a]) != member[a]}
        num_passed = sum(b in tests.passed[a] for a, b in across)
        if num_passed * 4 > len(across):
            continue
        rest = {a: {b for b in others if pair_of(a, b) not in across} for a, others in failed.items()}
        cover = find_cover({a: others for a, others in rest.items() if others}, costs)
        cost = cover.cost + _PARTITION + _FURTHER_GROUP * (len(groups) - 2) + _EXCEPTION * num_passed
        if cost < best_cost:
            best, best_cost, best_groups, best_across = cover, cost, groups, across
    return _describe(tests, area, best_groups, best_across, best)


def _partitions(tests: _Tests, area: Sequence[int]) -> Iterator[list[list[int]]]:
    """Ways to split the area into groups of two nodes and more, largest group first.

    Groups are what passing pairs connect; a second time without the pairs that pass although their two nodes disagree
    about most of the others, as where a few tests slipped through the partition.
    """
    passed = {node: tests.passed[node] for node in area}
    agreed = _agreed(tests, area)
    for graph in [passed] if agreed == passed else [passed, agreed]:
        groups = [group for group in areas_of(graph, area) if len(group) > 1]
        while len(groups) > 1:
            groups = sorted(groups, key=lambda group: (-len(group), group))[:MAX_GROUPS]
            yield groups
            member = {node: i for i, group in enumerate(groups) for node in group}
            cuts = Counter(pair_of(member[a], member[b]) for a in member for b in tests.failed[a] if b in member)
            i, j = min(combinations(range(len(groups)), 2), key=lambda pair: cuts[pair])
            others = [group for k, group in enumerate(groups) if k not in (i, j)]
            groups = [*others, sorted(groups[i] + groups[j])]


def _agreed(tests: _Tests, area: Sequence[int]) -> Graph:
    """The passing pairs, without those whose two nodes pass with different nodes."""
    passed, failed = (
        {node: sum(1 << b for b in graph[node]) for node in area} for graph in (tests.passed, tests.failed)
    )
    agreed: Graph = {node: set() for node in area}
    for a in area:
        for b in tests.passed[a]:
            num_alike = ((passed[a] & passed[b]) | (failed[a] & failed[b])).bit_count()
            num_unlike = ((passed[a] & failed[b]) | (failed[a] & passed[b])).bit_count()
            if num_alike + num_unlike < 3 or num_alike >= num_unlike:
                agreed[a].add(b)
    return agreed


def _describe(
    tests: _Tests, area: Sequence[int], groups: Sequence[Sequence[int]], across: set[Pair], cover: Cover
) -> Iterator[Blame]:
    blamed = cover.nodes | cover.maybe_nodes
    if groups:
        failed = {(a, b) for a, b in across if b in tests.failed[a]}
        direction = _direction(tests, groups[0], failed) if len(groups) == 2 else ""
        is_certain = len(failed) == len(across) > 3
        decide = "test more pairs: each node against nodes of the other groups"
        yield _blame(tests, Kind.PARTITION, groups, failed, across, direction, "" if is_certain else decide)

    for node in sorted(cover.nodes):
        around = {pair_of(node, b) for b in tests.tested[node]} - across
        failed = {(a, b) for a, b in around if b in tests.failed[a]}
        of_it_alone = {pair for pair in failed if not {*pair} - {node} & blamed}
        witnesses = {b for b in tests.failed[node] - blamed if tests.passed[b]}
        decide = f"test {tests.names[node]} against another node, one that passes elsewhere"
        if tests.passed[node]:
            decide = f"repeat the tests of {tests.names[node]} and see whether it fails with other nodes"
        elif len(witnesses) > 2 or (len(witnesses) == 2 and witnesses == {*area} - blamed):
            decide = ""
        yield _blame(tests, Kind.NODE, [[node]], failed, around, _direction(tests, [node], of_it_alone), decide)

    ends = Counter(node for link in cover.links | cover.maybe_links for node in link)
    for link in sorted(cover.links):
        direction = _direction(tests, link[:1], {link})
        unsure = [tests.names[n] for n in link if ends[n] > 1 or not tests.passed[n] - blamed]
        decide = f"test {' and '.join(unsure)} against nodes that pass elsewhere" if unsure else ""
        sides = [[node] for node in (link[::-1] if direction == "to" else link)]
        yield _blame(tests, Kind.LINK, sides, {link}, {link}, direction and "from", decide)

    yield from _undecided(tests, across, cover)


def _undecided(tests: _Tests, across: set[Pair], cover: Cover) -> Iterator[Blame]:
    """What is in some of the cheapest sets only, together where failures connect it."""
    failed = {pair_of(node, b) for node in cover.maybe_nodes for b in tests.failed[node]} | cover.maybe_links
    failed = {pair for pair in failed - across - cover.links if not cover.nodes & {*pair}}
    graph = {n: {b for b in tests.failed[n] if pair_of(n, b) in failed} for pair in failed for n in pair}
    for part in areas_of(graph, sorted(graph)):
        nodes = [node for node in part if node in cover.maybe_nodes]
        links = sorted(link for link in cover.maybe_links if link[0] in part)
        around = {pair_of(node, b) for node in nodes for b in tests.tested[node]}
        who = "both" if len(nodes) == 2 and not links else "each of them"
        decide = f"test {who} against a node that passes elsewhere"
        if not any(tests.passed[node] for node in nodes):
            decide = f"test {who} against a {'third' if len(nodes) == 2 else 'further'} node"
        groups = [*([node] for node in nodes), *links]
        yield _blame(tests, Kind.UNDECIDED, groups, {p for p in failed if p[0] in part}, around, "", decide)


def _direction(tests: _Tests, inside: Sequence[int], failed: Iterable[Pair]) -> str:
    """`from` or `to` the nodes inside, where each of the pairs fails in this direction and passes in the other."""
    ways = tests.ways(failed)
    lost = [way for way in ways if not tests.is_ok[way]]
    are_from = {a in inside for a, _ in lost}
    if len(ways) != 2 * len(lost) or len(are_from) != 1:
        return ""
    return "from" if are_from == {True} else "to"


def _blame(
    tests: _Tests, kind: Kind, groups: Iterable[Sequence[int]], failed: Iterable[Pair], around: Iterable[Pair],
    direction: str, would_decide: str,
) -> Blame:  # fmt: skip
    """The blame in names; it is certain where nothing more would decide it."""
    named = [tuple(tests.names[node] for node in group) for group in groups]
    explains = tests.edges(way for way in tests.ways(failed) if not tests.is_ok[way])
    against = [edge for edge in tests.edges(tests.ways(around)) if edge.is_ok]
    if direction:
        first = set(named[0])
        against = [edge for edge in against if (edge.source if direction == "from" else edge.target) in first]
    confidence = Confidence.LIKELY if would_decide else Confidence.CERTAIN
    if kind is Kind.UNDECIDED:
        confidence = Confidence.UNDECIDED
    counts = len(explains), len(against)
    return Blame(kind, tuple(named), bool(direction), *counts, confidence, would_decide, explains, direction)


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sort key by which node9 comes before node10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
