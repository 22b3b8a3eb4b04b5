"""The bytes of a log, in chunks of whole lines, for any compression and any size.

    for chunk in read_chunks(source):
        chunk.data, chunk.first_line, chunk.offset

Plain text, gzip and zstd (told by their first bytes, not by their names), UTF-16 with its mark, standard input, pipes,
logs of JSON objects (`records.py`), what was pasted (`pasted.py`).
Memory is a few chunks, for any size; zstd's window may add 128 MiB. Of a damaged or truncated file, the readable part
is read, and `problems` gets a line about the rest.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import select
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import zstandard

from allranks.why.logs.pasted import find_margin
from allranks.why.logs.records import find_json
from allranks.why.logs.sources import GZIP_MAGIC, UTF16_MARKS, ZSTD_MAGIC, Source

CHUNK_BYTES = 4 << 20
OVERLAP_BYTES = 4 << 10
COUNT_BYTES = 1 << 15
"""Newlines are counted in blocks of this many bytes."""
_SAMPLE_BYTES = 1 << 10
_SHORT_LINE_BYTES = 32
_BLOCK_BYTES = 1 << 18
"""Bytes that are read and unpacked at a time."""
_ZSTD_WINDOW_BYTES = 1 << 27
_GZIP = 31
"""zlib: a gzip header, and the largest window."""


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """Why a source was not read completely."""

    source: Source
    message: str


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a source; part of one if it is longer than a chunk."""

    data: bytes
    """At most CHUNK_BYTES, before the JSON of its lines is decoded. The second part of a cut line begins with the last
    OVERLAP_BYTES before the cut."""
    first_line: int
    """Number of its first line, from 1. Only a newline ends a line."""
    offset: int
    """Position of data[0] in the stream, unpacked and in UTF-8."""

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """Number of newlines before each block of COUNT_BYTES, and in total."""
        blocks = (self.data[at : at + COUNT_BYTES] for at in range(0, len(self.data), COUNT_BYTES))
        return (0, *itertools.accumulate(map(_count_newlines, blocks)))

    @property
    def num_newlines(self) -> int:
        """Total number of newlines."""
        return self._counts[-1]

    def number_at(self, position: int) -> int:
        """Return the number of the line that contains data[position]."""
        block = min(position, len(self.data)) // COUNT_BYTES
        return self.first_line + self._counts[block] + _count_newlines(self.data[block * COUNT_BYTES : position])


def _count_newlines(block: bytes) -> int:
    """Return the number of newlines.

    `count` looks at each byte, and would take half as long as matching (CPython before 3.13); `replace` jumps from one
    to the next, which is six times as fast unless lines are as short as a word.
    """
    is_short = block.count(b"\n", 0, _SAMPLE_BYTES) * _SHORT_LINE_BYTES > _SAMPLE_BYTES
    return block.count(b"\n") if is_short else len(block) - len(block.replace(b"\n", b""))


def read_chunks(source: Source, *, problems: list[ReadProblem] | None = None) -> Iterator[Chunk]:
    """Yield a source's bytes, each once except for overlaps in lines that are longer than a chunk.

    Args:
        problems: gets a line about what cannot be read: a part of a damaged file; all of one that cannot be opened, was
            removed, or whose file system fails, also after some chunks.
    """

    def note(message: str) -> None:
        if problems is not None:
            problems.append(ReadProblem(source, message))

    try:
        with io.FileIO(0, closefd=False) if source.path is None else io.FileIO(source.path) as file:
            yield from _to_text(_cut(_open_stream(file, note, source.size)))
    except IsADirectoryError:
        note("cannot list this directory")
    except OSError as exc:
        note(f"cannot be read: {exc.strerror or exc}")


