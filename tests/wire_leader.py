"""A leader's acceptor in a thread, and a peer by hand, for tests of the handshake."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from allranks import __version__
from allranks.model.card import Card
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection, decode_frames
from allranks.wire.leader_port import bind_port
from allranks.wire.protocol import PROTOCOL, Hello, Join, Message
from allranks.wire.secret import Secret, prove_join

KEY = Secret(b"swordfish", "test")
WRONG_KEY = Secret(b"haddock", "test")
CARD = Card(host="node02", pid=812, node_index=1, num_workers=6, num_gpus=0)
PATIENCE_S = 60
"""How long a test waits for what must come."""


class Leader:
    """An acceptor in a thread, with the smallest loop that drives it."""

    def __init__(
        self, *, port: int = 0, job: str = "train", attempt: int = 0, secret: Secret = KEY, address: str | None = None
    ) -> None:
        listener = socket.create_server((address, port)) if address is not None else bind_port(port)
        self.port = int(listener.getsockname()[1])
        self.accepted: list[tuple[Card, Connection]] = []
        self.rejected: list[str] = []
        self.said: list[str] = []
        self.after_welcome: tuple[Message, ...] = ()
        self.num_turns = 0
        self._is_over, self._turn = threading.Event(), threading.Lock()
        self._acceptor = Acceptor(listener, job=job, attempt=attempt, secret=secret)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Leader:
        self._thread.start()
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile it takes no turn, as if its machine were busy."""
        with self._turn:
            yield

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)
        for _, connection in self.accepted:
            connection.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._acceptor.attach(
                selector,
                on_peer=self._take,
                on_rejected=lambda rejection: self.rejected.append(rejection.line),
                say=self.said.append,
            )
            while not self._is_over.is_set():
                ready = selector.select(0.02)
                with self._turn:
                    for key, mask in ready:
                        key.data(mask)
                    self._acceptor.turn(time.monotonic())
                    self.num_turns += 1
            self._acceptor.close()

    def _take(self, peer: Connection, card: Card) -> None:
        for message in self.after_welcome:
            peer.send(message)
        self.accepted.append((card, peer))


class Peer:
    """An agent by hand: it says what the test wants it to say."""

    def __init__(self, port: int, *, own_address: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S, (own_address, 0))
        self._buffer = bytearray()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def read(self) -> Message | None:
        """The next message, None where the leader closed."""
        while not (messages := decode_frames(self._buffer, at_most=1)):
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._buffer += data
        return messages[0]

    def read_hello(self) -> Hello:
        hello = self.read()
        assert isinstance(hello, Hello)
        return hello


def join_after(hello: Hello, *, job: str = "train", secret: Secret = KEY, card: Card = CARD) -> Join:
    nonce = b"0123456789abcdef"
    join = Join(protocol=PROTOCOL, version=__version__, job=job, nonce=nonce, card=card)
    return prove_join(secret, join, leader_nonce=hello.nonce)
