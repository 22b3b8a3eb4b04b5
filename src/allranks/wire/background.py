"""Calls that may block (name lookups, munge), in threads of their own; a selector reports when one has ended.

    background = Background(max_threads=4)
    selector.register(background, selectors.EVENT_READ)
    call = background.start(lambda: socket.getaddrinfo("node01", 29500))
    ...
    for call in background.take_done():      # when the selector reports it
        print(call.get())

The deadline of a call is its owner's: a call that is given up ends whenever it likes, and its result is dropped. Beyond
`max_threads` calls wait for one another.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Call(Future[T]):
    """One call, and what came of it. An executor would wait at exit for a call that hangs."""

    def get(self) -> T:
        """Return the result, or raise what the function raised; only after the call is done."""
        return self.result(0)


class Background:
    """Runs calls in daemon threads. Owns the threads until `close`; a thread whose call hangs ends with that call."""

    def __init__(self, *, max_threads: int) -> None:
        self._max_threads = max_threads
        self._num_threads = 0
        self._num_open = 0
        """Calls that have not ended."""
        self._calls: queue.SimpleQueue[tuple[Call[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._done: list[Call[Any]] = []
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For a selector: readable when calls have ended."""
        return self._wakeup

    def start(self, function: Callable[[], T]) -> Call[T]:
        """Begin a call."""
        call = Call[T]()
        with self._lock:
            self._num_open += 1
            has_to_grow = self._num_threads < min(self._num_open, self._max_threads)
            self._num_threads += has_to_grow
        self._calls.put((call, function))
        if has_to_grow:
            threading.Thread(target=self._run, name="allranks-background", daemon=True).start()
        return call

    def take_done(self) -> list[Call[Any]]:
        """Return the calls that have ended since the last time."""
        with self._lock:
            done, self._done = self._done, []
            if done and self._wakeup >= 0:
                os.eventfd_read(self._wakeup)
        return done

    def close(self) -> None:
        """Let all threads end; what still runs is dropped. Safe to call twice."""
        with self._lock:
            if self._wakeup < 0:
                return
            os.close(self._wakeup)
            self._wakeup = -1
            num_threads = self._num_threads
        for _ in range(num_threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (next_one := self._calls.get()) is not None and self._wakeup >= 0:
            call, function = next_one
            try:
                call.set_result(function())
            except Exception as exc:
                call.set_exception(exc)
            with self._lock:
                self._num_open -= 1
                if self._wakeup >= 0:  # else the number may belong to another file by now
                    self._done.append(call)
                    os.eventfd_write(self._wakeup, 1)