def _to_text(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Decode the lines of a log as its first chunk shows: JSON objects, a margin."""
    for first in chunks:
        decode = find_json(first.data) or find_margin(first.data)
        for chunk in itertools.chain((first,), chunks):
            yield Chunk(decode(chunk.data), chunk.first_line, chunk.offset) if decode else chunk


def _cut(stream: _Stream) -> Iterator[Chunk]:
    """Split a stream into chunks."""
    parts: list[bytes] = []
    size = overlap = offset = 0
    line = 1
    is_more = True
    while is_more:
        while size < CHUNK_BYTES and (block := stream.read(CHUNK_BYTES - size)):
            parts.append(block)
            size += len(block)
        is_more = size == CHUNK_BYTES
        if size == overlap:  # nothing except the overlap
            return
        if b"\n" not in parts[-1]:
            parts = [b"".join(parts)]
        last = parts.pop()
        end, overlap = len(last), 0
        if is_more:
            end = last.rfind(b"\n") + 1
            if not end:
                end, overlap = size, OVERLAP_BYTES
        whole = last if end == len(last) else memoryview(last)[:end]
        chunk = Chunk(b"".join([*parts, whole]), line, offset)
        yield chunk
        line += chunk.num_newlines
        offset += len(chunk.data) - overlap
        parts = [last[end - overlap :]]
        size = len(parts[0])


# --- Compression ---------------------------------------------------------------------------------------------------

_Unpacker = Any  # a decompressobj of zlib or zstandard
_PACKINGS: tuple[tuple[bytes, str, Callable[[], _Unpacker], int], ...] = (
    (GZIP_MAGIC, "gzip", lambda: zlib.decompressobj(_GZIP), 1 << 14),
    (ZSTD_MAGIC, "zstd", zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj, 1 << 8),
)
"""First bytes, name, what unpacks, and how many bytes it gets at a time: 16 MiB of zeros are the largest result."""


class _Stream:
    """Bytes that can be looked at before they are read."""

    def __init__(self, read: Callable[[int], bytes], size: int = 0) -> None:
        self._read = read
        """Returns the next bytes, about so many; none at the end."""
        self._first = min(size, CHUNK_BYTES) or _BLOCK_BYTES
        """A small log is read at once, into no more memory than it needs."""
        self._head = b""

    @classmethod
    def of(cls, blocks: Iterator[bytes]) -> Self:
        """Return the stream of these blocks."""
        return cls(lambda _: next(filter(None, blocks), b""))

    def peek(self) -> bytes:
        """Return the first bytes, enough to tell what they are."""
        while len(self._head) < len(ZSTD_MAGIC) and (more := self._read(self._first)):
            self._head += more
        return self._head

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most so many; none at the end."""
        block = self._head or self._read(min(size, _BLOCK_BYTES))
        self._head = block[size:]
        return block[:size]


def _open_stream(file: io.FileIO, note: Callable[[str], None], size: int) -> _Stream:
    """Return the text of a file, unpacked and in UTF-8.

    Args:
        file: the open file.
        note: called with a text about the part that cannot be read.
        size: its size on disk; 0 if unknown.
    """
    stream = _Stream(partial(_read, file), size)
    for magic, name, new, feed in _PACKINGS:
        if stream.peek().startswith(magic):
            stream = _Stream.of(_unpack(stream, name, new, feed, note))
            break
    if stream.peek().startswith(UTF16_MARKS):
        blocks = iter(partial(stream.read, _BLOCK_BYTES), b"")
        stream = _Stream.of(text.encode() for text in codecs.iterdecode(blocks, "utf-16", errors="replace"))
    return stream


def _read(file: io.FileIO, size: int) -> bytes:
    while (data := file.read(size)) is None:  # standard input that somebody made non-blocking
        select.select([file], [], [])
    return data


def _unpack(
    stream: _Stream, name: str, new: Callable[[], _Unpacker], feed: int, note: Callable[[str], None]
) -> Iterator[bytes]:
    unpacker, is_open = new(), True  # within a member, or frame: files may be concatenated
    while block := stream.read(_BLOCK_BYTES):
        for begin in range(0, len(block), feed):
            piece = block[begin : begin + feed]
            while piece:
                if not is_open:
                    piece = piece.lstrip(b"\0")  # tapes and some file systems pad
                    if not piece:
                        break
                    unpacker, is_open = new(), True
                before: _Unpacker = unpacker.copy() if name == "gzip" else None
                try:
                    yield unpacker.decompress(piece)
                except (zlib.error, zstandard.ZstdError) as exc:
                    with contextlib.suppress(zlib.error):  # zlib returns nothing from a failed call
                        for at in range(len(piece) if before else 0):
                            yield before.decompress(piece[at : at + 1])
                    note(f"its {name} data is damaged, the rest was not read: {exc}")
                    return
                is_open = not unpacker.eof
                piece = unpacker.unused_data
    if is_open:
        note(f"its {name} data ends too early: it was truncated, or is still being written")
