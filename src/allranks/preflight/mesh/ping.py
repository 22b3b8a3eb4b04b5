"""The asking side of a pair test over UDP: how many packets are lost, how large they may be, what time it is there."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Collection

from allranks.preflight.mesh.dial import Address
from allranks.preflight.mesh.echo import DATAGRAM_BYTES, ECHO, HEAD, REQUEST, TOO_LARGE, open_datagram_socket
from allranks.preflight.mesh.mesh_loop import MeshLoop

WINDOW = 4
"""Datagrams of a pair on their way: 63 nodes that do this at once still fit into one socket's default buffer."""
PATIENCE_S = 0.1
"""After this time, a datagram in flight stops counting against WINDOW."""
REPLY_S = 0.4
"""After the last one was sent, those that are not back are lost."""
TRIES = 6
TRY_S = 0.17
"""How often an unfragmentable datagram is sent, and how far apart: with 20 % of packets lost, 0.2 % never return."""

COMMON_MTU = 1500
"""What passes nearly everywhere: tried beside a larger MTU, so that it can be said what passes."""

_MAX_PACKET_BYTES = 65535
_MAX_PROBE_BYTES = 128 << 10
"""For all tries of one size, both ways: jumbo frames have all, the 65520 bytes of IPoIB one."""
_HEADER_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}
_DATAGRAMS_AT_ONCE = 64


