"""Agents that join while the job runs, because their node is back or was late. The next generation includes them.

The port of the roll call now belongs to rank 0's store, so they use the side port that the announcement in the run
directory names. They authenticate as in the roll call, and wait for the Plan of the next generation. Meanwhile they
receive the leader's Pings.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.wire.accept import Acceptor, Reject, Rejected, turn_away
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Ping


class Reviver(Protocol):
    """Has SLURM start an agent again on a node that is back."""

    def expect(self, node: str, seat: int) -> None:
        """The node's agent is gone: look for the node from now on."""

    def turn(self, now_s: float) -> list[str]:
        """Do what is due without waiting; return lines for people."""

    @property
    def pids(self) -> list[int]:
        """Of the processes that it has started."""

    def close(self) -> None:
        """End what it started."""


@dataclass(slots=True, kw_only=True)
class Newcomers:
    """Agents that wait for the next generation. Owns their connections until `take`."""

    acceptor: Acceptor | None
    """None: nobody is taken in."""
    num_seats: int
    node_names: Sequence[str] = ()
    """By seat, as the scheduler calls them."""
    say: Callable[[str], None]
    gone_s: float
    beat_s: float
    reviver: Reviver | None = None
    cards: dict[int, Card] = field(default_factory=dict)
    """By seat."""
    _taken: Callable[[], set[int]] = set
    _lines: dict[int, Connection] = field(default_factory=dict)
    _barred: set[int] = field(default_factory=set)
    _selector: selectors.BaseSelector | None = None
    _next_ping_s: float = 0.0

    def attach(self, selector: selectors.BaseSelector, *, taken: Callable[[], set[int]]) -> None:
        """Accept agents from now on, with the agent's selector.

        Args:
            selector: calls `key.data(fileobj)`.
            taken: tells the seats whose agents are here.
        """
        self._selector, self._taken = selector, taken
        if self.acceptor is not None:
            self.acceptor.attach(selector, on_peer=self._admit, on_rejected=self._note_rejected, say=self.say)

    def expect(self, seat: int, node: str) -> None:
        """A seat is empty: its node may come back."""
        if self.reviver is not None and seat not in self._barred:
            self.reviver.expect(self.node_names[seat] if self.node_names else node, seat)

    def bar(self, seat: int) -> None:
        """A node was left out for the rest of the job."""
        self._barred.add(seat)

    def started_pids(self) -> list[int]:
        """Of the processes that bring nodes back: below this one, and no workers' left-overs."""
        return self.reviver.pids if self.reviver is not None else []

    def turn(self, now_s: float) -> None:
        """Do what is due."""
        if self.acceptor is not None:
            self.acceptor.turn(now_s)
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.beat_s
            for seat, line in list(self._lines.items()):
                try:
                    line.send(Ping(sent_ns=round(now_s * 1e9)))
                except ConnectionError:
                    self._lose(seat)
        if self.reviver is not None:
            for text in self.reviver.turn(now_s):
                self.say(text)

    def take(self) -> dict[int, tuple[Card, Connection]]:
        """Hand over everybody who waits; their lines are the caller's from now on."""
        taken = {seat: (card, self._lines[seat]) for seat, card in self.cards.items()}
        for line in self._lines.values():
            self._drop(line)
        self.cards.clear()
        self._lines.clear()
        return taken

    def dismiss(self, goodbye: Goodbye) -> None:
        """The job is over."""
        for line in self._lines.values():
            try:
                line.send(goodbye)
            except ConnectionError:
                continue

    def close(self) -> None:
        """Send everybody away."""
        for line in self._lines.values():
            line.close()
        if self.acceptor is not None:
            self.acceptor.close()
        if self.reviver is not None:
            self.reviver.close()

    def _note_rejected(self, rejected: Rejected) -> None:
        if rejected.why is not Reject.SILENT:
            self.say(rejected.text)

    def _admit(self, peer: Connection, card: Card) -> None:
        free = set(range(self.num_seats)) - self._taken() - self.cards.keys() - self._barred
        seat = card.node_index if card.node_index is not None else min(free, default=-1)
        if seat not in free:
            turn_away(peer, self._objection(seat))
            return
        peer.expect_alive_within(self.gone_s)
        self.cards[seat] = card
        self._lines[seat] = peer
        assert self._selector is not None
        self._selector.register(peer, selectors.EVENT_READ, lambda _: self._listen(seat))
        self.say(f"{card.host} has joined and waits for the next restart")

    def _objection(self, seat: int) -> str:
        if seat in self._barred:
            return f"node rank {seat} was at fault and is excluded for the rest of this job"
        return f"node rank {seat} is already in the job, or all {self.num_seats} nodes are"

    def _listen(self, seat: int) -> None:
        """A waiting agent sends nothing, so this means that its connection has ended."""
        try:
            self._lines[seat].receive()
        except (ConnectionError, WireError):
            self._lose(seat)

    def _lose(self, seat: int) -> None:
        line = self._lines.pop(seat)
        card = self.cards.pop(seat)
        self._drop(line)
        line.close()
        self.say(f"{card.host} joined, then disconnected")

    def _drop(self, line: Connection) -> None:
        if self._selector is not None:
            try:
                self._selector.unregister(line)
            except (KeyError, ValueError):
                return
