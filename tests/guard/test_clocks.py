"""How far is a node's clock off, whatever the way there takes?"""

from __future__ import annotations

import random

import pytest

from allranks.guard.goodput.clocks import NodeClock


def exchange(clock: NodeClock, at_s: float, *, offset_s: float, there_s: float, back_s: float, held_s: float) -> bool:
    """The leader sent at `at_s`; returns whether the clock was set."""
    replied_s = at_s + there_s + held_s
    return clock.hear(sent_s=at_s, held_s=held_s, node_s=replied_s + offset_s, now_s=replied_s + back_s)


def test_the_fastest_way_counts():
    rng = random.Random(3)
    clock = NodeClock()
    for number in range(100):
        exchange(
            clock,
            100.0 + number,
            offset_s=-3600.25,
            there_s=rng.uniform(0.0002, 0.2),
            back_s=rng.uniform(0.0002, 0.2),
            held_s=rng.uniform(0, 0.5),
        )
    assert clock.offset_s == pytest.approx(-3600.25, abs=0.02)
    assert clock.error_s < 0.03
    assert abs(clock.offset_s + 3600.25) <= clock.error_s


def test_a_clock_that_is_set_is_noticed_once():
    clock = NodeClock()
    way = {"there_s": 0.001, "back_s": 0.001, "held_s": 0.1}
    assert [exchange(clock, at_s, offset_s=5.0, **way) for at_s in (1.0, 2.0)] == [False, False]
    assert [exchange(clock, at_s, offset_s=4.9, **way) for at_s in (3.0, 4.0)] == [True, False]
    assert clock.offset_s == pytest.approx(4.9)


def test_a_slow_way_is_not_taken_for_a_clock_that_was_set():
    clock = NodeClock()
    exchange(clock, 1.0, offset_s=5.0, there_s=0.001, back_s=0.001, held_s=0.1)
    assert not exchange(clock, 2.0, offset_s=5.0, there_s=0.001, back_s=2.0, held_s=0.1)
    assert clock.offset_s == pytest.approx(5.0, abs=0.002)


def test_an_answer_before_the_question_is_not_believed():
    clock = NodeClock()
    assert not clock.hear(sent_s=100.0, held_s=5.0, node_s=0.0, now_s=101.0)
    assert clock.offset_s is None


def test_old_ways_are_forgotten():
    clock = NodeClock()
    exchange(clock, 1.0, offset_s=5.0, there_s=0.0001, back_s=0.0001, held_s=0.0)
    exchange(clock, 100.0, offset_s=5.001, there_s=0.01, back_s=0.01, held_s=0.0)
    assert clock.offset_s == pytest.approx(5.001)


def test_an_old_exchange_is_worth_less_and_less():
    """Clocks drift apart by 20 ppm: 50 s after the fastest way it is 1 ms off, and a slower new one is better."""
    clock = NodeClock()
    exchange(clock, 1.0, offset_s=5.0, there_s=0.0001, back_s=0.0001, held_s=0.0)
    for at_s in range(2, 52):
        exchange(clock, at_s, offset_s=5.0 + 2e-5 * at_s, there_s=0.0009, back_s=0.0001, held_s=0.0)
        assert abs(clock.offset_s - 5.0 - 2e-5 * at_s) <= clock.error_s
    assert clock.error_s < 0.0006
