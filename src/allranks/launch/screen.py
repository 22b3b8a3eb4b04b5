"""Standard output and standard error of an agent, written by threads: a reader that stopped never stops the agent.

    screen = open_screen()
    with contextlib.redirect_stderr(screen["err"].as_text()):   print(..., file=sys.stderr) goes through it, too
        screen["out"].write(b"[node03 r3] ...")  never waits
        screen["out"].has_room                   ask first for what can wait elsewhere: the workers' files
        screen["out"].drain(patience_s=5)        False: the reader has taken nothing for so long, and is given up

A pipe that nobody reads, Ctrl-S and a paused pager block `write(2)`. O_NONBLOCK is no way out: it belongs to the open
file, which the shell and the other tasks of a step share.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

ROOM_BYTES = 1 << 20
"""How much waits in memory before `has_room` says no."""
PIECE_BYTES = 1 << 14
"""Written at once: small, so that a slow reader is told from one that has stopped."""
LOOK_S = 0.1
"""How often `drain` looks whether it is over."""


class Stream(io.RawIOBase):
    """A file descriptor with a thread that writes what is queued, in order, and ends with the process."""

    def __init__(self, fd: int) -> None:
        self._fd = self.name = fd  # io.FileIO has that name, too
        self._waiting = bytearray()
        self._changed = threading.Condition()
        self.is_given_up = False
        """What is written goes nowhere: the reader has left, as after `| head`, or was given up. The job goes on."""
        self.num_dropped_lines = 0
        """Lines that waited for the reader when it was given up, and that came later."""
        threading.Thread(target=self._write, name="allranks-screen", daemon=True).start()

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
                    self.num_dropped_lines += self._waiting.count(b"\n")
                    self._give_up()
                    return False
            return True

    def as_text(self) -> io.TextIOWrapper:
        """Return a text file for `sys.stderr`."""
        return io.TextIOWrapper(self, sys.stderr.encoding, errors="backslashreplace", write_through=True)

    def writable(self) -> bool:
        """For TextIOWrapper, as the next two."""
        return True

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def fileno(self) -> int:
        """Descriptor of the file itself."""
        return self._fd

    def _write(self) -> None:
        while not self.is_given_up:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                end = self._waiting.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
                piece = bytes(self._waiting[:end])
            try:
                written = os.write(self._fd, piece)
            except BlockingIOError:  # whoever shares the file has made it non-blocking
                select.select([], [self._fd], [], 1.0)
                continue
            except OSError:
                written = 0
            with self._changed:
                if not written:
                    self._give_up()
                del self._waiting[:written]
                self._changed.notify_all()

    def _give_up(self) -> None:
        self.is_given_up = True
        self._waiting.clear()
        self._changed.notify_all()


Screen = Mapping[str, Stream]
"""`out` and `err`."""


def open_screen(*, out_fd: int = 1, err_fd: int = 2) -> Screen:
    """Return both streams; two that are one file, as after `2>&1`, are one stream, so that their order is kept."""
    out = Stream(out_fd)
    with contextlib.suppress(OSError):
        if os.path.sameopenfile(out_fd, err_fd):
            return {"out": out, "err": out}
    return {"out": out, "err": Stream(err_fd)}
