"""Who comes late to nearly every collective, and who does not?"""

from __future__ import annotations

import random

import pytest

from allranks.guard.goodput.stragglers import Stragglers
from allranks.guard.goodput.waited import CallTimes, WaitSample
from allranks.guard.inside.flight import chosen

RANKS = (0, 1, 2, 3)


class Line:
    """Calls of four ranks, each on a node of its own, and who is found to be late in them."""

    def __init__(self) -> None:
        self.times, self.stragglers, self.samples = CallTimes(), Stragglers(), list[WaitSample]()

    def call(self, rank: int, seq: int, called_s: float, *, error_s: float, step: int | None = None) -> None:
        for sample in self.times.hear("0", RANKS, rank, [(seq, called_s)], node=(rank, error_s)):
            self.samples.append(sample)
            self.stragglers.hear(sample, step=step)


def feed(
    late,
    *,
    count: int = 120,
    period_s: float = 0.5,
    noise_s: float = 0.005,
    error_s: float = 0.0005,
    is_told=bool,
    steps: int | None = 1,
):
    """`late(seq, rank)` seconds after its time, `steps` of them in each step; returns who was named."""
    rng, line = random.Random(1), Line()
    for seq in filter(is_told, range(1, count + 1)):
        for rank in RANKS:
            called_s = seq * period_s + rng.uniform(0, noise_s) + late(seq, rank)
            line.call(rank, seq, called_s, error_s=error_s, step=steps and seq // steps)
    return list(line.stragglers.named())


TABLE = {
    "nobody": (lambda seq, rank: 0.0, None),
    "one rank": (lambda seq, rank: 0.15 * (rank == 2), 2),
    "too little": (lambda seq, rank: 0.010 * (rank == 2), None),
    "less than the noise": (lambda seq, rank: 0.002 * (rank == 2), None),
    "now this one, now that one": (lambda seq, rank: 0.15 * (rank == seq % 4), None),
    "two ranks are equally late": (lambda seq, rank: 0.15 * (rank in (1, 2)), None),
    "every twentieth, for long": (lambda seq, rank: 5.0 * (rank == 0 and seq % 20 == 0), None),
    "every fourth, for long": (lambda seq, rank: 0.3 * (rank == 0 and seq % 4 == 0), None),
    "every second one": (lambda seq, rank: 0.15 * (rank == 2 and seq % 2 == 0), 2),
    "two of five, which costs 3 %": (lambda seq, rank: 0.04 * (rank == 2 and seq % 5 < 2), None),
    "only in the first window": (lambda seq, rank: 0.15 * (rank == 2 and seq < 15), None),
}


@pytest.mark.parametrize("case", TABLE)
def test_only_a_rank_that_is_late_again_and_again_is_named(case):
    late, rank = TABLE[case]
    named = feed(late, count=260)
    assert [straggler.rank for straggler in named] == ([] if rank is None else [rank])


@pytest.mark.parametrize(
    ("late_ms", "period_ms", "steps", "by"),
    [
        (150, 500, 1, 37),  # a large lag: three windows
        (10, 100, 1, 270),  # a small one: from 200 steps on
        (10, 100, None, 270),  # or 200 collectives, where no step is seen
        (10, 100, 4, 850),
        (6, 100, 1, 270),
        (4, 100, 1, None),  # less than 5 %
        (0.5, 2, 1, None),  # no more than a scheduler takes
    ],
)
def test_a_small_lag_is_named_after_200_steps(late_ms: float, period_ms: float, steps: int | None, by: int | None):
    def named(count: int) -> list[int]:
        late = feed(
            lambda seq, rank: late_ms / 1e3 * (rank == 2),
            count=count, period_s=period_ms / 1e3, noise_s=0.0002, error_s=0.0001, steps=steps,
        )  # fmt: skip
        return [straggler.rank for straggler in late]

    assert named(by or 3000) == ([2] if by else [])
    assert named((by or 3000) * 4 // 5) == []


def test_its_lag_and_share_are_told():
    (named,) = feed(lambda seq, rank: 0.15 * (rank == 2))
    assert named.lag_s == pytest.approx(0.15, abs=0.006)
    assert named.share == pytest.approx(0.30, abs=0.02)
    assert (named.num_late, named.num_collectives) == (36, 36)
    (named,) = feed(lambda seq, rank: 0.15 * (rank == 2), count=400, is_told=lambda seq: seq // 8 % 4 == 0)
    assert named.share == pytest.approx(0.30, abs=0.02)


@pytest.mark.parametrize("at_most", [18, 9, 20])
def test_buckets_that_are_late_together_cost_once(at_most: int):
    """0.08 s forward, three buckets 0.01 s apart that nobody waits for, and then an all-reduce that all wait for: of
    0.205 s for a step, rank 2 costs the others 0.1 s, however many of the calls are told."""
    line, told = Line(), 0
    for first in range(1, 1601, 20):  # told after five steps
        for seq in sorted(chosen(first, first + 19, at_most)):
            step, call = divmod(seq - 1, 4)
            for rank in RANKS:
                late_s = 0.1 if rank == 2 or call == 3 else 0.0
                called_s = 0.205 * step + (0.08 + 0.01 * call if call < 3 else 0.105) + late_s
                line.call(rank, seq, called_s, error_s=0.001)
                told += 1
    (named,) = line.stragglers.named()
    assert (named.rank, named.lag_s) == (2, pytest.approx(0.1))
    assert named.share == pytest.approx(0.1 / 0.205, abs=0.06), told


def test_it_is_named_once():
    line = Line()
    for seq in range(1, 600):
        for rank in RANKS:
            line.call(rank, seq, seq * 0.5 + 0.15 * (rank == 2), error_s=0.001, step=seq)
    assert [straggler.rank for straggler in line.stragglers.named()] == [2]
    assert list(line.stragglers.named()) == []
    assert line.stragglers.lately()[2].share == pytest.approx(0.3, abs=0.01)


def test_of_two_ranks_that_are_late_by_chance_neither_is_named():
    rng, line, at_s = random.Random(2), Line(), 0.0
    for seq in range(1, 5000):
        for rank in RANKS[:2]:
            called_s = at_s + 0.3 * rng.lognormvariate(0.0, 0.2) * (10 if rng.random() < 0.01 else 1)
            samples = line.times.hear("0", RANKS[:2], rank, [(seq, called_s)], node=(rank, 0.001))
            for sample in samples:
                line.stragglers.hear(sample, step=seq)
        at_s += 0.3 * 1.5
    assert list(line.stragglers.named()) == []


def test_who_waited_for_whom_in_one_collective():
    """Rank 3 comes 40 ms after rank 2. Rank 0 went on before that, so it did not wait."""
    times = CallTimes()
    for seq, calls in ((1, (0.000, 0.010, 0.020, 0.060)), (2, (0.030, 0.080, 0.090, 0.070))):
        for rank, called_s in enumerate(calls):
            samples = times.hear("0", RANKS, rank, [(seq, called_s)], node=(rank % 2, 0.010))
    (sample,) = samples
    assert (sample.seq, sample.rank, sample.is_decided) == (1, 3, True)
    assert [(rank, round(wait_s, 3)) for rank, _, wait_s, _ in sample.waited] == [
        (0, 0.0),
        (1, 0.05),
        (2, 0.04),
        (3, 0),
    ]


def test_a_lag_within_the_clocks_error_does_not_tell_who_is_last():
    line = Line()
    for seq in (1, 2):
        for rank, late_s in zip(RANKS, (0.0, 0.0, 0.099, 0.1), strict=True):
            line.call(rank, seq, seq + late_s, error_s=0.001)
    (sample,) = line.samples
    assert not sample.is_decided
    assert [round(wait_s, 3) for _, _, wait_s, _ in sample.waited] == [0.1, 0.1, 0.0, 0.0]


def test_a_lag_below_what_clocks_may_be_wrong_by_is_none():
    assert feed(lambda seq, rank: 0.15 * (rank == 2), error_s=0.030) == []


def test_three_windows_are_needed():
    assert feed(lambda seq, rank: 0.15 * (rank == 2), count=36) == []
    assert feed(lambda seq, rank: 0.15 * (rank == 2), count=37)


def test_collectives_that_not_all_ranks_tell_of_take_no_memory():
    times = CallTimes()
    for seq in range(1, 5000):
        times.hear("0", RANKS, 0, [(seq, float(seq))], node=(0, 0.001))
    assert max(len(group.open) for group in times._groups.values()) <= 512


def test_neither_groups_without_end_nor_a_rank_that_never_tells_grow_the_leader(monkeypatch):
    monkeypatch.setattr("allranks.guard.goodput.waited.MAX_TOLD", 1000)
    times = CallTimes()
    for number in range(5000):
        times.hear(f"{number}", RANKS, 0, [(1, 0.0)], node=(0, 0.0))
    assert len(times._groups) == 1024
    for seq in range(5000):
        for rank in range(9):
            times.hear("0", tuple(range(10)), rank, [(seq, float(seq))], node=(rank, 0.001))
    assert max(len(group.open) for group in times._groups.values()) == 100


def test_of_a_large_group_some_collectives_are_looked_at_all_over_the_step():
    members, looked = range(2048), list[int]()
    times = CallTimes()
    for seq in range(1, 200):
        for rank in members:
            looked += [sample.seq for sample in times.hear("0", members, rank, [(seq, 0.1 * seq)], node=(rank, 0.0))]
    assert len(looked) == pytest.approx(0.2 * 200, abs=20)  # 4096 ranks a second
    assert {seq % 8 for seq in looked} == set(range(8))
