"""How fast is one TCP stream between two nodes, each way? Each node runs its pairs in rounds, in no two at a time.

A pair has one connection (wire/rounds.py): the second node streams to the first one and closes its half of it, then the
first one streams back. After each round a node reports what its own stream carried, and what else used its interface.

A stream has two parts of fixed length: TCP speeds up in the first one, and only the second one counts. What counts is
what the other kernel has acknowledged, on average and in the fastest tenth of the moments: processes that get no core
lower the average alone. Counters of the interface say what others sent at that time.

Source of struct tcp_info: host/tcpinfo.py. A shaped link of 1 Gbit/s reads 0.941 to 0.957 (headers are no payload).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from allranks.host.tcpinfo import TcpInfo, read_tcp_info, read_unacked_bytes
from allranks.host.traffic import ByteCounter
from allranks.wire.rounds import LATE_S, Rounds, reason

WARM_S, MEASURE_S = 0.12, 0.27
"""Of a stream. A queue of 20 ms fills and drains in the first part; the second one carries 34 MB at 1 Gbit/s."""
SLOT_S = 2 * (WARM_S + MEASURE_S) + 0.07
"""A round, with its handshakes."""
BUDGET_S = 60.0
"""For all rounds: 70 of them, so that every pair of 70 nodes is tested."""
DRAIN_S = 2.0
"""For what is on its way when a stream ends."""
CHUNK = bytes(1 << 17)
UNSENT_BYTES = 1 << 18
"""At most so much waits in the sender's kernel: at 50 Mbit/s it leaves in 42 ms."""
HEADERS = 1.07
"""Bytes on an interface for a byte of payload, at most: Ethernet, IPv6 and TCP with options around 1,440 bytes."""
_SINK = bytearray(1 << 20)


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True):
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
class StreamMark:
    """One moment of a stream, at its sender."""

    time_s: float
    tcp: TcpInfo
    interface_bytes: int


def read_sent(begin: StreamMark, end: StreamMark) -> RoundReport:
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


def run_streams(plan: StreamPlan, node: str, tell: Callable[[RoundReport], None]) -> None:
    """Run this node's part of all rounds.

    Args:
        tell: gets a report for each round in which the node has a peer.
    """
    end = _End(plan.interfaces[node], plan.times)
    with Rounds(node, plan.addresses, port=plan.port, key=plan.key) as rounds:
        absent = rounds.meet()
        began_s = time.monotonic()
        for number, pair in enumerate(next((mine for mine in pairs if node in mine), None) for pairs in plan.rounds):
            if pair is None:
                continue
            peer, is_second = pair[1 - pair.index(node)], pair[1] == node
            report = RoundReport(why=absent.get(node) or absent.get(peer, ""))
            if not report.why:
                by_s = began_s + plan.expected_s + (number + 1) * LATE_S
                try:
                    with rounds.join(number, peer, is_second=is_second, by_s=by_s) as sock:
                        report = end.play(sock, is_first=is_second)
                except (OSError, ValueError) as exc:
                    report = RoundReport(why=reason(exc))
            tell(msgspec.structs.replace(report, node=node, peer=peer, round=number))


class _End:
    """One node's end of all its streams."""

    def __init__(self, interface: str, times: int) -> None:
        self._times, self._counter = times, None
        with contextlib.suppress(OSError):  # what others send is then not counted
            self._counter = ByteCounter(interface)

    def play(self, sock: socket.socket, *, is_first: bool) -> RoundReport:
        """Run both streams of one pair; returns what the own one carried."""
        if not is_first:
            others = self._receive(sock)
            return msgspec.structs.replace(self._send(sock), got_by_others_mbit_s=others)
        sent, others = self._send(sock), 0.0
        with contextlib.suppress(OSError):  # the peer, whose stream it is, says why
            others = self._receive(sock)
        return msgspec.structs.replace(sent, got_by_others_mbit_s=others)

    def _send(self, sock: socket.socket) -> RoundReport:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        now_s = time.monotonic()
        ends_s = now_s + WARM_S * self._times, now_s + (WARM_S + MEASURE_S) * self._times
        marks, samples = list[StreamMark](), list[tuple[float, TcpInfo]]()
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

    def _mark(self, sock: socket.socket) -> StreamMark:
        return StreamMark(time.monotonic(), read_tcp_info(sock), self._carried()[0])

    def _carried(self) -> tuple[int, int]:
        """Return the bytes that the interface has sent and received."""
        return (self._counter and self._counter.read()) or (0, 0)

    def _receive(self, sock: socket.socket) -> float:
        """Take all that comes, and throw it away in the kernel; returns the Mbit/s that came for others."""
        began_s = time.monotonic()
        by_s = began_s + SLOT_S * self._times + DRAIN_S
        before, count = self._carried()[1], 0
        while True:
            sock.settimeout(max(0.01, by_s - time.monotonic()))
            try:
                got = sock.recv_into(_SINK, 0, socket.MSG_TRUNC)
            except TimeoutError:
                raise TimeoutError(f"its stream did not end, after {count} bytes") from None
            if not got:
                break
            count += got
        return _others_mbit_s(self._carried()[1] - before, count, time.monotonic() - began_s)
