"""This node's end of the pair tests of the roll call: it tries other nodes, and answers those that try it.

    mesh = Mesh()                          # opens the ports that the card tells the others
    mesh.attach(selector)                  # whose keys have `data`, to be called with the ready mask
    mesh.admit(test.token)                 # from now on, who says this is answered
    mesh.start(test, own_index=3, own_address="192.168.20.3", mtu=9000, now_s=time.monotonic())
    while mesh.results is None:
        for key, mask in selector.select(mesh.advance(time.monotonic())):
            key.data(mask)

What happens between the tester and one target; all of it at the same time, but 4 after 1:

    1. TCP, each test port   connects, says token and a few bytes   <- the same bytes    ANSWER_S, again every RETRY_S
    2. UDP                   small datagrams, WINDOW on their way   <- the same, with the target's clock
                             lost: not back REPLY_S after the last was sent
    3. UDP, unfragmentable   one of 1500 and one of the interface's MTU   <- the same size      TRIES, each TRY_S
                             or one of `PairTarget.probe_bytes`, and no 4
    4. TCP, one port of 1    the large payload, as fast as it goes  <- all of it                LARGE_S
    5. TCP, the leader's     connects                               <- Hello, then Probe        ANSWER_S
       port (wire.protocol)

The tester speaks first, but in 5. A pair that works takes some milliseconds, a broken one at most ANSWER_S + LARGE_S.
A port counts as closed after ANSWER_S of fresh tries, so that lost packets do not look like a firewall (see dial).
Targets are taken in a circle that begins behind this node, so that not all nodes try the same one at once; while
MAX_SOCKETS are in use, the next one waits, and its time has not begun. Connections begin at the data address, so that
the data network is what is tested. A size of which not all TRIES fit (ping.py) is tried once, and only said when it
came back. Nothing here blocks: one thread can run many nodes on one selector.

Limits: `within_s` ends everything; what was not tried by then says so.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from allranks.model.card import TestPorts
from allranks.model.errors import WireError
from allranks.model.pair import Effort, PairResult, PairTarget
from allranks.preflight.mesh.dial import Address, Dialer, LargeEcho, describe_error
from allranks.preflight.mesh.echo import Echo
from allranks.preflight.mesh.mesh_loop import MeshLoop
from allranks.preflight.mesh.ping import COMMON_MTU, PingSocket, PingTest
from allranks.wire.connection import decode_frames, encode_frame
from allranks.wire.protocol import Hello, Probe, Test

MAX_SOCKETS = 576
"""Ports that are tried at once: all of 63 nodes. With MAX_SERVED, below the usual limit of 1024 files."""

_SMALL_BYTES = 32


class Mesh:
    """Both sides of the pair tests on one node. Owns its sockets; the selector is the caller's.

    The caller calls `key.data(mask)` for the keys that are ready, then `advance`, in every round.
    """

    def __init__(self, num_ports: int = 8) -> None:
        self._loop = MeshLoop()
        self._echo = Echo(self._loop, num_ports=num_ports)
        self._waiting: deque[_Pair] = deque()
        self._running: dict[_Pair, None] = {}
        self._pairs: list[_Pair] = []
        self._ping_sockets: dict[int, PingSocket] = {}
        self._is_one_by_one = False
        self._num_ports = 0
        self._is_beginning = False
        self._test_number = 0
        self._results: tuple[PairResult, ...] | None = None

    @property
    def ports(self) -> TestPorts:
        """Where this node can be tested."""
        return self._echo.ports

    @property
    def results(self) -> tuple[PairResult, ...] | None:
        """What came out, in the order of the targets; None before it is known."""
        return self._results

    @property
    def bytes_sent(self) -> int:
        """Payload that left this node so far, as tester and as the one that answers."""
        return self._loop.bytes_sent

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Say which selector watches the sockets; once."""
        self._loop.attach(selector)

    def admit(self, token: bytes) -> None:
        """Answer whoever begins with this token; nobody is answered, and nothing read, before the first one.

        Raises:
            ValueError: the token is empty or longer than 32 bytes.
        """
        self._echo.admit(token)

    def start(self, test: Test, *, own_index: int, own_address: str | None, mtu: int | None, now_s: float) -> None:
        """Begin to try the targets. Another test ends the one before it.

        Args:
            own_address: on the data network; None: routing decides.
            mtu: of the data interface; None: not known, and no large datagrams are sent.
            now_s: time.monotonic(), as in `advance`.
        """
        self._end(self._test_number, "not tried: another test was ordered")
        self._test_number += 1
        self._results = None
        self._pairs = [
            _Pair(self, self._loop, test, target, own_index=own_index, own_address=own_address, mtu=mtu)
            for target in test.targets
        ]
        behind = [pair for pair in self._pairs if pair.target.node_index > own_index]
        self._waiting = deque([*behind, *(pair for pair in self._pairs if pair.target.node_index <= own_index)])
        self._is_one_by_one = test.is_one_by_one
        self._num_ports = test.effort.num_ports
        number = self._test_number
        self._loop.at(now_s + test.within_s, lambda: self._end(number, f"not tried: the {test.within_s:g} s were over"))
        self._go_on()

    def advance(self, now_s: float) -> float | None:
        """Do what time asks for, and return the seconds until it asks again; None: it does not.

        Args:
            now_s: time.monotonic().
        """
        return self._loop.advance(now_s)

    def close(self) -> None:
        """Close all sockets; safe to call twice, and after the selector was closed."""
        self._waiting.clear()
        self._echo.close()
        self._loop.close()

    def _pair_ended(self, pair: _Pair) -> None:
        """A pair has its result."""
        self._running.pop(pair, None)
        self._go_on()

    def _ports_ended(self) -> None:
        """A pair needs no more sockets than it has."""
        self._go_on()

    def _ping_socket(self, family: int, source: Address | None, token: bytes) -> PingSocket:
        """Return the socket that all pairs of one test and address family share.

        Raises:
            OSError: it cannot be had, or not at this address.
        """
        if family not in self._ping_sockets:
            self._ping_sockets[family] = PingSocket(self._loop, family, source, token)
        return self._ping_sockets[family]

    def _go_on(self) -> None:
        if self._is_beginning:
            return  # a pair may end at once (no route): not one inside the other, a thousand deep
        while self._waiting and self._has_room():
            pair = self._waiting.popleft()
            self._running[pair] = None
            self._is_beginning = True
            pair.begin()
            self._is_beginning = False
        if not self._running and not self._waiting and self._results is None:
            for ping_socket in self._ping_sockets.values():
                ping_socket.close()
            self._ping_sockets.clear()
            self._results = tuple(pair.result() for pair in self._pairs)

    def _has_room(self) -> bool:
        if self._is_one_by_one or not self._running:
            return not self._running
        return sum(pair.num_dialing for pair in self._running) + self._num_ports < MAX_SOCKETS

    def _end(self, number: int, problem: str) -> None:
        """The test with this number has no time left."""
        if number != self._test_number or self._results is not None:
            return
        for pair in self._waiting:
            pair.problem = problem
        self._waiting.clear()
        for pair in tuple(self._running):
            pair.cut()


