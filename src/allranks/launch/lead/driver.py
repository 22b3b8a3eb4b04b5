"""Drive the leader: turn its connections and time into events, and its effects into deeds.

Agents that join while the job runs (their node is back, or was late) connect to the side port that the announcement in
the run directory names, since rank 0's store now has the port of the roll call. They authenticate as in the roll call.
What may wait for a file server or for SLURM runs in a thread of its own, and its result is an event.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from allranks.launch import events
from allranks.launch.events import Driver, Effect, Event
from allranks.launch.lead.leader import Leader
from allranks.launch.queue import ending
from allranks.model.errors import WireError
from allranks.model.finding import Finding
from allranks.state.saved.manifest import parse_final
from allranks.wire.connection import Connection
from allranks.wire.door import Door, StrangerError

FAREWELL_S = 2.0
"""Time allowed to deliver the last message to slow agents."""


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


class LeaderDriver:
    """Owns the connections to all agents, and the side port.

    Args:
        leader: the reducer.
        connections: to the agents of the first generation, by their index in the job.
        door: accepts the agents that join while the job runs; None: nobody is accepted.
        gone_s: a silent connection of such an agent ends after this time.
        reviver: starts lost agents again; None outside of SLURM.
        node_names: by index, as the scheduler calls them.
        checkpoints: where `allranks.session()` saves.
        say: prints one line.
        show: prints findings.
        on_event: writes to events.jsonl.
        on_signal: decides what a signal means for the job, given how long a checkpoint takes (0: nothing to save;
            None: unknown); it may take seconds.
    """

    def __init__(
        self,
        leader: Leader,
        connections: Mapping[int, Connection],
        *,
        door: Door | None,
        gone_s: float,
        checkpoints: Path,
        say: Callable[[str], None],
        show: Callable[[Sequence[Finding]], None],
        on_event: Callable[..., None],
        on_signal: Callable[[int, float | None], ending.Decision],
        reviver: Reviver | None = None,
        node_names: Sequence[str] = (),
    ) -> None:
        self.leader = leader
        self._connections = dict(connections)
        self._door, self._gone_s, self._checkpoints = door, gone_s, checkpoints
        self._say, self._show, self._on_event, self._on_signal = say, show, on_event, on_signal
        self._reviver, self._node_names = reviver, node_names
        self._joining: dict[int, Connection] = {}
        """Authenticated, by the number that the leader answers with."""
        self._num_joined = 0
        self._feed = Driver(leader.step, self._carry_out).feed
        self._answers: queue.SimpleQueue[Callable[[float], Event]] = queue.SimpleQueue()
        self._selector: selectors.BaseSelector | None = None

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Let the agent's selector watch all connections; it calls `key.data(fileobj)`."""
        self._selector = selector
        for node, connection in list(self._connections.items()):
            self._watch(node, connection)
        if (door := self._door) is not None:
            selector.register(door, selectors.EVENT_READ, lambda _: self._accept(door))

    def turn(self, now_s: float) -> None:
        """Do what is due; the agent's loop calls it between two waits."""
        if self._door is not None:
            for late in self._door.overdue(now_s):
                self._unregister(late)
                self._door.dismiss(late)
        with contextlib.suppress(queue.Empty):
            while True:
                self._feed(self._answers.get_nowait()(now_s))
        self._feed(events.Due(now_s=now_s))
        for text in self._reviver.turn(now_s) if self._reviver is not None else ():
            self._say(text)

    @property
    def started_pids(self) -> list[int]:
        """Of the processes that bring nodes back: they are descendants of this process, but no workers' left-overs."""
        return self._reviver.pids if self._reviver is not None else []

    def close(self) -> None:
        """Give slow agents a moment to receive their last message, and close all connections."""
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s and any(each.has_unsent for each in self._connections.values()):
            for connection in self._connections.values():
                with contextlib.suppress(ConnectionError):
                    connection.flush()
            time.sleep(0.01)
        for connection in self._connections.values():
            connection.close()
        if self._door is not None:
            self._door.shut()
        if self._reviver is not None:
            self._reviver.close()

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Send(node=node, message=message):
                if (connection := self._connections.get(node)) is not None:
                    try:
                        connection.send(message)
                    except ConnectionError as exc:
                        self._lose(node, str(exc))
            case events.Disconnect(node=node):
                self._disconnect(node)
            case events.Accept(connection=number, node=node):
                connection = self._connections[node] = self._joining.pop(number)
                connection.expect_alive_within(self._gone_s)
                self._watch(node, connection)
            case events.Reject(connection=number, reason=reason):
                assert self._door is not None
                self._door.refuse(self._joining.pop(number), reason)
            case events.Say(text=text):
                self._say(text)
            case events.Show(findings=findings):
                self._show(findings)
            case events.Record(event=event, fields=fields):
                self._on_event(event, **fields)
            case events.ExpectBack(node=node, name=name):
                if self._reviver is not None:
                    self._reviver.expect(self._node_names[node] if self._node_names else name, node)
            case events.AskScheduler(signum=signum, save_s=save_s):
                self._answer_later(
                    lambda: {"signum": signum, "decision": self._on_signal(signum, save_s)}, events.Meant
                )
            case events.FindCheckpoint():
                self._answer_later(lambda: {"step": find_checkpoint(self._checkpoints)}, events.CheckpointFound)

    def _answer_later(self, look: Callable[[], dict[str, Any]], answer: type[Event]) -> None:
        """Look something up in a thread; the leader does not wait for ever."""

        def run() -> None:
            found = look()
            self._answers.put(lambda now_s: answer(now_s=now_s, **found))

        threading.Thread(target=run, name="allranks-leader-look", daemon=True).start()

    # Connections

    def _watch(self, node: int, connection: Connection) -> None:
        assert self._selector is not None
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._listen(node, connection))
        if connection.has_unread:
            self._listen(node, connection)

    def _listen(self, node: int, connection: Connection) -> None:
        if self._connections.get(node) is not connection:
            return
        try:
            messages = connection.receive()
            connection.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(node, str(exc))
            return
        for message in messages:
            self._feed(events.Heard(now_s=time.monotonic(), node=node, message=message))

    def _lose(self, node: int, reason: str) -> None:
        self._disconnect(node)
        self._feed(events.Lost(now_s=time.monotonic(), node=node, reason=reason))

    def _disconnect(self, node: int) -> None:
        if (connection := self._connections.pop(node, None)) is not None:
            self._unregister(connection)
            connection.close()

    def _accept(self, door: Door) -> None:
        peer = door.greet(time.monotonic())
        if peer is not None and self._selector is not None:
            self._selector.register(peer, selectors.EVENT_READ, lambda _: self._authenticate(door, peer))

    def _authenticate(self, door: Door, peer: Connection) -> None:
        try:
            card = door.hear(peer)
        except StrangerError as exc:
            self._unregister(peer)
            self._say(str(exc))
            return
        if card is None:
            if peer.fileno() < 0:  # it only checked the port
                self._unregister(peer)
            return
        self._unregister(peer)
        self._num_joined += 1
        self._joining[self._num_joined] = peer
        self._feed(events.Joined(now_s=time.monotonic(), connection=self._num_joined, card=card, address=peer.peer))

    def _unregister(self, connection: Connection) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)


def find_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a directory; None: there is none, or no directory."""
    with contextlib.suppress(OSError):
        return max((found[0] for path in directory.iterdir() if (found := parse_final(path.name))), default=None)
    return None
