"""The asking side of a pair test over TCP: one port tried until it answers, and a large payload there and back.

One SYN that is lost is sent again by the kernel after a whole second, so one try would call every lossy link a
firewall. A port is therefore tried again every RETRY_S: a try that is not even connected by then is replaced, one that
is connected goes on beside a second one, and whichever answers first wins. With 20 % of all packets lost, about one
port in 10 000 is so called closed by mistake, with 5 % none. Limit: a round trip must be shorter than RETRY_S.

Why a port is closed is one of four kinds: `no answer in 1.6 s`; `refused` (by the port, or on the way by an ICMP
message of a firewall); `connected, ...`; else the errno with which this node's own kernel gave up, as in
`No route to host (EHOSTUNREACH)`. An errno that passes when other connections are closed is tried again.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from allranks.host.tcpinfo import TcpInfo, read_tcp_info, read_unacked_bytes
from allranks.preflight.mesh.mesh_loop import MeshLoop

ANSWER_S = 1.6
"""From the first try of a port to the verdict that it does not answer."""
RETRY_S = 0.16
"""Ten tries in ANSWER_S, counted by tries: a machine that gave us no CPU for a second has cost one of them."""
LARGE_S = 2.0
"""For the large payload: long enough for three retransmissions (after 0.2, 0.6 and 1.4 s)."""

_TRIES_AT_ONCE = 2
_ANSWER_BYTES = 1 << 16
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER: close by RST. What a broken link never acknowledges must not stay in the kernel for minutes."""
_NO_PORT_AT_BIND = 24
"""IP_BIND_ADDRESS_NO_PORT (linux/in.h): the local port is chosen by connect, so that connections to different ports
share one. A range of ten local ports is enough then."""
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRINUSE, errno.EADDRNOTAVAIL})
"""What may be there again when other connections are closed: files, memory, local ports."""
# Not in Python's socket module: linux/in.h, linux/in6.h, linux/errqueue.h, linux/icmp.h, linux/icmpv6.h.
_RECVERR: dict[int, tuple[int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 11),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 25),
}
_EXTENDED_ERROR = struct.Struct("=IBBBB")
"""sock_extended_err: errno, origin, type, code, padding."""
_PROHIBITED = {
    **dict.fromkeys([(2, 3, code) for code in (9, 10, 13)], "ICMP: communication prohibited"),
    **dict.fromkeys([(3, 1, code) for code in (1, 5, 6)], "ICMPv6: communication prohibited"),
}
"""Origin, type and code of the ICMP messages that firewalls refuse with."""

Address = tuple[str | int, ...]


