"""What the ranks of one node have spent their time on, over time: `book.bin` in the node's directory. Frozen data.

    data = pack_book(book)
    books, problem = parse_books(data)

Of each rank, in each generation that it ran in, a book has two accounts. Its rows are totals, as the rank booked them
itself (model.pace), after the first second or the first hours, and after each of the last seconds: rows get longer with
their age. Its lane is a picture: the worst state in each column, and all lanes of a book have the same columns.

A file has one frame for each agent that the node had in this attempt; one that was started again keeps what it finds.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from allranks.model.beat import Moment
from allranks.model.foreign import UNREADABLE, Unreadable
from allranks.model.pace import PACE_STATES, Amount, PaceState

FILE = "book.bin"
MAX_BYTES_PER_RANK = 8 << 10
COLUMN_US = 500_000
"""Length of a column at first; it doubles whenever MAX_COLUMNS are full."""
MAX_COLUMNS = 1200
MAX_ROWS = 512
"""That are read; fewer are written (guard.node.booking)."""
MAX_RAW_BYTES = 32 << 20
"""Of one frame, unpacked: 1,000 ranks on one node."""
_HEAD = struct.Struct(">5sI")
_MAGIC = b"ARBK\x01"
"""The last byte is the version."""
_NUM_FIELDS = len(PACE_STATES) + 1


class LaneState(IntEnum):
    """What a rank did in a column. The order is the one of badness: the highest in a column wins."""

    NONE = 0
    """It does not run."""
    UNKNOWN = 1
    """It runs, and has booked nothing (no hook, no torch, no optimizer)."""
    STEP = 2
    BACKWARD = 3
    START = 4
    EVAL = 5
    DATA = 6
    SAVE = 7
    BLOCKED = 8
    STOPPED = 9
    """By SIGSTOP, or held by a debugger."""
    GONE = 10
    """Its process has ended, and its node's agent has not yet begun another generation."""


LANE_OF_PACE = tuple(LaneState[state.name] for state in PACE_STATES)
"""By the index of a state in PACE_STATES."""
_ALL_LANE_STATES = bytes(LaneState)


class BookRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank had booked at some time: totals since its process began."""

    totals_us: tuple[Amount, Amount, Amount, Amount, Amount, Amount, Amount]
    """In the order of PACE_STATES. `eval` is known only afterwards: it grows at the cost of `step` and `data`."""
    steps: Amount = 0

    @property
    def age_us(self) -> int:
        """How long the process had run, since its totals sum to that."""
        return sum(self.totals_us)

    def of(self, state: PaceState) -> int:
        """Microseconds in one state."""
        return self.totals_us[PACE_STATES.index(state)]


class RankBook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank in one generation."""

    rank: Annotated[int, Meta(ge=0, lt=1 << 24)]
    generation: Annotated[int, Meta(ge=0, le=1 << 62)]
    begun_us: Annotated[int, Meta(ge=-(1 << 52), le=1 << 52)]
    """When its process began, since the book's `begun_s`."""
    lane: Annotated[bytes, Meta(max_length=MAX_COLUMNS)] = b""
    """A LaneState for each column of the book; columns behind the last one are NONE."""
    packed_rows: Annotated[bytes, Meta(max_length=MAX_ROWS * _NUM_FIELDS * 8)] = b""
    back_blocked_permille: Annotated[int, Meta(ge=-1, le=1000)] = -1
    """As in model.pace."""
    is_async: bool = False

    @property
    def rows(self) -> tuple[BookRow, ...]:
        """Oldest first; the first one begins with the process, each other one where the one before it ends."""
        return tuple(BookRow(fields[:-1], fields[-1]) for fields in zip(*_unpack(self.packed_rows), strict=True))

    @property
    def last(self) -> BookRow:
        """The last row."""
        fields = tuple(map(sum, _deltas(self.packed_rows)))
        return BookRow(fields[:-1], fields[-1])  # type: ignore[arg-type]  # seven of them


class TimeBook(msgspec.Struct, frozen=True, array_like=True):
    """One node, as long as one agent of it lived."""

    begun_s: Moment
    """Since the epoch: begin of the first column."""
    until_us: Annotated[int, Meta(ge=0, le=1 << 52)]
    """When it was written last, since `begun_s`."""
    doublings: Annotated[int, Meta(ge=0, le=32)] = 0
    """How often its columns have doubled their length."""
    ranks: Annotated[tuple[RankBook, ...], Meta(max_length=1 << 16)] = ()
    """By generation and rank."""
    num_dropped: Amount = 0
    """Accounts of the oldest generations, if there were very many."""
    node: Annotated[str, Meta(max_length=300)] = ""
    """Name of its directory; not in the file."""

    @property
    def column_us(self) -> int:
        """Length of a column."""
        return COLUMN_US << self.doublings

    @property
    def until_s(self) -> float:
        """Since the epoch: when it was written last."""
        return self.begun_s + self.until_us / 1e6


