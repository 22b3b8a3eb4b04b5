"""The nodes of the job with connected agents, and the connections to them. Owned by the leader.

A seat is a node's index in the job (0 is the leader's node). It never changes, unlike the node's index in the group of
one generation. The leader's own agent has a seat like all others, connected through a socket pair.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.wire.connection import Connection
from allranks.wire.protocol import Message

FAREWELL_S = 2.0
"""How long slow agents have to take their last word."""


@dataclass(slots=True)
class Seat:
    """One node of the job, as long as its agent is connected."""

    card: Card
    line: Connection
    name: str
    has_stopped: bool = True
    """Its workers have ended, or have not begun."""


@dataclass(slots=True)
class Seats:
    """All seats that are taken. Owns their lines."""

    on_message: Callable[[int, Seat, Message], None]
    on_lost: Callable[[int, Seat, str], None]
    """Told the seat, who sat there, and why it is empty."""
    own_address: str = "127.0.0.1"
    """The leader's own node, as the other agents see it."""
    _taken: dict[int, Seat] = field(default_factory=dict)
    _selector: selectors.BaseSelector | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._taken))

    def __len__(self) -> int:
        return len(self._taken)

    def __contains__(self, index: int) -> bool:
        return index in self._taken

    def __getitem__(self, index: int) -> Seat:
        return self._taken[index]

    @property
    def names(self) -> dict[int, str]:
        """Name of each node by its seat."""
        return {index: seat.name for index, seat in self._taken.items()}

    @property
    def cards(self) -> dict[int, Card]:
        """Card of each node by its seat."""
        return {index: seat.card for index, seat in self._taken.items()}

    def addresses(self, index: int) -> dict[str, str]:
        """Where a node can be tried: on the data network, and on the one that its agent speaks over."""
        seat = self._taken[index]
        control = seat.line.peer_address or self.own_address
        return {"data": seat.card.data_address or control, "control": control}

    @property
    def running(self) -> list[int]:
        """Seats whose agents have not said that their workers have ended."""
        return [index for index, seat in self._taken.items() if not seat.has_stopped]

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have a selector watch all lines; its owner calls `key.data(fileobj)`."""
        self._selector = selector
        for index in self:
            self._watch(index)

    def take(self, index: int, card: Card, line: Connection, *, name: str) -> None:
        """Seat a node."""
        self._taken[index] = Seat(card, line, name)
        if self._selector is not None:
            self._watch(index)

    def send(self, index: int, message: Message) -> None:
        """Say something to one agent; one that is gone is lost."""
        if index not in self._taken:
            return
        try:
            self._taken[index].line.send(message)
        except ConnectionError as exc:
            self.lose(index, str(exc))

    def send_all(self, message: Message) -> None:
        """Say something to all agents."""
        for index in self:
            self.send(index, message)

    def lose(self, index: int, reason: str) -> None:
        """Close a line, and tell that the seat is empty."""
        seat = self.dismiss(index)
        if seat is not None:
            self.on_lost(index, seat, reason)

    def dismiss(self, index: int) -> Seat | None:
        """Close a line without a word about it."""
        seat = self._taken.pop(index, None)
        if seat is not None:
            if self._selector is not None:
                self._selector.unregister(seat.line)
            seat.line.close()
        return seat

    def flush(self) -> None:
        """Give slow agents a moment to take their last word."""
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s and any(seat.line.has_unsent for seat in self._taken.values()):
            for seat in self._taken.values():
                with contextlib.suppress(ConnectionError):
                    seat.line.flush()
            time.sleep(0.01)

    def close(self) -> None:
        """Close all lines."""
        for seat in self._taken.values():
            seat.line.close()

    def _watch(self, index: int) -> None:
        assert self._selector is not None
        seat = self._taken[index]
        self._selector.register(seat.line, selectors.EVENT_READ, lambda _: self._listen(index, seat))
        if seat.line.has_unread:
            self._listen(index, seat)

    def _listen(self, index: int, seat: Seat) -> None:
        if self._taken.get(index) is not seat:
            return
        try:
            messages = seat.line.receive()
            seat.line.flush()
        except (ConnectionError, WireError) as exc:
            self.lose(index, str(exc))
            return
        for message in messages:
            self.on_message(index, seat, message)
