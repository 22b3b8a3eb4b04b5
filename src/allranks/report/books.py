"""The books of all nodes of an attempt, as their agents wrote them (launch.book_writer): for the report.

    found = read_books(run.attempt_path)
    found.damaged                        # one line for each file that cannot be read
    lanes(found.books)                   # all ranks on one axis of time, 1,200 columns at most
    sums(found.books)                    # where the time of each rank went, as it booked that itself

The books have what each rank knows of itself. The job's account, which says who waited for whom, is the leader's
(model.ledger): a sum of these is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.files.regular import read_regular
from allranks.model.pace import PACE_STATES, PaceState
from allranks.model.time_book import FILE, MAX_COLUMNS, TimeBook, parse_books

MAX_FILE_BYTES = 16 << 20
"""8 KB for each of 1,000 ranks on one node, twice."""
MAX_ALL_BYTES = 64 << 20
"""Of all files of an attempt: 8,000 ranks. What is beyond it is not read."""


@dataclass(frozen=True, slots=True)
class BooksFound:
    """The books of one attempt."""

    books: tuple[TimeBook, ...]
    """By node; of one node, oldest first."""
    damaged: tuple[str, ...] = ()
    """One line for each file that could not be read to its end: `node03/book.bin: it is cut off after 312 bytes`."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one rank did over the time of an attempt."""

    rank: int
    nodes: tuple[str, ...]
    """That it ran on, in order: it may move with a restart."""
    columns: bytes
    """A LaneState each."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of all ranks, with the same columns."""

    begun_s: float
    """Since the epoch: begin of the first column."""
    column_s: float
    num_columns: int
    lanes: tuple[Lane, ...]
    """By rank."""


@dataclass(frozen=True, slots=True)
class RankSum:
    """Where the time of one rank went in an attempt, over all generations that are in the books."""

    rank: int
    nodes: tuple[str, ...]
    """That it ran on, in order."""
    seconds: dict[PaceState, float]
    process_s: float
    """How long its processes ran: the sum of `seconds`."""
    steps: int
    """Optimizer steps; those that were made again after a restart count again."""
    num_generations: int
    is_async: bool


def read_books(attempt: Path) -> BooksFound:
    """Return the books in the directory of an attempt; it raises nothing."""
    books: list[TimeBook] = []
    damaged: list[str] = []
    left_bytes, num_left_out = MAX_ALL_BYTES, 0
    for path in _find_files(attempt):
        name = f"{path.parent.name}/{FILE}"
        try:
            data = read_regular(path, at_most=min(MAX_FILE_BYTES, left_bytes))
        except OSError as exc:
            if left_bytes < MAX_FILE_BYTES:
                num_left_out += 1
            else:
                damaged.append(f"{name}: {exc.strerror}")
            continue
        left_bytes -= len(data)
        found, problem = parse_books(data, node=path.parent.name)
        books += found
        if problem is not None:
            damaged.append(f"{name}: {problem}")
    if num_left_out:
        damaged.append(f"{num_left_out} books were not read: all together have more than {MAX_ALL_BYTES >> 20} MiB")
    return BooksFound(tuple(books), tuple(damaged))


def _find_files(attempt: Path) -> list[Path]:
    try:
        return sorted(attempt.glob(f"*/{FILE}"))
    except OSError:
        return []


def lanes(books: Sequence[TimeBook], *, num_columns: int = MAX_COLUMNS) -> Lanes:
    """Return the lanes of all ranks on one axis of time, at most this many columns; of several attempts, too. Pure.

    A column of a book goes into the one of the axis that has its beginning, so it is right to half a column of the
    book. Clocks of nodes differ by less, as a rule.
    """
    books = [book for book in books if book.ranks]
    if not books:
        return Lanes(0.0, 0.0, 0, ())
    begun_s, until_s = min(book.begun_s for book in books), max(book.until_s for book in books)
    doublings = max(book.doublings for book in books)
    one_us = books[0].column_us >> books[0].doublings
    while (until_s - begun_s) * 1e6 > num_columns * (one_us << doublings):
        doublings += 1
    column_us = one_us << doublings
    width = max(1, min(num_columns, -int((begun_s - until_s) * 1e6 // column_us)))
    merged: dict[int, bytearray] = {}
    for book in books:
        shift = round((book.begun_s - begun_s) * 1e6 / book.column_us)
        times = column_us // book.column_us
        for rank_book in book.ranks:
            at, columns = _widen(rank_book.lane, shift, times)
            _put(merged.setdefault(rank_book.rank, bytearray(width)), at, columns)
    nodes = _nodes_of(books)
    found = tuple(Lane(rank, nodes[rank], bytes(merged[rank])) for rank in sorted(merged))
    return Lanes(begun_s, column_us / 1e6, width, found)


def _widen(lane: bytes, shift: int, times: int) -> tuple[int, bytes]:
    """Return the first column and the columns of a lane whose columns become `times` as long, a power of two.

    Args:
        shift: where it begins, in its own columns.
    """
    kept = lane.lstrip(b"\0")
    at = shift + len(lane) - len(kept)
    kept = kept.rstrip(b"\0")
    while times > 1:
        kept = bytes(at % 2) + kept
        kept = bytes(map(max, kept[::2], kept[1::2] + bytes(len(kept) % 2)))
        at, times = at // 2, times // 2
    return at, kept


def _put(lane: bytearray, at: int, columns: bytes) -> None:
    """Put columns into a lane; where both have a state, the worse one wins."""
    columns = columns[: max(0, len(lane) - at)]
    there = lane[at : at + len(columns)]
    lane[at : at + len(columns)] = bytes(map(max, columns, there)) if any(there) else columns


def sums(books: Sequence[TimeBook]) -> list[RankSum]:
    """Return where the time of each rank went, by rank. Pure."""
    totals: dict[int, list[int]] = {}
    async_ranks: set[int] = set()
    for book in books:
        for rank_book in book.ranks:
            last = rank_book.last
            known = totals.setdefault(rank_book.rank, [0] * (len(PACE_STATES) + 2))
            totals[rank_book.rank] = list(map(sum, zip(known, (*last.totals_us, last.steps, 1), strict=True)))
            if rank_book.is_async:
                async_ranks.add(rank_book.rank)
    nodes = _nodes_of(books)
    return [
        RankSum(
            rank=rank,
            nodes=nodes[rank],
            seconds={state: total_us / 1e6 for state, total_us in zip(PACE_STATES, numbers, strict=False)},
            process_s=sum(numbers[: len(PACE_STATES)]) / 1e6,
            steps=numbers[-2],
            num_generations=numbers[-1],
            is_async=rank in async_ranks,
        )
        for rank, numbers in sorted(totals.items())
    ]


def _nodes_of(books: Iterable[TimeBook]) -> dict[int, tuple[str, ...]]:
    """Return the nodes that each rank ran on, in this order."""
    found: dict[int, dict[str, None]] = {}
    ran = [
        (book.begun_s + rank_book.begun_us / 1e6, rank_book.rank, book.node)
        for book in books
        for rank_book in book.ranks
    ]
    for _, rank, node in sorted(ran):
        found.setdefault(rank, {})[node] = None
    return {rank: tuple(names) for rank, names in found.items()}
