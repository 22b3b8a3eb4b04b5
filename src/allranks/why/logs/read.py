"""The bytes of a log, in chunks of whole lines, for any compression and any size.

    for chunk in read_chunks(source):
        chunk.data, chunk.first_line, chunk.offset

Plain text, gzip and zstd (told by their first bytes, not by their names), UTF-16 with its mark, standard input, pipes.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import zstandard

from allranks.model.errors import AllranksError
from allranks.why.logs.sources import GZIP_MAGIC, UTF16_MARKS, ZSTD_MAGIC, Source

CHUNK_BYTES = 4 << 20
OVERLAP_BYTES = 4 << 10
COUNT_BYTES = 1 << 15
"""Newlines are counted in blocks of this many bytes."""
_SAMPLE_BYTES = 1 << 10
_SHORT_LINE_BYTES = 32
_BLOCK_BYTES = 1 << 18
"""Bytes that are read and unpacked at a time."""
_ZSTD_FEED_BYTES = 1 << 8
"""Compressed bytes fed at a time: 8 MiB of zeros are the largest result."""
_ZSTD_WINDOW_BYTES = 1 << 27
_GZIP = 31
"""zlib: a gzip header, and the largest window."""


class ReadError(AllranksError):
    """A source cannot be read, or can no longer be read."""

    def __init__(self, source: Source, why: str) -> None:
        super().__init__(f"{source.shown}: {why}")
        self.source = source


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """Why a source was not read completely."""

    source: Source
    message: str


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a source; part of one if it is longer than a chunk."""

    data: bytes
    """At most CHUNK_BYTES. The second part of a cut line begins with the last OVERLAP_BYTES before the cut."""
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
        problems: gets a line about the unreadable part of a damaged file.
    Raises:
        ReadError: it cannot be opened, was removed, or the file system fails, also after some chunks.
    """

    def note(message: str) -> None:
        if problems is not None:
            problems.append(ReadProblem(source, message))

    try:
        with io.FileIO(0, closefd=False) if source.path is None else io.FileIO(source.path) as file:
            yield from _cut(*_open_stream(file, note, size=source.size))
    except IsADirectoryError as exc:
        raise ReadError(source, "cannot list this directory") from exc
    except OSError as exc:
        raise ReadError(source, f"cannot be read: {exc.strerror or exc}") from exc


def _cut(head: bytes, fill: _Fill) -> Iterator[Chunk]:
    """Split a head, and what `fill` writes into a buffer after it, into chunks."""
    following = bytearray(1)
    if not fill(memoryview(following)):  # most logs: the head is the whole log
        if head:
            yield Chunk(head, 1, 0)
        return
    buffer = bytearray(CHUNK_BYTES)
    kept = len(head) + 1
    buffer[:kept] = head + following
    overlap = offset = 0
    line = 1
    is_more = True
    while is_more:
        size = kept
        while is_more and size < CHUNK_BYTES:
            with memoryview(buffer) as view, view[size:] as rest:
                count = fill(rest)
            size += count
            is_more = bool(count)
        if size == overlap:  # nothing except the overlap
            return
        end, overlap = size, 0
        if is_more:
            end = buffer.rfind(b"\n", 0, size) + 1
            if not end:
                end, overlap = size, OVERLAP_BYTES
        with memoryview(buffer) as view:
            chunk = Chunk(bytes(view[:end]), line, offset)
        yield chunk
        line += chunk.num_newlines
        offset += end - overlap
        kept = size - end + overlap
        buffer[:kept] = buffer[size - kept : size]


# --- Compression ---------------------------------------------------------------------------------------------------

_Fill = Callable[[memoryview], int]
"""Writes the next bytes into a buffer and returns their number; 0 at the end."""
_Note = Callable[[str], None]


def _open_stream(file: io.FileIO, note: _Note, *, size: int) -> tuple[bytes, _Fill]:
    """Return the text of a file, unpacked and in UTF-8: a head shorter than a chunk, and a function for the rest.

    Args:
        file: the open file.
        note: called with a text about the part that cannot be read.
        size: its size on disk; 0 if it is not seekable. The head of a small log is the whole log: an intermediate
            buffer would take five times as long as reading.
    """
    head = b""
    while len(head) < len(ZSTD_MAGIC) and (more := _read(file, len(ZSTD_MAGIC) - len(head))):
        head += more
    blocks = _read_blocks(file, head)
    if head.startswith(GZIP_MAGIC):
        blocks = _unpack_gzip(blocks, note)
    elif head.startswith(ZSTD_MAGIC):
        blocks = _unpack_zstd(blocks, note)
    elif not head.startswith(UTF16_MARKS):
        if size:
            file.seek(0)
            head = _read(file, min(size, CHUNK_BYTES - 1))
        return head, lambda view: _read_into(file, view)
    return b"", _join(_to_utf8(block for block in blocks if block))


def _read(file: io.FileIO, size: int) -> bytes:
    while (data := file.read(size)) is None:  # standard input that somebody made non-blocking
        select.select([file], [], [])
    return data


def _read_into(file: io.FileIO, view: memoryview) -> int:
    while (count := file.readinto(view)) is None:
        select.select([file], [], [])
    return count


def _read_blocks(file: io.FileIO, head: bytes) -> Iterator[bytes]:
    yield head
    while block := _read(file, _BLOCK_BYTES):
        yield block


def _join(blocks: Iterable[bytes]) -> _Fill:
    """Copy blocks, none of them empty, into buffers of any size."""
    left = iter(blocks)
    rest = memoryview(b"")

    def fill(view: memoryview) -> int:
        nonlocal rest
        rest = rest or memoryview(next(left, b""))
        count = min(len(rest), len(view))
        view[:count] = rest[:count]
        rest = rest[count:]
        return count

    return fill


def _to_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Pass text on unchanged, and convert UTF-16 with a byte order mark to UTF-8."""
    first = next(blocks, b"")
    while len(first) < len(UTF16_MARKS[0]) and (more := next(blocks, b"")):
        first += more
    if not first.startswith(UTF16_MARKS):
        yield from filter(None, (first,))
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    for block in itertools.chain((first,), blocks):
        if text := decoder.decode(block):
            yield text.encode()
    if text := decoder.decode(b"", final=True):
        yield text.encode()


