"""How fast is one TCP stream between two nodes, each way? Each node runs its pairs in rounds, in no two at a time.

Phases, on every node:

1 listen   at its data address; it knocks at the first node's until that one says who is there         START_S
2 round    the pairs of a matching: the second node connects to the first one. It streams to it and closes its half of
           the connection, then the first one streams back. A pair that waits for an end which is still busy with the
           round before ends the next round later, so no node is ever in two streams              LATE_S a round
3 report   after each round: what the own stream carried, and what else came in during the other one

A stream has two parts of fixed length: TCP speeds up in the first one, and only the second one counts. What counts is
what the other kernel has acknowledged, on average and in the fastest tenth of the moments: processes that get no core
lower the average alone. Counters of the interface say what others sent at that time.

Source of struct tcp_info: host/tcpinfo.py. A shaped link of 1 Gbit/s reads 0.941 to 0.957 (headers are no payload).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from allranks.host.net import read_traffic
from allranks.host.tcpinfo import TcpInfo, read_tcp_info, read_unacked_bytes

WARM_S, MEASURE_S = 0.12, 0.27
"""Of a stream. A queue of 20 ms fills and drains in the first part; the second one carries 34 MB at 1 Gbit/s."""
SLOT_S = 2 * (WARM_S + MEASURE_S) + 0.07
"""A round, with its handshakes."""
BUDGET_S = 60.0
"""For all rounds: 70 of them, so that every pair of 71 nodes is tested."""
START_S = 30.0
"""From the first node's arrival to the others': they import Python from one file server."""
LATE_S = 3.0
"""By how much each round may be later than the one before; a pair whose other end is not there then is not tested."""
DRAIN_S = 2.0
"""For what is on its way when a stream ends."""
BUSY_S = 3.0
"""To retry a port that is in use: another program of the same job may just be closing it."""
RETRY_S = 0.05
CHUNK = bytes(1 << 17)
UNSENT_BYTES = 1 << 18
"""At most so much waits in the sender's kernel: at 50 Mbit/s it leaves in 42 ms."""
HEADERS = 1.07
"""Bytes on an interface for a byte of payload, at most: Ethernet, IPv6 and TCP with options around 1,440 bytes."""
MAX_LINE = 1 << 20
_SINK = bytearray(1 << 20)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who streams to whom."""

    rounds: tuple[tuple[tuple[str, str], ...], ...]
    addresses: Mapping[str, str]
    """Of each node's data interface; the first node is the one at which the others knock."""
    interfaces: Mapping[str, str]
    port: int
    key: str = ""
    """A connection that does not begin with it is not one of ours."""
    times: int = 1
    """Streams are so many times as long as usual: for a second look."""

    @property
    def expected_s(self) -> float:
        """How long the rounds take where nobody waits."""
        return len(self.rounds) * SLOT_S * self.times


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of one round: of its own stream to the peer, and of the traffic around both streams."""

    node: str = ""
    peer: str = ""
    round: int = 0
    mbit_s: float | None = None
    """Payload that the peer's kernel acknowledged; None: not measured, `why` says the reason."""
    retransmitted: int = 0
    segments: int = 0
    lost_at: float = 0.0
    """Fraction of the stream's tenths in which segments were sent again: all of them where random ones are lost, few
    where TCP finds the end of a full queue."""
    peak_mbit_s: float = 0.0
    """The fastest that the peer's kernel acknowledged within the stream, over a round trip or longer."""
    sent_by_others_mbit_s: float = 0.0
    """Leaving the own interface during the own stream."""
    got_by_others_mbit_s: float = 0.0
    """Coming in at the own interface during the peer's stream."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment of a stream, at its sender."""

    time_s: float
    tcp: TcpInfo
    interface_bytes: int


def read_sent(begin: Mark, end: Mark) -> RoundReport:
    """Return what a stream carried between two moments. Pure."""
    took_s = max(end.time_s - begin.time_s, 1e-6)
    acked = end.tcp.acked_bytes - begin.tcp.acked_bytes
    sent = end.tcp.sent_bytes - begin.tcp.sent_bytes or acked  # 0 before Linux 4.19
    return RoundReport(
        mbit_s=round(acked * 8e-6 / took_s, 2),
        retransmitted=end.tcp.total_retrans - begin.tcp.total_retrans,
        segments=end.tcp.data_segments - begin.tcp.data_segments,
        sent_by_others_mbit_s=_others_mbit_s(end.interface_bytes - begin.interface_bytes, sent, took_s),
    )


