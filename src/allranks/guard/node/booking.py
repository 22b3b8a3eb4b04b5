"""What this node's ranks have spent their time on, booked whenever their agent looks at them: the contents of book.bin.

    book = NodeBook()
    book.note(beat.ranks, generation=0, now_s=time.monotonic(), wall_s=time.time())
    data = book.pack()

A note costs some microseconds a rank. A book of any length has at most MAX_BYTES_PER_RANK of each:

rows   one a second at first. Of each length there are at most NUM_ROWS, then the two oldest become one of twice that
       length. Of the longest there are up to NUM_OLDEST, so a curve over the whole time has enough points.
lane   a note is in the state in which the rank spent most of the time since the last note. That state colors all
       columns which this time touches, unless they have a worse one. Columns double their length when all are full.

Pure: the agent's loop says when.
"""

from __future__ import annotations

from collections.abc import Iterable

from allranks.model.beat import ProcessState, RankBeat
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.model.time_book import (
    COLUMN_US,
    LANE_OF_PACE,
    MAX_COLUMNS,
    BookRow,
    LaneState,
    RankBook,
    TimeBook,
    pack_book,
    pack_rows,
)

ROW_US = 1_000_000
NUM_ROWS = 6
NUM_OLDEST = 64
NUM_ENDED_ROWS = 32
"""Of a rank, in all generations that have ended."""
MAX_ENDED = 32
"""Generations that have ended and are kept: one row each is 1.1 KB of a rank."""
_EVAL = PACE_STATES.index(PaceState.EVAL)
_LANE_OF_PROCESS = {
    ProcessState.STOPPED: LaneState.STOPPED,
    ProcessState.TRACED: LaneState.STOPPED,
    ProcessState.GONE: LaneState.GONE,
}
_NOTHING = BookRow((0, 0, 0, 0, 0, 0, 0))
_BECOMES_EVAL = (LaneState.STEP, LaneState.BACKWARD, LaneState.DATA)


