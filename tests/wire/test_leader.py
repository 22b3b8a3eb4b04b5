"""The leader's port and its announcement, and where the others look for it."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest

from allranks.model.errors import SetupError
from allranks.wire.leader_port import Announcement, Hint, bind_port, collect_hints, decode_announcement


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))]


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def test_zero_takes_any_free_port():
    with bind_port(0) as first, bind_port(0) as second:
        assert 0 not in (port_of(first), port_of(second))
        assert port_of(first) != port_of(second)


def test_a_free_port_is_taken_as_preferred():
    with bind_port(0) as sock:
        port = port_of(sock)
    with bind_port(port) as sock:
        assert port_of(sock) == port


@pytest.mark.parametrize("holder", ["0.0.0.0", "127.0.0.1"])
def test_a_port_in_use_makes_way_for_the_next_one(holder):
    with socket.socket() as other:
        other.bind((holder, 0))
        other.listen()
        port = port_of(other)
        with bind_port(port) as sock:
            assert port_of(sock) in range(port + 1, port + 16)


def test_two_leaders_share_a_machine():
    with bind_port(0) as first, bind_port(port_of(first)) as second, bind_port(port_of(first)) as third:
        assert port_of(first) < port_of(second) < port_of(third) < port_of(first) + 16


@pytest.mark.parametrize("host", HOSTS)
def test_ipv4_and_ipv6_clients_reach_the_next_port(host):
    with (
        bind_port(0) as first,
        bind_port(port_of(first)) as second,
        socket.create_connection((host, port_of(second)), timeout=10) as client,
    ):
        second.settimeout(10)
        accepted, _ = second.accept()
        with accepted:
            accepted.sendall(b"hello")
            assert client.recv(5) == b"hello"


def test_no_free_port_names_the_ports_and_the_flag():
    with bind_port(0) as sock:
        port = port_of(sock)
        with pytest.raises(SetupError) as refused:
            bind_port(port, tries=1)
    assert str(refused.value) == (
        f"ports {port} to {port} are all in use or forbidden; choose a free one with --master-port"
    )


def test_the_search_ends_at_the_last_port():
    with bind_port(65535, tries=1) as sock:
        assert port_of(sock) == 65535
        with pytest.raises(SetupError, match=r"^ports 65535 to 65535 are all in use"):
            bind_port(65535)


def test_connections_of_the_last_job_do_not_block_the_port():
    with bind_port(0) as listener:
        port = port_of(listener)
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", port), timeout=10)
            accepted, _ = listener.accept()
            accepted.close()  # whoever closes first keeps the connection in TIME_WAIT
            assert client.recv(1) == b""
            client.close()
    with bind_port(port, tries=1) as sock:
        assert port_of(sock) == port


HERE = Announcement(job="4711", attempt=2, host="node01", addresses=("192.168.20.11", "fd00::11"), port=29501)


def test_the_announcement_is_plain_json():
    assert decode_announcement(msgspec.json.encode(HERE)) == HERE
    assert json.loads(msgspec.json.encode(HERE)) == {
        "job": "4711",
        "attempt": 2,
        "host": "node01",
        "addresses": ["192.168.20.11", "fd00::11"],
        "port": 29501,
        "side_port": 0,
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"job": "4711", "attempt": 2, "host": "no',
        b"\x00" * 64,
        b"\xff\xfe{}",
        b"[]",
        b"null",
        100_000 * b"[",
        b'{"job": "4711"}',
        b'{"job": "4711", "attempt": 2, "host": "node01", "addresses": ["10.0.0.1"], "port": "29500"}',
    ],
)
def test_a_torn_or_foreign_announcement_is_none(data):
    assert decode_announcement(data) is None


def ports(host: str, first: int, source: str, count: int = 16) -> list[Hint]:
    return [Hint(host, first + step, source) for step in range(count)]


def test_the_users_endpoint_comes_first_then_the_announcement_then_guesses():
    hints = collect_hints(
        HERE,
        job="4711",
        named=[Hint("login1", 29500, "--rdzv-endpoint")],
        guessed=[Hint("node01", 29500, "first node of the step")],
    )
    assert hints == [
        ports("login1", 29500, "--rdzv-endpoint"),
        [Hint("192.168.20.11", 29501, "leader.json")],
        [Hint("fd00::11", 29501, "leader.json")],
        ports("node01", 29500, "first node of the step"),
    ]


def test_the_side_port_is_tried_after_the_main_port_of_each_address():
    found = msgspec.structs.replace(HERE, side_port=41234)
    assert collect_hints(found, job="4711", named=[], guessed=[]) == [
        [Hint("192.168.20.11", 29501, "leader.json")],
        [Hint("192.168.20.11", 41234, "leader.json")],
        [Hint("fd00::11", 29501, "leader.json")],
        [Hint("fd00::11", 41234, "leader.json")],
    ]


def test_an_announcement_of_another_job_is_passed_over():
    assert collect_hints(HERE, job="4712", named=[], guessed=[]) == []


def test_ports_beyond_the_last_are_not_tried():
    hints = collect_hints(None, job="4711", named=[Hint("node01", 65534, "--rdzv-endpoint")], guessed=[])
    assert hints == [ports("node01", 65534, "--rdzv-endpoint", count=2)]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Hint("node01", 29500, "test"), "node01:29500"),
        (Hint("10.0.0.1", 29500, "test"), "10.0.0.1:29500"),
        (Hint("fd00::1", 29500, "test"), "[fd00::1]:29500"),
    ],
)
def test_a_hint_reads_as_people_write_it(hint, text):
    assert str(hint) == text


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_port_that_a_stranger_holds_on_ipv6_alone_is_in_use():
    with socket.socket(socket.AF_INET6) as stranger:
        stranger.bind(("::1", 0))
        stranger.listen()
        taken = port_of(stranger)
        with bind_port(taken) as sock:
            assert port_of(sock) != taken
