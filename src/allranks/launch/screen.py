"""Standard output and standard error of an agent, written by threads: a reader that stopped never stops the agent.

    screen = Screen()
    with screen.as_stderr():                     print(..., file=sys.stderr) goes through it, too
        screen.write("out", b"[node03 r3] ...")  never waits
        screen.has_room("out")                   ask first for what can wait elsewhere: the workers' files
        screen.flush("out", patience_s=5)        False: the reader has taken nothing for so long, and is given up

A pipe that nobody reads, Ctrl-S and a paused pager block `write(2)`. O_NONBLOCK is no way out: it belongs to the open
file, which the shell and the other tasks of a step share.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

ROOM_BYTES = 1 << 20
"""How much waits in memory before `has_room` says no."""
PIECE_BYTES = 1 << 14
"""Written at once: small, so that a slow reader is told from one that has stopped."""
LOOK_S = 0.1
"""How often a flush looks whether it is over."""


class Screen:
    """Both streams. Two that are one file, as after `2>&1`, share a thread, so that their order is kept."""

    def __init__(self, *, out_fd: int = 1, err_fd: int = 2) -> None:
        self._fds = {"out": out_fd, "err": err_fd}
        out = _Writer()
        self._writers = {"out": out, "err": out if _is_same_file(out_fd, err_fd) else _Writer()}

    def write(self, stream: str, data: bytes) -> None:
        """Queue bytes for `out` or `err`."""
        self._writers[stream].put(self._fds[stream], data)

    def has_room(self, stream: str) -> bool:
        """Whether the reader keeps up; a stream whose reader has left always has room."""
        return self._writers[stream].waiting_bytes < ROOM_BYTES

    def is_given_up(self, stream: str) -> bool:
        """Whether what is written goes nowhere: the reader has left, or was given up."""
        return self._writers[stream].is_gone

    def flush(
        self, stream: str, *, patience_s: float | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all is written; else give the stream up: what waits, and what comes, is dropped.

        Args:
            stream: `out` or `err`.
            patience_s: how long the reader may take nothing; None: no limit.
            is_over: asked meanwhile; True ends the wait.
        """
        return self._writers[stream].drain(patience_s, is_over)

    @property
    def num_dropped_lines(self) -> int:
        """Lines that waited for a reader when it was given up."""
        return sum(writer.num_dropped_lines for writer in set(self._writers.values()))

    @contextlib.contextmanager
    def as_stderr(self) -> Iterator[None]:
        """Send what this process prints to `sys.stderr` through the queue."""
        before = sys.stderr
        raw = _Queued(self, "err", self._fds["err"])
        sys.stderr = io.TextIOWrapper(raw, encoding=before.encoding, errors="backslashreplace", write_through=True)
        try:
            yield
        finally:
            sys.stderr = before


class _Queued(io.RawIOBase):
    """What a TextIOWrapper writes into."""

    def __init__(self, screen: Screen, stream: str, fd: int) -> None:
        self._screen, self._stream, self._fd = screen, stream, fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        whole = bytes(data)
        self._screen.write(self._stream, whole)
        return len(whole)

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd


class _Writer:
    """One thread that writes what is queued, in order; it starts with the first bytes and ends with the process."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._changed = threading.Condition()
        self._has_begun = False
        self.is_gone = False
        """Nobody reads any more, as after `| head`: the job goes on, its files are complete."""
        self.waiting_bytes = 0
        self.num_dropped_lines = 0

    def put(self, fd: int, data: bytes) -> None:
        with self._changed:
            if self.is_gone or not data:
                return
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._write, name="allranks-screen", daemon=True).start()
            self._queue.append((fd, data))
            self.waiting_bytes += len(data)
            self._changed.notify_all()

    def drain(self, patience_s: float | None, is_over: Callable[[], bool]) -> bool:
        seen, seen_s = self.waiting_bytes, time.monotonic()
        with self._changed:
            while self.waiting_bytes:
                self._changed.wait(LOOK_S)
                if self.waiting_bytes != seen:
                    seen, seen_s = self.waiting_bytes, time.monotonic()
                is_stuck = patience_s is not None and time.monotonic() - seen_s >= patience_s
                if self.waiting_bytes and (is_stuck or is_over()):
                    self.num_dropped_lines += sum(data.count(b"\n") for _, data in self._queue)
                    self._give_up()
                    return False
            return True

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                fd, data = self._queue.popleft()
            start = 0
            while start < len(data):
                end = data.rfind(b"\n", start, start + PIECE_BYTES) + 1 or start + PIECE_BYTES
                try:
                    written = os.write(fd, data[start:end])
                except BlockingIOError:  # whoever shares the file has made it non-blocking
                    select.select([], [fd], [], 1.0)
                    continue
                except OSError:
                    written = 0
                start += written
                with self._changed:
                    if not written:
                        self._give_up()
                    if self.is_gone:
                        return
                    self.waiting_bytes -= written
                    self._changed.notify_all()

    def _give_up(self) -> None:
        self.is_gone = True
        self._queue.clear()
        self.waiting_bytes = 0
        self._changed.notify_all()


def _is_same_file(one_fd: int, other_fd: int) -> bool:
    with contextlib.suppress(OSError):
        one, other = os.fstat(one_fd), os.fstat(other_fd)
        return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    return False
