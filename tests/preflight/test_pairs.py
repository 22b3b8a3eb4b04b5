"""Which pairs are tried: nobody is left out, and no cut is crossed by few."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.preflight.pairs import MAX_FOLLOW_UPS, MAX_PER_SUSPECT, choose_pairs, choose_ring, follow_up

SPARSE_SIZES = st.integers(min_value=65, max_value=1100)
SEEDS = st.integers(min_value=0, max_value=2**32)


@pytest.mark.parametrize(("num_nodes", "num_pairs"), [(0, 0), (1, 0), (2, 2), (6, 30), (64, 4032)])
def test_up_to_64_nodes_everybody_tries_everybody_else(num_nodes: int, num_pairs: int) -> None:
    pairs = choose_pairs(num_nodes, seed=7)
    assert len(set(pairs)) == len(pairs) == num_pairs
    assert all(source != target and max(source, target) < num_nodes for source, target in pairs)


def test_1024_nodes_are_tried_in_10240_pairs() -> None:
    assert len(choose_pairs(1024, seed=7)) == 10240


def test_the_seed_decides() -> None:
    assert choose_pairs(100, seed=7) == choose_pairs(100, seed=7)
    assert choose_pairs(100, seed=7) != choose_pairs(100, seed=8)


def test_few_nodes_can_be_told_to_be_many() -> None:
    assert len(choose_pairs(6, full_up_to=2, seed=0)) == 12  # steps 1 and 2
    assert choose_pairs(2, full_up_to=0, seed=0) == [(0, 1), (1, 0)]


@given(SPARSE_SIZES, SEEDS)
def test_every_node_is_a_source_and_a_target_as_often_as_log2(num_nodes: int, seed: int) -> None:
    pairs = choose_pairs(num_nodes, seed=seed)
    times = num_nodes.bit_length() - 1
    assert len(set(pairs)) == len(pairs)
    assert all(source != target for source, target in pairs)
    assert Counter(source for source, _ in pairs) == dict.fromkeys(range(num_nodes), times)
    assert Counter(target for _, target in pairs) == dict.fromkeys(range(num_nodes), times)


@given(SPARSE_SIZES, SEEDS)
def test_the_ring_is_a_part_of_the_pairs_in_which_every_node_is_once_a_source_and_once_a_target(
    num_nodes: int, seed: int
) -> None:
    ring = choose_ring(num_nodes, seed=seed)
    assert set(ring) <= set(choose_pairs(num_nodes, seed=seed))
    assert [source for source, _ in ring] == sorted(target for _, target in ring) == list(range(num_nodes))


@given(SPARSE_SIZES, SEEDS)
def test_every_node_is_reached_from_every_other(num_nodes: int, seed: int) -> None:
    neighbours: dict[int, set[int]] = {node: set() for node in range(num_nodes)}
    for source, target in choose_pairs(num_nodes, seed=seed):
        neighbours[source].add(target)
    reached, new = {0}, {0}
    while new:
        new = set().union(*(neighbours[node] for node in new)) - reached
        reached |= new
    assert len(reached) == num_nodes


@given(SPARSE_SIZES, SEEDS, st.data())
def test_every_cut_is_crossed_by_twice_log2_pairs(num_nodes: int, seed: int, data: st.DataObject) -> None:
    pairs = choose_pairs(num_nodes, seed=seed)
    size = data.draw(st.integers(1, num_nodes - 1))
    nodes = list(range(num_nodes))
    if data.draw(st.booleans()):  # otherwise: neighbours in the host list, as in a rack
        random.Random(seed).shuffle(nodes)
    part = set(nodes[:size])
    crossing = {frozenset(pair) for pair in pairs if (pair[0] in part) != (pair[1] in part)}
    assert len(crossing) >= 2 * (num_nodes.bit_length() - 1) - 1


def test_two_halves_of_a_cluster_are_crossed_by_thousands() -> None:
    crossing = [pair for pair in choose_pairs(1024, seed=7) if (pair[0] < 512) != (pair[1] < 512)]
    assert len(crossing) > 4500


def test_one_failing_pair_is_tried_back_and_each_end_with_two_others() -> None:
    chosen = follow_up({(3, 5)}, choose_pairs(100, seed=1), 100, seed=1)
    assert (5, 3) in chosen
    for suspect in (3, 5):
        others = Counter(sum(pair) - suspect for pair in chosen if suspect in pair)
        assert {node: count for node, count in others.items() if node not in (3, 5)} == dict.fromkeys(
            set(others) - {3, 5}, 2
        )
        assert len(set(others) - {3, 5}) == 2
    assert len(chosen) == 9


def test_two_suspects_of_different_pairs_are_tried_with_each_other() -> None:
    chosen = follow_up({(1, 2), (3, 4)}, {(1, 2), (3, 4)}, 4 + 1, seed=1)
    assert {(1, 3), (3, 1)} <= set(chosen)


def test_a_full_mesh_leaves_nothing_to_follow_up() -> None:
    assert follow_up({(0, 1)}, choose_pairs(20, seed=1), 20, seed=1) == []
    assert follow_up((), choose_pairs(100, seed=1), 100, seed=1) == []


def test_a_job_where_everything_fails_is_followed_up_within_bounds() -> None:
    pairs = choose_pairs(1024, seed=1)
    chosen = follow_up(pairs, pairs, 1024, seed=1)
    assert 0 < len(chosen) <= MAX_FOLLOW_UPS


def test_sixteen_thousand_suspects_take_no_longer_than_the_pairs_that_are_chosen() -> None:
    ring = choose_ring(16_384, seed=1)
    assert len(follow_up(ring, ring, 16_384, seed=1, at_most=512)) in (511, 512)


@given(st.integers(2, 200), SEEDS, st.data())
def test_follow_ups_are_new_and_bounded(num_nodes: int, seed: int, data: st.DataObject) -> None:
    pairs = choose_pairs(num_nodes, full_up_to=8, seed=seed)
    failed = set(data.draw(st.lists(st.sampled_from(pairs), max_size=30)))
    chosen = follow_up(failed, pairs, num_nodes, seed=seed)
    suspects = {node for pair in failed for node in pair}
    assert chosen == follow_up(failed, pairs, num_nodes, seed=seed)
    assert not set(chosen) & set(pairs)
    assert all(set(pair) & suspects for pair in chosen)
    times = Counter(node for pair in chosen for node in pair)
    assert all(times[suspect] <= MAX_PER_SUSPECT for suspect in suspects)
