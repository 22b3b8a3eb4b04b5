from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from allranks.model.finding import Confidence
from allranks.preflight.pair_blame import Blame, Edge, Kind, blame

CERTAIN, LIKELY, UNDECIDED = Confidence.CERTAIN, Confidence.LIKELY, Confidence.UNDECIDED


def mesh(nodes: str, *failed: str) -> list[Edge]:
    """All pairs both ways of one-letter nodes; `ab` fails both ways, `a>b` one way, `a*` all of a, `a>*` from a."""
    return try_all((a + b for a, b in combinations(nodes, 2)), *failed)


def try_all(pairs: Iterable[str], *failed: str) -> list[Edge]:
    def is_ok(a: str, b: str) -> bool:
        patterns = {a + b, b + a, f"{a}>{b}", f"{a}*", f"{b}*", f"{a}>*", f"*>{b}"}
        return not patterns & {*failed}

    return [Edge(a, b, is_ok(a, b)) for pair in pairs for a, b in (pair, pair[::-1])]


def named(found: Iterable[Blame]) -> list[str]:
    """`node a certain`, `link a-b likely`, `partition abc|de certain`, `undecided a or b-c undecided`."""
    joints = {Kind.NODE: "", Kind.LINK: "-", Kind.PARTITION: "|", Kind.UNDECIDED: " or "}
    return [
        f"{b.kind} " + joints[b.kind].join(("-" if b.kind is Kind.UNDECIDED else "").join(g) for g in b.groups)
        + (f" {b.direction}" if b.kind is not Kind.LINK and b.is_one_way else " one way" if b.is_one_way else "")
        + (f" {b.confidence}" if b.kind is not Kind.UNDECIDED else "")
        for b in found
    ]  # fmt: skip


def crossing(left: str, right: str) -> list[str]:
    return [a + b for a in left for b in right]


