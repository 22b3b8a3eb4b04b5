from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.preflight.cover import LINK_COST, Cover, Graph, areas_of, find_cover, pair_of


def graph_of(*pairs: tuple[int, int]) -> Graph:
    graph: Graph = {}
    for a, b in pairs:
        graph.setdefault(a, set()).add(b)
        graph.setdefault(b, set()).add(a)
    return graph


def cover(*pairs: tuple[int, int], cost: int) -> Cover:
    graph = graph_of(*pairs)
    return find_cover(graph, dict.fromkeys(graph, cost))


def test_a_link_is_cheaper_than_its_nodes() -> None:
    assert cover((0, 1), cost=50) == Cover(LINK_COST, links={(0, 1)})


def test_a_node_that_explains_enough_is_cheaper_than_its_links() -> None:
    assert cover((0, 1), (0, 2), (0, 3), cost=50) == Cover(50, nodes={0})


def test_of_two_that_explain_the_same_neither_is_certain() -> None:
    assert cover((0, 1), cost=18) == Cover(18, maybe_nodes={0, 1})


def test_failures_that_share_no_node_are_explained_apart() -> None:
    found = cover((0, 1), (0, 2), (0, 3), (4, 5), cost=50)
    assert (found.cost, found.nodes, found.links) == (50 + LINK_COST, {0}, {(4, 5)})


def test_areas_are_what_links_connect() -> None:
    assert list(areas_of({0: {2}, 1: set(), 2: {0}}, [2, 1, 0])) == [[0, 2], [1]]


PAIRS = list(combinations(range(7), 2))


@settings(deadline=None)
@given(st.sets(st.sampled_from(PAIRS), min_size=1), st.lists(st.sampled_from([18, 50]), min_size=7, max_size=7))
def test_no_cheaper_set_explains_all_failures(pairs: set[tuple[int, int]], costs: list[int]) -> None:
    def cost_of(nodes: tuple[int, ...]) -> int:
        return sum(costs[node] for node in nodes) + LINK_COST * sum(not {*pair} & {*nodes} for pair in pairs)

    cheapest = min(cost_of(nodes) for size in range(8) for nodes in combinations(range(7), size))
    found = find_cover(graph_of(*pairs), dict(enumerate(costs)))
    assert found.cost == cheapest
    assert {pair_of(*pair) for pair in found.links} <= pairs
