"""TCP streams of several nodes: real sockets on addresses of the loopback interface, a thread for each node."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from allranks.comm import streams
from allranks.comm.streams import RoundReport, StreamMark, StreamPlan, read_sent, run_streams
from allranks.host.net import read_tcp_counters
from allranks.host.tcpinfo import parse_tcp_info
from allranks.preflight.matchings import matchings
from allranks.wire import rounds
from conftest import HANG_S


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WARM_S": 0.005, "MEASURE_S": 0.02, "SLOT_S": 0.06, "LATE_S": 0.3}.items():
        monkeypatch.setattr(streams, name, value)
    for name, value in {"START_S": 1.0, "BUSY_S": 0.1}.items():
        monkeypatch.setattr(rounds, name, value)


@pytest.fixture
def plan() -> StreamPlan:
    nodes = {f"n{i}": f"127.0.0.{i}" for i in range(2, 6)}
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = int(listener.getsockname()[1])
    return StreamPlan(
        rounds=matchings([*nodes], 99), addresses=nodes, interfaces=dict.fromkeys(nodes, "lo"), port=port, key="k"
    )


def run(plan: StreamPlan, *names: str) -> dict[tuple[str, str], RoundReport]:
    """Run these nodes at the same time; returns what each says of each peer."""
    told: list[RoundReport] = []
    threads = [threading.Thread(target=run_streams, args=(plan, name, told.append)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return {(each.node, each.peer): each for each in told}


def test_every_node_streams_to_every_other_one(plan: StreamPlan) -> None:
    told = run(plan, *plan.addresses)
    assert told.keys() == {(a, b) for a in plan.addresses for b in plan.addresses if a != b}
    assert max(each.mbit_s or 0.0 for each in told.values()) > 10
    assert {each.why for each in told.values()} == {""}


def test_no_node_is_in_two_streams_at_once(plan: StreamPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, streaming, both = threading.Lock(), list[frozenset[str]](), list[frozenset[str]]()
    mark, names = streams._End._mark, {address: name for name, address in plan.addresses.items()}

    def watched(self: streams._End, sock: socket.socket) -> StreamMark:
        """A stream is marked where its second part begins, and where it ends."""
        pair = frozenset(names[end[0]] for end in (sock.getsockname(), sock.getpeername()))
        with lock:
            if pair in streaming:
                streaming.remove(pair)
            else:
                both.extend(other for other in streaming if other & pair)
                streaming.append(pair)
        return mark(self, sock)

    monkeypatch.setattr(streams._End, "_mark", watched)
    assert len(run(plan, *plan.addresses)) == 12
    assert both == []


def test_a_node_that_does_not_start_costs_its_own_pairs_only_whoever_says_to_be_it(
    plan: StreamPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LATE_S", HANG_S)  # nobody who started is late
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            other = json.dumps(["other key", -1, "n4", ""]).encode() + b"\n"
            for hello in (b"GET / HTTP/1.0\r\n\r\n", other, b"[" * 3_000 + b"\n"):
                try:
                    with socket.create_connection(("127.0.0.2", plan.port), timeout=0.2) as sock:
                        sock.sendall(hello)
                except OSError:
                    pass
                time.sleep(0.01)

    stranger = threading.Thread(target=knock)
    stranger.start()
    try:
        told = run(plan, "n2", "n3", "n5")
    finally:
        stop.set()
        stranger.join(HANG_S)
    assert {way: each.why for way, each in told.items() if each.mbit_s is None} == dict.fromkeys(
        [("n2", "n4"), ("n3", "n4"), ("n5", "n4")], "n4 did not start"
    )


def test_a_node_whose_port_is_taken_says_so_to_all(plan: StreamPlan) -> None:
    with socket.create_server(("127.0.0.4", plan.port)):
        told = run(plan, *plan.addresses)
    reason = f"n4 cannot listen at port {plan.port}: address already in use"
    assert {each.why for way, each in told.items() if "n4" in way} == {reason}
    assert {each.why for way, each in told.items() if "n4" not in way} == {""}


def test_a_node_that_ends_between_two_rounds_costs_its_own_pairs_only(plan: StreamPlan) -> None:
    two = replace(plan, rounds=((("n2", "n3"), ("n4", "n5")), (("n2", "n4"), ("n3", "n5"))))
    told: list[RoundReport] = []

    def leave(report: RoundReport) -> None:
        told.append(report)
        raise SystemExit

    def play_one_round() -> None:
        with suppress(SystemExit):
            run_streams(two, "n5", leave)

    leaver = threading.Thread(target=play_one_round)
    leaver.start()
    others = run(two, "n2", "n3", "n4")
    leaver.join(HANG_S)
    assert others["n2", "n4"].why == ""
    assert others["n3", "n5"].why in ("n5 did not connect", "n5 has ended")


def test_a_stream_is_what_was_acknowledged_between_two_moments_and_the_rest_is_of_others() -> None:
    tcp = parse_tcp_info(b"")

    begin = StreamMark(10.0, tcp, 1_000)
    later = dataclasses.replace(
        tcp, acked_bytes=100_000_000, sent_bytes=101_000_000, total_retrans=690, data_segments=69_000
    )
    end = StreamMark(12.0, later, 1_000 + 158_070_000)
    said = read_sent(begin, end)
    assert (said.mbit_s, said.retransmitted, said.segments) == (400.0, 690, 69_000)
    assert said.sent_by_others_mbit_s == 200.0


def test_counters_are_read_from_proc(tmp_path: Path) -> None:
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "snmp").write_text(
        "Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm RtoMin MaxConn OutSegs RetransSegs\nTcp: 1 200 -1 900 12\n"
    )
    assert read_tcp_counters(root=tmp_path) == (900, 12)