def read_spread(samples: Sequence[tuple[float, int]]) -> float:
    """Return the fraction of the tenths of a stream in which a counter rose, of those in which it was read. Pure."""
    if not samples or samples[-1][0] <= samples[0][0]:
        return 0.0
    begin_s, tenth_s = samples[0][0], (samples[-1][0] - samples[0][0]) / 10
    read, rose = set[int](), set[int]()
    for (_, before), (at_s, now) in pairwise(samples):
        tenth = min(9, int((at_s - begin_s) / tenth_s))
        read.add(tenth)
        rose |= {tenth} if now > before else set()
    return round(len(rose) / len(read), 2)


def _others_mbit_s(on_interface: int, own: int, took_s: float) -> float:
    return round(max(0.0, on_interface - own * HEADERS) * 8e-6 / max(took_s, 1e-6), 1)


def run_streams(plan: Plan, node: str, tell: Callable[[RoundReport], None]) -> None:
    """Run this node's part of all rounds.

    Args:
        tell: gets a report for each round in which the node has a peer.
    """
    with contextlib.ExitStack() as left:
        end = _End(plan, node, left)
        try:
            absent = end.meet()
        except (OSError, ValueError) as exc:
            absent = {node: _reason(exc)}
        began_s = time.monotonic()
        for number, pairs in enumerate(plan.rounds):
            pair = next((each for each in pairs if node in each), None)
            if pair is None:
                continue
            peer = pair[1 - pair.index(node)]
            report = RoundReport(why=absent.get(node) or absent.get(peer, ""))
            if not report.why:
                try:
                    by_s = began_s + plan.expected_s + (number + 1) * LATE_S
                    report = end.play(number, peer, is_second=pair[1] == node, by_s=by_s)
                except (OSError, ValueError) as exc:
                    report = RoundReport(why=_reason(exc))
            tell(msgspec.structs.replace(report, node=node, peer=peer, round=number))


def _reason(exc: Exception) -> str:
    """Return what went wrong, in the kernel's words where they are its, else in ours."""
    number = getattr(exc, "errno", None)
    return os.strerror(number).lower() if number else str(exc) or type(exc).__name__


