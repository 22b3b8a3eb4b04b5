"""One TCP connection between two agents: how a message becomes bytes, and bytes become a message. Nothing blocks.

A connection carries frames. A frame is a 4-byte big-endian length and that many bytes of MessagePack, one message
each. A frame longer than MAX_FRAME_BYTES (before the leader knows the agent: MAX_JOIN_BYTES) ends the connection.

A Plan names all nodes and goes to all nodes. So what is the same for all of them is encoded and compressed once, and
the node's own index is sent beside it. A Join is compressed, too: to an eighth, since GPUs and ports are alike.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib
from collections import deque
from functools import partial
from itertools import accumulate
from typing import Union

import msgspec

from allranks import __version__
from allranks.model.beat import NodeBeat, drop_unsound
from allranks.model.errors import WireError
from allranks.model.membership import Member
from allranks.model.safe_text import as_one_line, plain_address
from allranks.wire.protocol import PROTOCOL, Beat, Join, Message, Plan

MAX_FRAME_BYTES = 4 << 20
MAX_JOIN_BYTES = 512 << 10
"""Of all that an agent sends before it is known, and of its Join once it is decompressed. The card of a node with 8
GPUs and 10 RDMA ports has 26 kB; with as many GPUs, ports, variables and files as a card may hold, 242 kB."""
MAX_UNSENT_BYTES = 16 << 20
"""Of what waits for a peer that does not read; then its connection ends. A Plan of 16,384 nodes has 38 kB."""
MAX_SHOWN = 64
"""Maximum number of characters printed of a foreign peer's name, job and version."""
LENGTH = struct.Struct(">I")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _PackedPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """A Plan as it is sent."""

    node_index: int
    common: bytes
    """_Common as MessagePack, compressed (RFC 1950)."""


_Common = tuple[Plan, list[tuple[str, int, str | None]]]
"""The Plan of node 0 without its members, and a row for each: name, workers, host (None: the name). The first rank
follows from the rows before. Rows that are so alike compress to a third."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message | _PackedPlan] = msgspec.msgpack.Decoder(
    Union[(*(kind for kind in Message.__subclasses__() if kind is not Plan), _PackedPlan)]
)
_common_decoder: msgspec.msgpack.Decoder[_Common] = msgspec.msgpack.Decoder(_Common)
_packed: tuple[Plan, bytes] | None = None
"""The last Plan that was sent, with its common part: the leader sends the Plans of all nodes one after another."""


class Connection:
    """Frames over one TCP connection. Owns the socket; never blocks after the handshake.

    `send` queues and writes what the kernel takes; the owner's selector calls `flush` until all is written. Both
    raise ConnectionError if the connection is gone.
    """

    def __init__(self, sock: socket.socket, *, peer: str, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:  # an agent and its leader in one process
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.max_frame_bytes = max_frame_bytes
        """A longer frame is a WireError, and is not read."""
        self._received = bytearray()
        self._unsent = deque[memoryview]()
        """A message that goes to many is in memory once."""
        self.num_unsent = 0
        """Bytes of it."""

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self.sock.fileno()

    @property
    def num_buffered(self) -> int:
        """Bytes that have come of a message that is not complete."""
        return len(self._received)

    @property
    def own_address(self) -> str:
        """This machine's address on the connection; the other side can reach it."""
        return plain_address(str(self.sock.getsockname()[0]))

    def send(self, message: Message) -> None:
        """Queue a message and write what the kernel takes now."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already, since it goes to many, and write what the kernel takes now."""
        if self.num_unsent > MAX_UNSENT_BYTES:
            raise ConnectionError(f"{self.peer}: it does not read what is sent to it")
        self._unsent.append(memoryview(frame))
        self.num_unsent += len(frame)
        self.flush()

    def flush(self) -> bool:
        """Write what the kernel takes now; return whether bytes are left."""
        while self._unsent:
            try:
                num_sent = self.sock.send(self._unsent[0])
            except BlockingIOError:
                return True
            except OSError as exc:
                raise ConnectionError(f"{self.peer}: {exc.strerror}") from exc
            self.num_unsent -= num_sent
            if rest := self._unsent.popleft()[num_sent:]:
                self._unsent.appendleft(rest)
        return False

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
        set_tcp = partial(self.sock.setsockopt, socket.IPPROTO_TCP)
        set_tcp(socket.TCP_KEEPIDLE, interval_s)
        set_tcp(socket.TCP_KEEPINTVL, interval_s)
        set_tcp(socket.TCP_KEEPCNT, 4)
        set_tcp(socket.TCP_USER_TIMEOUT, round(gone_s * 1000))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self.sock.close()


