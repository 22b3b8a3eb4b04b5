"""The reader of books: whatever the files are, all lanes on one axis, and sums a rank."""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

import msgspec
import pytest

from allranks.model.pace import PaceState
from allranks.model.time_book import (
    FILE,
    MAX_RAW_BYTES,
    BookRow,
    LaneState,
    RankBook,
    TimeBook,
    pack_book,
    pack_rows,
    parse_books,
)
from allranks.report.books import lanes, read_books, sums

STEP, DATA, SAVE, GONE = LaneState.STEP, LaneState.DATA, LaneState.SAVE, LaneState.GONE
BEGUN_S = 1795847021.0


def rows(*totals_us: tuple[int, int], steps: int = 1) -> bytes:
    """Rows of a rank that only starts and steps."""
    return pack_rows([BookRow((start, step, 0, 0, 0, 0, 0), steps) for start, step in totals_us])


def book(*ranks: RankBook, begun_s: float = BEGUN_S, columns: int = 4, doublings: int = 0, node: str = "") -> TimeBook:
    until_us = columns * 500_000 << doublings
    return TimeBook(begun_s=begun_s, until_us=until_us, doublings=doublings, ranks=ranks, node=node)


def leave(attempt: Path, node: str, data: bytes) -> None:
    (attempt / node).mkdir(parents=True)
    (attempt / node / FILE).write_bytes(data)


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    account = RankBook(3, 1, -200, bytes([STEP, SAVE]), rows((5, 0), (5, 9), steps=7), 120, is_async=True)
    leave(tmp_path, "node03", pack_book(book(account)))
    (found,) = read_books(tmp_path).books
    assert (found.node, found.ranks, found.until_s) == ("node03", (account,), BEGUN_S + 2)
    assert account.rows == (BookRow((5, 0, 0, 0, 0, 0, 0), 7), BookRow((5, 9, 0, 0, 0, 0, 0), 7))
    assert (account.last.age_us, account.last.of(PaceState.STEP)) == (14, 9)


def forged(**changes) -> bytes:
    account = msgspec.structs.replace(RankBook(0, 0, 0, b"\1", rows((5, 1))), **changes)
    return pack_book(book(account))


def bomb() -> bytes:
    data = zlib.compress(bytes(MAX_RAW_BYTES + 1))
    return b"ARBK\x01" + len(data).to_bytes(4, "big") + data


SOUND = pack_book(book(RankBook(0, 0, 0, b"\1", rows((5, 1)))))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "it is empty"),
        (b"no", "it is cut off after 2 bytes"),
        (b"x" * 50, "it is no book"),
        (SOUND[:-3], f"it is cut off after {len(SOUND) - 3} bytes"),
        (SOUND[:4] + b"\x02" + SOUND[5:], "another version of allranks wrote it (2)"),
        (SOUND[:-1] + b"x", "it is damaged (Error -3 while decompressing data: incorrect data check)"),
        (bomb(), "it is damaged: incomplete, or too large"),
        (forged(lane=b"\x0b"), "rank 0: an unknown state in its lane"),
        (forged(packed_rows=b"\1" * 63), "63 bytes are no whole rows"),
        (forged(packed_rows=pack_rows([BookRow((-1, 5, 0, 0, 0, 0, 0), 0)])), "rank 0: a total that is none"),
        (forged(packed_rows=rows((5, 1), (5, 1))), "rank 0: rows that are not in order"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes, line: str):
    leave(tmp_path, "a", data)
    leave(tmp_path, "b", SOUND)
    found = read_books(tmp_path)
    assert ([sound.node for sound in found.books], found.damaged) == (["b"], (f"a/book.bin: {line}",))


def test_books_before_the_damage_count():
    books, problem = parse_books(SOUND + SOUND[:20])
    assert (len(books), problem) == (1, f"it is cut off after {len(SOUND) + 20} bytes")


def test_what_is_no_file_is_one_line(tmp_path: Path):
    (tmp_path / "a" / FILE).mkdir(parents=True)
    assert read_books(tmp_path).damaged == ("a/book.bin: not a regular file",)
    assert read_books(tmp_path / "none").books == ()


def test_more_than_all_books_may_have_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("allranks.report.books.MAX_ALL_BYTES", 2 * len(SOUND))
    for node in "abcd":
        leave(tmp_path, node, SOUND)
    found = read_books(tmp_path)
    assert [sound.node for sound in found.books] == ["a", "b"]
    assert found.damaged == ("2 books were not read: all together have more than 0 MiB",)


def test_lanes_of_nodes_stand_on_one_axis_and_the_worse_state_wins():
    first = book(RankBook(0, 0, 0, bytes([STEP, SAVE, STEP, STEP])), columns=4, node="a")
    # This one began 1 s later, and has columns twice as long.
    second = book(
        RankBook(1, 0, 0, bytes([DATA, GONE])), begun_s=BEGUN_S + 1, columns=2, doublings=1, node="b"
    )  # fmt: skip
    found = lanes([first, second])
    assert (found.begun_s, found.column_s, found.num_columns) == (BEGUN_S, 1.0, 3)
    assert [(lane.rank, lane.nodes, [*lane.columns]) for lane in found.lanes] == [
        (0, ("a",), [SAVE, STEP, 0]),
        (1, ("b",), [0, DATA, GONE]),
    ]


def test_a_rank_that_moved_has_one_lane():
    first = book(RankBook(0, 0, 0, bytes([STEP, STEP, GONE])), columns=3, node="b")
    second = book(RankBook(0, 1, 0, bytes([DATA, STEP])), begun_s=BEGUN_S + 1, columns=2, node="a")
    (lane,) = lanes([second, first]).lanes
    assert (lane.nodes, [*lane.columns]) == (("b", "a"), [STEP, STEP, GONE, STEP])


def test_an_axis_has_at_most_so_many_columns():
    found = lanes([book(RankBook(0, 0, 0, bytes([STEP] * 9 + [SAVE])), columns=10)], num_columns=3)
    assert (found.column_s, [*found.lanes[0].columns]) == (2.0, [STEP, STEP, SAVE])
    assert lanes([]).lanes == ()


def test_a_thousand_ranks_are_merged_in_half_a_second():
    draw = random.Random(1)
    states = [bytes(draw.choices(range(10), k=1200)) for _ in range(64)]
    books = [
        book(
            *(RankBook(8 * node + local, 0, 0, draw.choice(states)) for local in range(8)),
            begun_s=BEGUN_S + draw.random(), columns=1200, doublings=node % 2, node=f"n{node}",
        )
        for node in range(128)
    ]  # fmt: skip
    begun_s = time.process_time()
    found = lanes(books)
    took_s = time.process_time() - begun_s
    assert (len(found.lanes), found.num_columns) == (1024, 601)
    assert took_s < 0.5


def test_sums_are_those_of_all_generations():
    first = book(
        RankBook(0, 0, 0, b"", rows((5_000_000, 0), (5_000_000, 9_000_000), steps=4)), node="a", begun_s=BEGUN_S - 20
    )
    second = book(RankBook(0, 1, 0, b"", rows((1_000_000, 2_000_000), steps=3), is_async=True), node="b")
    (found,) = sums([first, second])
    assert (found.rank, found.nodes, found.steps, found.num_generations) == (0, ("a", "b"), 7, 2)
    assert (found.seconds[PaceState.START], found.seconds[PaceState.STEP]) == (6.0, 11.0)
    assert (found.process_s, sum(found.seconds.values()), found.is_async) == (17.0, 17.0, True)
