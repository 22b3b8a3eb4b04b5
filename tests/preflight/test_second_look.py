"""What is looked at again, how, and what the second look is worth."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import NO_ANSWER, PORTS, around, change, good, mesh, silence, stall

from allranks.model.pair import FULL, MAX_PAIR_BYTES
from allranks.preflight.second_look import (
    CONFIRM_S,
    MAX_FAILED,
    QUIET,
    RATE,
    _cover,
    merge,
    plan_confirmation,
    plan_quiet_look,
    plan_rate_look,
)
from allranks.preflight.symptoms import _median_without, has_failed, is_proven, slow_nodes


def test_where_all_is_well_nothing_is_looked_at_again():
    results = list(mesh(6).values())
    assert plan_confirmation(results) is None
    assert plan_quiet_look(results) is None


FAILURES = {
    "a port": {"num_open": 7, "closed": {40001: NO_ANSWER}},
    "the store's port": {"store": NO_ANSWER},
    "the large transfer": {"large_s": None},
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_failed_is_a_failure(what):
    assert has_failed(good(1, 0, **FAILURES[what]))
    assert not has_failed(good(1, 0))


def test_datagrams_alone_are_no_failure():
    assert not has_failed(good(1, 2, datagrams_lost=3))
    assert not has_failed(good(1, 2, datagrams_lost=40))
    assert not has_failed(good(1, 2, datagrams={1500: True, 9000: False}))


def test_what_a_busy_machine_explains_is_tried_again():
    results = mesh(6)
    change(results, [(2, 3)], num_open=7, closed={40001: "connected, but no answer in 1.6 s"})
    look = plan_confirmation(results.values())
    assert look is not None
    assert (look.pairs, look.effort, look.within_s, look.is_one_by_one) == ([(2, 3)], FULL, CONFIRM_S, False)


def test_what_no_busy_machine_explains_is_not_tried_again():
    assert is_proven(good(1, 2, num_open=2, closed=dict.fromkeys(PORTS[:6], NO_ANSWER)))
    assert is_proven(good(1, 2, num_open=6, closed={40001: NO_ANSWER, 40002: NO_ANSWER}, datagrams_lost=14))
    silent, stalled = mesh(3), mesh(3)
    silence(silent, [(1, 2)])
    stall(stalled, [(1, 2)])
    assert is_proven(silent[1, 2])
    assert is_proven(stalled[1, 2])
    assert not is_proven(good(1, 2, large_s=None))  # stalled, although a datagram of the same size came through
    for results in (silent, stalled):
        assert plan_confirmation(results.values()) is None


@pytest.mark.parametrize("lost", [1, 0])
def test_a_silent_pair_of_a_node_that_loses_some_packets_is_tried_again(lost: int):
    results = mesh(6)
    change(results, around(5, 6), datagrams_lost=lost)
    silence(results, [(1, 5), (5, 1)])  # two answers to ARP were lost
    look = plan_confirmation(results.values())
    assert (None if look is None else look.pairs) == ([(1, 5), (5, 1)] if lost else None)


def test_a_busy_cluster_with_dead_nodes_has_only_its_doubtful_pairs_tried_again():
    results = mesh(64)
    for pair in [pair for number, pair in enumerate(results) if number % 5 == 0]:
        change(results, [pair], datagrams_lost=1)
    silence(results, [pair for pair in results if min(pair) < 12])
    change(results, [(40, 41)], num_open=7, closed={40001: "connected, but no answer in 1.6 s"})
    look = plan_confirmation(results.values())
    assert look is not None
    assert look.pairs == [(40, 41)]


def test_hundreds_of_failures_need_no_confirmation():
    results = mesh(64)
    for node in range(10):
        change(results, around(node, 64), num_open=7, closed={40001: "connected, but no answer in 1.6 s"})
    assert sum(map(has_failed, results.values())) > MAX_FAILED
    assert plan_confirmation(results.values()) is None


def test_who_lost_datagrams_is_looked_at_with_three_witnesses_one_by_one():
    results = mesh(6)
    change(results, around(2, 6), datagrams_lost=1)
    look = plan_quiet_look(list(results.values()))
    assert look is not None
    assert look.effort == QUIET
    assert look.is_one_by_one
    assert [pair for pair in look.pairs if 2 in pair] == [(0, 2), (1, 2), (2, 0), (2, 1), (2, 3), (3, 2)]
    assert [pair for pair in look.pairs if 2 not in pair] == [(0, 1), (0, 3), (1, 0), (1, 3), (3, 0), (3, 1)]  # usual


@pytest.mark.parametrize("num_nodes", [3, 4, 6, 64])
def test_in_a_quiet_look_each_node_is_tried_as_often_as_the_suspect(num_nodes):
    results = mesh(num_nodes)
    change(results, around(2, num_nodes), delivery_mbit_s=90.0)
    look = plan_quiet_look(list(results.values()))
    assert look is not None
    for end in (0, 1):
        assert {*Counter(pair[end] for pair in look.pairs).values()} == {min(3, num_nodes - 1)}


def test_who_is_slow_is_looked_at():
    results = mesh(6)
    change(results, around(4, 6), delivery_mbit_s=90.0)
    look = plan_quiet_look(list(results.values()))
    assert look is not None
    assert {4} == set.intersection(*({*pair} for pair in look.pairs if 4 in pair))
    assert look.reason == "datagrams lost at 0, slow at 1 nodes"


def test_a_quiet_look_is_bounded_at_200_nodes():
    results = mesh(200)
    change(results, list(results), datagrams_lost=1)
    look = plan_quiet_look(list(results.values()))
    assert look is not None
    assert len(look.pairs) <= 8 * 12


def test_a_quiet_look_stays_below_the_bytes_of_a_pair():
    assert 2 * QUIET.large_bytes + 2 * QUIET.num_datagrams * 64 < MAX_PAIR_BYTES
    assert 2 * FULL.large_bytes + 2 * FULL.num_datagrams * 64 < MAX_PAIR_BYTES


def test_one_slow_transfer_does_not_make_a_slow_node():
    results = mesh(6)
    change(results, [(2, 3)], delivery_mbit_s=10.0)
    assert slow_nodes(results.values()) == {}


def test_who_is_slow_in_the_quiet_look_is_measured_again():
    quiet = mesh(6)
    assert plan_rate_look(list(quiet.values())) is None
    change(quiet, around(4, 6), delivery_mbit_s=90.0)
    look = plan_rate_look(list(quiet.values()))
    assert look is not None
    assert look.pairs == list(quiet)
    assert look.effort == RATE
    assert look.is_one_by_one
    assert look.reason == "still slow at 1 nodes"


def test_once_fast_is_not_slow():
    results = mesh(6)
    change(results, around(4, 6), delivery_mbit_s=90.0)
    again = [good(4, 0, datagrams_sent=0), good(0, 4, datagrams_sent=0)]
    assert [*slow_nodes([*results.values(), *again[:1]])] == [4]  # the other way it still is
    assert slow_nodes([*results.values(), *again]) == {}
    assert slow_nodes([*again, *results.values()]) == {}


@pytest.mark.parametrize(("rtt_s", "is_slow"), [(0.0004, True), (0.001, False), (None, True)])
def test_ten_segments_for_each_round_trip_are_all_that_a_young_connection_sends(rtt_s, is_slow):
    results = mesh(6)
    change(results, around(4, 6), delivery_mbit_s=115.8, segment_bytes=1448, rtt_s=rtt_s)  # ten in 1 ms
    assert [*slow_nodes(results.values())] == [4] * is_slow
    loaded = [good(4, 0, delivery_mbit_s=90.0, segment_bytes=1448, rtt_s=0.02)]  # the link was full just then
    assert [*slow_nodes([*results.values(), *loaded])] == [4] * is_slow


@pytest.mark.parametrize("way", ["from", "to"])
def test_a_node_that_is_slow_one_way_is_slow(way):
    results = mesh(6)
    pairs = [(2, other) if way == "from" else (other, 2) for other in (0, 1, 3, 4, 5)]
    change(results, pairs, delivery_mbit_s=100.0)
    assert {node: (slow.mbit_s, slow.usual_mbit_s) for node, slow in slow_nodes(results.values()).items()} == {
        2: (100.0, 900.0)
    }


def test_two_nodes_cannot_say_who_is_slow():
    results = mesh(2)
    change(results, [(0, 1)], delivery_mbit_s=10.0)
    assert slow_nodes(results.values()) == {}


def test_the_later_look_counts():
    first = mesh(3)
    silence(first, [(1, 2)])
    merged = merge(merge(first.values(), [good(1, 2)]), [])
    assert len(merged) == 6
    assert not any(map(has_failed, merged))


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-10, 1 << 60).map(float)


@given(
    st.lists(
        st.builds(
            good,
            st.integers(0, 9),
            st.integers(0, 9),
            delivery_mbit_s=st.none() | NUMBERS,
            large_s=st.none() | NUMBERS,
            datagrams_lost=st.integers(-5, 50),
            datagrams_sent=st.integers(-5, 50),
            closed=st.dictionaries(st.integers(), st.text(max_size=20), max_size=2),
        ),
        max_size=60,
    )
)
def test_whatever_is_reported_the_next_look_is_planned(results):
    for look in (plan_confirmation(results), plan_quiet_look(results)):
        assert look is None or len(look.pairs) <= MAX_FAILED


def cover_step_by_step(pairs):
    """The node with most pairs, the smallest of equals, and again without its pairs: as it reads, and slow."""
    chosen = []
    while pairs:
        counted = Counter(node for pair in pairs for node in pair)
        chosen.append(min(counted, key=lambda node: (-counted[node], node)))
        pairs = [pair for pair in pairs if chosen[-1] not in pair]
    return chosen


PAIRS = st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda pair: pair[0] != pair[1])


@given(st.lists(PAIRS, max_size=60))
def test_who_takes_part_in_all_losses_is_found_in_the_order_of_their_number(pairs):
    assert _cover([good(*pair) for pair in pairs]) == cover_step_by_step(pairs)


@given(st.lists(st.integers(0, 9).map(float), min_size=2, max_size=40), st.data())
def test_a_median_without_some_numbers_is_that_of_the_others(numbers, data):
    order = data.draw(st.permutations(numbers))
    size = data.draw(st.integers(0, len(numbers) - 1))
    assert _median_without(sorted(numbers), order[:size]) == statistics.median(order[size:])


def test_where_udp_is_closed_among_thousands_of_nodes_eight_of_them_are_looked_at():
    nodes = range(8192)
    closed = [good(a, (a + step) % 8192, datagrams_lost=40) for a in nodes for step in (1, 2, 4, 8)]
    look = plan_quiet_look(closed)
    assert look is not None
    assert len({source for source, _ in look.pairs}) <= 40
