"""Timers and sockets of one node's pair tests, on a selector that the caller runs.

Nothing here blocks, starts a thread or is global, so that one thread can run many nodes on one selector.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import time
from collections.abc import Callable

LATE_S = 0.1
"""Whoever comes this late to a deadline looks first at what has arrived meanwhile: see `MeshLoop.advance`."""


class MeshLoop:
    """Sockets on the caller's selector, and calls that time asks for. The callback of a socket is its key's `data`."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._sockets: set[socket.socket] = set()
        self._deadlines: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._has_looked = False
        self.bytes_sent = 0
        """Payload, counted by whoever sends."""

    def attach(self, selector: selectors.BaseSelector) -> None:
        """From now on, sockets are watched by this selector."""
        self._selector = selector

    def watch(self, sock: socket.socket, events: int, call: Callable[[int], None]) -> None:
        """Have `call` called with what is ready; again for a socket: from now on with these events.

        A socket that was dropped may still be in the list that the caller's `select` returned: `call` must bear that.
        """
        assert self._selector is not None, "attach() comes first"
        if sock in self._sockets:
            self._selector.modify(sock, events, call)
        else:
            self._selector.register(sock, events, call)
            self._sockets.add(sock)

    def unwatch(self, sock: socket.socket) -> None:
        """Leave a socket alone, without closing it; safe to call twice, and after the selector is closed."""
        if sock in self._sockets:
            assert self._selector is not None
            self._sockets.remove(sock)
            if self._selector.get_map():
                self._selector.unregister(sock)

    def drop(self, sock: socket.socket) -> None:
        """Unwatch and close a socket; safe to call twice."""
        self.unwatch(sock)
        sock.close()

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """Have `call` called at this time. It cannot be taken back: it finds out itself that it came too late."""
        heapq.heappush(self._deadlines, (due_s, next(self._serial), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` called in so many seconds."""
        self.at(time.monotonic() + delay_s, call)

    def advance(self, now_s: float) -> float | None:
        """Do what is due, and return the seconds until something will be; None: nothing.

        A machine that gave us no CPU for a while must not take its own sleep for another machine's silence: who comes
        late to a deadline is asked to look at the sockets once more (0.0) before the deadline counts.
        """
        deadlines = self._deadlines
        if deadlines and now_s - deadlines[0][0] > LATE_S and not self._has_looked:
            self._has_looked = True
            return 0.0
        self._has_looked = False
        while deadlines and deadlines[0][0] <= now_s:
            heapq.heappop(deadlines)[2]()
        return max(0.0, deadlines[0][0] - now_s) if deadlines else None

    def close(self) -> None:
        """Close all watched sockets and forget all deadlines."""
        for sock in tuple(self._sockets):
            self.drop(sock)
        self._deadlines.clear()
