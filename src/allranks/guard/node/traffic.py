"""How much do this node's data interfaces carry, and how much do its ranks send again? The agent's half.

    traffic = TrafficMeter("192.168.20.13")
    traffic.turn(now_s)                               # often (every 50 ms): the slices of time that count
    traffic.look(now_s, sockets.connections, pids)    # whose connections these are; looks every few seconds
    traffic.interfaces, traffic.sent[rank]

An interface is busy in slices of time, not on average: between two backward passes it carries nothing. A slice counts
as busy if it carries BUSY of the limit, one way. The limit is the speed that the interface reports; where it reports
none (veth, most virtual machines), what its connections reach: the median of the kernel's delivery rates, or the most
that slices carry, whichever is more. So an interface whose ranks are slow themselves is not busy.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from allranks.host.net import read_interfaces
from allranks.host.sockets import TcpConnection
from allranks.host.traffic import ByteCounter, find_sockets
from allranks.model.beat import MAX_INTERFACES, InterfaceSeen
from allranks.model.card import Interface
from allranks.model.safe_text import plain_address

SLICE_S = 0.04
"""Shortest slice: an agent's loop turns every 50 ms, or sooner."""
WINDOW_S = 10.0
LOOK_EVERY_S = 2.0
BUSY = 0.8
MOST = 20
"""The most that slices carry is the mean of one in so many: a single one may have been a burst."""
NUM_RATES, MIN_RATES = 64, 5
"""Delivery rates of an interface that count, and how many it needs."""
MIN_BYTES = 256 << 10
"""Acknowledged between two looks: the delivery rate of less says little."""


class Slice(NamedTuple):
    """What an interface has carried in some time."""

    duration_s: float
    sent_bytes: int
    received_bytes: int

    @property
    def most_mbit_s(self) -> float:
        """In the direction that carried more."""
        return max(self.sent_bytes, self.received_bytes) * 8e-6 / self.duration_s


class Sent(NamedTuple):
    """What one rank has sent to other machines since it began."""

    segments: int = 0
    retransmits: int = 0


class _Watched:
    """One interface."""

    def __init__(self, interface: Interface, counter: ByteCounter) -> None:
        self.interface = interface
        self.counter = counter
        self.before: tuple[float, int, int] | None = None
        self.slices: deque[Slice] = deque()
        self.duration_s = 0.0
        self.rates_mbit_s: deque[float] = deque(maxlen=NUM_RATES)

    def read(self, now_s: float) -> None:
        before = self.before
        if before is not None and now_s - before[0] < SLICE_S:
            return
        if (told := self.counter.read()) is None:  # it is gone
            self.before, self.duration_s = None, 0.0
            self.slices.clear()
            return
        self.before = now_s, *told
        if before is None or told[0] < before[1] or told[1] < before[2]:
            return
        self.slices.append(Slice(now_s - before[0], told[0] - before[1], told[1] - before[2]))
        self.duration_s += self.slices[-1].duration_s
        while self.duration_s > WINDOW_S and len(self.slices) > 1:
            self.duration_s -= self.slices.popleft().duration_s