class Dialer:
    """One TCP port, tried until it answers or ANSWER_S is over.

    Args:
        address: where to, as `connect` takes it.
        source: own address to connect from, as `bind` takes it; None: routing decides.
        words: what we say first; empty: the other side speaks first.
        listen: told all that came so far; None: go on, empty: that is the answer, else why this is none.
        on_end: called once: with the connection that answered, whose owner it becomes, or with None and why not.
    """

    def __init__(
        self,
        loop: MeshLoop,
        family: int,
        address: Address,
        *,
        source: Address | None,
        words: bytes,
        listen: Callable[[bytearray], str | None],
        on_end: Callable[[socket.socket | None, str], None],
    ) -> None:
        self._loop = loop
        self._family = family
        self._address = address
        self._source = source
        self._words = words
        self._listen = listen
        self._on_end = on_end
        self._tries: list[_Try] = []
        self._num_left = round(ANSWER_S / RETRY_S)
        self._is_done = False
        self._has_begun = False
        self._reason: str | None = None
        self._shortage: str | None = None
        """Why no try has begun yet."""
        self._began_s = time.monotonic()
        self._try()

    def cut(self) -> None:
        """Time is up."""
        if self._is_done:
            return
        waited = f"in {min(ANSWER_S, time.monotonic() - self._began_s):.1f} s"
        if any(attempt.is_connected for attempt in self._tries):
            self._end(None, f"connected, but no answer {waited}")
        else:
            self._end(None, self._reason or self._shortage or f"no answer {waited}")

    def _try(self) -> None:
        if self._is_done:
            return
        if self._num_left == 0:
            self.cut()
            return
        self._num_left -= 1
        for stale in [attempt for attempt in self._tries if not attempt.is_connected]:
            self._forget(stale)
        if len(self._tries) < _TRIES_AT_ONCE:
            self._dial()
        self._loop.after(RETRY_S, self._try)

    def _dial(self) -> None:
        attempt: _Try | None = None
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            attempt = _Try(sock)
            self._tries.append(attempt)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(*_RECVERR[self._family], 1)
            if self._source is not None:
                sock.setsockopt(socket.IPPROTO_IP, _NO_PORT_AT_BIND, 1)
                sock.bind(self._source)
            error = sock.connect_ex(self._address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            self._has_begun, self._shortage = True, None
            self._loop.watch(sock, selectors.EVENT_WRITE, partial(self._on_event, attempt))
        except OSError as exc:
            if attempt is not None:
                self._forget(attempt)
            if exc.errno in _SHORT_OF:  # others will be done soon
                self._shortage = None if self._has_begun else describe_error(exc.errno)
            else:
                self._end(None, describe_error(exc.errno or 0))

    def _on_event(self, attempt: _Try, _mask: int) -> None:
        if self._is_done or attempt.sock.fileno() < 0:
            return
        if not attempt.is_connected:
            error = attempt.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._end(None, _read_refusal(attempt.sock) or describe_error(error))
                return
            attempt.is_connected = True
            attempt.sock.setsockopt(
                *_RECVERR[self._family], 0
            )  # what ICMP says of a connection that works is no end of it
            self._loop.watch(attempt.sock, selectors.EVENT_READ, partial(self._on_event, attempt))
        try:
            if self._words and not attempt.has_spoken:
                attempt.has_spoken = True
                self._loop.bytes_sent += attempt.sock.send(self._words)
                return
            data = attempt.sock.recv(1 << 14)
        except BlockingIOError:
            return
        except OSError as exc:
            self._reason = f"connected, then: {describe_error(exc.errno or 0)}"
            self._forget(attempt)
            return
        attempt.received += data
        reason = "connected, then closed without an answer" if not data else self._listen(attempt.received)
        if reason is None and len(attempt.received) > _ANSWER_BYTES:
            reason = "connected, then received too much data"
        if reason is None:
            return
        if reason:
            self._reason = reason
            self._forget(attempt)
            return
        self._tries.remove(attempt)
        self._loop.unwatch(attempt.sock)
        self._end(attempt.sock, "")

    def _forget(self, attempt: _Try) -> None:
        self._tries.remove(attempt)
        self._loop.drop(attempt.sock)

    def _end(self, sock: socket.socket | None, reason: str) -> None:
        self._is_done = True
        for attempt in tuple(self._tries):
            self._forget(attempt)
        self._on_end(sock, reason)


class _Try:
    """One connection of a port's."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_connected = False
        self.has_spoken = False
        self.received = bytearray()


class LargeEcho:
    """So many bytes over one connection and back, timed from the first byte sent to the last one that returns.

    The connection is closed at the end, after the kernel was asked how it went.
    """

    def __init__(self, loop: MeshLoop, sock: socket.socket, num_bytes: int, *, on_end: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._unsent = memoryview(_noise(num_bytes))
        self._on_end = on_end
        self._is_done = False
        self.num_bytes = num_bytes
        self.num_back = 0
        self.time_s: float | None = None
        self.info: TcpInfo | None = None
        self.unacked_bytes = 0
        # The kernel takes all of it at once, so that a busy machine does not stretch the time.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * num_bytes)
        self._began_s = time.monotonic()
        loop.after(LARGE_S, self.cut)
        self._is_writing = True
        loop.watch(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_event)
        self._on_event(selectors.EVENT_WRITE)

    @property
    def num_sent(self) -> int:
        """Bytes that this kernel took."""
        return self.num_bytes - len(self._unsent)

    def cut(self) -> None:
        """Time is up, or it is done."""
        if self._is_done:
            return
        self._is_done = True
        try:
            self.info = read_tcp_info(self._sock)
            self.unacked_bytes = read_unacked_bytes(self._sock)
        except OSError:
            pass  # gone: what was counted stands
        self._loop.drop(self._sock)
        self._on_end()

    def _on_event(self, mask: int) -> None:
        if self._is_done or self._sock.fileno() < 0:
            return
        try:
            if mask & selectors.EVENT_WRITE and self._unsent:
                num_sent = self._sock.send(self._unsent)
                self._loop.bytes_sent += num_sent
                self._unsent = self._unsent[num_sent:]
            if self._is_writing and not self._unsent:
                self._is_writing = False
                self._loop.watch(self._sock, selectors.EVENT_READ, self._on_event)
            if mask & selectors.EVENT_READ:
                data = self._sock.recv(1 << 16)
                if not data:
                    self.cut()
                self.num_back += len(data)
        except BlockingIOError:
            return
        except OSError:
            self.cut()
            return
        if self.num_back >= self.num_bytes and self.time_s is None:
            self.time_s = time.monotonic() - self._began_s
            self.cut()


@functools.cache
def _noise(num_bytes: int) -> bytes:
    """Bytes that nothing on the way can compress."""
    return random.Random(num_bytes).randbytes(num_bytes)


def describe_error(error: int) -> str:
    """`refused`, or another errno by text and name: `No route to host (EHOSTUNREACH)`.

    >>> describe_error(113)
    'No route to host (EHOSTUNREACH)'
    """
    if error == errno.ECONNREFUSED:
        return "refused"
    return f"{os.strerror(error)} ({errno.errorcode.get(error, error)})"


def _read_refusal(sock: socket.socket) -> str:
    """Return how a firewall on the way refused the connection, where ICMP says so; else empty (before Linux 5.8, too).

    The errno alone does not tell: EHOSTUNREACH is both "no route" and "prohibited by the administrator".
    """
    try:
        _, ancillary, _, _ = sock.recvmsg(0, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return ""
    for level, kind, data in ancillary:
        if (level, kind) in _RECVERR.values() and len(data) >= _EXTENDED_ERROR.size:
            _, origin, icmp_type, code, _ = _EXTENDED_ERROR.unpack_from(data)
            if (origin, icmp_type, code) in _PROHIBITED:
                return f"refused on the way ({_PROHIBITED[origin, icmp_type, code]})"
    return ""
