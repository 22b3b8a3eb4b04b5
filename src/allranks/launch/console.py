"""What of the workers' output the terminal shows: their files, followed, every line with its `[node03 r3]`.

A worker alone in its job is shown as it is, byte by byte. Among several, lines stay whole. A progress bar that redraws
itself with carriage returns becomes a line now and then (REDRAW_S), and its last state at the end.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

CHUNK_BYTES = 1 << 18
CHUNKS_PER_PUMP = 4
LINE_LIMIT_BYTES = 1 << 16
"""Longer lines are shown in pieces; the file has them whole."""
REDRAW_S = 5.0
HELD_S = 2.5
"""How long a traceback waits for the verdict, which has the one that counts: when a rank breaks, all others lose it,
and say so in as many tracebacks."""
_TRACEBACK = re.compile(rb"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
NOISE = (b"[c10d] The hostname of the client socket cannot be retrieved",)
"""What torch 2.13 says on every rank of a healthy job where addresses have no names (socket.cpp, for its log
only). Among several ranks, the terminal leaves these lines out; the files have them."""


@dataclass(slots=True)
class _Followed:
    file_fd: int
    screen_fd: int
    prefix: bytes
    pending: bytearray = field(default_factory=bytearray)
    redrawn_s: float = 0.0
    held: bytearray = field(default_factory=bytearray)
    held_until_s: float = 0.0


class Console:
    """Follows the output files of this node's workers and shows what is new at each `pump`.

    Args:
        out_fd, err_fd: where standard output and standard error of workers go.
    """

    def __init__(self, *, out_fd: int = 1, err_fd: int = 2) -> None:
        self._screens = {"out": out_fd, "err": err_fd}
        self._followed: list[_Followed] = []
        self._is_muted: set[int] = set()
        self._has_verdict = False

    def follow(self, path: Path, *, start: int, stream: str, prefix: str) -> None:
        """Show what a worker writes into this file from `start` on.

        Args:
            path: the file; it exists.
            start: byte offset.
            stream: `out` or `err`.
            prefix: what stands before each line; empty shows the bytes as they are.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fd, start, os.SEEK_SET)
        self._followed.append(_Followed(fd, self._screens[stream], prefix.encode()))

    def mute(self, stream: str) -> None:
        """Show no more of a stream; the files still get it."""
        self._is_muted.add(self._screens[stream])

    def drop_tracebacks(self) -> None:
        """A verdict has been given: tracebacks that wait, and those that come now, are in the files only."""
        self._has_verdict = True

    def pump(self) -> bool:
        """Show what is new; True if there was anything."""
        has_news = False
        for followed in self._followed:
            # Bounded: a worker that writes faster than the terminal shows must not keep the agent from watching.
            for _ in range(CHUNKS_PER_PUMP):
                if not (data := _read(followed.file_fd)):
                    break
                has_news = True
                if not followed.prefix:
                    self._show(followed.screen_fd, data)
                    continue
                followed.pending += data
                self._show_lines(followed)
            if b"\r" in followed.pending.rstrip(b"\r") and time.monotonic() - followed.redrawn_s >= REDRAW_S:
                followed.redrawn_s = time.monotonic()
                head, _, rest = bytes(followed.pending).rpartition(b"\r")
                followed.pending[:] = rest
                self._show_line(followed, head)
            if followed.held and time.monotonic() >= followed.held_until_s:
                self._release(followed)
        return has_news

    def close(self) -> None:
        """Show everything that is left, also unfinished lines; the writers have ended."""
        while self.pump():
            pass
        for followed in self._followed:
            if followed.pending:
                self._show_line(followed, bytes(followed.pending))
            self._release(followed)
            os.close(followed.file_fd)
        self._followed.clear()
        self._has_verdict = False

    def _show_lines(self, followed: _Followed) -> None:
        *lines, rest = bytes(followed.pending).split(b"\n")
        while len(rest) > LINE_LIMIT_BYTES:
            lines.append(rest[:LINE_LIMIT_BYTES])
            rest = rest[LINE_LIMIT_BYTES:]
        followed.pending[:] = rest
        shown = (line for line in lines if not any(noise in line for noise in NOISE))
        self._show(followed.screen_fd, b"".join(self._or_hold(followed, _last_drawn(line)) for line in shown))

    def _or_hold(self, followed: _Followed, line: bytes) -> bytes:
        """Return what is shown of a line now; from the beginning of a traceback on it is held back."""
        text = followed.prefix + line + b"\n"
        if not followed.held and not _TRACEBACK.match(line):
            return text
        if not followed.held:
            followed.held_until_s = time.monotonic() + HELD_S
        followed.held += text
        return b""

    def _release(self, followed: _Followed) -> None:
        if not self._has_verdict:
            self._show(followed.screen_fd, bytes(followed.held))
        followed.held.clear()

    def _show_line(self, followed: _Followed, line: bytes) -> None:
        if shown := _last_drawn(line):
            self._show(followed.screen_fd, followed.prefix + shown + b"\n")

    def _show(self, screen_fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and screen_fd not in self._is_muted:
            try:
                view = view[os.write(screen_fd, view) :]
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # nobody reads any more (`| head`): the job goes on, its files are complete
                self._is_muted.add(screen_fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except OSError:  # a stale file handle of a network file system; the next pump tries again
        return b""


def _last_drawn(line: bytes) -> bytes:
    """What a terminal would show of a line that redraws itself."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
