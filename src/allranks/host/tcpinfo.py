"""What the kernel knows of one TCP connection: retransmissions, segment size, what is not acknowledged yet.

Source: struct tcp_info in linux/tcp.h (fields are only ever appended), SIOCOUTQ in tcp(7).
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from dataclasses import dataclass

_ASKED_BYTES = 216
"""Up to tcpi_bytes_retrans; an older kernel gives less, a newer one would give more."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Some fields of struct tcp_info; 0 where this kernel does not say."""

    state: int
    """1 is established, as in linux/tcp_states.h."""
    retransmits: int
    """Timeouts in a row without an acknowledgement."""
    snd_mss: int
    """Largest segment that is sent, bytes of payload."""
    unacked: int
    """Segments sent and not acknowledged."""
    lost: int
    pmtu: int
    rtt_s: float
    """Smoothed."""
    total_retrans: int
    """Segments sent again since the connection began."""
    min_rtt_s: float
    """Shortest one, between the two kernels."""
    delivery_bytes_s: int
    """How fast the other kernel acknowledged, lately: the path's speed, whatever the two processes were busy with, as
    long as the other's receive buffer takes all that is sent."""
    acked_bytes: int
    """Payload that the other kernel has acknowledged since the connection began."""
    data_segments: int
    """Segments with payload that were sent, those that were sent again included."""
    sent_bytes: int
    """Payload that was sent, what was sent again included; 0 before Linux 4.19."""


def parse_tcp_info(data: bytes) -> TcpInfo:
    """Read the bytes of struct tcp_info, however many there are."""
    data = data.ljust(_ASKED_BYTES, b"\0")

    def field(offset: int, kind: str = "=I") -> int:
        return int(struct.unpack_from(kind, data, offset)[0])

    return TcpInfo(
        state=data[0],
        retransmits=data[2],
        snd_mss=field(16),
        unacked=field(24),
        lost=field(32),
        pmtu=field(60),
        rtt_s=field(68) / 1e6,
        total_retrans=field(100),
        min_rtt_s=field(148) / 1e6,
        delivery_bytes_s=field(160, "=Q"),
        acked_bytes=field(120, "=Q"),
        data_segments=field(156),
        sent_bytes=field(200, "=Q"),
    )


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Ask the kernel.

    Raises:
        OSError: this is no TCP socket, or it is closed.
    """
    return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES))


def read_unacked_bytes(sock: socket.socket) -> int:
    """Bytes written to the socket that the other machine has not acknowledged.

    Raises:
        OSError: this is no TCP socket, or it is closed.
    """
    return int(struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
