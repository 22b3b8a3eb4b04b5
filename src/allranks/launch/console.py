"""Follow the workers' output files and print them, each line with its prefix `[node03 r3]`; no reader stops the agent.

    console = Console()
    with contextlib.redirect_stderr(console.screen["err"].as_text()):   print(..., file=sys.stderr) goes through it, too
        console.follow(path, start=0, stream="out", prefix="[node03 r3] ")
        console.pump()               shows what is new and has room
    console.close(patience_s=5)      a reader that takes nothing for so long is given up

The output of a single worker is printed byte by byte. With several workers, lines stay whole. A progress bar that
redraws itself with carriage returns is printed as a line every REDRAW_S, and once more at the end.

Threads write to the terminal: a pipe that nobody reads, Ctrl-S and a paused pager block `write(2)`. O_NONBLOCK does not
help: it belongs to the open file, which the shell and the other tasks of a step share. A slow reader delays no worker:
output that the screen has no room for stays in the files until there is room again.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
"""Of each file at once: a worker that writes faster than the terminal shows must not keep the agent from watching."""
LINE_LIMIT_BYTES = 1 << 16
"""Longer lines are shown in pieces; the file has them whole."""
REDRAW_S = 5.0
HELD_S = 3.8
"""How long a traceback waits for the verdict, which has the one that counts: when a rank breaks, all others lose it,
and say so in as many tracebacks. Longer than LINGERS_S (launch.workers), after which the verdict may come."""
_TRACEBACK = re.compile(
    rb"^(?:(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):|Fatal Python error: "
    rb"|  File \"[^\"\n]+\", line \d+$)",
    re.MULTILINE,
)
"""How one begins; the second form is faulthandler's, the third one that of a script that Python cannot parse."""
NOISE = b"[c10d] The hostname of the client socket cannot be retrieved"
"""What torch 2.13 says on every rank of a healthy job where addresses have no names (socket.cpp, for its log
only). Among several ranks, the terminal leaves this line out; the files have it."""
ROOM_BYTES = 1 << 20
"""How much waits in memory before `has_room` says no."""
PIECE_BYTES = 1 << 14
"""Written at once: small, so that a slow reader is told from one that has stopped."""
LOOK_S = 0.1
"""How often `drain` looks whether it is over."""


