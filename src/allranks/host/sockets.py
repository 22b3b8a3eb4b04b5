"""Which TCP connections of this machine have bytes that the other kernel has not acknowledged, and for how long?

    sockets = SocketWatch()
    sockets.look(now_s, addresses={"192.168.20.13"})     # every now and then

The kernel is asked over netlink (sock_diag(7), as `ss -tin` does), which needs no rights; where that is refused
(gVisor, some containers), /proc/net/tcp says as much as is needed. A connection counts as stuck while bytes are
unacknowledged and the number of acknowledged ones does not grow; a receiver that is merely stopped goes on
acknowledging until its buffer is full, and then nothing is sent any more: it is never stuck here. Nor is one that no
process has open any more: what a dead machine did not acknowledge is retransmitted for minutes after the job that
sent it, and would be held against the next job.

Source: linux/inet_diag.h, linux/sock_diag.h, proc(5) on /proc/net/tcp; struct tcp_info in host.tcpinfo.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, _TCPDIAG_GETSOCK = 20, 18
"""The older question asks for both families of addresses at once: the kernel searches its table only once."""
ANSWER_S = 0.5
"""The kernel answers at once; this is for a machine that does not."""
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_INET_DIAG_INFO = 2
_STATES = {1: "ESTABLISHED", 4: "FIN_WAIT1", 8: "CLOSE_WAIT", 9: "LAST_ACK"}
"""In which bytes can be on their way (linux/tcp_states.h)."""
_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=3xB48xI4x")
"""struct inet_diag_req: the parts of attributes and states that are wanted."""
_MESSAGE = struct.Struct("=BBBB2s2s16s16sI8sIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_SND_WND = 228
"""Of tcpi_snd_wnd in struct tcp_info, since Linux 5.4."""
_RETRANSMITTING = 1
"""Of the timer: it waits for an acknowledgement."""


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """One TCP connection, as the kernel has it."""

    own_address: str
    own_port: int
    peer_address: str
    """Empty: it listens."""
    peer_port: int
    unacked_bytes: int
    """Written to the socket and not acknowledged."""
    is_pending: bool
    """Something is on its way, or would be if it could leave: the other side has room, the own link may be down."""
    retransmits: int
    """Timeouts in a row without an acknowledgement."""
    acked_bytes: int | None = None
    """Since the connection began; None: this kernel, or this way of asking, does not say."""
    mss: int = 0
    inode: int = -1
    """Of the socket; 0: no process has it open any more."""
    segments: int = 0
    """Sent since the connection began, `retransmitted` among them."""
    retransmitted: int = 0
    delivery_bytes_s: int = 0
    """How fast the other kernel acknowledged lately, as in host.tcpinfo; 0: not known."""
    unread_bytes: int = 0
    """Arrived, and not read by the process; of one that listens: connections that the process has not accepted."""
    received_bytes: int | None = None
    """Since the connection began; None as of `acked_bytes`."""

    @property
    def is_listening(self) -> bool:
        """Whether it waits for connections."""
        return not self.peer_address

    @property
    def is_held(self) -> bool:
        """Whether a process has it open; else one that ended has left it, and the kernel still tries to close it."""
        return self.inode != 0

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What tells it from others."""
        return self.own_address, self.own_port, self.peer_address, self.peer_port


@dataclass(frozen=True, slots=True)
class StuckConnection:
    """A connection that gets nothing across."""

    connection: TcpConnection
    stalled_s: float


class SocketWatch:
    """Looks at all connections again and again, and remembers since when one is stuck.

    Args:
        root: where /proc is; tests feed a tree.
        uses_netlink: ask the kernel directly; False: read /proc/net/tcp.
    """

    def __init__(self, *, root: Path = Path("/"), uses_netlink: bool = True) -> None:
        self._root = root
        self._uses_netlink = uses_netlink
        self._since_s: dict[tuple[str, int, str, int], tuple[object, float]] = {}
        self.connections: list[TcpConnection] = []
        """All of this machine, as the last look found them."""

    def look(self, now_s: float, *, addresses: Collection[str]) -> list[StuckConnection]:
        """Return the connections that have got nothing across since they were first seen so.

        Args:
            now_s: a monotonic clock.
            addresses: own ones that count.
        """
        self.connections = self._read()
        return self.weigh(self.connections, now_s, addresses=addresses)

    def weigh(
        self, connections: Collection[TcpConnection], now_s: float, *, addresses: Collection[str]
    ) -> list[StuckConnection]:
        """Return which of these are stuck, and since when."""
        before, self._since_s = self._since_s, {}
        stuck = []
        for connection in connections:
            is_between_nodes = connection.own_address in addresses and connection.peer_address not in addresses
            if not connection.is_pending or not connection.is_held or not is_between_nodes:
                continue
            # Without a count of what was acknowledged, what is left and has timed out is the best there is.
            mark = (
                connection.acked_bytes
                if connection.acked_bytes is not None
                else (connection.unacked_bytes, connection.retransmits > 0)
            )
            known, since_s = before.get(connection.key, (None, now_s))
            if known != mark:
                since_s = now_s
            self._since_s[connection.key] = mark, since_s
            stuck.append(StuckConnection(connection, now_s - since_s))
        return stuck

    def _read(self) -> list[TcpConnection]:
        if self._uses_netlink:
            try:
                return ask_kernel()
            except OSError:
                self._uses_netlink = False
        return read_proc(root=self._root)


