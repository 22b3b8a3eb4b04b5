"""Who comes late to nearly every collective, and who does not?"""

from __future__ import annotations

import random

import pytest

from allranks.guard.inside.flight import chosen
from allranks.guard.stragglers import Stragglers

RANKS = (0, 1, 2, 3)


def feed(
    late, *, count: int = 100, period_s: float = 0.5, noise_s: float = 0.005, error_s: float = 0.001, is_told=bool
):
    """`late(seq, rank)` seconds after its time; returns who was named."""
    rng = random.Random(1)
    stragglers = Stragglers()
    for seq in filter(is_told, range(1, count + 1)):
        for rank in RANKS:
            called_s = seq * period_s + rng.uniform(0, noise_s) + late(seq, rank)
            stragglers.hear("0", RANKS, rank, seq, called_s, error_s)
    return list(stragglers.named())


TABLE = {
    "nobody": (lambda seq, rank: 0.0, None),
    "one rank": (lambda seq, rank: 0.15 * (rank == 2), 2),
    "too little": (lambda seq, rank: 0.010 * (rank == 2), None),
    "now this one, now that one": (lambda seq, rank: 0.15 * (rank == seq % 4), None),
    "two ranks are equally late": (lambda seq, rank: 0.15 * (rank in (1, 2)), None),
    "every twentieth, for long": (lambda seq, rank: 5.0 * (rank == 0 and seq % 20 == 0), None),
    "every second one": (lambda seq, rank: 0.15 * (rank == 2 and seq % 2 == 0), 2),
    "only in the first window": (lambda seq, rank: 0.15 * (rank == 2 and seq < 15), None),
}


@pytest.mark.parametrize("case", TABLE)
def test_only_a_rank_that_is_late_again_and_again_is_named(case):
    late, rank = TABLE[case]
    named = feed(late)
    assert [each.rank for each in named] == ([] if rank is None else [rank])


def test_its_lag_and_share_are_told():
    (named,) = feed(lambda seq, rank: 0.15 * (rank == 2))
    assert named.lag_s == pytest.approx(0.15, abs=0.006)
    assert named.share == pytest.approx(0.30, abs=0.02)
    assert (named.num_late, named.num_collectives) == (36, 36)
    (named,) = feed(lambda seq, rank: 0.15 * (rank == 2), count=400, is_told=lambda seq: seq // 8 % 4 == 0)
    assert named.share == pytest.approx(0.30, abs=0.02)


@pytest.mark.parametrize("at_most", [16, 8, 20])
def test_buckets_that_are_late_together_cost_once(at_most: int):
    """0.08 s forward, three buckets 0.01 s apart that nobody waits for, and then an all-reduce that all wait for: of
    0.205 s for a step, rank 2 costs the others 0.1 s, however many of the calls are told."""
    stragglers, told = Stragglers(), 0
    for first in range(1, 1601, 20):  # told after five steps
        for seq in sorted(chosen(first, first + 19, at_most)):
            step, call = divmod(seq - 1, 4)
            for rank in RANKS:
                late_s = 0.1 if rank == 2 or call == 3 else 0.0
                called_s = 0.205 * step + (0.08 + 0.01 * call if call < 3 else 0.105) + late_s
                stragglers.hear("0", RANKS, rank, seq, called_s, 0.001)
                told += 1
    (named,) = stragglers.named()
    assert (named.rank, named.lag_s) == (2, pytest.approx(0.1))
    assert named.share == pytest.approx(0.1 / 0.205, abs=0.06), told


def test_a_lag_below_what_clocks_may_be_wrong_by_is_none():
    assert feed(lambda seq, rank: 0.15 * (rank == 2), error_s=0.030) == []


def test_three_windows_are_needed():
    assert feed(lambda seq, rank: 0.15 * (rank == 2), count=35) == []
    assert feed(lambda seq, rank: 0.15 * (rank == 2), count=40)


def test_collectives_that_not_all_ranks_tell_of_take_no_memory():
    stragglers = Stragglers()
    for seq in range(1, 5000):
        stragglers.hear("0", RANKS, 0, seq, float(seq), 0.001)
    assert max(len(group.open) for group in stragglers._groups.values()) <= 512


def test_neither_groups_without_end_nor_a_rank_that_never_tells_grow_the_leader(monkeypatch):
    monkeypatch.setattr("allranks.guard.stragglers.MAX_TOLD", 1000)
    stragglers = Stragglers()
    for number in range(5000):
        stragglers.hear(f"{number}", RANKS, 0, 1, 0.0, 0.0)
    assert len(stragglers._groups) == 1024
    for seq in range(5000):
        for rank in range(9):
            stragglers.hear("0", tuple(range(10)), rank, seq, float(seq), 0.001)
    assert max(len(group.open) for group in stragglers._groups.values()) == 100