class NodeBook:
    """The book of one node. Its times are microseconds since the first note."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[int, int], _Account] = {}
        """By generation and rank."""
        self._generation = -1
        self._begun_s = self._begun_wall_s = 0.0
        self._until_us = 0
        self._doublings = 0
        self._num_dropped = 0

    def note(self, ranks: Iterable[RankBeat], *, generation: int, now_s: float, wall_s: float) -> None:
        """Book how these ranks are.

        Args:
            generation: whose ranks these are; never lower than before.
            now_s: time.monotonic(), the clock by which the ranks book, too.
            wall_s: time.time().
        """
        if self._generation < 0:
            self._begun_s = now_s
        if generation > self._generation:
            self._generation = generation
            self._make_room()
        # The clock of a node may be set after it has started: what it says now is best for the whole book.
        self._begun_wall_s = max(0.0, wall_s - (now_s - self._begun_s))
        self._until_us = now_us = max(self._until_us, round((now_s - self._begun_s) * 1e6))
        while now_us > MAX_COLUMNS * COLUMN_US << self._doublings:
            self._doublings += 1
            for account in self._accounts.values():
                account.halve()
        for beat in ranks:
            if (key := (generation, beat.rank)) not in self._accounts:
                self._accounts[key] = _Account(now_us)
            self._accounts[key].note(beat, now_us, column_us=COLUMN_US << self._doublings, boot_us=round(now_s * 1e6))

    def pack(self) -> bytes:
        """Return the book as a frame of its file."""
        return pack_book(
            TimeBook(
                begun_s=self._begun_wall_s,
                until_us=self._until_us,
                doublings=self._doublings,
                ranks=tuple(account.to_book(*key) for key, account in sorted(self._accounts.items())),
                num_dropped=self._num_dropped,
            )
        )

    def _make_room(self) -> None:
        """Shorten what is known of generations that have ended, before another one begins."""
        ended = sorted({generation for generation, _ in self._accounts})
        for key in [key for key in self._accounts if key[0] in ended[:-MAX_ENDED]]:
            del self._accounts[key]
            self._num_dropped += 1
        for account in self._accounts.values():
            account.rows.thin(NUM_ENDED_ROWS // min(len(ended), MAX_ENDED))


class _Rows:
    """Totals at some times, oldest first: the older, the farther apart."""

    def __init__(self) -> None:
        self.last: BookRow | None = None
        """The newest one; it moves on until ROW_US are full."""
        self._levels: list[list[BookRow]] = [[]]
        """Those of one length each, which doubles from level to level."""
        self._full_us = 0
        """Age of the process at the end of the newest full row."""

    def put(self, row: BookRow, age_us: int, last_age_us: int) -> None:
        """Take in how it is now.

        Args:
            age_us: of the process.
            last_age_us: at the last row.
        """
        if self.last is not None and last_age_us - self._full_us >= ROW_US:
            self._full_us = last_age_us
            self._put_full(self.last)
        self.last = row

    def _put_full(self, row: BookRow) -> None:
        for level in self._levels[:-1]:
            level.append(row)
            if len(level) <= NUM_ROWS:
                return
            row = level[1]
            del level[:2]
        oldest = self._levels[-1]
        oldest.append(row)
        if len(oldest) == NUM_OLDEST:
            self._levels.append(oldest[1::2])
            oldest.clear()

    def all(self) -> list[BookRow]:
        """Return all rows."""
        found = [row for level in reversed(self._levels) for row in level]
        return found if self.last is None else [*found, self.last]

    def thin(self, at_most: int) -> None:
        """Keep the last one, and of the others every second one, until there are no more than that."""
        rows = self.all()
        while len(rows) > at_most:
            rows = rows[1 - len(rows) % 2 :: 2]
        self._levels = [rows[:-1]]


class _Account:
    """One rank in one generation.

    Args:
        now_us: when it was seen first.
    """

    def __init__(self, now_us: int) -> None:
        self.rows = _Rows()
        self.lane = bytearray()
        self._until_us = now_us
        """Up to here, its lane has colors."""
        self._begun_us = now_us
        self._pace: Pace | None = None
        """The last one that was booked."""
        self._age_us = 0
        """What its process had booked then."""
        self._is_gone = False

    def note(self, beat: RankBeat, now_us: int, *, column_us: int, boot_us: int) -> None:
        """Book how it is.

        Args:
            boot_us: time since the boot of this machine: no process is older.
        """
        held, last = _LANE_OF_PROCESS.get(beat.state), self.rows.last or _NOTHING
        if held is None and beat.pace is None and last is _NOTHING:
            held = LaneState.UNKNOWN
        is_gone = held is LaneState.GONE
        is_news = beat.pace is not None and self._take(beat.pace, boot_us)
        if is_news and (row := self.rows.last) is not None:
            gains_us = [now - before for now, before in zip(row.totals_us, last.totals_us, strict=True)]
            if last is _NOTHING:
                self._begun_us = now_us - self._age_us
                self._until_us = max(0, self._begun_us)
            self._color(LANE_OF_PACE[gains_us.index(max(gains_us))], self._until_us, now_us, column_us)
            if (eval_us := gains_us[_EVAL]) > 0:
                self._color_eval(max(0, now_us - eval_us), now_us, column_us)
        if held is not None:
            # A process that has just ended has spent that time in other states.
            begin_us = max(0, now_us - 1) if is_gone and not self._is_gone else self._until_us
            self._color(held, begin_us, now_us, column_us)
        self._is_gone = is_gone
        if is_news or held is not None:
            self._until_us = now_us

    def _take(self, pace: Pace, boot_us: int) -> bool:
        """Make this its last row; returns False where the worker has booked nothing more, or what cannot be."""
        age_us, last = pace.total_us, self.rows.last or _NOTHING
        if not (self._age_us < age_us <= boot_us and last.steps <= pace.steps):
            return False
        self.rows.put(BookRow(pace.totals_us, pace.steps), age_us, self._age_us)
        self._pace, self._age_us = pace, age_us
        return True

    def _color(self, state: LaneState, begin_us: int, end_us: int, column_us: int) -> None:
        """Give all columns that this time touches a state, where they have no worse one."""
        lane, first, end = self.lane, begin_us // column_us, -(-end_us // column_us)
        if len(lane) < end:
            lane.extend(bytes(end - len(lane)))
        for column in range(first, end):
            if lane[column] < state:
                lane[column] = state

    def _color_eval(self, begin_us: int, end_us: int, column_us: int) -> None:
        """Evaluation is known only when it is over: where it fills a column, that column is nothing else."""
        self._color(LaneState.EVAL, begin_us, end_us, column_us)
        for column in range(-(-begin_us // column_us), end_us // column_us):
            if self.lane[column] in _BECOMES_EVAL:
                self.lane[column] = LaneState.EVAL

    def halve(self) -> None:
        """Make each column twice as long."""
        self.lane = bytearray(map(max, self.lane[::2], self.lane[1::2] + bytes(len(self.lane) % 2)))

    def to_book(self, generation: int, rank: int) -> RankBook:
        """Return it as the file has it."""
        return RankBook(
            rank=rank,
            generation=generation,
            begun_us=self._begun_us,
            lane=bytes(self.lane).rstrip(b"\0"),
            packed_rows=pack_rows(self.rows.all()),
            back_blocked_permille=self._pace.back_blocked_permille if self._pace else -1,
            is_async=self._pace is not None and self._pace.is_async,
        )
