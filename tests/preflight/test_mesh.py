"""Pair tests on loopback: what works, and what a tester says of all that does not."""

from __future__ import annotations

import contextlib
import gc
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from allranks.host.tcpinfo import parse_tcp_info, read_tcp_info, read_unacked_bytes
from allranks.model.card import TestPorts
from allranks.model.pair import FULL, MAX_PAIR_BYTES, SPARSE, Effort, PairResult, PairTarget
from allranks.preflight.mesh import dial, echo, ping
from allranks.preflight.mesh.mesh_loop import MeshLoop
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.second_look import QUIET
from allranks.wire.connection import decode_frames, encode_frame
from allranks.wire.protocol import Hello, Probe, Test

TOKEN = b"swordfish, 16 by"
PATIENCE_S = 20
ONE_PORT = Effort(num_ports=1, large_bytes=0, num_datagrams=0, has_mtu_probe=False)
DATAGRAMS = Effort(num_ports=0, large_bytes=0, num_datagrams=6, has_mtu_probe=False)


class Room:
    """Several nodes on one selector, and time that passes."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.meshes: list[Mesh] = []
        self.num_events = 1
        """That the last turn took."""

    def mesh(self, *, token: bytes | None = TOKEN, num_ports: int = 8) -> Mesh:
        mesh = Mesh(num_ports)
        mesh.attach(self.selector)
        if token is not None:
            mesh.admit(token)
        self.meshes.append(mesh)
        return mesh

    def run(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline_s, "nothing came of it"
            self.turn()

    def run_for(self, seconds: float) -> None:
        """At least; until everything that has arrived has been read, as slow as the machine may be."""
        end_s = time.monotonic() + seconds
        self.run(lambda: time.monotonic() > end_s and not self.num_events)

    def turn(self) -> None:
        waits = [mesh.advance(time.monotonic()) for mesh in self.meshes]
        wait_s = min((each for each in waits if each is not None), default=0.02)
        ready = self.selector.select(min(wait_s, 0.02))
        self.num_events = len(ready)
        for key, mask in ready:
            key.data(mask)

    def try_all(
        self,
        mesh: Mesh,
        *targets: PairTarget,
        effort: Effort = FULL,
        own_address: str | None = "127.0.0.1",
        **more: object,
    ) -> tuple[PairResult, ...]:
        order = order_of(*targets, effort=effort, **more)
        mesh.start(order, own_index=0, own_address=own_address, mtu=9000, now_s=time.monotonic())
        self.run(lambda: mesh.results is not None)
        assert mesh.results is not None
        return mesh.results

    def close(self) -> None:
        for mesh in self.meshes:
            mesh.close()
        self.selector.close()


@pytest.fixture
def room() -> Iterator[Room]:
    gc.collect()  # what other tests have left
    files = count_files()
    it = Room()
    yield it
    it.close()
    assert count_files() == files


def count_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def order_of(
    *targets: PairTarget, effort: Effort = FULL, token: bytes = TOKEN, within_s: float = 10.0, **more: object
) -> Test:
    return Test(token=token, targets=targets, effort=effort, within_s=within_s, **more)  # type: ignore[arg-type]


def target_of(mesh: Mesh, index: int = 1, address: str = "127.0.0.1", store_port: int | None = None) -> PairTarget:
    return PairTarget(node_index=index, address=address, ports=mesh.ports, store_port=store_port)


def target_at(*tcp: int, udp: int = 9, store_port: int | None = None) -> PairTarget:
    ports = TestPorts(tcp=tcp, udp=udp)
    return PairTarget(node_index=1, address="127.0.0.1", ports=ports, store_port=store_port)


def listen(backlog: int = 8) -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::ffff:127.0.0.1", "::1"])
def test_a_healthy_pair_passes_everything(room: Room, address: str) -> None:
    [result] = room.try_all(room.mesh(), target_of(room.mesh(), address=address), own_address=None)
    assert (result.source, result.target, result.problem) == (0, 1, None)
    assert (result.num_open, result.closed, result.store) == (8, {}, None)
    assert (result.large_sent, result.large_back, result.unacked_bytes) == (48 << 10, 48 << 10, 0)
    assert (result.datagrams_sent, result.datagrams_lost) == (40, 0)
    assert result.datagrams == {1500: True, 9000: True}
    assert result.large_s is not None
    assert 0 < result.large_s < PATIENCE_S
    assert result.rtt_s is not None
    assert 0 < result.rtt_s < PATIENCE_S
    assert result.clock_offset_s is not None
    assert abs(result.clock_offset_s) < 0.5  # two clocks of one machine; what is late on a busy one is in it


def test_a_sparse_pair_is_one_connection_and_four_datagrams(room: Room) -> None:
    [result] = room.try_all(room.mesh(), target_of(room.mesh()), effort=SPARSE)
    assert (result.num_open, result.large_back, result.datagrams_sent, result.datagrams) == (1, 1024, 4, {})


@pytest.mark.parametrize(("effort", "limit"), [(FULL, MAX_PAIR_BYTES), (SPARSE, 4096)])
@pytest.mark.parametrize("mtu", [1400, 1500, 9000, 65520])
def test_a_pair_stays_within_its_budget(room: Room, effort: Effort, limit: int, mtu: int) -> None:
    one, other = room.mesh(), room.mesh()
    one.start(order_of(target_of(other), effort=effort), own_index=0, own_address=None, mtu=mtu, now_s=time.monotonic())
    room.run(lambda: one.results is not None)
    assert 1024 < one.bytes_sent + other.bytes_sent < limit


@pytest.mark.parametrize(("mtu", "limit"), [(1400, 4096), (1500, 4096), (1700, 4096), (9000, 20_000)])
def test_a_packet_of_the_mtu_takes_the_place_of_the_large_payload(room: Room, mtu: int, limit: int) -> None:
    one, other = room.mesh(), room.mesh()
    [result] = room.try_all(one, replace(target_of(other), probe_bytes=mtu), effort=SPARSE)
    assert (result.num_open, result.large_sent, result.datagrams_sent, result.datagrams) == (1, 0, 4, {mtu: True})
    assert 2 * (mtu - 28) < one.bytes_sent + other.bytes_sent < limit


def test_what_has_an_mtu_probe_needs_no_other(room: Room) -> None:
    [result] = room.try_all(room.mesh(), replace(target_of(room.mesh()), probe_bytes=4000))
    assert (result.large_sent, result.datagrams) == (48 << 10, {1500: True, 9000: True})


def test_other_nodes_try_other_ports_where_not_all_are_tried(room: Room) -> None:
    socks = [listen(), listen(), listen()]
    ports = [port_of(sock) for sock in socks]
    for sock in socks:
        sock.close()
    mesh = room.mesh()
    order = order_of(target_at(*ports), effort=ONE_PORT)
    mesh.start(order, own_index=4, own_address=None, mtu=None, now_s=time.monotonic())
    room.run(lambda: mesh.results is not None)
    assert mesh.results is not None
    assert mesh.results[0].closed == {ports[1]: "refused"}


def test_connections_come_from_the_data_address(room: Room) -> None:
    with listen() as server:
        mesh = room.mesh()
        order = order_of(target_at(port_of(server)), effort=ONE_PORT, within_s=0.2)
        mesh.start(order, own_index=0, own_address="127.0.0.77", mtu=None, now_s=time.monotonic())
        sock, peer = server.accept()
        sock.close()
        assert peer[0] == "127.0.0.77"
        room.run(lambda: mesh.results is not None)


def test_an_address_that_is_not_ours_is_said(room: Room) -> None:
    [result] = room.try_all(room.mesh(), target_of(room.mesh()), own_address="203.0.113.7")
    assert result.problem == "cannot send from 203.0.113.7: Cannot assign requested address (EADDRNOTAVAIL)"
    assert set(result.closed.values()) == {"Cannot assign requested address (EADDRNOTAVAIL)"}


def test_a_name_instead_of_an_address_is_said_and_not_looked_up(room: Room) -> None:
    [result] = room.try_all(room.mesh(), target_of(room.mesh(), address="localhost"))
    assert result.problem == "not tried: 'localhost' is no address"


def test_a_closed_port_is_refused(room: Room) -> None:
    with listen() as server:
        port = port_of(server)
    [result] = room.try_all(room.mesh(), target_at(port), effort=ONE_PORT)
    assert result.closed == {port: "refused"}


def test_a_filtered_port_gives_no_answer(room: Room) -> None:
    with listen(backlog=0) as server, socket.create_connection(server.getsockname()):
        # The queue of the listener is full: the kernel drops every SYN, as a firewall does.
        [result] = room.try_all(room.mesh(), target_at(port_of(server)), effort=ONE_PORT)
        assert result.closed == {port_of(server): "no answer in 1.6 s"}


def test_a_lost_try_is_made_good_by_the_next_one(room: Room) -> None:
    mesh = room.mesh()
    with listen(backlog=0) as server, socket.create_connection(server.getsockname()) as plug:
        order = order_of(target_at(port_of(server)), effort=ONE_PORT)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        room.run_for(0.3)
        assert mesh.results is None
        server.accept()[0].close()  # from now on there is room
        plug.close()
        served: list[socket.socket] = []
        server.setblocking(False)

        def has_answer() -> bool:
            try:
                sock, _ = server.accept()
                sock.settimeout(PATIENCE_S)
                served.append(sock)
                sock.sendall(sock.recv(100)[len(TOKEN) :])
            except (BlockingIOError, ConnectionError):
                pass
            return mesh.results is not None

        room.run(has_answer)
        for sock in served:
            sock.close()
    assert mesh.results is not None
    assert mesh.results[0].num_open == 1


def test_a_port_that_connects_and_stays_silent_is_told_from_a_filter(room: Room) -> None:
    with listen() as server:
        [result] = room.try_all(room.mesh(), target_at(port_of(server)), effort=ONE_PORT)
        assert result.closed == {port_of(server): "connected, but no answer in 1.6 s"}


def test_a_stranger_on_the_port_is_no_answer(room: Room) -> None:
    mesh = room.mesh()
    with listen() as server:
        server.setblocking(False)
        served: list[socket.socket] = []

        def greet() -> bool:
            try:
                served.append(server.accept()[0])
                served[-1].sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            except (BlockingIOError, ConnectionError):
                pass
            return mesh.results is not None

        order = order_of(target_at(port_of(server)), effort=ONE_PORT)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        room.run(greet)
        for sock in served:
            sock.close()
        assert mesh.results is not None
        assert mesh.results[0].closed == {port_of(server): "connected, but another process answers"}


def test_a_target_with_another_token_does_not_answer(room: Room) -> None:
    other = room.mesh(token=b"haddock")
    effort = Effort(num_ports=1, large_bytes=0, num_datagrams=4, has_mtu_probe=False)
    [result] = room.try_all(room.mesh(), target_of(other), effort=effort)
    [reason] = result.closed.values()
    assert reason.startswith("connected, then ")
    assert (result.datagrams_sent, result.datagrams_lost) == (4, 4)
    assert other.bytes_sent == 0


def test_who_comes_before_the_order_waits_for_it(room: Room) -> None:
    one, other = room.mesh(), room.mesh(token=None)
    one.start(order_of(target_of(other)), own_index=0, own_address=None, mtu=1500, now_s=time.monotonic())
    room.run_for(0.2)
    assert one.results is None
    other.admit(TOKEN)
    room.run(lambda: one.results is not None)
    assert one.results is not None
    assert (one.results[0].num_open, one.results[0].datagrams_lost) == (8, 0)


def test_a_target_that_vanishes_mid_way_leaves_what_was_seen(room: Room) -> None:
    mesh = room.mesh()
    with listen() as server:
        effort = Effort(num_ports=1, num_datagrams=0, has_mtu_probe=False)
        order = order_of(target_at(port_of(server)), effort=effort)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        sock, _ = server.accept()
        room.turn()
        sock.sendall(sock.recv(100)[len(TOKEN) :])
        room.turn()
        sock.recv(1000)
        sock.sendall(bytes(1000))
        room.turn()
        sock.close()
        room.run(lambda: mesh.results is not None)
    assert mesh.results is not None
    [result] = mesh.results
    assert (result.num_open, result.large_sent, result.large_back, result.large_s) == (1, 48 << 10, 1000, None)


def test_a_large_payload_that_is_swallowed_ends_at_its_deadline(room: Room) -> None:
    mesh = room.mesh()
    with listen() as server:
        effort = Effort(num_ports=1, large_bytes=4 << 20, num_datagrams=0, has_mtu_probe=False)
        order = order_of(target_at(port_of(server)), effort=effort)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        sock, _ = server.accept()
        room.turn()
        sock.sendall(sock.recv(100)[len(TOKEN) :])
        room.run(lambda: mesh.results is not None)
        sock.close()
    assert mesh.results is not None
    [result] = mesh.results
    assert (result.num_open, result.large_back, result.large_s) == (1, 0, None)
    assert result.unacked_bytes > 0


def test_datagrams_into_a_black_hole_are_lost(room: Room) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        effort = Effort(num_ports=0, large_bytes=0, num_datagrams=6)
        [result] = room.try_all(room.mesh(), target_at(udp=port_of(hole)), effort=effort)
    assert (result.datagrams_sent, result.datagrams_lost) == (6, 6)
    assert result.datagrams == {1500: False, 9000: False}
    assert (result.rtt_s, result.clock_offset_s) == (None, None)


def test_datagrams_that_had_no_time_to_come_back_are_not_called_lost(room: Room) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        effort = Effort(num_ports=0, large_bytes=0, num_datagrams=6)
        [result] = room.try_all(room.mesh(), target_at(udp=port_of(hole)), effort=effort, within_s=0.2)
    assert (result.datagrams_sent, result.datagrams_lost, result.datagrams) == (0, 0, {})


def test_a_target_that_cannot_send_as_much_says_so(room: Room) -> None:
    mesh = room.mesh()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.setblocking(False)
        effort = Effort(num_ports=0, large_bytes=0, num_datagrams=0)
        order = order_of(target_at(udp=port_of(peer)), effort=effort)
        mesh.start(order, own_index=0, own_address=None, mtu=9000, now_s=time.monotonic())

        def answer() -> bool:
            try:
                request, tester = peer.recvfrom(1 << 16)
                short = request[: len(TOKEN) + echo.HEAD.size]
                kind = echo.TOO_LARGE if len(request) > 1472 else echo.ECHO
                peer.sendto(TOKEN + bytes([kind]) + short[len(TOKEN) + 1 :], tester)
            except BlockingIOError:
                pass
            return mesh.results is not None

        room.run(answer)
    assert mesh.results is not None
    assert mesh.results[0].datagrams == {1500: True, 9000: False}


def test_a_clock_that_is_off_shows(room: Room) -> None:
    mesh = room.mesh()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.setblocking(False)
        order = order_of(target_at(udp=port_of(peer)), effort=DATAGRAMS)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())

        def answer() -> bool:
            try:
                request, tester = peer.recvfrom(1 << 16)
                _, pair, seq, _ = echo.HEAD.unpack_from(request, len(TOKEN))
                late_ns = time.time_ns() - 7_000_000_000
                peer.sendto(TOKEN + echo.HEAD.pack(echo.ECHO, pair, seq, late_ns), tester)
            except BlockingIOError:
                pass
            return mesh.results is not None

        room.run(answer)
    assert mesh.results is not None
    assert mesh.results[0].clock_offset_s == pytest.approx(-7.0, abs=0.5)


def test_the_leaders_port_is_read_and_probed(room: Room) -> None:
    mesh, other = room.mesh(), room.mesh()
    with listen() as leader:
        order = order_of(target_of(other, store_port=port_of(leader)), effort=ONE_PORT)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        sock, _ = leader.accept()
        with sock:
            sock.sendall(encode_frame(Hello(protocol=2, version="0.1", job="17", nonce=b"n")))
            room.run(lambda: mesh.results is not None)
            sock.settimeout(PATIENCE_S)
            received = bytearray()
            while data := sock.recv(100):
                received += data
    assert mesh.results is not None
    assert mesh.results[0].store == ""
    assert decode_frames(received) == [Probe()]


def test_a_leaders_port_where_nobody_says_hello_is_said(room: Room) -> None:
    with listen() as silent:
        [result] = room.try_all(room.mesh(), target_of(room.mesh(), store_port=port_of(silent)), effort=ONE_PORT)
    assert (result.store, result.num_open) == ("connected, but no answer in 1.6 s", 1)


def test_time_that_is_up_ends_everything_and_names_what_was_not_tried(room: Room) -> None:
    with listen() as silent:
        port = port_of(silent)
        targets = [target_at(port)] * 3
        results = room.try_all(room.mesh(), *targets, effort=ONE_PORT, within_s=0.3, is_one_by_one=True)
    assert results[0].closed[port].startswith("connected, but no answer in 0.")
    assert [each.problem for each in results] == [None, *["not tried: the 0.3 s were over"] * 2]


def test_one_by_one_is_one_after_the_other(room: Room) -> None:
    with listen() as first, listen() as second:
        second.setblocking(False)
        mesh = room.mesh()
        order = order_of(
            target_at(port_of(first)), target_at(port_of(second)), effort=ONE_PORT, within_s=0.3, is_one_by_one=True
        )
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        room.run(lambda: mesh.results is not None)
        with pytest.raises(BlockingIOError):
            second.accept()


def test_no_targets_is_a_result(room: Room) -> None:
    assert room.try_all(room.mesh()) == ()


def test_a_thousand_targets_without_a_route_are_no_problem(room: Room) -> None:
    targets = [
        PairTarget(node_index=i, address="255.255.255.255", ports=TestPorts(tcp=(9,), udp=9)) for i in range(1, 1001)
    ]
    results = room.try_all(room.mesh(), *targets, effort=ONE_PORT)
    assert {each.num_open for each in results} == {0}
    assert [each.target for each in results] == list(range(1, 1001))


def test_a_second_order_ends_the_first(room: Room) -> None:
    mesh, other = room.mesh(), room.mesh()
    with listen() as silent:
        order = order_of(target_at(port_of(silent)), effort=ONE_PORT)
        mesh.start(order, own_index=0, own_address=None, mtu=None, now_s=time.monotonic())
        room.run_for(0.1)
        [result] = room.try_all(mesh, target_of(other), effort=ONE_PORT)
    assert result.num_open == 1


def test_an_agent_that_got_no_cpu_does_not_blame_the_others(room: Room) -> None:
    mesh, other = room.mesh(), room.mesh()
    mesh.start(order_of(target_of(other)), own_index=0, own_address=None, mtu=1500, now_s=time.monotonic())
    room.turn()
    time.sleep(2.5)
    room.run(lambda: mesh.results is not None)
    assert mesh.results is not None
    assert (mesh.results[0].num_open, mesh.results[0].datagrams_lost) == (8, 0)
    assert mesh.results[0].datagrams == {1500: True}


def test_32_nodes_try_each_other_on_one_selector(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in ((dial, "LARGE_S"), (ping, "REPLY_S"), (echo, "SERVED_S")):
        monkeypatch.setattr(module, limit, 20.0)  # one process does the work of 32, on a busy machine
    meshes = [room.mesh() for _ in range(32)]
    pairs = choose_pairs(32, seed=1)
    for index, mesh in enumerate(meshes):
        targets = [target_of(meshes[target], target) for source, target in pairs if source == index]
        order = order_of(*targets, effort=SPARSE, within_s=20.0)
        mesh.start(order, own_index=index, own_address=None, mtu=1500, now_s=time.monotonic())
    room.run(lambda: all(mesh.results is not None for mesh in meshes))
    results = [result for mesh in meshes for result in mesh.results or ()]
    assert len(results) == 992
    assert {(each.num_open, each.large_back, each.datagrams_lost) for each in results} == {(1, 1024, 0)}


def test_closing_in_the_middle_leaves_no_file_open() -> None:
    files = count_files()
    room = Room()
    mesh, other = room.mesh(), room.mesh()
    mesh.start(order_of(target_of(other)), own_index=0, own_address=None, mtu=9000, now_s=time.monotonic())
    room.turn()
    room.turn()
    events = room.selector.select(0)
    mesh.close()
    other.close()
    for key, mask in events:  # what one select has returned may outlive its socket
        key.data(mask)
    mesh.close()
    room.selector.close()
    mesh.close()
    assert count_files() == files


# The answering side


def test_garbage_is_closed_without_a_word(room: Room) -> None:
    mesh = room.mesh()
    with socket.create_connection(("127.0.0.1", mesh.ports.tcp[0])) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.setblocking(False)
        room.run_for(0.1)
        assert reads_end(sock)
    assert mesh.bytes_sent == 0


def test_a_token_in_pieces_is_a_token(room: Room) -> None:
    mesh = room.mesh()
    with socket.create_connection(("127.0.0.1", mesh.ports.tcp[0])) as sock:
        for piece in (TOKEN[:5], TOKEN[5:] + b"a", b"bc"):
            sock.sendall(piece)
            room.run_for(0.05)
        sock.setblocking(False)
        assert sock.recv(100) == b"abc"


def test_a_silent_peer_is_closed_after_seconds(room: Room) -> None:
    mesh = room.mesh()
    with socket.create_connection(("127.0.0.1", mesh.ports.tcp[0])) as sock:
        sock.setblocking(False)
        room.run_for(0.1)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        room.run_for(echo.SERVED_S)
        assert reads_end(sock)


def test_a_peer_that_asks_for_too_much_is_closed(room: Room) -> None:
    mesh = room.mesh()
    with socket.create_connection(("127.0.0.1", mesh.ports.tcp[0])) as sock:
        sock.sendall(TOKEN)
        sock.setblocking(False)
        num_back, is_closed = 0, False
        for _ in range(2000):
            try:
                sock.send(bytes(1000))
                num_back += len(sock.recv(1 << 16))
            except BlockingIOError:
                pass
            except ConnectionError:
                is_closed = True
                break
            room.turn()
    assert is_closed
    assert num_back <= MAX_PAIR_BYTES


def test_a_peer_that_does_not_read_cannot_fill_the_memory(room: Room) -> None:
    mesh = room.mesh()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        sock.connect(("127.0.0.1", mesh.ports.tcp[0]))
        sock.sendall(TOKEN + bytes(200_000))
        room.run_for(0.2)
        received = bytearray()
        sock.setblocking(False)

        def has_all() -> bool:
            with contextlib.suppress(BlockingIOError):
                received.extend(sock.recv(1 << 16))
            return len(received) == 200_000

        room.run(has_all)


def test_strangers_do_not_keep_testers_out(room: Room) -> None:
    mesh, other = room.mesh(), room.mesh()
    strangers = [socket.create_connection(("127.0.0.1", other.ports.tcp[0])) for _ in range(echo.MAX_SERVED + 20)]
    try:
        room.run_for(0.1)
        assert not reads_end(strangers[-1])
        assert reads_end(strangers[0])
        [result] = room.try_all(mesh, target_of(other))
        assert result.num_open == 8
    finally:
        for sock in strangers:
            sock.close()


@pytest.mark.parametrize("size", [0, 1, len(TOKEN), len(TOKEN) + echo.HEAD.size, 64, 9000])
def test_an_echo_is_never_longer_than_what_asked_for_it(room: Room, size: int) -> None:
    mesh = room.mesh()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        request = (TOKEN + echo.HEAD.pack(echo.REQUEST, 1, 2, 0)).ljust(size, b"\0")[:size]
        sock.sendto(request, ("127.0.0.1", mesh.ports.udp))
        room.run_for(0.05)
        try:
            answer = sock.recv(1 << 16)
        except BlockingIOError:
            answer = b""
    assert len(answer) == (size if size >= len(TOKEN) + echo.HEAD.size else 0)


@pytest.mark.parametrize("kind", [echo.ECHO, echo.TOO_LARGE, 77])
def test_an_answer_is_not_answered(room: Room, kind: int) -> None:
    mesh = room.mesh()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(TOKEN + echo.HEAD.pack(kind, 1, 2, 0), ("127.0.0.1", mesh.ports.udp))
        sock.sendto(b"haddock, 16 byte" + echo.HEAD.pack(echo.REQUEST, 1, 2, 0), ("127.0.0.1", mesh.ports.udp))
        room.run_for(0.05)
    assert mesh.bytes_sent == 0


def test_an_answer_comes_from_the_address_that_was_asked(room: Room) -> None:
    mesh = room.mesh()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(TOKEN + echo.HEAD.pack(echo.REQUEST, 1, 2, 0), ("127.0.0.42", mesh.ports.udp))
        room.run_for(0.05)
        sock.setblocking(False)
        assert sock.recvfrom(100)[1] == ("127.0.0.42", mesh.ports.udp)


@pytest.mark.parametrize("token", [b"", bytes(33)])
def test_a_token_without_a_proper_length_is_refused(room: Room, token: bytes) -> None:
    with pytest.raises(ValueError, match="expected 1 to 32"):
        room.mesh(token=None).admit(token)


# What it stands on


def test_who_comes_late_to_a_deadline_looks_at_the_sockets_first() -> None:
    loop, done = MeshLoop(), []
    loop.at(10.0, lambda: done.append("due"))
    assert loop.advance(9.0) == 1.0
    assert loop.advance(12.0) == 0.0
    assert done == []
    assert loop.advance(12.1) is None
    assert done == ["due"]


def test_tcp_info_is_read_by_offset_and_may_be_short() -> None:
    data = bytearray(232)
    data[0], data[2] = 1, 3
    for offset, value in ((16, 8948), (24, 5), (32, 2), (60, 9000), (68, 1500), (100, 7), (148, 900)):
        struct.pack_into("=I", data, offset, value)
    info = parse_tcp_info(bytes(data))
    assert (info.state, info.retransmits, info.snd_mss, info.unacked) == (1, 3, 8948, 5)
    assert (info.lost, info.pmtu, info.rtt_s, info.total_retrans) == (2, 9000, 0.0015, 7)
    assert info.min_rtt_s == 0.0009
    assert parse_tcp_info(bytes(data[:72])).total_retrans == 0
    assert parse_tcp_info(b"").state == 0


def test_the_kernel_tells_of_a_connection() -> None:
    with listen() as server, socket.create_connection(server.getsockname()) as sock, server.accept()[0] as peer:
        sock.sendall(b"five!")
        assert peer.recv(5) == b"five!"
        info = read_tcp_info(sock)
        assert (info.state, info.total_retrans) == (1, 0)
        assert info.snd_mss > 500
        assert read_unacked_bytes(sock) == 0


def test_the_kernel_takes_a_whole_payload_at_once_whatever_its_process_does(room: Room) -> None:
    target = room.mesh(token=None)  # it accepts nothing, and reads nothing
    rates = []
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", target.ports.tcp[0])) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * QUIET.large_bytes)
            sock.setblocking(False)
            assert sock.send(bytes(QUIET.large_bytes)) == QUIET.large_bytes
            room.run(lambda sock=sock: read_unacked_bytes(sock) == 0)
            rates.append(read_tcp_info(sock).delivery_bytes_s)
    assert max(rates) > QUIET.large_bytes / 0.02, "acknowledged at once: not after the 40 ms that an answer may take"


def reads_end(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
