"""The answering side of a pair test: what this node sends back to whoever knows the token.

A connection begins with the token; every byte after it comes back, at most MAX_PAIR_BYTES. A datagram is

    token | kind, pair, seq, clock_ns | padding

and comes back in the same size with kind ECHO and the time of this node's clock; where this node's own interface
cannot send that much in one packet, its head alone comes back with kind TOO_LARGE. An answer is never longer than
what asked for it, and an answer is never answered.

Until `admit` nothing is accepted or read: whoever comes early waits in the kernel's queues, whose lengths bound how
many, and gives up by itself after seconds. Limits: MAX_SERVED connections, SERVED_S for each.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from functools import partial

from allranks.model.card import TestPorts
from allranks.model.pair import MAX_PAIR_BYTES
from allranks.preflight.mesh.mesh_loop import MeshLoop

MAX_TOKEN_BYTES = 32
DATAGRAM_BYTES = 64
"""Payload of a small datagram: the longest token and the head fit in."""

REQUEST, ECHO, TOO_LARGE = range(3)
HEAD = struct.Struct(">BIIQ")
"""Kind, pair and sequence number (the tester's own), the answering node's clock in ns."""

MAX_SERVED = 256
"""Connections at once. Above that, the oldest without the token makes room, else new ones wait in the kernel."""
SERVED_S = 4.0
"""A little longer than a tester keeps a connection (mesh: ANSWER_S and LARGE_S)."""

_BACKLOG = 1024
_MAX_TOKENS = 8
_PAUSE_S = 0.02
"""For the listeners, where this process has no file descriptors left or serves enough."""
_AT_ONCE = 64
"""Connections or datagrams taken before others have their turn."""
_BUFFER_BYTES = 4 << 20
"""Wanted (the kernel gives what net.core.rmem_max allows), so that an agent that waits for a core loses no datagram
itself, and its kernel acknowledges the whole payload of a pair at once: into the buffer that a new connection has
otherwise 64 KiB go, the last of them acknowledged after 40 ms (measured on Linux 6.18)."""

# Not in Python's socket module: linux/in.h, linux/in6.h.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_IP_PKTINFO = 8
_PKTINFO_BYTES = 64


def open_datagram_socket(family: int) -> socket.socket:
    """Return a non-blocking UDP socket whose packets are never fragmented, whatever the kernel believes of the path."""
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    # An IPv6 socket that also speaks IPv4 needs both.
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return sock


class Echo:
    """The ports that this node listens on during the roll call, and who is served on them."""

    def __init__(self, loop: MeshLoop, *, num_ports: int) -> None:
        self._loop = loop
        self._tokens: list[bytes] = []
        self._served: dict[_Served, None] = {}  # oldest first
        self._owed: tuple[bytes, list[tuple[int, int, bytes]], tuple[object, ...]] | None = None
        self._request = bytearray(1 << 16)
        self._udp = _bind(socket.SOCK_DGRAM)
        self._listeners: list[socket.socket] = []
        try:
            for _ in range(num_ports):
                self._listeners.append(_bind(socket.SOCK_STREAM))
        except OSError:
            self.close()
            raise
        self.ports = TestPorts(
            tcp=tuple(sock.getsockname()[1] for sock in self._listeners), udp=self._udp.getsockname()[1]
        )

    def admit(self, token: bytes) -> None:
        """Answer whoever begins with this token, from now on.

        Raises:
            ValueError: the token is empty or longer than MAX_TOKEN_BYTES.
        """
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ValueError(f"a token of {len(token)} bytes: expected 1 to {MAX_TOKEN_BYTES}")
        if token not in self._tokens:
            self._tokens = [*self._tokens[1 - _MAX_TOKENS :], token]
        self._listen()
        self._loop.watch(self._udp, selectors.EVENT_READ, self._on_datagrams)

    def knows(self, data: bytes | bytearray) -> bytes | None:
        """Return the token that these bytes begin with, None for no token of ours."""
        return next((token for token in self._tokens if data.startswith(token)), None)

    def may_know(self, data: bytes | bytearray) -> bool:
        """Whether these bytes may become a token of ours."""
        return any(token.startswith(bytes(data)) for token in self._tokens)

    def forget(self, served: _Served) -> None:
        """A connection has ended."""
        self._served.pop(served, None)

    def close(self) -> None:
        """Close everything; safe to call twice."""
        for served in tuple(self._served):
            served.close()
        for sock in (self._udp, *self._listeners):
            self._loop.drop(sock)

    def _listen(self) -> None:
        for sock in self._listeners:
            if sock.fileno() >= 0:
                self._loop.watch(sock, selectors.EVENT_READ, partial(self._on_connection, sock))

    def _on_connection(self, listener: socket.socket, _mask: int) -> None:
        for _ in range(_AT_ONCE):
            if listener.fileno() < 0:
                return
            if len(self._served) >= MAX_SERVED and not self._make_room():
                self._pause()
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                    return
                continue  # that one connection was gone already: accept(2), "Error handling"
            served = _Served(self, self._loop, sock)
            self._served[served] = None
            served.begin()

    def _make_room(self) -> bool:
        stranger = next((served for served in self._served if not served.is_known), None)
        if stranger is not None:
            stranger.close()
        return stranger is not None

    def _pause(self) -> None:
        for sock in self._listeners:
            self._loop.unwatch(sock)
        self._loop.after(_PAUSE_S, self._listen)

    def _on_datagrams(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._loop.watch(self._udp, selectors.EVENT_READ, self._on_datagrams)
            if self._owed is not None:
                owed, self._owed = self._owed, None
                self._answer(*owed)
        for _ in range(_AT_ONCE):
            if self._udp.fileno() < 0 or self._owed is not None:
                return
            try:
                length, ancillary, _, peer = self._udp.recvmsg_into([self._request], _PKTINFO_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier answer could not be delivered
            now_ns = time.time_ns()
            request = self._request[:length]
            token = self.knows(request)
            if token is None or length < len(token) + HEAD.size:
                continue
            kind, pair, seq, _ = HEAD.unpack_from(request, len(token))
            if kind != REQUEST:
                continue
            HEAD.pack_into(request, len(token), ECHO, pair, seq, now_ns)
            # From the address that was asked: a firewall on the way back expects that one.
            self._answer(bytes(request), _source_from(ancillary), peer)

    def _answer(self, data: bytes, ancillary: list[tuple[int, int, bytes]], peer: tuple[object, ...]) -> None:
        try:
            self._loop.bytes_sent += self._udp.sendmsg([data], ancillary, 0, peer)
        except BlockingIOError:
            self._owed = (data, ancillary, peer)
            self._loop.watch(self._udp, selectors.EVENT_WRITE, self._on_datagrams)
        except OSError as exc:
            token = self.knows(data) or b""
            short = len(token) + HEAD.size
            if exc.errno == errno.EMSGSIZE and len(data) > short:
                self._answer(token + bytes([TOO_LARGE]) + data[len(token) + 1 : short], ancillary, peer)


class _Served:
    """One connection of a tester: token first, then everything comes back."""

    def __init__(self, echo: Echo, loop: MeshLoop, sock: socket.socket) -> None:
        self._echo = echo
        self._loop = loop
        self._sock = sock
        self.is_known = False
        self._num_left = MAX_PAIR_BYTES
        self._unsent = bytearray()
        self._is_waiting = False

    def begin(self) -> None:
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.watch(self._sock, selectors.EVENT_READ, self._on_event)
        self._loop.after(SERVED_S, self.close)
        self._on_event(selectors.EVENT_READ)  # its first words are often here already

    def close(self) -> None:
        self._loop.drop(self._sock)
        self._echo.forget(self)

    def _on_event(self, mask: int) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            if mask & selectors.EVENT_READ:
                data = self._sock.recv(1 << 16)
                if not data:
                    self.close()
                    return
                self._take(data)
            if self.is_known and self._unsent:
                self._flush()
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _take(self, data: bytes) -> None:
        self._unsent += data
        if not self.is_known:
            token = self._echo.knows(self._unsent)
            if token is None:
                if not self._echo.may_know(self._unsent):
                    self.close()
                return
            self.is_known = True
            del self._unsent[: len(token)]
            self._num_left += len(token)
        self._num_left -= len(data)
        if self._num_left < 0:
            self.close()

    def _flush(self) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            num_sent = self._sock.send(self._unsent)
        except BlockingIOError:
            num_sent = 0
        self._loop.bytes_sent += num_sent
        del self._unsent[:num_sent]
        # Nothing more is read until what is owed has left: a peer that does not read cannot fill our memory.
        if bool(self._unsent) != self._is_waiting:
            events = selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
            self._loop.watch(self._sock, events, self._on_event)
            self._is_waiting = bool(self._unsent)


def _bind(kind: int) -> socket.socket:
    """Return a non-blocking socket on a free port of all addresses: IPv6 and IPv4, or IPv4 where there is no IPv6."""
    try:
        return _bind_family(socket.AF_INET6, kind)
    except OSError:
        return _bind_family(socket.AF_INET, kind)


def _bind_family(family: int, kind: int) -> socket.socket:
    if kind == socket.SOCK_DGRAM:
        sock = open_datagram_socket(family)
    else:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", 0))
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)  # theirs who connect, too
            sock.listen(_BACKLOG)
        elif family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    except OSError:
        sock.close()
        raise
    return sock


def _source_from(ancillary: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Have an answer leave from the address that was asked, over the interface that routing chooses (index 0)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return [(level, kind, data[:16] + bytes(4))]
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            return [(level, kind, bytes(4) + data[4:])]
    return []
