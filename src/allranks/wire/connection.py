"""Non-blocking frames of wire.protocol over one TCP connection."""

from __future__ import annotations

import socket

from allranks.wire.frames import LENGTH, MAX_FRAME_BYTES, decode_frames, encode_frame
from allranks.wire.protocol import Message, plain_address


class Connection:
    """Frames over one TCP connection. Owns the socket; never blocks after the handshake.

    `send` queues and writes what the kernel takes; the owner's selector calls `flush` while `has_unsent`. Both raise
    ConnectionError if the connection is gone.
    """

    def __init__(self, sock: socket.socket, *, peer: str, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:  # an agent and its leader in one process
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.max_frame_bytes = max_frame_bytes
        """A longer frame is a WireError, and is not read."""
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self.sock.fileno()

    @property
    def own_address(self) -> str:
        """This machine's address on the connection; the other side can reach it."""
        return plain_address(str(self.sock.getsockname()[0]))

    @property
    def peer_address(self) -> str:
        """The other side's address; empty for an agent and its leader in one process."""
        return plain_address(str(self.sock.getpeername()[0])) if self.sock.family != socket.AF_UNIX else ""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are queued that the kernel has not taken yet."""
        return bool(self._unsent)

    @property
    def has_unread(self) -> bool:
        """Whether a complete message is buffered, which the selector does not report."""
        size = len(self._received) - LENGTH.size
        return size >= 0 and size >= int(LENGTH.unpack_from(self._received)[0])

    def send(self, message: Message) -> None:
        """Queue a message and write what the kernel takes now."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already, since it goes to many, and write what the kernel takes now."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Write what the kernel takes now."""
        while self._unsent:
            try:
                del self._unsent[: self.sock.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError as exc:
                raise ConnectionError(f"{self.peer}: {exc.strerror}") from exc

    def receive(self, *, at_most: int | None = None) -> list[Message]:
        """Return the messages that have arrived, all or `at_most`; the rest stays for the next call.

        Raises:
            ConnectionError: the other side closed or is gone, and no earlier message is left.
            WireError: the bytes are not an allranks message.
        """
        end = None
        while end is None and len(self._received) <= LENGTH.size + self.max_frame_bytes:
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as exc:
                end = f"{self.peer}: {exc.strerror}"
            else:
                self._received += data
                end = None if data else f"{self.peer} closed the connection"
        messages = decode_frames(self._received, at_most=at_most, max_bytes=self.max_frame_bytes)
        if end is not None and not messages:
            raise ConnectionError(end)
        return messages

    def expect_alive_within(self, gone_s: float) -> None:
        """Let the kernel end the connection after this many seconds without an answer from the other machine.

        Source: tcp(7), TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT.
        """
        interval_s = max(1, round(gone_s / 5))
        for option, value in (
            (socket.TCP_KEEPIDLE, interval_s),
            (socket.TCP_KEEPINTVL, interval_s),
            (socket.TCP_KEEPCNT, 4),
            (socket.TCP_USER_TIMEOUT, round(gone_s * 1000)),
        ):
            self.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self.sock.close()