class _Pair:
    """The test of one target: its parts run side by side, and it ends with the last of them."""

    def __init__(
        self,
        mesh: Mesh,
        loop: MeshLoop,
        test: Test,
        target: PairTarget,
        *,
        own_index: int,
        own_address: str | None,
        mtu: int | None,
    ) -> None:
        self.target = target
        self.problem: str | None = None
        self.num_dialing = 0
        """TCP ports that have not answered yet."""
        self._mesh = mesh
        self._loop = loop
        self._token = test.token
        self._effort: Effort = test.effort
        self._own_index = own_index
        self._own_address = own_address
        self._mtu = mtu
        self._probe_bytes = 0 if test.effort.has_mtu_probe else target.probe_bytes
        self._num_open = 0
        self._closed: dict[int, str] = {}
        self._store: str | None = None
        self._large: LargeEcho | None = None
        self._ping: PingTest | None = None
        self._dialers: list[Dialer] = []
        self._num_parts = 1  # begin() itself

    def begin(self) -> None:
        try:
            family, host = _resolve(self.target.address)
            own_family, own_host = (family, None) if self._own_address is None else _resolve(self._own_address)
        except ValueError as exc:
            self.problem = f"not tried: {exc}"
            self._end_part()
            return
        # To a target of the other family there is no way from the data address: routing decides.
        source = (own_host[0], 0, *own_host[2:]) if own_host is not None and own_family == family else None
        if not all(0 < port < 1 << 16 for port in (*self.target.ports.tcp, self.target.ports.udp)):
            self.problem = f"not tried: {self.target.ports} are no ports"
            self._end_part()
            return
        self._begin_ping(family, host, source)
        self._begin_ports(family, host, source)
        self._end_part()

    def cut(self) -> None:
        """Time is up: end with what there is."""
        for dialer in self._dialers:
            dialer.cut()
        if self._large is not None:
            self._large.cut()
        if self._ping is not None:
            self._ping.cut()

    def result(self) -> PairResult:
        large, ping = self._large, self._ping
        info = large.info if large else None
        rtts_s = (ping.rtt_s if ping else None, info.min_rtt_s or info.rtt_s if info else None)
        return PairResult(
            source=self._own_index,
            target=self.target.node_index,
            num_open=self._num_open,
            closed=self._closed,
            store=self._store,
            large_s=large.time_s if large else None,
            large_sent=large.num_sent if large else 0,
            large_back=large.num_back if large else 0,
            delivery_mbit_s=info.delivery_bytes_s * 8 / 1e6 or None if info else None,
            segment_bytes=info.snd_mss if info else 0,
            retransmits=info.total_retrans if info else 0,
            unacked_bytes=large.unacked_bytes if large else 0,
            datagrams_sent=ping.num_sent if ping else 0,
            datagrams_lost=ping.num_lost if ping else 0,
            datagrams=ping.sizes if ping else {},
            rtt_s=min(filter(None, rtts_s), default=None),
            clock_offset_s=ping.clock_offset_s if ping else None,
            problem=self.problem,
        )

    def _begin_ports(self, family: int, host: Address, source: Address | None) -> None:
        ports = self.target.ports.tcp
        # Where not all are tried, other nodes try others.
        first = self._own_index % max(1, len(ports))
        for port in (*ports[first:], *ports[:first])[: self._effort.num_ports]:
            words = os.urandom(_SMALL_BYTES)
            self._dial(
                (family, (host[0], port, *host[2:]), source),
                words=self._token + words,
                listen=partial(_judge_echo, words),
                on_end=partial(self._on_port, port),
            )
        if self.target.store_port is not None:
            place = (family, (host[0], self.target.store_port, *host[2:]), source)
            self._dial(place, words=b"", listen=_judge_hello, on_end=self._on_store)

    def _dial(
        self,
        place: tuple[int, Address, Address | None],
        *,
        words: bytes,
        listen: Callable[[bytearray], str | None],
        on_end: Callable[[socket.socket | None, str], None],
    ) -> None:
        family, address, source = place
        self._num_parts += 1
        self.num_dialing += 1
        self._dialers.append(
            Dialer(self._loop, family, address, source=source, words=words, listen=listen, on_end=on_end)
        )

    def _on_port(self, port: int, sock: socket.socket | None, reason: str) -> None:
        if sock is None:
            self._closed[port] = reason
        else:
            self._num_open += 1
            if self._large is None and self._effort.large_bytes and not self._probe_bytes:
                self._num_parts += 1
                self._large = LargeEcho(self._loop, sock, self._effort.large_bytes, on_end=self._end_part)
            else:
                sock.close()
        self._end_dial()

    def _on_store(self, sock: socket.socket | None, reason: str) -> None:
        self._store = reason
        if sock is not None:
            # An ordinary end: the Probe must still arrive.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))
            with contextlib.suppress(OSError):  # it has answered, and that was the question
                self._loop.bytes_sent += sock.send(encode_frame(Probe()))
            sock.close()
        self._end_dial()

    def _begin_ping(self, family: int, host: Address, source: Address | None) -> None:
        sizes = self._probe_sizes()
        if not self._effort.num_datagrams and not sizes:
            return
        try:
            ping_socket = self._mesh._ping_socket(family, source, self._token)
        except OSError as exc:
            self.problem = f"cannot send from {self._own_address}: {describe_error(exc.errno or 0)}"
            return
        self._num_parts += 1
        self._ping = PingTest(
            ping_socket,
            (host[0], self.target.ports.udp, *host[2:]),
            num_datagrams=self._effort.num_datagrams,
            sizes=sizes,
            on_end=self._end_part,
        )

    def _probe_sizes(self) -> set[int]:
        """IP packet sizes that are tried unfragmentable."""
        if self._effort.has_mtu_probe:
            return {min(self._mtu, COMMON_MTU), self._mtu} if self._mtu is not None else set()
        return {self._probe_bytes} if self._probe_bytes else set()

    def _end_dial(self) -> None:
        self.num_dialing -= 1
        self._end_part()
        if self.num_dialing == 0:
            self._mesh._ports_ended()

    def _end_part(self) -> None:
        self._num_parts -= 1
        if self._num_parts == 0:
            self._mesh._pair_ended(self)


def _resolve(address: str) -> tuple[int, Address]:
    """Return family and socket address of an IPv4 or IPv6 address; no name is looked up.

    Raises:
        ValueError: this is no address.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address.removeprefix("::ffff:"), 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, ValueError) as exc:
        raise ValueError(f"{address!r} is no address") from exc
    return family, cast(Address, place)  # typeshed knows of a build without IPv6


def _judge_echo(words: bytes, received: bytearray) -> str | None:
    if not words.startswith(received):
        return "connected, but another process answers"
    return "" if len(received) == len(words) else None


def _judge_hello(received: bytearray) -> str | None:
    try:
        messages = decode_frames(bytearray(received), at_most=1)
    except WireError as exc:
        return f"connected, then {exc}"
    if not messages:
        return None
    return "" if isinstance(messages[0], Hello) else f"connected, then a {type(messages[0]).__name__} instead of Hello"
