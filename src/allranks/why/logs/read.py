"""The bytes of a log, in chunks of whole lines, for any compression and any size.

    for chunk in read_chunks(source):
        chunk.data, chunk.first_line

Plain text, gzip and zstd (told by their first bytes, not by their names), UTF-16 with its mark, standard input, pipes,
logs of JSON objects (`records.py`).
Memory is a few chunks, for any size; zstd's window may add 128 MiB. Of a damaged or truncated file, the readable part
is read, and `problems` gets a line about the rest.
"""

from __future__ import annotations

import codecs
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import zstandard

from allranks.why.logs.pasted import find_margin
from allranks.why.logs.records import find_json

if TYPE_CHECKING:
    from allranks.why.logs.sources import Source

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
CHUNK_BYTES = 2 << 20
"""With 4 MiB, the memory allocator gives each chunk back to the kernel, which costs a quarter of the rate."""
OVERLAP_BYTES = 4 << 10
_SHORT_PART_BYTES = 1 << 12
_SAMPLE_BYTES = 1 << 10
_SHORT_LINES = 32
"""If a sample has more lines, they are as short as a word."""
_BLOCK_BYTES = 1 << 18
"""Bytes that are read at a time."""
_ZSTD_WINDOW_BYTES = 1 << 27
_GZIP = 31
"""zlib: a gzip header, and the largest window."""


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """Why a source was not read completely."""

    source: Source
    message: str


@dataclass
class Chunk:
    """Whole lines of a source; part of one if it is longer than a chunk."""

    data: bytes
    """CHUNK_BYTES and the rest of a line, before its lines are decoded. The second part of a cut line begins
    with the last OVERLAP_BYTES before the cut."""
    first_line: int
    """Number of its first line, from 1. Only a newline ends a line."""
    _counted: tuple[int, int] = field(default=(0, 0), repr=False)
    """A position, and the number of newlines before it."""

    def number_at(self, position: int) -> int:
        """Return the number of the line that contains data[position]; each byte is counted once if positions rise."""
        at, count = self._counted if position >= self._counted[0] else (0, 0)
        count += _count_newlines(self.data, at, position)
        self._counted = position, count
        return self.first_line + count


def _count_newlines(data: bytes, begin: int, end: int) -> int:
    """Return the number of newlines in a part.

    `count` looks at each byte, and would take half as long as matching (CPython before 3.13); `replace` jumps from one
    to the next, which is three times as fast unless lines are as short as a word.
    """
    if end - begin < _SHORT_PART_BYTES or data.count(b"\n", begin, begin + _SAMPLE_BYTES) > _SHORT_LINES:
        return data.count(b"\n", begin, end)
    part = data[begin:end]
    return len(part) - len(part.replace(b"\n", b""))


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
        with open(source.path or 0, "rb", closefd=source.path is not None) as file:
            if source.path is None:
                os.set_blocking(0, True)  # somebody may have made it non-blocking
            is_one_chunk = 0 < source.size < CHUNK_BYTES
            yield from _cut(_open_stream(file, note), source.size + 1 if is_one_chunk else _BLOCK_BYTES)
    except IsADirectoryError:
        note("cannot list this directory")
    except OSError as exc:
        note(f"cannot be read: {exc.strerror or exc}")


def read_head(path: str, size: int) -> bytes:
    """Return the first bytes of a file, unpacked and in UTF-8; none of a damaged one.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        head = file.read(size)
    if not head.startswith((GZIP_MAGIC, ZSTD_MAGIC, *UTF16_MARKS)):
        return head  # at once: there may be thousands
    return _open_stream(io.BufferedReader(io.BytesIO(head)), lambda _: None).read(size)


def _cut(stream: io.BufferedReader, block_bytes: int) -> Iterator[Chunk]:
    """Split a stream into chunks; decode their lines if the first ones are JSON objects.

    A small file is read at once: joining its blocks would take longer than reading them.
    """
    decode: Callable[[bytes], bytes] | None = None
    blocks = iter(partial(stream.read, block_bytes), b"")
    overlap = first = b""
    line = 1
    while parts := list(itertools.islice(blocks, CHUNK_BYTES // block_bytes)):
        data = b"".join(filter(None, (overlap, *parts, stream.readline(_BLOCK_BYTES))))
        first = first or data  # kept: else the allocator gives pages back after each chunk, 8% of the rate
        decode = decode or find_json(data) or find_margin(data) or bytes
        chunk = Chunk(decode(data), line)
        yield chunk
        line = chunk.number_at(len(chunk.data))
        overlap = b"" if data.endswith(b"\n") else data[-OVERLAP_BYTES:]


# --- Compression ---------------------------------------------------------------------------------------------------

_PACKINGS: tuple[tuple[bytes, str, Callable[[], Any], int], ...] = (
    (GZIP_MAGIC, "gzip", lambda: zlib.decompressobj(_GZIP), 1 << 14),
    (ZSTD_MAGIC, "zstd", zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj, 1 << 9),
)
"""First bytes, name, what unpacks, and how many bytes it gets at a time: 16 MiB of zeros are the largest result."""


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = filter(None, blocks)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._left or memoryview(next(self._blocks, b""))  # of bytes, each rest would be a copy
        size = min(len(block), len(buffer))
        buffer[:size] = block[:size]
        self._left = block[size:]
        return size


def _open_stream(stream: io.BufferedReader, note: Callable[[str], None]) -> io.BufferedReader:
    """Return the text of a file, unpacked and in UTF-8; `note` is called with a text about what cannot be read."""
    for magic, name, new, size in _PACKINGS:
        if stream.peek().startswith(magic):
            stream = io.BufferedReader(_Blocks(_unpack(stream, name, new, size, note)))
            break
    if stream.peek().startswith(UTF16_MARKS):
        texts = codecs.iterdecode(iter(partial(stream.read, _BLOCK_BYTES), b""), "utf-16", errors="replace")
        stream = io.BufferedReader(_Blocks(text.encode() for text in texts))
    return stream


def _unpack(
    stream: io.BufferedReader, name: str, new: Callable[[], Any], size: int, note: Callable[[str], None]
) -> Iterator[bytes]:
    unpacker = new()
    try:
        while block := stream.read(size):
            # Files may be concatenated; tapes and some file systems pad.
            while block := block.lstrip(b"\0") if unpacker.eof else block:
                unpacker = new() if unpacker.eof else unpacker
                yield unpacker.decompress(block)
                block = unpacker.unused_data
    except (zlib.error, zstandard.ZstdError) as exc:
        note(f"its {name} data is damaged, the rest was not read: {exc}")
        return
    if not unpacker.eof:
        note(f"its {name} data ends too early: it was truncated, or is still being written")