class PingSocket:
    """The socket that the pings of one test share; answers find their ping by its number.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, loop: MeshLoop, family: int, source: Address | None, token: bytes) -> None:
        self.loop = loop
        self.header_bytes = _HEADER_BYTES[socket.AddressFamily(family)]
        self._token = token
        self._pings: list[PingTest] = []
        self._sock = open_datagram_socket(family)
        try:
            if source is not None:
                self._sock.bind(source)
        except OSError:
            self._sock.close()
            raise
        loop.watch(self._sock, selectors.EVENT_READ, self._on_datagrams)

    def add(self, ping: PingTest) -> int:
        """Take part, and return the number to send with."""
        self._pings.append(ping)
        return len(self._pings) - 1

    def send(self, address: Address, *, number: int, seq: int, size: int) -> None:
        """Send a datagram with so many bytes of payload.

        Raises:
            OSError: BlockingIOError: not now; EMSGSIZE: longer than the interface sends; others: it is lost.
        """
        request = self._token + HEAD.pack(REQUEST, number, seq, 0)
        self.loop.bytes_sent += self._sock.sendto(request.ljust(size, b"\0"), address)

    def close(self) -> None:
        """Close it; safe to call twice."""
        self.loop.drop(self._sock)

    def _on_datagrams(self, _mask: int) -> None:
        start = len(self._token)
        for _ in range(_DATAGRAMS_AT_ONCE):
            if self._sock.fileno() < 0:
                return
            try:
                answer, _ = self._sock.recvfrom(_MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            now_s, now_ns = time.monotonic(), time.time_ns()
            if len(answer) < start + HEAD.size or not answer.startswith(self._token):
                continue
            kind, number, seq, clock_ns = HEAD.unpack_from(answer, start)
            if kind in (ECHO, TOO_LARGE) and number < len(self._pings):
                is_whole = kind == ECHO
                self._pings[number].on_answer(seq, is_whole=is_whole, clock_ns=clock_ns, now_s=now_s, now_ns=now_ns)


class PingTest:
    """Small datagrams to one target, and unfragmentable IP packets of some sizes.

    Answers count until the test ends, even after this ping is done.
    """

    def __init__(
        self,
        ping_socket: PingSocket,
        address: Address,
        *,
        num_datagrams: int,
        sizes: Collection[int],
        on_end: Callable[[], None],
    ) -> None:
        self.rtt_s: float | None = None
        self.clock_offset_s: float | None = None
        self.sizes: dict[int, bool] = {}
        self.num_sent = 0
        self._socket = ping_socket
        self._address = address
        self._num_datagrams = num_datagrams
        self._on_end = on_end
        self._on_way: dict[int, tuple[float, int]] = {}  # sequence number -> when sent: monotonic s, wall clock ns
        self._window: set[int] = set()
        self._probes: dict[int, int] = {}  # sequence number -> packet size
        least = DATAGRAM_BYTES + ping_socket.header_bytes
        self._undecided = {size for size in sizes if least <= size <= _MAX_PACKET_BYTES}
        self._num_waits = round(REPLY_S / PATIENCE_S)
        self._is_small_done = num_datagrams == 0
        self._is_done = False
        self._number = ping_socket.add(self)
        self._pump()
        for size in sorted(self._undecided):
            self._probe(size, 0)
        if not self._is_done:
            ping_socket.loop.after(0.0, self._end_if_done)  # nothing to do at all is done, too

    @property
    def num_lost(self) -> int:
        """Small datagrams that were not echoed."""
        return len(self._on_way)

    def cut(self) -> None:
        """Time is up: what was not given REPLY_S to come back, or all TRIES, is not counted at all."""
        if not self._is_done:
            self._is_done = True
            if not self._is_small_done:
                now_s = time.monotonic()
                for seq in [seq for seq, sent in self._on_way.items() if now_s - sent[0] < REPLY_S]:
                    del self._on_way[seq]
                    self.num_sent -= 1
            self._on_end()

    def on_answer(self, seq: int, *, is_whole: bool, clock_ns: int, now_s: float, now_ns: int) -> None:
        """An echo has come, or word that the other side cannot send as much (`is_whole` is False)."""
        size = self._probes.get(seq)
        if size is not None:
            self.sizes[size] = is_whole or self.sizes.get(size, False)
            self._undecided.discard(size)
        elif (sent := self._on_way.pop(seq, None)) is not None:
            rtt_s = now_s - sent[0]
            if self.rtt_s is None or rtt_s < self.rtt_s:
                self.rtt_s = rtt_s
                self.clock_offset_s = (clock_ns - (sent[1] + now_ns) / 2) / 1e9
            self._window.discard(seq)
            if not self._is_small_done and len(self._window) <= WINDOW // 2:
                self._send_small()
        self._end_if_done()

    def _pump(self) -> None:
        """Let nobody who does not answer keep the others back, and see whether the wait is over."""
        if self._is_done or self._is_small_done:
            return
        self._window.clear()
        if self.num_sent < self._num_datagrams:
            self._send_small()
        elif self._num_waits:
            self._num_waits -= 1
        else:
            self._is_small_done = True
            self._end_if_done()
            return
        self._socket.loop.after(PATIENCE_S, self._pump)

    def _send_small(self) -> None:
        while self.num_sent < self._num_datagrams and len(self._window) < WINDOW:
            seq = self.num_sent
            self._on_way[seq] = (time.monotonic(), time.time_ns())
            try:
                self._socket.send(self._address, number=self._number, seq=seq, size=DATAGRAM_BYTES)
            except BlockingIOError:
                del self._on_way[seq]
                return
            except OSError:
                pass  # no route, a local firewall: as good as lost
            self._window.add(seq)
            self.num_sent += 1

    def _probe(self, size: int, num_tried: int) -> None:
        """Send an unfragmentable packet of this size, the next of several."""
        if self._is_done or size not in self._undecided:
            return
        wanted = min(TRIES, max(1, _MAX_PROBE_BYTES // (2 * size)))
        if num_tried == wanted:
            self._undecided.discard(size)
            if wanted == TRIES:
                self.sizes[size] = False
            self._end_if_done()
            return
        seq = self._num_datagrams + len(self._probes)
        self._probes[seq] = size
        wait_s = TRY_S
        try:
            payload = size - self._socket.header_bytes
            self._socket.send(self._address, number=self._number, seq=seq, size=payload)
            num_tried += 1
        except BlockingIOError:
            wait_s = PATIENCE_S
        except OSError as exc:
            if exc.errno == errno.EMSGSIZE:
                self.sizes[size] = False
                self._undecided.discard(size)
                self._end_if_done()
                return
            num_tried += 1
        self._socket.loop.after(wait_s, lambda: self._probe(size, num_tried))

    def _end_if_done(self) -> None:
        if self.num_sent == self._num_datagrams and not self._on_way:
            self._is_small_done = True
        if self._is_small_done and not self._undecided:
            self.cut()