CASES = {
    "nothing was tested": ([], []),
    "all pass": (mesh("abcd"), []),
    "two nodes": (mesh("ab", "ab"), ["undecided a or b"]),
    "two nodes, one way": (mesh("ab", "a>b"), ["undecided a or b"]),
    "three nodes, one link": (mesh("abc", "ab"), ["link a-b certain"]),
    "three nodes, one link one way": (mesh("abc", "b>a"), ["link b-a one way certain"]),
    "one node against two": (mesh("abc", "b*"), ["node b certain"]),
    "one node against two that were not tried": (try_all(["ab", "bc"], "b*"), ["node b likely"]),
    "three nodes, nothing passes": (mesh("abc", "a*", "b*"), ["undecided a or b or c"]),
    "four nodes, nothing passes": (mesh("abcd", "a*", "b*", "c*"), ["undecided a or b or c or d"]),
    "one node of six": (mesh("abcdef", "c*"), ["node c certain"]),
    "one node cannot send": (mesh("abcdef", "c>*"), ["node c from certain"]),
    "one node cannot be reached": (mesh("abcdef", "*>c"), ["node c to certain"]),
    "two nodes of six": (mesh("abcdef", "c*", "e*"), ["node c certain", "node e certain"]),
    "two nodes, one of them one way": (mesh("abcdef", "c*", "e>*"), ["node c certain", "node e from certain"]),
    "two nodes of four": (mesh("abcd", "a*", "b*"), ["node a certain", "node b certain"]),
    "a node and a link": (mesh("abcdef", "c*", "ef"), ["node c certain", "link e-f certain"]),
    "a node and a link of four": (mesh("abcd", "a*", "bc"), ["node a certain", "link b-c certain"]),
    "two links": (mesh("abcdef", "ab", "ef"), ["link a-b certain", "link e-f certain"]),
    "two links of four": (mesh("abcd", "ab", "cd"), ["link a-b certain", "link c-d certain"]),
    "two links of one node": (mesh("abcdef", "ab", "ac"), ["link a-b likely", "link a-c likely"]),
    "three links of one node are the node": (mesh("abcdef", "ab", "ac", "ad"), ["node a likely"]),
    "a lossy node": (mesh("abcdefgh", "ab", "ac", "d>a", "ae", "ah"), ["node a likely"]),
    "two halves": (mesh("abcdef", *crossing("abc", "def")), ["partition abc|def certain"]),
    "two pairs": (mesh("abcd", *crossing("ab", "cd")), ["partition ab|cd certain"]),
    "two against many": (mesh("abcdefg", *crossing("bd", "acefg")), ["partition acefg|bd certain"]),
    "three groups": (
        mesh("abcdefgh", *crossing("abc", "defgh"), *crossing("de", "fgh")),
        ["partition abc|fgh|de certain"],
    ),
    "a partition one way": (
        mesh("abcdef", *(f"{a}>{b}" for a in "abc" for b in "def")),
        ["partition abc|def from certain"],
    ),
    "a partition that lets one pair through": (
        mesh("abcdef", *[pair for pair in crossing("abc", "def") if pair != "ad"]),
        ["partition abc|def likely"],
    ),
    "a partition and a node": (
        mesh("abcdefg", *crossing("abc", "def"), "g*"),
        ["partition abc|def certain", "node g certain"],
    ),
    "a partition and a node of one side": (
        mesh("abcdefgh", *crossing("abcd", "efgh"), "h*"),
        ["partition abcd|efg certain", "node h certain"],
    ),
    "a partition and a link": (
        mesh("abcdef", *crossing("abc", "def"), "ab"),
        ["partition abc|def certain", "link a-b certain"],
    ),
    "a bridge is a link": (try_all(["ab", "bc", "ac", "cd", "de", "ef", "df"], "cd"), ["link c-d certain"]),
    "a leaf is a node": (try_all(["ab", "bc", "ac", "cd"], "cd"), ["node d likely"]),
    "a node with three partners": (try_all(["ab", "bc", "cd", "da", "ea", "eb", "ec"], "e*"), ["node e certain"]),
    "a node with two partners": (try_all(["ab", "bc", "cd", "da", "ea", "eb"], "e*"), ["node e likely"]),
    "a star whose hub fails": (try_all(["ha", "hb", "hc", "hd"], "h*"), ["node h likely"]),
    "a star whose leaf fails": (try_all(["ha", "hb", "hc", "hd"], "d*"), ["node d likely"]),
    "a node, another that cannot send, and a link": (
        mesh("abcdefg", "a*", "b>*", "cd"),
        ["node a certain", "node b from certain", "link c-d certain"],
    ),
    "two jobs that know nothing of each other": (
        [*mesh("abc", "ab"), *mesh("xy", "xy")],
        ["link a-b certain", "undecided x or y"],
    ),
    "two lossy nodes that share a link": (
        mesh("abcdefgh", "ab", "ac", "ad", "be", "bf"),
        ["undecided a or b or a-c or a-d or b-e or b-f"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edges", "expected"), CASES.values(), ids=CASES.keys())
def test_the_smallest_explanation_is_named(edges: list[Edge], expected: list[str]) -> None:
    assert named(blame(edges)) == expected
    assert named(blame(edges[::-1])) == expected


def test_every_failure_is_explained_and_counted() -> None:
    (node, link) = blame(mesh("abcdef", "c*", "ef"))
    assert node == Blame(
        kind=Kind.NODE, groups=(("c",),), is_one_way=False, num_failed=10, num_passed=0, confidence=CERTAIN,
        would_decide="", explains=tuple(e for e in mesh("abcdef", "c*") if "c" in (e.source, e.target)),
    )  # fmt: skip
    assert link.explains == (Edge("e", "f", False), Edge("f", "e", False))


def test_what_passes_against_a_lossy_node_is_counted() -> None:
    (found,) = blame(mesh("abcdef", "ab", "ac", "ad"))
    assert (found.num_failed, found.num_passed) == (6, 4)
    assert found.would_decide == "repeat the tests of a and see whether it fails with other nodes"


def test_what_a_one_way_node_passes_the_other_way_speaks_not_against_it() -> None:
    (found,) = blame(mesh("abcdef", "c>*"))
    assert (found.num_failed, found.num_passed, found.is_one_way, found.direction) == (5, 0, True, "from")


def test_two_nodes_need_a_third() -> None:
    (found,) = blame(mesh("ab", "ab"))
    assert found.would_decide == "test both against a third node"
    assert (found.confidence, found.num_failed) == (UNDECIDED, 2)


@pytest.mark.parametrize(
    ("nodes", "failed", "suspects", "expected"),
    [
        ("ab", ["ab"], "b", ["node b likely"]),
        ("ab", ["ab"], "ab", ["undecided a or b"]),
        ("abc", ["ab"], "a", ["link a-b certain"]),
        ("abc", ["a*", "b*"], "b", ["node b likely", "undecided a or c"]),
        ("abcdef", [], "a", []),
        ("abcdef", ["c*"], "a", ["node c certain"]),
    ],
)
def test_suspects_break_ties_only(nodes: str, failed: list[str], suspects: str, expected: list[str]) -> None:
    assert named(blame(mesh(nodes, *failed), suspects=suspects)) == expected


def test_a_test_done_twice_fails_where_it_failed_once() -> None:
    edges = [*mesh("abc", "ab"), *mesh("abc")]
    assert named(blame(edges)) == named(blame(edges[::-1])) == ["link a-b certain"]


def test_a_node_tried_against_itself_says_nothing() -> None:
    assert blame([Edge("a", "a", False), *mesh("abc")]) == ()


def test_names_are_in_the_order_of_their_numbers() -> None:
    left, right = ["n9", "n10"], ["n1", "n2", "n11"]
    nodes = left + right
    edges = [Edge(a, b, (a in left) == (b in left)) for a in nodes for b in nodes if a != b]
    assert blame(edges)[0].groups == (("n1", "n2", "n11"), ("n9", "n10"))


def test_many_nodes_of_which_none_passes_are_all_undecided() -> None:
    nodes = [f"n{i:02}" for i in range(64)]
    edges = [Edge(a, b, False) for a in nodes for b in nodes if a != b]
    (found,) = blame(edges)
    assert found.groups == tuple((node,) for node in nodes)
    assert found.num_failed == 4032
    (suspect, rest) = blame(edges, suspects=["n07"])
    assert (suspect.groups, suspect.confidence, len(rest.groups)) == ((("n07",),), LIKELY, 63)


# ---- planted faults

Graph = tuple[list[str], list[tuple[str, str]]]


@st.composite
def graphs(draw: st.DrawFn, min_nodes: int) -> Graph:
    """A full mesh, or connected pairs in which every node has three partners or more."""
    num_nodes = draw(st.one_of(st.integers(min_nodes, 9), st.integers(min_nodes, 64)))
    nodes = [f"n{i:02}" for i in range(num_nodes)]
    if num_nodes < 5 or draw(st.booleans()):
        return nodes, list(combinations(nodes, 2))
    chance = draw(st.randoms(use_true_random=False))
    ring = chance.sample(nodes, num_nodes)
    pairs = {tuple(sorted((ring[i - 1], ring[i]))) for i in range(num_nodes)}
    degree = dict.fromkeys(nodes, 2)
    while poor := [node for node in nodes if degree[node] < 3]:
        a = poor[0]
        b = chance.choice([n for n in nodes if n != a and tuple(sorted((a, n))) not in pairs])
        pairs.add(tuple(sorted((a, b))))
        degree[a] += 1
        degree[b] += 1
    return nodes, sorted(pairs)


def run(graph: Graph, is_broken: Callable[[str, str], bool]) -> tuple[list[Edge], tuple[Blame, ...]]:
    edges = [Edge(a, b, not is_broken(a, b)) for pair in graph[1] for a, b in (pair, pair[::-1])]
    found = blame(edges)
    exonerated = set(graph[0]) - {name for edge in edges if not edge.is_ok for name in (edge.source, edge.target)}
    for one in found:
        if one.kind is not Kind.PARTITION:
            assert not exonerated & {name for group in one.groups for name in group}
        assert not any(edge.is_ok for edge in one.explains)
    assert {e for one in found for e in one.explains} == {e for e in edges if not e.is_ok}
    return edges, found


def culprits(found: Iterable[Blame]) -> set[tuple[Kind, frozenset[str]]]:
    return {(b.kind, frozenset(name for group in b.groups for name in group)) for b in found}


def node(name: str) -> tuple[Kind, frozenset[str]]:
    return Kind.NODE, frozenset([name])


def link(pair: tuple[str, str]) -> tuple[Kind, frozenset[str]]:
    return Kind.LINK, frozenset(pair)


@given(graphs(3), st.data())
def test_a_planted_node_is_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from(graph[0]))
    way = data.draw(st.sampled_from(["", "from", "to"]))
    _, found = run(graph, lambda a, b: (bad == a and way != "to") or (bad == b and way != "from"))
    assert culprits(found) == {node(bad)}
    assert (found[0].direction, found[0].confidence) == (way, CERTAIN)


@given(graphs(3), st.data())
def test_a_planted_link_is_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from(graph[1]))
    is_one_way = data.draw(st.booleans())
    _, found = run(graph, lambda a, b: (a, b) == bad or ((b, a) == bad and not is_one_way))
    assert culprits(found) == {link(bad)}
    assert (found[0].is_one_way, found[0].confidence) == (is_one_way, CERTAIN)
    if is_one_way:
        assert found[0].groups == ((bad[0],), (bad[1],))


@given(graphs(4), st.data())
def test_a_planted_partition_is_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    nodes, pairs = graph
    left = set(data.draw(st.lists(st.sampled_from(nodes), min_size=2, max_size=len(nodes) - 2, unique=True)))
    groups = {tuple(sorted(left)), tuple(sorted(set(nodes) - left))}
    # A group that is not connected is several.
    assume(all(is_connected(group, pairs) for group in groups))
    across = [pair for pair in pairs if (pair[0] in left) != (pair[1] in left)]
    _, found = run(graph, lambda a, b: (a in left) != (b in left))
    if len(across) < 3:
        # One or two failed links that happen to be a cut of the tests: links.
        assert culprits(found) == {link(pair) for pair in across}
    elif shared := set.intersection(*map(set, across)):
        # The tests across all have one node in common.
        assert culprits(found) == {node(*shared)}
        assert found[0].confidence is LIKELY
    else:
        assert [b.kind for b in found] == [Kind.PARTITION]
        assert set(found[0].groups) == groups


@given(graphs(4), st.data())
def test_two_planted_nodes_are_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    bad = data.draw(st.lists(st.sampled_from(graph[0]), min_size=2, max_size=2, unique=True))
    _, found = run(graph, lambda a, b: a in bad or b in bad)
    assert culprits(found) == {node(name) for name in bad}


@given(graphs(4), st.data())
def test_a_planted_node_and_a_planted_link_are_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from(graph[0]))
    pair = data.draw(st.sampled_from([pair for pair in graph[1] if bad not in pair]))
    _, found = run(graph, lambda a, b: bad in (a, b) or {a, b} == {*pair})
    assert culprits(found) == {node(bad), link(pair)}


