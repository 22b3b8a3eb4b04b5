"""Does a try tell what two kernels do, whatever runs there?"""

from __future__ import annotations

import socket
import time

import pytest

from allranks.guard.node.tries import Listener, Tries
from allranks.model.beat import TrySeen
from allranks.wire.protocol import Try, TryTarget


def try_it(port: int, *, address: str = "127.0.0.1", network: str = "data", within_s: float = 10.0) -> TrySeen:
    tries = Tries(own_data_address="127.0.0.1" if address.startswith("127") else "")
    target = TryTarget(node_index=3, network=network, address=address, port=port)
    tries.begin(Try(targets=(target,), within_s=within_s), time.monotonic())
    end_s = time.monotonic() + within_s + 1.5
    while not tries.results(time.monotonic()) and time.monotonic() < end_s:
        tries.turn(time.monotonic())
        time.sleep(0.01)
    (seen,) = tries.results(time.monotonic())
    tries.close()
    return seen


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()


def test_a_listener_that_nobody_reads_acknowledges(listener):
    seen = try_it(listener.port)
    assert (seen.target, seen.network) == (3, "data")
    assert (seen.connects, seen.refused, seen.carries) == (True, False, True)
    assert seen.age_s < 9.0


def test_a_listener_of_a_stopped_agent_answers_many_tries(listener):
    for _ in range(20):  # nobody calls listener.turn()
        assert try_it(listener.port).carries


def test_a_listener_lets_go_of_what_came(listener):
    for _ in range(3):
        try_it(listener.port)
    listener.turn(100.0)
    assert len(listener._held) == 3
    listener.turn(111.0)
    assert listener._held == []


def test_a_try_of_another_subnet_leaves_from_the_own_address_there(listener):
    tries = Tries(own_data_address="127.0.0.1", further={"127.1.0.9": "127.1.0.0/24"})
    other = Listener("127.1.0.1", port=listener.port)
    try:
        for address, own in (("127.1.0.1", "127.1.0.9"), ("127.0.0.1", "127.0.0.1")):
            target = TryTarget(node_index=1, network="data", address=address, port=listener.port)
            tries.begin(Try(targets=(target,), within_s=1.0), 0.0)
            assert [each.sock.getsockname()[0] for each in tries._running.values()] == [own]
    finally:
        tries.close()
        other.close()


def test_nobody_listens_is_an_answer():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    seen = try_it(port)
    assert (seen.connects, seen.refused, seen.carries) == (True, True, None)


def test_a_listener_that_ends_between_two_looks_is_an_answer():
    """Its agent was killed just then: the other kernel has accepted the try, and resets it."""
    listener, tries = Listener("127.0.0.1"), Tries()
    target = TryTarget(node_index=0, network="data", address="127.0.0.1", port=listener.port)
    tries.begin(Try(targets=(target,), within_s=1.0), 0.0)
    listener.close()
    tries.turn(0.1)
    (seen,) = tries.results(0.1)
    assert (seen.connects, seen.refused, seen.error) == (True, True, "Connection reset by peer")


def test_a_machine_that_swallows_everything_does_not_connect():
    with socket.socket() as full:  # a backlog that is full drops what comes, as a lost machine does
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        time.sleep(0.1)
        seen = try_it(full.getsockname()[1], within_s=0.5)
        for other in others:
            other.close()
    assert (seen.connects, seen.carries, seen.error) == (False, None, "no answer within 0.5 s")


def test_a_peer_that_closes_was_reached():
    with socket.socket() as rude:
        rude.bind(("127.0.0.1", 0))
        rude.listen(8)
        rude.settimeout(60)
        tries = Tries()
        target = TryTarget(node_index=0, network="control", address="127.0.0.1", port=rude.getsockname()[1])
        tries.begin(Try(targets=(target,), within_s=60.0), time.monotonic())
        rude.accept()[0].close()
        while not tries.results(time.monotonic()):
            tries.turn(time.monotonic())
            time.sleep(0.01)
        (seen,) = tries.results(time.monotonic())
    assert seen.connects
    assert seen.carries is not False


@pytest.mark.parametrize(("address", "port"), [("127.0.0.1", 70000), ("no address", 80), ("300.1.1.1", 80)])
def test_a_target_that_makes_no_sense_is_an_error_and_no_crash(address, port):
    seen = try_it(port, address=address)
    assert not seen.connects
    assert seen.error


def test_results_grow_old_and_are_forgotten(listener):
    tries = Tries()
    target = TryTarget(node_index=1, network="data", address="127.0.0.1", port=listener.port)
    tries.begin(Try(targets=(target,), within_s=1.0), 100.0)
    for _ in range(50):
        tries.turn(100.5)
        time.sleep(0.01)
    assert [seen.age_s for seen in tries.results(103.5)] == [3.0]
    assert tries.results(131.0) == ()