def _unpack_gzip(blocks: Iterator[bytes], note: _Note) -> Iterator[bytes]:
    inflate = zlib.decompressobj(_GZIP)
    is_open = True  # within a member: files may be concatenated
    for block in blocks:
        while block:
            if not is_open:
                block = block.lstrip(b"\0")  # tapes and some file systems pad
                if not block:
                    break
                inflate, is_open = zlib.decompressobj(_GZIP), True
            before = inflate.copy()
            try:
                yield inflate.decompress(block, _BLOCK_BYTES)
            except zlib.error as exc:
                yield _unpack_until_error(before, block)
                note(f"its gzip data is damaged, the rest was not read: {exc}")
                return
            is_open = not inflate.eof
            block = inflate.unconsumed_tail if is_open else inflate.unused_data
    if is_open:
        yield inflate.flush()
        note("its gzip data ends too early: it was truncated, or is still being written")


def _unpack_until_error(inflate: zlib._Decompress, block: bytes) -> bytes:
    """Return the bytes lost in an error: zlib returns nothing from a failed call."""
    found = bytearray()
    with contextlib.suppress(zlib.error):
        for i in range(len(block)):
            found += inflate.decompress(block[i : i + 1])
    return bytes(found)


def _unpack_zstd(blocks: Iterator[bytes], note: _Note) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame, is_open = decompressor.decompressobj(), True
    for block in blocks:
        begin = 0
        while begin < len(block):
            if not is_open:
                frame, is_open = decompressor.decompressobj(), True
            piece = block[begin : begin + _ZSTD_FEED_BYTES]
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as exc:
                note(f"its zstd data is damaged, the rest was not read: {exc}")
                return
            is_open = not frame.eof
            begin += len(piece) - len(frame.unused_data)
    if is_open:
        note("its zstd data ends too early: it was truncated, or is still being written")