class TrafficMeter:
    """The interfaces and connections of one node.

    Args:
        address: of this node on the network that carries gradients; its interface counts from the beginning, others
            from when a rank has a connection to a neighbor there. Loopback never does.
        root: where /sys and /proc are; tests feed a tree.
    """

    def __init__(self, address: str, *, interfaces: Sequence[Interface] | None = None, root: Path = Path("/")) -> None:
        self._root = root
        self._of = {
            plain_address(address): interface
            for interface in (read_interfaces() if interfaces is None else interfaces)
            for address in interface.addresses
            if interface.kind != "loopback"
        }
        self._watched: dict[str, _Watched] = {}
        self._next_look_s = 0.0
        self._owners: dict[int, int | None] = {}
        """By inode of a socket: its rank; None: it is no rank's."""
        self._acked: dict[tuple[str, int, str, int], int] = {}
        self._counted: dict[tuple[str, int, str, int], Sent] = {}
        self.sent: dict[int, Sent] = {}
        """By rank."""
        self.interfaces: tuple[InterfaceSeen, ...] = ()
        """As the last look found them."""
        self._begin_at(address)

    def begin(self) -> None:
        """New workers start: what the last ones sent is of the past."""
        self._owners, self._counted, self.sent = {}, {}, {}

    def turn(self, now_s: float) -> None:
        """Close a slice of time, if it is long enough."""
        for watched in self._watched.values():
            watched.read(now_s)

    def look(self, now_s: float, connections: Collection[TcpConnection], pids: Mapping[int, int]) -> None:
        """Find out whose connections these are and what they have sent, from time to time.

        Args:
            pids: of the ranks, by rank.
        """
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        away = [
            connection
            for connection in connections
            if connection.own_address in self._of and connection.peer_address not in self._of
        ]
        self._find_owners(away, pids)
        acked = {connection.key: connection.acked_bytes for connection in away if connection.acked_bytes is not None}
        for connection in away:
            if (rank := self._owners.get(connection.inode)) is None or (
                watched := self._watched_by(connection)
            ) is None:
                continue
            self._count(rank, connection)
            is_moving = acked.get(connection.key, 0) - self._acked.get(connection.key, 0) >= MIN_BYTES
            if is_moving and connection.delivery_bytes_s:
                watched.rates_mbit_s.append(connection.delivery_bytes_s * 8e-6)
        self._acked = acked
        alive = {connection.key for connection in away}
        self._counted = {key: sent for key, sent in self._counted.items() if key in alive}
        self.interfaces = tuple(
            found
            for name, carrier in self._watched.items()
            if (
                found := summarize(
                    name, carrier.slices, speed=carrier.interface.speed_mbit_s, rates=carrier.rates_mbit_s
                )
            )
        )

    def close(self) -> None:
        """Close the files."""
        for watched in self._watched.values():
            watched.counter.close()
        self._watched = {}

    def _watched_by(self, connection: TcpConnection) -> _Watched | None:
        """Return what watches the interface of a connection; None: it leads out of the cluster."""
        interface = self._of[connection.own_address]
        watched = self._watched.get(interface.name.partition(":")[0])
        peer = ip_address(connection.peer_address)
        if watched is None and any(peer in ip_network(network) for network in interface.networks):
            watched = self._begin_at(connection.own_address)
        return watched

    def _begin_at(self, address: str) -> _Watched | None:
        """Return what watches the interface of this address; None: there is none, or it cannot be read."""
        interface = self._of.get(plain_address(address))
        if interface is None:
            return None
        name = interface.name.partition(":")[0]
        if name not in self._watched and len(self._watched) < MAX_INTERFACES:
            try:
                self._watched[name] = _Watched(interface, ByteCounter(name, root=self._root))
            except OSError:
                return None
        return self._watched.get(name)

    def _find_owners(self, connections: Sequence[TcpConnection], pids: Mapping[int, int]) -> None:
        inodes = {connection.inode for connection in connections if connection.inode > 0}
        if inodes - self._owners.keys():
            found = {inode: rank for rank, pid in pids.items() if pid for inode in find_sockets(pid, root=self._root)}
            self._owners = {inode: found.get(inode) for inode in inodes}
        else:
            self._owners = {inode: self._owners[inode] for inode in inodes}

    def _count(self, rank: int, connection: TcpConnection) -> None:
        now = Sent(connection.segments, connection.retransmitted)
        before = self._counted.get(connection.key, Sent())
        if now.segments < before.segments:  # another connection between the same ports
            before = Sent()
        self._counted[connection.key] = now
        known = self.sent.get(rank, Sent())
        self.sent[rank] = Sent(*(old + new - had for old, new, had in zip(known, now, before, strict=True)))


def summarize(
    name: str, slices: Collection[Slice], *, speed: int | None, rates: Collection[float] = ()
) -> InterfaceSeen | None:
    """Return what an interface has carried; None: nothing is known yet.

    Args:
        speed: that it reports, in Mbit/s; None: none.
        rates: delivery rates of its connections lately, in Mbit/s.
    """
    whole_s = sum(part.duration_s for part in slices)
    if not whole_s:
        return None
    limit = float(speed) if speed else None
    if limit is None and len(rates) >= MIN_RATES:
        best = sorted(part.most_mbit_s for part in slices)[-max(1, len(slices) // MOST) :]
        limit = max(statistics.median(rates), statistics.fmean(best))
    busy = [part for part in slices if limit is not None and part.most_mbit_s >= BUSY * limit]
    busy_s = sum(part.duration_s for part in busy)
    return InterfaceSeen(
        name=name,
        sent_mbit_s=round(sum(part.sent_bytes for part in slices) * 8e-6 / whole_s, 1),
        received_mbit_s=round(sum(part.received_bytes for part in slices) * 8e-6 / whole_s, 1),
        limit_mbit_s=None if limit is None else round(limit, 1),
        is_measured=limit is not None and not speed,
        busy_share=round(busy_s / whole_s, 3),
        busy_mbit_s=round(sum(part.most_mbit_s * part.duration_s for part in busy) / busy_s, 1) if busy_s else 0.0,
    )
