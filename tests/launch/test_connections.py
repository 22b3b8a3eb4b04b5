"""What an agent sends to a leader that does not read, and of a heartbeat that is longer than a message may be."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from allranks.launch import events
from allranks.launch.lines import BEHIND_BYTES, ConnectionDriver
from allranks.model.beat import CallSeen, NodeBeat, RankBeat
from allranks.wire import connection
from allranks.wire.connection import Connection
from allranks.wire.protocol import Beat, Message, Stopped


class Driven:
    """The lines of a reducer that does nothing, to one other side."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.other = Connection(there, peer="leader")
        self.fed: list[events.Event] = []
        self.lines = ConnectionDriver(self._step, lambda effect: None, selectors.DefaultSelector())
        self.lines.add(0, Connection(here, peer="leader"))

    def _step(self, event: events.Event) -> list[events.Effect]:
        self.fed.append(event)
        send = [event.beat] if isinstance(event, events.Observed) else []
        return [events.Send(message=Beat(node=beat, ping_ns=0, held_ns=0)) for beat in send]

    def beat(self, *ranks: RankBeat) -> None:
        self.lines.feed(events.Observed(now_s=0.0, beat=NodeBeat(node_index=0, generation=0, ranks=ranks)))

    def read(self) -> list[Message]:
        """All that has been sent, and still is."""
        got: list[Message] = []
        line = self.lines.connections[0]
        while line.flush() or not got:
            got += self.other.receive()
        return got + self.other.receive()


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    made.lines.close()
    made.other.close()


CALL = CallSeen(group="0", seq=1, op="all_reduce", place="x" * 200)


def test_a_leader_that_does_not_read_gets_no_more_heartbeats(driven: Driven):
    for _ in range(100):
        driven.beat(RankBeat(rank=0, calls=(CALL,) * 400))
    assert driven.lines.connections[0].num_unsent < BEHIND_BYTES + 200_000
    num_read = len(driven.read())
    assert 2 < num_read < 20
    driven.beat(RankBeat(rank=0))
    assert len(driven.read()) == 1


def test_a_heartbeat_that_is_too_long_goes_without_calls(driven: Driven):
    driven.beat(*[RankBeat(rank=rank, step=7, calls=(CALL,) * 300) for rank in range(64)])
    (beat,) = driven.read()
    assert isinstance(beat, Beat)
    assert [(rank.rank, rank.step, rank.calls) for rank in beat.node.ranks] == [(rank, 7, ()) for rank in range(64)]


def test_a_peer_that_reads_nothing_loses_its_connection(driven: Driven, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 10_000)
    line = driven.lines.connections[0]
    while line.num_unsent <= 10_000:
        line.send(Stopped(generation=1))
    with pytest.raises(ConnectionError, match="leader: it does not read what is sent to it"):
        line.send(Stopped(generation=1))