class Stream(io.FileIO):
    """A file descriptor with a thread that writes what is queued, in order, and ends with the process."""

    def __init__(self, fd: int) -> None:
        try:
            super().__init__(fd, "wb", closefd=False)
        except OSError:  # it is closed, as after `>&-`
            super().__init__(os.devnull, "wb")
        self._waiting = bytearray()
        self._changed = threading.Condition()
        self.is_given_up = False
        """`drain` has given the reader up: what is written goes nowhere."""
        self.num_dropped_lines = 0
        """Lines that waited for the reader when it was given up, and that came later."""
        threading.Thread(target=self._write, args=(self.fileno(),), name="allranks-screen", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether the reader keeps up; a stream whose reader has left always has room."""
        return len(self._waiting) < ROOM_BYTES

    def write(self, data: Any, /) -> int:
        """Queue bytes."""
        with self._changed:
            if self.is_given_up:
                self.num_dropped_lines += data.count(b"\n")
            else:
                self._waiting += data
                self._changed.notify_all()
        return len(data)

    def drain(self, *, patience_s: float = math.inf, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is written; else give the reader up: what waits, and what comes, is dropped.

        Args:
            patience_s: how long the reader may take nothing.
            is_over: asked meanwhile; True ends the wait.
        """
        moved_s = time.monotonic()
        with self._changed:
            while self._waiting:
                if self._changed.wait(LOOK_S):
                    moved_s = time.monotonic()
                if self._waiting and (time.monotonic() - moved_s >= patience_s or is_over()):
                    self.num_dropped_lines = self._waiting.count(b"\n")
                    self.is_given_up = True
                    self._waiting.clear()
                    return False
            return True

    def as_text(self) -> io.TextIOWrapper:
        """Return a text file for `sys.stderr`."""
        return io.TextIOWrapper(self, sys.stderr.encoding, errors="backslashreplace", write_through=True)

    def _write(self, fd: int) -> None:
        while not self.is_given_up:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                end = self._waiting.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
                piece = bytes(self._waiting[:end])
            try:
                written = os.write(fd, piece)
            except BlockingIOError:  # whoever shares the file has made it non-blocking
                select.select([], [fd], [], 1.0)
                continue
            except OSError:  # the reader has left, as after `| head`; the job goes on
                fd = os.open(os.devnull, os.O_WRONLY)
                continue
            with self._changed:
                del self._waiting[:written]
                self._changed.notify_all()


@dataclass(slots=True)
class _Followed:
    file_fd: int
    stream: str
    prefix: bytes
    position: int
    pending: bytearray = field(default_factory=bytearray)
    """Of a line that has not ended."""
    redrawn_s: float = 0.0
    held: bytearray = field(default_factory=bytearray)
    """From the beginning of a traceback on."""
    held_until_s: float = 0.0
    has_verdict: bool = False
    """Tracebacks stay in the file."""
    end: int = sys.maxsize
    """Where it ends, once the writer has ended: what follows is the next generation's."""

    def read(self) -> bytes:
        data = b""
        with contextlib.suppress(OSError):  # a stale file handle of a network file system; the next pump tries again
            data = os.pread(self.file_fd, min(CHUNK_BYTES, self.end - self.position), self.position)
        self.position += len(data)
        if not data and self.end < sys.maxsize:
            self.end = self.position
        return data

    def take_lines(self, data: bytes) -> bytes:
        """Return the lines that have ended, as a terminal would show them."""
        *lines, rest = bytes(self.pending + data).split(b"\n")
        while len(rest) > LINE_LIMIT_BYTES:
            lines.append(rest[:LINE_LIMIT_BYTES])
            rest = rest[LINE_LIMIT_BYTES:]
        self.pending[:] = rest
        return b"".join(_last_drawn(line) + b"\n" for line in lines if NOISE not in line)

    def take_redrawn(self) -> bytes:
        """Return the last whole state of a line that redraws itself, if it is time to show it."""
        if b"\r" not in self.pending.rstrip(b"\r") or time.monotonic() - self.redrawn_s < REDRAW_S:
            return b""
        self.redrawn_s = time.monotonic()
        head, _, rest = bytes(self.pending).rpartition(b"\r")
        self.pending[:] = rest
        return _last_drawn(head)


class Console:
    """Follows the output files of this node's workers and shows what is new at each `pump`.

    Args:
        out_fd: standard output; `err_fd` standard error. If they are one file, as after `2>&1`, they are one stream, so
            that their order is kept.
    """

    def __init__(self, *, out_fd: int = 1, err_fd: int = 2) -> None:
        is_one = False
        with contextlib.suppress(OSError):
            is_one = os.path.sameopenfile(out_fd, err_fd)
        out = Stream(out_fd)
        self.screen = {"out": out, "err": out if is_one else Stream(err_fd)}
        self._followed: list[_Followed] = []
        self._is_muted: set[str] = set()

    def follow(self, path: Path, *, start: int, stream: str, prefix: str) -> None:
        """Show what a worker writes into this file from `start` on.

        Args:
            stream: `out` or `err`.
            prefix: what stands before each line; empty shows the bytes as they are.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._followed.append(_Followed(fd, stream, prefix.encode(), start))

    def mute(self, stream: str) -> None:
        """Show no more of a stream; the files still get it."""
        self._is_muted.add(stream)

    def drop_tracebacks(self) -> None:
        """A verdict has been given: tracebacks that wait, and those that come now, are in the files only."""
        for followed in self._followed:
            followed.has_verdict = True

    def pump(self) -> bool:
        """Show what is new and has room; True if there was anything."""
        has_news = False
        for followed in list(self._followed):
            if self.screen[followed.stream].has_room and (data := followed.read()):
                has_news = True
                self._show_or_hold(followed, followed.take_lines(data) if followed.prefix else data)
            if redrawn := followed.take_redrawn():
                self._show(followed, redrawn + b"\n")
            is_last = followed.position >= followed.end
            if followed.held and (is_last or time.monotonic() >= followed.held_until_s):
                if not followed.has_verdict:
                    self._show(followed, bytes(followed.held))
                followed.held.clear()
            if is_last:
                if rest := _last_drawn(bytes(followed.pending)):
                    self._show(followed, rest + b"\n")
                os.close(followed.file_fd)
                self._followed.remove(followed)
        return has_news

    def finish(self) -> None:
        """The writers have ended: what they have written is shown as far as there is room, the rest at later pumps."""
        for followed in self._followed:
            followed.end = min(followed.end, os.fstat(followed.file_fd).st_size)
        while self.pump():
            pass

    def close(self, *, patience_s: float = math.inf, is_over: Callable[[], bool] = lambda: False) -> int:
        """Show everything that is left, also unfinished lines, as patiently as `Stream.drain`; the writers have ended.

        Returns:
            How many lines were not shown, since nobody read them; the files have them.
        """
        while True:
            self.finish()
            for stream in ("err", "out"):
                self.screen[stream].drain(patience_s=patience_s, is_over=is_over)
            if not self._followed:
                return sum(each.num_dropped_lines for each in set(self.screen.values()))

    def _show_or_hold(self, followed: _Followed, data: bytes) -> None:
        """Show what a worker has written; from the beginning of a traceback on it is held back."""
        begin = 0 if followed.held else len(data)
        can_begin = not followed.held and (followed.prefix or followed.stream == "err")
        if can_begin and (found := _TRACEBACK.search(data)):
            begin, followed.held_until_s = found.start(), time.monotonic() + HELD_S
        self._show(followed, data[:begin])
        followed.held += data[begin:]

    def _show(self, followed: _Followed, data: bytes) -> None:
        if followed.stream not in self._is_muted:
            self.screen[followed.stream].write(b"".join(followed.prefix + line for line in io.BytesIO(data)))


def _last_drawn(line: bytes) -> bytes:
    """What a terminal would show of a line that redraws itself."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
