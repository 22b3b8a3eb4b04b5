"""Who is paired with whom in the rounds of a deep check."""

from __future__ import annotations

import pytest

from allranks.preflight.matchings import matchings

SIZES = [2, 3, 4, 5, 6, 7, 16, 63, 64, 1024]


def test_one_node_has_nobody() -> None:
    assert matchings([]) == ()
    assert matchings(["n1"]) == ()


def test_two_nodes_have_one_round() -> None:
    assert matchings(["n1", "n2"]) == ((("n1", "n2"),),)


def test_six_nodes_have_two_rounds() -> None:
    assert matchings(["a", "b", "c", "d", "e", "f"]) == (
        (("a", "f"), ("b", "e"), ("c", "d")),
        (("a", "e"), ("f", "d"), ("b", "c")),
    )


@pytest.mark.parametrize("size", SIZES)
def test_in_a_round_every_node_is_there_at_most_once(size: int) -> None:
    nodes = [f"n{i}" for i in range(size)]
    for pairs in matchings(nodes):
        there = [node for pair in pairs for node in pair]
        assert len(there) == len(set(there)) == size - size % 2
        assert set(there) <= set(nodes)


@pytest.mark.parametrize("size", SIZES)
def test_every_node_takes_part_and_no_pair_comes_twice(size: int) -> None:
    nodes = [f"n{i}" for i in range(size)]
    rounds = matchings(nodes)
    assert len(rounds) == min(2, size - 1)
    assert {node for pairs in rounds for pair in pairs for node in pair} == set(nodes)
    pairs = [frozenset(pair) for of_round in rounds for pair in of_round]
    assert len(pairs) == len(set(pairs))


def test_all_rounds_are_all_pairs() -> None:
    nodes = [f"n{i}" for i in range(6)]
    assert sum(map(len, matchings(nodes, 99))) == 15
    assert len(matchings([*nodes, "n6"], 99)) == 7
