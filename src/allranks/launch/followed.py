"""One output file of a worker, read as it grows: chunk by chunk, and as the lines that a terminal would show.

    followed = Followed("rank_3.err", fd, "err", b"[node03 r3] ", position=0)
    followed.take_lines(followed.read())

Nobody waits for the worker, and none of what it does to the file costs more than a chunk: seeks that leave holes,
truncation, lines without an end (launch.bars).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from dataclasses import dataclass, field

from allranks.launch.bars import FinishedLine, TerminalLines

CHUNK_BYTES = 1 << 16
"""Of each file at once. The worst of it, empty lines and control sequences, becomes 5 MB with its prefixes, and takes
the agent 0.1 s."""
HOLE_BYTES = 16 << 20
"""A part of a file that was never written, as after ftruncate, reads as zeros; from this size on it is skipped."""
REDRAW_S = 5.0
SETTLE_S = 1.0
"""A cursor that has not gone up for so long does not come back to the lines above it."""
PROMPT_S = 0.3
"""The end of a line that comes in two parts comes before that."""
NOISE = b"[c10d] The hostname of the client socket cannot be retrieved"
"""What torch 2.13 says on every rank of a healthy job where addresses have no names (socket.cpp, for its log
only). Among several ranks, the terminal leaves this line out; the files have it."""


@dataclass(slots=True)
class Followed:
    """A file that is followed, and what of it is not shown yet."""

    name: str
    """Of the file, for people."""
    file_fd: int
    stream: str
    """`out` or `err`."""
    prefix: bytes
    """Before each line; empty: its bytes are shown as they are."""
    position: int
    """What is before it has been read."""
    has_keyboard: bool = False
    """Somebody may answer a worker: what asks for it is shown before its line ends."""
    lines: TerminalLines = field(default_factory=TerminalLines)
    held: bytearray = field(default_factory=bytearray)
    """From the beginning of a traceback on."""
    held_until_s: float = 0.0
    num_beyond: int = 0
    """Bytes that came after what is held, and are in the file only."""
    has_verdict: bool = False
    """Tracebacks stay in the file."""
    end: int = sys.maxsize
    """Where it ends, once the writer has ended: what follows is the next generation's."""
    num_skipped: int = 0
    """Bytes of holes."""
    _fed_s: float = 0.0
    """When data last came."""
    _redrawn_s: float = 0.0

    def read(self) -> bytes:
        """Return the next chunk, empty where there is none now."""
        data = b""
        with contextlib.suppress(OSError):  # a stale file handle of a network file system; the next pump tries again
            data = self._read_chunk()
            is_empty = data.startswith(b"\0") and not data.strip(b"\0")
            if (is_empty and self._skip_hole()) or (not data and self._was_emptied()):
                data = self._read_chunk()
        self.position += len(data)
        if not data and self.end < sys.maxsize:
            self.end = self.position
        return data

    def _read_chunk(self) -> bytes:
        return os.pread(self.file_fd, max(0, min(CHUNK_BYTES, self.end - self.position)), self.position)

    def _was_emptied(self) -> bool:
        """Begin again with a file that somebody has emptied, to make room or to rotate it."""
        if self.position <= os.fstat(self.file_fd).st_size:
            return False
        self.position = 0
        return True

    def _skip_hole(self) -> bool:
        """Go on behind a hole that begins at the position; return whether there is one."""
        length = min(find_hole(self.file_fd, self.position), self.end - self.position)
        self.position += length
        self.num_skipped += length
        return length > 0

    @property
    def is_last(self) -> bool:
        """Whether all is read that there will ever be."""
        return self.position >= self.end

    def take_lines(self, data: bytes) -> list[FinishedLine]:
        """Return the lines that have ended with this data, as a terminal would show them."""
        ended = self.lines.feed(data)
        if data:
            self._fed_s = time.monotonic()
        elif self.lines.is_deep and time.monotonic() - self._fed_s >= SETTLE_S:
            ended = self.lines.settle()
        elif self.has_keyboard and self.lines.is_prompt and time.monotonic() - self._fed_s >= PROMPT_S:
            ended = self.lines.end()
        if self.is_last:
            ended = [*ended, *self.lines.end()]
        return [quiet for line in ended if (quiet := _without_noise(line)) is not None]

    def take_redrawn(self) -> bytes:
        """Return the last whole state of a line that redraws itself, if it is time to show it."""
        if time.monotonic() - self._redrawn_s < REDRAW_S or not (rows := self.lines.take_whole()):
            return b""
        self._redrawn_s = time.monotonic()
        return b"".join(row + b"\n" for row in rows)


def _without_noise(ended: FinishedLine) -> FinishedLine | None:
    """Return the lines without NOISE; None where nothing else is there."""
    if NOISE not in ended.text:
        return ended
    kept = [line for line in ended.text.split(b"\n") if NOISE not in line]
    return ended._replace(text=b"\n".join(kept)) if kept else None


def find_hole(fd: int, position: int) -> int:
    """Return how many bytes from a position on were never written; 0 where they are few, or nobody knows.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    try:
        behind = min(os.lseek(fd, position, os.SEEK_DATA), size)
    except OSError as exc:
        behind = size if exc.errno == errno.ENXIO else 0  # else the file system does not tell
    return behind - position if behind - position >= HOLE_BYTES else 0