def ask_kernel(*, with_listening: bool = False) -> list[TcpConnection]:
    """Return the connections in which bytes can be on their way, and, if asked for, sockets that listen.

    A question costs 1 ms, however few connections there are: the kernel searches its whole table.

    Args:
        with_listening: also sockets that listen.
    Raises:
        OSError: this kernel does not answer such questions, or not to us.
    """
    states = sum(1 << state for state in (*_STATES, *([_LISTEN] if with_listening else [])))
    request = _REQUEST.pack(1 << (_INET_DIAG_INFO - 1), states)
    head = _HEADER.pack(_HEADER.size + len(request), _TCPDIAG_GETSOCK, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(ANSWER_S)
        sock.sendto(head + request, (0, 0))
        found: list[TcpConnection] = []
        while True:
            is_done = parse_answer(sock.recv(1 << 18), found)
            if is_done:
                return found


def parse_answer(data: bytes, found: list[TcpConnection]) -> bool:
    """Read one datagram of netlink; tell whether it was the last one.

    Args:
        data: whole messages.
        found: gets the connections.
    Raises:
        OSError: the kernel refused.
    """
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size or at + length > len(data):
            break
        body = data[at + _HEADER.size : at + length]
        if kind == _NLMSG_DONE:
            return True
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", body.ljust(4, b"\0"))[0]
            raise OSError(number, "netlink refused to list connections")
        if kind in (SOCK_DIAG_BY_FAMILY, _TCPDIAG_GETSOCK) and len(body) >= _MESSAGE.size:
            found.append(_parse_message(body))
        at += (length + 3) & ~3
    return False


def _parse_message(body: bytes) -> TcpConnection:
    family, state, timer, retransmits, own_port, peer_port, own, peer, *_, unread, written, _, inode = (
        _MESSAGE.unpack_from(body)
    )
    unacked_bytes = 0 if state == _LISTEN else written  # of one that listens: how many may wait to be accepted
    info = next((value for kind, value in _attributes(body[_MESSAGE.size :]) if kind == _INET_DIAG_INFO), b"")
    window = struct.unpack_from("=I", info, _SND_WND)[0] if len(info) >= _SND_WND + 4 else 0
    is_told = bool(info)
    info = info.ljust(192, b"\0")
    mss = struct.unpack_from("=I", info, 16)[0]
    is_sent = bool(struct.unpack_from("=I", info, 24)[0]) if is_told else timer == _RETRANSMITTING
    return TcpConnection(
        own_address=_address(family, own),
        own_port=int.from_bytes(own_port, "big"),
        peer_address="" if state == _LISTEN else _address(family, peer),
        peer_port=int.from_bytes(peer_port, "big"),
        unacked_bytes=unacked_bytes,
        is_pending=is_sent or (unacked_bytes > 0 and window >= mss > 0),
        retransmits=retransmits if timer == _RETRANSMITTING else 0,
        acked_bytes=struct.unpack_from("=Q", info, 120)[0] if is_told else None,
        mss=mss,
        inode=inode,
        segments=struct.unpack_from("=I", info, 136)[0],
        retransmitted=struct.unpack_from("=I", info, 100)[0],
        delivery_bytes_s=struct.unpack_from("=Q", info, 160)[0],
        unread_bytes=unread,
        received_bytes=struct.unpack_from("=Q", info, 128)[0] if is_told else None,
    )


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def _address(family: int, raw: bytes) -> str:
    """IPv4 as itself, also where an IPv6 socket carries it."""
    if family == socket.AF_INET:
        return str(ip_address(raw[:4]))
    address = IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def read_proc(*, root: Path = Path("/"), of: str = "", with_listening: bool = False) -> list[TcpConnection]:
    """Return the same from /proc/net/tcp and tcp6, which know of no acknowledged or received bytes.

    Args:
        root: where /proc is; tests feed a tree.
        of: pid of a process whose network namespace is meant; empty: ours.
        with_listening: also sockets that listen.
    """
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc" / of / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        found += [connection for line in lines if (connection := parse_proc_line(line)) is not None]
    return [connection for connection in found if with_listening or not connection.is_listening]


def parse_proc_line(line: str) -> TcpConnection | None:
    """Read one line of /proc/net/tcp; None: bytes cannot be on their way, and nobody listens."""
    words = line.split()
    try:
        state = int(words[3], 16)
        (waiting, unread), timer = (int(word, 16) for word in words[4].split(":")), int(words[5].partition(":")[0], 16)
        (own, own_end), (peer, peer_end) = (word.split(":") for word in words[1:3])
        own_port, peer_port = int(own_end, 16), int(peer_end, 16)
        retransmits, inode = int(words[6], 16), int(words[9])
        addresses = _proc_address(own), _proc_address(peer)
    except (IndexError, ValueError, struct.error):
        return None
    if state != _LISTEN and state not in _STATES:
        return None
    return TcpConnection(
        own_address=addresses[0],
        own_port=own_port,
        peer_address="" if state == _LISTEN else addresses[1],
        peer_port=peer_port,
        unacked_bytes=0 if state == _LISTEN else waiting,
        is_pending=timer == _RETRANSMITTING,
        retransmits=retransmits if timer == _RETRANSMITTING else 0,
        inode=inode,
        unread_bytes=unread,
    )


def _proc_address(text: str) -> str:
    """Each group of four bytes stands there as a number of the machine."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return _address(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