def pack_rows(rows: list[BookRow]) -> bytes:
    """Return rows as RankBook has them.

    Rows get longer with their age, so the differences between them have few digits. Their bytes are sorted by weight:
    then those that are zero stand together, and zlib leaves nothing of them.
    """
    fields: list[tuple[int, ...]] = list(zip(*((*row.totals_us, row.steps) for row in rows), strict=True))
    deltas = array("q", [value - before for field in fields for before, value in pairwise((0, *field))])
    if sys.byteorder == "big":
        deltas.byteswap()
    plain = deltas.tobytes()
    return b"".join(plain[weight::8] for weight in range(8))


def _deltas(packed: bytes) -> list[array[int]]:
    """Return the differences of each field."""
    count, rest = divmod(len(packed), 8 * _NUM_FIELDS)
    if rest:
        raise Unreadable(f"{len(packed)} bytes are no whole rows")
    plain, size = bytearray(len(packed)), len(packed) // 8
    for weight in range(8):
        plain[weight::8] = packed[weight * size : (weight + 1) * size]
    deltas = array("q", bytes(plain))
    if sys.byteorder == "big":
        deltas.byteswap()
    return [deltas[field * count : (field + 1) * count] for field in range(_NUM_FIELDS)]


def _unpack(packed: bytes) -> list[list[int]]:
    return [list(accumulate(field)) for field in _deltas(packed)]


def _refuse_forged(book: RankBook) -> None:
    """Refuse an account that no agent wrote.

    Raises:
        Unreadable: what is wrong with it.
    """
    if book.lane.translate(None, _ALL_LANE_STATES):
        raise Unreadable(f"rank {book.rank}: an unknown state in its lane")
    fields = _unpack(book.packed_rows)
    if any(field and not (min(field) >= 0 and max(field) < 1 << 62) for field in fields):
        raise Unreadable(f"rank {book.rank}: a total that is none")
    ages = map(sum, zip(*fields[:-1], strict=True))
    if any(after <= before for before, after in pairwise(ages)) or fields[-1] != sorted(fields[-1]):
        raise Unreadable(f"rank {book.rank}: rows that are not in order")


def pack_book(book: TimeBook) -> bytes:
    """Return a frame of a file."""
    data = zlib.compress(msgspec.msgpack.encode(book), 9)
    return _HEAD.pack(_MAGIC, len(data)) + data


def parse_books(data: bytes, *, node: str = "") -> tuple[list[TimeBook], str | None]:
    """Return the books of a file, oldest first, as far as it can be read; and why not further, None: it was read whole.

    Args:
        data: whatever anybody wrote; at most MAX_RAW_BYTES of each frame are unpacked.
        node: whose it is.
    """
    books: list[TimeBook] = []
    at = 0
    while at < len(data):
        try:
            book, at = _parse_frame(data, at)
        except Unreadable as exc:
            return books, str(exc)
        books.append(msgspec.structs.replace(book, node=node))
    return books, None if books else "it is empty"


def _parse_frame(data: bytes, at: int) -> tuple[TimeBook, int]:
    begin = at + _HEAD.size
    if begin > len(data):
        raise Unreadable(f"it is cut off after {len(data)} bytes")
    magic, size = _HEAD.unpack_from(data, at)
    if magic != _MAGIC:
        is_ours = magic[:-1] == _MAGIC[:-1]
        raise Unreadable(f"another version of allranks wrote it ({magic[-1]})" if is_ours else "it is no book")
    if begin + size > len(data):
        raise Unreadable(f"it is cut off after {len(data)} bytes")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data[begin : begin + size], MAX_RAW_BYTES)
    except zlib.error as exc:
        raise Unreadable(f"it is damaged ({exc})") from exc
    if not unpacker.eof:
        raise Unreadable("it is damaged: incomplete, or too large")
    try:
        book = msgspec.msgpack.decode(plain, type=TimeBook)
    except UNREADABLE as exc:
        raise Unreadable(f"it is damaged ({' '.join(str(exc).split())[:200]})") from exc
    for rank_book in book.ranks:
        _refuse_forged(rank_book)
    return book, begin + size