@given(graphs(4), st.data())
def test_two_planted_links_are_named_and_nothing_else(graph: Graph, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from(graph[1]))
    others = [pair for pair in graph[1] if not {*pair} & {*bad}]
    assume(others)
    other = data.draw(st.sampled_from(others))
    _, found = run(graph, lambda a, b: {a, b} in ({*bad}, {*other}))
    assert culprits(found) == {link(bad), link(other)}


@given(graphs(3), st.randoms(use_true_random=False), st.floats(0, 1))
def test_whatever_fails_is_explained_by_nobody_who_passes(graph: Graph, chance: random.Random, share: float) -> None:
    broken = {pair for pair in graph[1] if chance.random() < share}
    run(graph, lambda a, b: (a, b) in broken or (b, a) in broken)


def is_connected(group: Iterable[str], pairs: list[tuple[str, str]]) -> bool:
    left = set(group)
    todo = [left.pop()]
    while todo:
        here = todo.pop()
        near = {b if a == here else a for a, b in pairs if here in (a, b)} & left
        left -= near
        todo += near
    return not left


@given(st.integers(8, 24), st.randoms(use_true_random=False))
def test_a_partition_that_lets_a_few_pairs_through_is_still_one(num_nodes: int, chance: random.Random) -> None:
    nodes = [f"n{i:02}" for i in range(num_nodes)]
    left = set(chance.sample(nodes, chance.randint(4, num_nodes - 4)))
    across = [pair for pair in combinations(nodes, 2) if (pair[0] in left) != (pair[1] in left)]
    slipped = chance.sample(across, 2)
    _, found = run((nodes, [*combinations(nodes, 2)]), lambda a, b: tuple(sorted((a, b))) in {*across} - {*slipped})
    assert [(b.kind, b.confidence, b.num_passed) for b in found] == [(Kind.PARTITION, LIKELY, 4)]
    assert {frozenset(group) for group in found[0].groups} == {frozenset(left), frozenset(nodes) - left}


