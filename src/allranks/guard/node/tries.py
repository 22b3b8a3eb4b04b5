"""Can this machine reach another one: do small packets pass, do full-sized ones? Kernel to kernel.

    listener = Listener("192.168.20.13")             # what others try; nobody reads from it
    tries = Tries(own_data_address="192.168.20.13")
    tries.begin(order, now_s)                        # wire.protocol.Try
    tries.turn(now_s)                                # often; never waits
    tries.results(now_s)                             # TrySeen

A try connects and pushes 64 KiB. The other kernel answers and acknowledges by itself, whatever its processes do, so a
try tells of machines and the way between them, not of programs. The first acknowledged segments are of full size: they
show that such packets pass.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from types import MappingProxyType
from typing import Any

import msgspec

from allranks.host.tcpinfo import read_unacked_bytes
from allranks.model.beat import TrySeen
from allranks.wire.protocol import Try, TryTarget

PUSHED_BYTES = 64 << 10
PASSED_BYTES = 2 << 10
"""Acknowledged so much, at least one packet of full size came through, on any MTU up to that of Ethernet."""
BACKLOG = 1024
"""Tries wait there while the agent is stopped or starved."""
HELD_S = 10.0
"""How long the listener keeps a try's connection: longer than any try lasts."""
TOLD_S = 30.0
"""How long a result is told."""
MAX_TRIES = 4096
_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
_UNREACHABLE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ENETDOWN, errno.EHOSTDOWN})


class Listener:
    """A listening socket that others try, at one address of this node; nothing that comes is read.

    Args:
        port: the same one at each address of the data network; 0: a free one.
    Raises:
        OSError: the address is not of this machine, or the port is taken there.
    """

    def __init__(self, address: str, *, port: int = 0) -> None:
        self._sock = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Inherited by what is accepted: the kernel must be able to take all of a try without a reader.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PUSHED_BYTES)
            self._sock.bind((address, port))
            self._sock.listen(BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self._sock.setblocking(False)
        self._held: list[tuple[float, socket.socket]] = []
        self.port = int(self._sock.getsockname()[1])

    def turn(self, now_s: float) -> None:
        """Make room for the next ones: a full backlog would look like a lost machine."""
        with contextlib.suppress(OSError):
            while len(self._held) < MAX_TRIES:
                self._held.append((now_s, self._sock.accept()[0]))
        while self._held and self._held[0][0] < now_s - HELD_S:
            self._held.pop(0)[1].close()

    def close(self) -> None:
        """Close it, and what came."""
        self._sock.close()
        for _, accepted in self._held:
            accepted.close()
        self._held.clear()


@dataclass(slots=True)
class _Running:
    target: TryTarget
    sock: socket.socket
    until_s: float
    within_s: float
    pushed_bytes: int = 0
    is_connected: bool = False


class Tries:
    """The tries that this agent makes; on the data network from its own address there, so that they take that way.

    Args:
        further: own addresses of other interfaces that carry gradients, with their subnets.
    """

    def __init__(self, *, own_data_address: str = "", further: Mapping[str, str] = MappingProxyType({})) -> None:
        self._own_address = own_data_address
        self._further = {address: ip_network(subnet, strict=False) for address, subnet in further.items()}
        self._running: dict[tuple[int, str], _Running] = {}
        self._done: dict[tuple[int, str], tuple[float, TrySeen]] = {}

    def begin(self, order: Try, now_s: float) -> None:
        """Start what was ordered; a try of the same target that still runs is dropped."""
        for target in order.targets[: MAX_TRIES - len(self._running)]:
            self._drop(_key(target))
            self._start(target, order.within_s, now_s)

    def turn(self, now_s: float) -> None:
        """Go on with what runs."""
        for key, running in list(self._running.items()):
            if not running.is_connected:
                self._look_for_answer(running, now_s)
            if running.is_connected and key in self._running:
                self._look_for_acknowledgement(running, now_s)

    def results(self, now_s: float) -> tuple[TrySeen, ...]:
        """Return what came out lately, with its age."""
        self._done = {key: done for key, done in self._done.items() if done[0] > now_s - TOLD_S}
        return tuple(msgspec.structs.replace(seen, age_s=max(0.0, now_s - at_s)) for at_s, seen in self._done.values())

    def own_ports(self) -> frozenset[int]:
        """Return the ports that tries come from: what is stuck there is no worker's."""
        return frozenset(int(running.sock.getsockname()[1]) for running in self._running.values())

    def close(self) -> None:
        """End all that runs."""
        for key in list(self._running):
            self._drop(key)

    def _start(self, target: TryTarget, within_s: float, now_s: float) -> None:
        try:
            sock = socket.socket(_family(target.address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as exc:
            self._tell(target, now_s, error=exc.strerror or str(exc))
            return
        sock.setblocking(False)
        running = _Running(target, sock, now_s + within_s, within_s)
        self._running[_key(target)] = running
        try:
            there = ip_address(target.address)
            own = next((name for name, net in self._further.items() if there in net), self._own_address)
            if target.network == "data" and own and _family(own) == sock.family:
                sock.bind((own, 0))
            number = sock.connect_ex((target.address, target.port))
        except (OSError, OverflowError, ValueError) as exc:
            self._end(running, now_s, error=str(exc))
            return
        if number not in (0, errno.EINPROGRESS):
            self._fail(running, number, now_s)

    def _look_for_answer(self, running: _Running, now_s: float) -> None:
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(running.sock, select.POLLOUT)
        if not poll.poll(0):
            if now_s >= running.until_s:
                self._end(running, now_s, error=f"no answer within {running.within_s:.1f} s")
            return
        if number := running.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(running, number, now_s)
            return
        running.is_connected = True
        # Whoever notices late, because this machine is busy, gives the rest its time all the same.
        running.until_s = max(running.until_s, now_s + running.within_s / 2)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            running.pushed_bytes = running.sock.send(bytes(PUSHED_BYTES))

    def _look_for_acknowledgement(self, running: _Running, now_s: float) -> None:
        number = running.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number and number not in _UNREACHABLE:
            self._end(running, now_s, connects=True, error=os.strerror(number))
            return
        try:
            acked = running.pushed_bytes - read_unacked_bytes(running.sock)
        except OSError as exc:
            self._end(running, now_s, connects=True, error=exc.strerror or str(exc))
            return
        if acked >= min(PASSED_BYTES, running.pushed_bytes) > 0:
            self._end(running, now_s, connects=True, carries=True)
        elif now_s >= running.until_s:
            error = f"{running.pushed_bytes - acked} bytes unacknowledged after {running.within_s:.1f} s"
            self._end(running, now_s, connects=True, carries=False, error=error)

    def _fail(self, running: _Running, number: int, now_s: float) -> None:
        # A reset: the other kernel had accepted it, and its listener ended before anybody looked.
        is_refused = number in _REFUSED
        self._end(running, now_s, connects=is_refused, refused=is_refused, error=os.strerror(number))

    def _end(self, running: _Running, now_s: float, **what: Any) -> None:
        self._tell(running.target, now_s, **what)
        self._drop(_key(running.target))

    def _tell(self, target: TryTarget, now_s: float, *, connects: bool = False, **more: Any) -> None:
        seen = TrySeen(target=target.node_index, network=target.network, connects=connects, **more)
        self._done[_key(target)] = now_s, seen

    def _drop(self, key: tuple[int, str]) -> None:
        if running := self._running.pop(key, None):
            with contextlib.suppress(OSError):  # what was pushed is nothing to wait for
                running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            running.sock.close()


def _key(target: TryTarget) -> tuple[int, str]:
    return target.node_index, target.network


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
