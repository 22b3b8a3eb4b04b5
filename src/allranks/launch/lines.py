"""The connections of a reducer: messages become its events, and Send and Disconnect are carried out on them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from allranks.launch import events
from allranks.launch.events import Driver, Effect, Event
from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.wire.connection import Connection
from allranks.wire.protocol import Beat, Message

BEHIND_BYTES = 256 << 10
"""With so much that the other side has not read, it gets no Beat: the next one says what counts then."""


class ConnectionDriver(Driver):
    """Drives a reducer that speaks to others over connections, by node; an agent has only that to its leader, 0.

    Args:
        do: carries out the effects that need no connection.
        selector: its owner calls `key.data(fileobj)`.
    """

    def __init__(
        self, step: Callable[[Event], Sequence[Effect]], do: Callable[[Effect], None], selector: selectors.BaseSelector
    ) -> None:
        super().__init__(step, self._carry_out)
        self._do_else, self._selector = do, selector
        self.connections: dict[int, Connection] = {}
        self.joined: dict[int, Connection] = {}
        """Authenticated, by their descriptors, until the reducer accepts or rejects them."""

    def add(self, node: int, connection: Connection) -> None:
        """Speak to a node over this connection from now on; call `listen` for what has come over it before."""
        self.end(node)
        self.connections[node] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self.listen(node))

    def listen(self, node: int) -> None:
        """Take in what has come from a node."""
        if (connection := self.connections.get(node)) is None:
            return  # disconnected in the same turn
        try:
            messages = connection.receive()
            connection.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(node, str(exc))
            return
        for message in messages:
            self.feed(events.Heard(now_s=time.monotonic(), node=node, message=message))

    def join(self, peer: Connection, card: Card) -> None:
        """An agent has connected, and proven that it belongs to the job."""
        self.joined[peer.fileno()] = peer
        self.feed(events.Joined(now_s=time.monotonic(), connection=peer.fileno(), card=card, address=peer.peer))

    def end(self, node: int) -> None:
        """Close the connection to a node, if there is one."""
        if (connection := self.connections.pop(node, None)) is not None:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for node in list(self.connections):
            self.end(node)
        for connection in self.joined.values():
            connection.close()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Send(node=node, message=message):
                if (connection := self.connections.get(node)) is not None:
                    try:
                        _send(connection, message)
                    except ConnectionError as exc:
                        self._lose(node, str(exc))
            case events.Disconnect(node=node):
                self.end(node)
            case _:
                self._do_else(effect)

    def _lose(self, node: int, reason: str) -> None:
        self.end(node)
        self.feed(events.Lost(now_s=time.monotonic(), node=node, reason=reason))


def _send(connection: Connection, message: Message) -> None:
    """Send a message; of a Beat, what there is room for."""
    if not isinstance(message, Beat):
        connection.send(message)
    elif connection.num_unsent <= BEHIND_BYTES:
        try:
            connection.send(message)
        except WireError:  # workers may write thousands of calls into their cells
            ranks = tuple(replace(rank, calls=(), groups=(), lags=()) for rank in message.node.ranks)
            connection.send(replace(message, node=replace(message.node, ranks=ranks)))