@pytest.mark.parametrize("shape", ["mesh of 64", "1024 sparse"])
@pytest.mark.parametrize(
    "fault", ["node", "lossy", "partition", "third of the nodes", "third of the pairs", "most pairs", "all"]
)
def test_large_jobs_are_judged_in_a_second(shape: str, fault: str) -> None:
    chance = random.Random(1)
    nodes = [f"n{i:04}" for i in range(64 if shape == "mesh of 64" else 1024)]
    pairs = list(combinations(nodes, 2))
    if shape == "1024 sparse":
        pairs = [(nodes[i], nodes[(i + step) % 1024]) for i in range(1024) for step in (1, 7, 63, 201, 509)]
    bad = {"node": nodes[5:6], "third of the nodes": nodes[::3], "partition": nodes[: len(nodes) // 2], "all": nodes}
    shares = {"third of the pairs": 1 / 3, "most pairs": 0.85}
    bad_nodes = set(bad.get(fault, []))

    def is_broken(a: str, b: str) -> bool:
        if fault == "partition":
            return (a in bad_nodes) != (b in bad_nodes)
        if fault == "lossy":
            return nodes[7] in (a, b) and chance.random() < 0.6
        return bool({a, b} & bad_nodes) or chance.random() < shares.get(fault, 0)

    edges = [Edge(x, y, not broken) for a, b in pairs for broken in [is_broken(a, b)] for x, y in ((a, b), (b, a))]
    start = time.process_time()
    found = blame(edges)
    took_s = time.process_time() - start
    assert {e for b in found for e in b.explains} == {e for e in edges if not e.is_ok}
    if shape == "mesh of 64" and fault in ("node", "third of the nodes"):
        assert culprits(found) == {node(name) for name in bad_nodes}
    assert took_s < 20  # of a core: 0.1 s, and 1 s where most pairs fail, on a machine that does nothing else