def encode_frame(message: Message) -> bytes:
    """Return a message as one frame.

    Raises:
        WireError: the message is longer than MAX_FRAME_BYTES.
    """
    payload = _encoder.encode(_pack(message) if isinstance(message, Plan) else message)
    if isinstance(message, Join):
        payload = zlib.compress(payload, level=1)  # the best level takes twice as long, and 4 % off
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(payload)) + payload


def decode_frames(buffer: bytearray, *, at_most: int | None = None, max_bytes: int = MAX_FRAME_BYTES) -> list[Message]:
    """Take complete frames out of the buffer, all or `at_most`; an incomplete one stays in it.

    Raises:
        WireError: the bytes are no frames of ours.
    """
    messages: list[Message] = []
    while len(buffer) >= LENGTH.size and (at_most is None or len(messages) < at_most):
        (length,) = LENGTH.unpack_from(buffer)
        if length > max_bytes:
            raise WireError(f"a frame of {length} bytes, more than {max_bytes}: the peer is not allranks")
        if len(buffer) < LENGTH.size + length:
            break
        payload = bytes(buffer[LENGTH.size : LENGTH.size + length])
        del buffer[: LENGTH.size + length]
        try:
            if payload.startswith(b"x"):  # RFC 1950; the map of a message begins otherwise
                payload = _inflate(payload, "a Join", MAX_JOIN_BYTES)
            messages.append(_decode(payload))
        except _UNREADABLE as exc:
            what = f"a frame that is not an allranks message: {as_one_line(str(exc))}"
            with contextlib.suppress(*_UNREADABLE):
                head = msgspec.msgpack.decode(payload, type=_Head)
                what = describe_version(head) if head.protocol != PROTOCOL else what
            raise WireError(what) from exc
    return messages


def _decode(payload: bytes) -> Message:
    try:
        message = _decoder.decode(payload)
        return _unpack(message) if isinstance(message, _PackedPlan) else message
    except msgspec.ValidationError:  # of a Beat, what is sound counts
        told = msgspec.msgpack.decode(payload)
        if not isinstance(told, dict) or "node" not in told:
            raise
        drop_unsound(told["node"], NodeBeat)
        return msgspec.convert(told, Beat)


def _pack(plan: Plan) -> _PackedPlan:
    global _packed
    if _packed is None or msgspec.structs.replace(_packed[0], node_index=plan.node_index) != plan:
        rows = [
            (member.name, member.num_workers, None if member.host == member.name else member.host)
            for member in plan.members
        ]
        common = msgspec.structs.replace(plan, members=(), node_index=0), rows  # a _Common
        _packed = plan, zlib.compress(_encoder.encode(common))
    return _PackedPlan(node_index=plan.node_index, common=_packed[1])


def _unpack(packed: _PackedPlan) -> Plan:
    plan, rows = _common_decoder.decode(_inflate(packed.common, "a Plan", MAX_FRAME_BYTES))
    firsts = accumulate((num_workers for _, num_workers, _ in rows), initial=0)
    members = tuple(
        Member(name=name, first_rank=first, num_workers=num_workers, host=name if host is None else host)
        for (name, num_workers, host), first in zip(rows, firsts, strict=False)  # one more of `firsts`: the end
    )
    return msgspec.structs.replace(plan, members=members, node_index=packed.node_index)


def _inflate(data: bytes, what: str, max_bytes: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        payload = inflating.decompress(data, max_bytes)
    except zlib.error as exc:
        raise msgspec.DecodeError(f"{what} that cannot be decompressed: {exc}") from exc
    if not inflating.eof:
        raise msgspec.DecodeError(f"{what} of more than {max_bytes} bytes, or a truncated one")
    return payload


class _Head(msgspec.Struct, frozen=True):
    """What Hello and Join of every version begin with."""

    protocol: int
    version: str


def describe_version(head: _Head | Join) -> str:
    """Say that a message is of another version of the protocol."""
    what = f"a message of allranks {as_one_line(head.version, at_most=MAX_SHOWN)} (protocol {head.protocol})"
    return f"{what}, here is {__version__} (protocol {PROTOCOL}); install the same version on all nodes"
