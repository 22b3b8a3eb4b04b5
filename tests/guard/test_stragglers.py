"""Who comes late to nearly every collective, and who does not?"""

from __future__ import annotations

import random

import pytest

from allranks.guard.stragglers import Stragglers

RANKS = (0, 1, 2, 3)


def feed(
    late, *, count: int = 100, period_s: float = 0.5, noise_s: float = 0.005, error_s: float = 0.001, stride: int = 1
):
    """`late(seq, rank)` seconds after its time; returns who was named."""
    rng = random.Random(1)
    stragglers = Stragglers()
    for number in range(1, count + 1):
        seq = number * stride
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
    assert feed(lambda seq, rank: 0.15 * (rank == 2), stride=4)[0].share == pytest.approx(0.30, abs=0.02)


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