class _End:
    """One node's end of all its streams."""

    def __init__(self, plan: Plan, node: str, left: contextlib.ExitStack) -> None:
        self._plan, self._node, self._left = plan, node, left
        self._early: dict[tuple[int, str], tuple[socket.socket, str]] = {}
        self._problem = ""
        try:
            self._listener = left.enter_context(_listen(plan.addresses[node], plan.port))
        except OSError as exc:
            self._problem = f"{node} cannot listen at port {plan.port}: {_reason(exc)}"

    def meet(self) -> dict[str, str]:
        """Wait until all nodes are here; returns why each absent one is not."""
        first, *others = self._plan.addresses
        by_s = time.monotonic() + START_S
        if self._node != first:
            with self._connect(-1, first, by_s=by_s, said=self._problem) as sock:
                sock.settimeout(START_S + LATE_S)
                return dict(json.loads(_read_line(sock)))
        absent, here = dict[str, str](), dict[str, socket.socket]()
        for name in others if not self._problem else ():
            try:
                here[name], said = self._accept(-1, name, by_s=by_s)
                absent |= {name: said} if said else {}
            except OSError:
                absent[name] = f"{name} did not start"
        absent |= dict.fromkeys((first, *others), self._problem) if self._problem else {}
        for sock in here.values():
            with contextlib.suppress(OSError), sock:
                sock.sendall(json.dumps(absent).encode() + b"\n")
        return absent

    def play(self, number: int, peer: str, *, is_second: bool, by_s: float) -> RoundReport:
        """Run both streams of one pair."""
        sock = self._connect(number, peer, by_s=by_s) if is_second else self._accept(number, peer, by_s=by_s)[0]
        with sock:
            if is_second:
                sent, others = self._send(sock), 0.0
                with contextlib.suppress(OSError):  # the peer, whose stream it is, says why
                    others = self._receive(sock)
                return msgspec.structs.replace(sent, got_by_others_mbit_s=others)
            others = self._receive(sock)
            return msgspec.structs.replace(self._send(sock), got_by_others_mbit_s=others)

    def _send(self, sock: socket.socket) -> RoundReport:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        now_s = time.monotonic()
        ends_s = now_s + WARM_S * self._plan.times, now_s + (WARM_S + MEASURE_S) * self._plan.times
        marks, samples = list[Mark](), list[tuple[float, TcpInfo]]()
        for end_s in ends_s:
            while (left_s := end_s - time.monotonic()) > 0:
                sock.settimeout(left_s)
                with contextlib.suppress(TimeoutError):
                    sock.send(CHUNK)
                if marks:
                    samples.append((time.monotonic(), read_tcp_info(sock)))
            marks.append(self._mark(sock))
        sock.shutdown(socket.SHUT_WR)
        by_s = time.monotonic() + DRAIN_S
        while read_unacked_bytes(sock) and time.monotonic() < by_s:  # the next stream begins on an empty network
            time.sleep(0.002)
        rates = sorted(info.delivery_bytes_s for _, info in samples) or [0]
        return msgspec.structs.replace(
            read_sent(*marks),
            peak_mbit_s=round(rates[len(rates) * 9 // 10] * 8e-6, 2),
            lost_at=read_spread([(at_s, info.total_retrans) for at_s, info in samples]),
        )

    def _mark(self, sock: socket.socket) -> Mark:
        return Mark(time.monotonic(), read_tcp_info(sock), read_traffic(self._plan.interfaces[self._node])[1])

    def _receive(self, sock: socket.socket) -> float:
        """Take all that comes, and throw it away in the kernel; returns the Mbit/s that came for others."""
        began_s = time.monotonic()
        interface, by_s = self._plan.interfaces[self._node], began_s + SLOT_S * self._plan.times + DRAIN_S
        before, count = read_traffic(interface)[0], 0
        while True:
            sock.settimeout(max(0.01, by_s - time.monotonic()))
            try:
                got = sock.recv_into(_SINK, 0, socket.MSG_TRUNC)
            except TimeoutError:
                raise TimeoutError(f"its stream did not end, after {count} bytes") from None
            if not got:
                break
            count += got
        return _others_mbit_s(read_traffic(interface)[0] - before, count, time.monotonic() - began_s)

    def _connect(self, number: int, peer: str, *, by_s: float, said: str = "") -> socket.socket:
        """Connect to a peer; a refused connection counts only where it may not have started yet.

        Raises:
            OSError: it is not there in time.
        """
        address, hello = self._plan.addresses[peer], json.dumps([self._plan.key, number, self._node, said])
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                sock.settimeout(max(0.1, by_s - time.monotonic()))
                sock.bind((self._plan.addresses[self._node], 0))
                sock.connect((address, self._plan.port))
                sock.sendall(hello.encode() + b"\n")
                if number < 0 or _read_line(sock) == "go":
                    return sock
                raise ConnectionError(f"something else than a node of this bench listens at {address}")
            except OSError as exc:
                sock.close()
                if number >= 0 and isinstance(exc, ConnectionRefusedError):
                    raise ConnectionError(f"{peer} has ended") from exc
                if time.monotonic() > by_s - RETRY_S:
                    raise ConnectionError(f"{peer} did not answer at {address}:{self._plan.port}") from exc
                time.sleep(RETRY_S)

    def _accept(self, number: int, peer: str, *, by_s: float) -> tuple[socket.socket, str]:
        """Return the connection of a peer for a round, and what it says of itself."""
        while (number, peer) not in self._early:
            self._listener.settimeout(max(0.01, by_s - time.monotonic()))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise ConnectionError(f"{peer} did not connect") from None
            self._left.enter_context(sock)
            try:
                sock.settimeout(1.0)
                key, its_number, name, said = json.loads(_read_line(sock))
            except (OSError, ValueError, TypeError):
                sock.close()
                continue
            if key == self._plan.key:
                self._early[its_number, name] = sock, str(said)
            else:
                sock.close()
        sock, said = self._early.pop((number, peer))
        if number >= 0:
            sock.settimeout(1.0)
            sock.sendall(b"go\n")
        return sock, said


def _listen(address: str, port: int) -> socket.socket:
    """Open the port; another program of the same job may just be closing it."""
    by_s = time.monotonic() + BUSY_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError:
            if time.monotonic() > by_s:
                raise
            time.sleep(RETRY_S)


def _read_line(sock: socket.socket) -> str:
    """Read a short line, a byte at a time: what follows it belongs to the stream.

    Raises:
        OSError: none came.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > MAX_LINE:
            raise ConnectionError("the connection ended before a line")
        line += byte
    return line.decode(errors="replace").strip()
