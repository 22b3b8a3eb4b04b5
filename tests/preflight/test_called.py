"""What the others hear when a roll call has succeeded, and its leader cannot give out the places."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_entry import applicant

from allranks.model.errors import SetupError
from allranks.model.membership import Member
from allranks.preflight.called import Called
from allranks.preflight.judge import Judgement, Observations
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Plan
from cards import make_card
from conftest import HANG_S

CARDS = {0: make_card(1), 1: make_card(2), 2: make_card(3, host="node02")}
"""Two of the three agents share a host."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close(2) ends the connection at once."""


@pytest.fixture
def called(tmp_path: Path) -> Iterator[tuple[Called, dict[int, Connection]]]:
    """A roll call of three agents, and the other ends of its leader's connections."""
    theirs, peers = {}, {}
    for node in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs[node] = Connection(socket.create_connection(server.getsockname()), peer="leader")
            peers[node] = Connection(server.accept()[0], peer="127.0.0.1")
    yield (
        Called(
            applicant=applicant(tmp_path),
            judgement=Judgement(findings=(), results=(), exit_code=0),
            observations=Observations(cards=CARDS),
            cards=CARDS,
            peers=peers,
            listener=socket.create_server(("127.0.0.1", 0)),
            store_address="127.0.0.1",
            group="4711",
        ),
        theirs,
    )
    for connection in theirs.values():
        connection.close()


def make_plans(called: Called) -> dict[int, Plan]:
    members = tuple(Member(first_rank=node, num_workers=1) for node in called.cards)
    common = {"members": members, "attempt": 0, "store_address": "127.0.0.1", "store_port": 1}
    return {node: Plan(**common, node_index=node, backend="gloo", backend_reason="") for node in called.cards}


@pytest.mark.parametrize("lets_go", [False, True])
def test_an_agent_that_leaves_before_it_has_its_place_is_named(
    called: tuple[Called, dict[int, Connection]], *, lets_go: bool
) -> None:
    held, theirs = called
    theirs[2].sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    theirs[2].close()
    lost = select.poll()
    lost.register(held.peers[2], select.POLLHUP)
    assert lost.poll(1000 * HANG_S)
    goodbye = held.give_out(make_plans, lets_go=lets_go)
    assert isinstance(goodbye, Goodbye)
    assert goodbye.verdict is not None
    (finding,) = goodbye.verdict.findings
    assert (finding.cause, finding.node, goodbye.exit_code) == ("AR512 node-cannot-start", "node02.1", 75)
    assert finding.message.startswith("it joined, then disconnected: ")
    told = theirs[1].receive()
    assert [type(each) for each in told] == [Plan, Goodbye]
    assert told[-1].verdict == goodbye.verdict
    assert held.listener.fileno() == -1


def test_a_reason_that_is_only_words_is_a_finding_about_the_leader(
    called: tuple[Called, dict[int, Connection]],
) -> None:
    def fail(_: Called) -> dict[int, Plan]:
        raise SetupError("nobody can be placed")

    held, theirs = called
    goodbye = held.give_out(fail)
    assert isinstance(goodbye, Goodbye)
    assert goodbye.verdict is not None
    (finding,) = goodbye.verdict.findings
    assert (finding.node, finding.message, goodbye.exit_code) == ("node01", "nobody can be placed", 78)
    for connection in theirs.values():
        (told,) = connection.receive()
        assert told.verdict == goodbye.verdict
