"""What an agent books of its ranks' time: rows, lanes, and how little room they take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.guard.node.booking import MAX_ENDED, NUM_OLDEST, NUM_ROWS, NodeBook
from allranks.model.beat import ProcessState, RankBeat
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.model.time_book import (
    MAX_BYTES_PER_RANK,
    MAX_COLUMNS,
    BookRow,
    LaneState,
    RankBook,
    TimeBook,
    pack_book,
    pack_rows,
    parse_books,
)  # fmt: skip

BOOT_S, WALL_S = 1e7, 1795847021.0
STEP, BACKWARD, START, DATA, EVAL = (PaceState[name] for name in ("STEP", "BACKWARD", "START", "DATA", "EVAL"))
SAVE, BLOCKED = PaceState.SAVE, PaceState.BLOCKED
MS = 1000
S = 1_000_000


@dataclass
class Rank:
    """A rank that books, and an agent that looks at it."""

    rank: int = 0
    generation: int = 0
    book: NodeBook = field(default_factory=NodeBook)
    now_us: int = 0
    """Of the agent, since its first look."""
    totals_us: list[int] = field(default_factory=lambda: [0] * 7)
    steps: int = 0

    def spend(
        self, *gains: tuple[PaceState, int], steps: int = 0, process: ProcessState = ProcessState.RUNNING
    ) -> None:
        """Spend microseconds in states; then the agent looks."""
        for state, gain_us in gains:
            self.totals_us[PACE_STATES.index(state)] += gain_us
            self.now_us += gain_us
        self.steps += steps
        self.look(process)

    def look(self, process: ProcessState = ProcessState.RUNNING, *, pace: bool = True) -> None:
        booked = Pace(0, 0, self.steps, tuple(self.totals_us)) if pace else None
        beat = RankBeat(rank=self.rank, state=process, pace=booked)
        now_s = BOOT_S + self.now_us / 1e6
        self.book.note([beat], generation=self.generation, now_s=now_s, wall_s=WALL_S + self.now_us / 1e6)

    def wait(self, wait_us: int, process: ProcessState) -> None:
        """Time passes that it does not book."""
        self.now_us += wait_us
        self.look(process)

    def read(self) -> TimeBook:
        (book,), problem = parse_books(self.book.pack())
        assert problem is None
        return book

    @property
    def lane(self) -> list[LaneState]:
        return [LaneState(state) for state in self.read().ranks[-1].lane]


GAINS = st.tuples(st.sampled_from(PACE_STATES), st.integers(1, 40 * S))
LOOKS = st.lists(st.tuples(st.lists(GAINS, min_size=1, max_size=4), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(LOOKS)
def test_rows_and_lane_are_those_of_a_naive_book(looks):
    """Its last row is all that was booked, its rows are in order, and in each column the worst state wins."""
    rank = Rank()
    rank.look()
    colored: list[tuple[int, int, LaneState]] = []
    booked = {0: [0] * 7}
    for gains, is_stopped in looks:
        before, begin_us = list(rank.totals_us), rank.now_us
        rank.spend(*gains, process=ProcessState.STOPPED if is_stopped else ProcessState.SLEEPING)
        spent = [now - then for now, then in zip(rank.totals_us, before, strict=True)]
        longest = next(state for state, us in zip(PACE_STATES, spent, strict=True) if us == max(spent))
        is_eval = spent[PACE_STATES.index(EVAL)] > 0
        colored.append((begin_us, rank.now_us, LaneState[longest.name]))
        if is_stopped:
            colored.append((begin_us, rank.now_us, LaneState.STOPPED))
        if is_eval:
            colored.append((rank.now_us - spent[PACE_STATES.index(EVAL)], rank.now_us, LaneState.EVAL))
        booked[sum(rank.totals_us)] = list(rank.totals_us)
    book = rank.read()
    (account,) = book.ranks
    assert [*account.last.totals_us] == rank.totals_us
    assert account.rows[-1] == account.last
    ages = [row.age_us for row in account.rows]
    assert all(before < after for before, after in pairwise(ages))
    assert all(booked[row.age_us] == [*row.totals_us] for row in account.rows)
    assert (book.until_us, account.begun_us) == (rank.now_us, 0)
    worst = [LaneState.NONE] * len(account.lane)
    for begin_us, end_us, state in colored:
        for column in range(begin_us // book.column_us, -(-end_us // book.column_us)):
            worst[column] = max(worst[column], state)
    # What becomes `eval` afterwards has a test of its own.
    seen = [(state, LaneState(found)) for state, found in zip(worst, account.lane, strict=True)]
    assert [pair for pair in seen if pair[0] is not pair[1] and pair[1] is not LaneState.EVAL] == []
    assert len(account.lane) <= MAX_COLUMNS


def test_rows_get_longer_with_their_age_and_the_oldest_are_many_all_the_same():
    rank = Rank()
    for _ in range(20_000):
        rank.spend((STEP, S), steps=1)
    rows = rank.read().ranks[0].rows
    lengths = [after.age_us - before.age_us for before, after in pairwise(rows)]
    assert rows[-1].age_us == 20_000 * S
    assert lengths[-NUM_ROWS:] == [S] * NUM_ROWS
    assert lengths == sorted(lengths, reverse=True)
    assert {length // S for length in lengths} <= {2**power for power in range(12)}
    assert NUM_OLDEST // 2 - 1 <= lengths.count(lengths[0]) <= NUM_OLDEST
    assert all(lengths.count(length) <= NUM_ROWS + 1 for length in set(lengths[NUM_OLDEST:]))


def test_a_look_before_a_second_is_over_moves_the_last_row():
    rank = Rank()
    for _ in range(12):
        rank.spend((STEP, 500 * MS))
    assert [row.age_us // MS for row in rank.read().ranks[0].rows] == [1000, 2000, 3000, 4000, 5000, 6000]


def test_the_state_of_a_look_is_the_one_that_took_most_of_it():
    rank = Rank()
    rank.look()
    rank.spend((START, 500 * MS))
    rank.spend((STEP, 300 * MS), (BLOCKED, 200 * MS))
    rank.spend((STEP, 200 * MS), (SAVE, 300 * MS))
    rank.spend((BACKWARD, 1500 * MS), (DATA, 500 * MS))
    assert rank.lane == [LaneState.START, LaneState.STEP, LaneState.SAVE, *[LaneState.BACKWARD] * 4]


def test_an_evaluation_colors_the_columns_that_it_has_filled():
    rank = Rank()
    rank.look()
    rank.spend((STEP, 1000 * MS))
    for _ in range(4):
        rank.spend((DATA, 400 * MS), (STEP, 100 * MS))
    rank.totals_us[PACE_STATES.index(DATA)] -= 1600 * MS
    rank.totals_us[PACE_STATES.index(EVAL)] += 1600 * MS
    rank.spend((BACKWARD, 500 * MS))
    step, data, evaluated = LaneState.STEP, LaneState.DATA, LaneState.EVAL
    # It is 1.6 s, and was over at the latest when it was told of: at 3.5 s.
    assert rank.lane == [step, step, data, data, evaluated, evaluated, evaluated]
    assert rank.read().ranks[0].last.of(EVAL) == 1600 * MS


def test_the_lane_of_a_rank_begins_with_its_book():
    other, rank = Rank(rank=1), Rank()
    other.look()
    rank.book, rank.now_us = other.book, 1000 * MS
    rank.look(pace=False)
    rank.now_us = 1500 * MS
    rank.spend((START, 1500 * MS))
    account = rank.read().ranks[0]
    assert (rank.now_us, account.begun_us, account.last.of(START)) == (3000 * MS, 1500 * MS, 1500 * MS)
    assert [*account.lane] == [0, 0, 0, *[LaneState.START] * 3]


def test_a_book_that_is_older_than_the_first_look_counts_whole():
    rank = Rank(totals_us=[2000 * MS, *[0] * 6])
    rank.look()
    rank.spend((START, 1000 * MS))
    account = rank.read().ranks[0]
    assert (account.begun_us, account.last.of(START)) == (-2000 * MS, 3000 * MS)
    assert [*account.lane] == [LaneState.START] * 2


def test_a_rank_that_ends_is_gone_from_then_on():
    rank = Rank()
    rank.look()
    rank.spend((STEP, 1000 * MS))
    rank.spend((STEP, 500 * MS), process=ProcessState.GONE)
    rank.wait(1000 * MS, ProcessState.GONE)
    assert rank.lane == [LaneState.STEP, LaneState.STEP, *[LaneState.GONE] * 3]
    assert rank.read().ranks[0].last.age_us == 1500 * MS


def test_a_stopped_rank_is_stopped_whatever_its_book_says():
    rank = Rank()
    rank.look()
    rank.spend((STEP, 500 * MS))
    rank.spend((BLOCKED, 500 * MS), process=ProcessState.STOPPED)
    rank.wait(500 * MS, ProcessState.TRACED)
    assert rank.lane == [LaneState.STEP, LaneState.STOPPED, LaneState.STOPPED]


def test_a_rank_that_books_nothing_is_unknown_while_it_runs():
    rank = Rank()
    for now_us, process in (
        (0, ProcessState.RUNNING),
        (1000 * MS, ProcessState.RUNNING),
        (1500 * MS, ProcessState.GONE),
    ):
        rank.now_us = now_us
        rank.look(process, pace=False)
    assert rank.lane == [LaneState.UNKNOWN, LaneState.UNKNOWN, LaneState.GONE]
    assert rank.read().ranks[0].rows == ()


@pytest.mark.parametrize(
    "pace",
    [
        pytest.param(Pace(0, 0, 9, (2**62, 0, 0, 0, 0, 0, 0)), id="older than the machine"),
        pytest.param(Pace(0, 0, 9, (1, 0, 0, 0, 0, 0, 0)), id="younger than before"),
        pytest.param(Pace(0, 0, 2, (9 * S, 0, 0, 0, 0, 0, 0)), id="fewer steps"),
    ],
)
def test_what_cannot_be_is_not_booked(pace):
    rank = Rank()
    rank.spend((STEP, 2 * S), steps=3)
    beat = RankBeat(rank=0, pace=pace)
    rank.book.note([beat], generation=0, now_s=BOOT_S + 9, wall_s=WALL_S + 9)
    assert rank.read().ranks[0].rows == (BookRow((0, 2 * S, 0, 0, 0, 0, 0), 3),)


def test_generations_have_accounts_of_their_own_on_one_lane_and_old_ones_get_short():
    rank = Rank()
    for generation in range(MAX_ENDED + 20):
        rank.generation, rank.totals_us, rank.steps = generation, [0] * 7, 0
        for _ in range(30):
            rank.spend((STEP, S), steps=1)
    book = rank.read()
    assert [account.generation for account in book.ranks] == [*range(19, MAX_ENDED + 20)]
    assert book.num_dropped == 19
    assert {account.last for account in book.ranks} == {BookRow((0, 30 * S, 0, 0, 0, 0, 0), 30)}
    assert [len(account.rows) for account in book.ranks] == [1] * MAX_ENDED + [30]
    begun = [account.begun_us // S for account in book.ranks]
    assert [after - before for before, after in pairwise(begun)] == [30] * MAX_ENDED


def test_generations_that_have_ended_share_the_room_for_their_rows():
    rank = Rank()
    for generation in range(3):
        rank.generation, rank.totals_us = generation, [0] * 7
        for _ in range(40):
            rank.spend((STEP, S))
    assert [len(account.rows) for account in rank.read().ranks] == [10, 10, 40]


def test_a_rank_takes_at_most_8_kb_for_30_days_whatever_it_does():
    """A book in which all states of all rows differ by chance, so that nothing can be packed."""
    draw = random.Random(41)

    def random_rows(*lengths_us: int) -> bytes:
        totals_us, steps, rows = [0] * 7, 0, []
        for length_us in lengths_us:
            totals_us = [total_us + draw.randrange(2 * length_us // 7) for total_us in totals_us]
            steps += draw.randrange(20 * length_us // S)
            rows.append(BookRow(tuple(totals_us), steps))
        return pack_rows(rows)

    levels = [S << level for level in reversed(range(17)) for _ in range(NUM_ROWS)]
    oldest = [S << 17] * NUM_OLDEST
    assert sum(oldest) + sum(levels) >= 30 * 86400 * S
    lane = bytes(draw.randrange(1, 10) for _ in range(MAX_COLUMNS))
    ended = [
        RankBook(0, generation, draw.randrange(1 << 41), b"", random_rows(S << 14)) for generation in range(MAX_ENDED)
    ]
    account = RankBook(0, MAX_ENDED, draw.randrange(1 << 41), lane, random_rows(*oldest, *levels))
    assert len(pack_book(TimeBook(WALL_S, 1 << 41, 13, (*ended, account)))) <= MAX_BYTES_PER_RANK


def test_a_year_fits_into_the_columns_of_a_lane():
    rank = Rank()
    rank.look()
    for _ in range(365):
        rank.spend((STEP, 86400 * S))
    book = rank.read()
    assert MAX_COLUMNS / 2 <= len(book.ranks[0].lane) <= MAX_COLUMNS
    assert {*book.ranks[0].lane} == {LaneState.STEP}
