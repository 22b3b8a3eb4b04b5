"""The handshake on real sockets: who is accepted, who is rejected and why, and what an agent does not believe."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from allranks import __version__
from allranks.model.errors import NodeFaultError, StoppedBySignal, WireError
from allranks.wire.accept import turn_away
from allranks.wire.connection import Connection, decode_frames, encode_frame
from allranks.wire.leader_port import Hint, bind_port, collect_hints
from allranks.wire.protocol import PROTOCOL, Goodbye, Hello, Message, Probe, Refused, Stop, Stopped, Welcome
from allranks.wire.secret import Secret
from allranks.wire.seek import Search
from conftest import wait_until
from wire_leader import CARD, KEY, PATIENCE_S, WRONG_KEY, Leader, Peer, join_after


def seek(
    *ports: int,
    hints: Callable[[], list[list[Hint]]] | None = None,
    job: str = "train",
    attempt: int | None = 0,
    secret: Secret | None = KEY,
    deadline_s: float = PATIENCE_S,
    told: list[str] | None = None,
    check_signals: Callable[[], None] = lambda: None,
) -> Connection:
    return Search(
        hints or (lambda: [[Hint("127.0.0.1", port, "test") for port in ports]]),
        job=job,
        secret=lambda: secret,
        card=msgspec.structs.replace(CARD, attempt=attempt),
    ).wait(
        deadline_s=deadline_s,
        on_wait=lambda _, obstacle: told.append(obstacle) if told is not None else None,
        check_signals=check_signals,
    )


def test_an_agent_with_the_right_key_is_accepted():
    with Leader() as leader, contextlib.closing(seek(leader.port)) as connection:
        assert connection.peer == f"127.0.0.1:{leader.port}"
        wait_until(lambda: leader.accepted, "the card")
        card, peer = leader.accepted[0]
        assert card == msgspec.structs.replace(CARD, attempt=0, came_by=f"127.0.0.1:{leader.port}", age_s=card.age_s)
        assert peer.peer == "127.0.0.1"
        peer.send(Goodbye(exit_code=0, summary=""))
        received: list[Message] = []
        wait_until(lambda: received.extend(connection.receive()) or received, "the Goodbye")
        assert received == [Goodbye(exit_code=0, summary="")]
        assert leader.rejected == []


def test_what_follows_the_welcome_at_once_is_not_lost():
    with Leader() as leader:
        leader.after_welcome = (Stop(signum=15), Stopped())
        with contextlib.closing(seek(leader.port)) as connection:
            received: list[Message] = []
            wait_until(lambda: received.extend(connection.receive()) or len(received) == 2, "Stop and Stopped")
            assert received == [Stop(signum=15), Stopped()]


def test_many_agents_are_accepted_at_once():
    with Leader() as leader:
        connections: list[Connection] = []
        threads = [threading.Thread(target=lambda: connections.append(seek(leader.port))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(connections) == 8
        wait_until(lambda: len(leader.accepted) == 8, "the eighth card")
        for connection in connections:
            connection.close()


def test_an_agent_that_does_not_know_the_attempt_is_accepted():
    with Leader(attempt=3) as leader, contextlib.closing(seek(leader.port, attempt=None)):
        wait_until(lambda: leader.accepted, "the card")


def test_the_wrong_key_is_refused_with_the_place_of_the_right_one():
    with Leader() as leader:
        with pytest.raises(WireError) as refused:
            seek(leader.port, secret=WRONG_KEY)
        assert str(refused.value) == (
            f"the leader at 127.0.0.1:{leader.port} rejected this node: it does not know this job's secret "
            "(the leader's comes from test)"
        )
        wait_until(lambda: leader.rejected, "the refusal")
        assert leader.rejected == [
            "127.0.0.1 was rejected: it does not know this job's secret (the leader's comes from test)"
        ]
        assert leader.accepted == []


def test_a_left_over_of_an_earlier_start_is_refused():
    with Leader(attempt=2) as leader:
        with pytest.raises(WireError) as refused:
            seek(leader.port, attempt=1)
        assert str(refused.value) == (
            f"the leader at 127.0.0.1:{leader.port} rejected this node: it belongs to attempt 1, this is attempt 2; "
            "it is left over from an earlier one"
        )
        assert leader.accepted == []


ESCAPED = r"\x1b[2J\n" * 6 + r"\x1b[2J..."
REFUSALS = {
    "other job": (
        lambda hello: join_after(hello, job="eval"),
        Refused(reason="it belongs to job eval, this is job train", is_final=False),
    ),
    "other protocol": (
        lambda hello: msgspec.structs.replace(join_after(hello), protocol=99, version="9.9"),
        Refused(
            reason=f"it sent a message of allranks 9.9 (protocol 99), here is {__version__} (protocol {PROTOCOL}); "
            "install the same version on all nodes",
            is_final=True,
        ),
    ),
    "no proof": (
        lambda hello: msgspec.structs.replace(join_after(hello), proof=b""),
        Refused(reason="it does not know this job's secret (the leader's comes from test)", is_final=True),
    ),
    "a card that the proof is not about": (
        lambda hello: msgspec.structs.replace(join_after(hello), card=msgspec.structs.replace(CARD, num_workers=600)),
        Refused(reason="it does not know this job's secret (the leader's comes from test)", is_final=True),
    ),
    "escapes for a version": (
        lambda hello: msgspec.structs.replace(join_after(hello), protocol=99, version="\x1b[2J\n" * 100),
        Refused(
            reason=f"it sent a message of allranks {ESCAPED} (protocol 99), here is "
            f"{__version__} (protocol {PROTOCOL}); install the same version on all nodes",
            is_final=True,
        ),
    ),
    "no Join": (
        lambda hello: Stopped(),
        Refused(reason="it sent Stopped, expected Join", is_final=True),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_peer_that_says_the_wrong_thing_is_told_why(case):
    make, answer = REFUSALS[case]
    with Leader() as leader, Peer(leader.port) as peer:
        peer.sock.sendall(encode_frame(make(peer.read_hello())))
        assert peer.read() == answer
        assert peer.read() is None
        wait_until(lambda: leader.rejected, "the refusal")
        assert leader.rejected == [f"127.0.0.1 was rejected: {answer.reason}"]
        assert leader.accepted == []


def test_a_join_that_comes_byte_by_byte_is_heard():
    with Leader() as leader, Peer(leader.port) as peer:
        for byte in encode_frame(join_after(peer.read_hello())):
            peer.sock.sendall(bytes([byte]))
        assert isinstance(peer.read(), Welcome)


def test_a_replayed_join_is_refused():
    with Leader() as leader:
        with Peer(leader.port) as peer:
            recorded = encode_frame(join_after(peer.read_hello()))
            peer.sock.sendall(recorded)
            assert isinstance(peer.read(), Welcome)
        with Peer(leader.port) as thief:
            thief.read_hello()
            thief.sock.sendall(recorded)
            assert thief.read() == Refused(
                reason="it does not know this job's secret (the leader's comes from test)", is_final=True
            )
        wait_until(lambda: leader.accepted, "the card")
        assert len(leader.accepted) == 1


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (
            b"GET / HTTP/1.1\r\n\r\n",
            "it sent a frame of 1195725856 bytes, more than 524288: the peer is not allranks",
        ),
        (b"\x00\x00\x00\x01\xc1", "it sent a frame that is not an allranks message: "),
    ],
)
def test_garbage_is_rejected_and_the_next_peer_accepted(garbage, reason):
    with Leader() as leader:
        with Peer(leader.port) as peer:
            peer.read_hello()
            peer.sock.sendall(garbage)
            answer = peer.read()
            assert isinstance(answer, Refused)
            assert answer.is_final
        with contextlib.closing(seek(leader.port)):
            wait_until(lambda: leader.accepted, "the card")
        assert len(leader.rejected) == 1
        assert leader.rejected[0].startswith(f"127.0.0.1 was rejected: {reason}")


def test_a_peer_that_hangs_up_is_rejected_by_name():
    with Leader() as leader:
        with Peer(leader.port) as peer:
            peer.read_hello()
        wait_until(lambda: leader.rejected, "the refusal")
        assert leader.rejected == ["127.0.0.1 was rejected: 127.0.0.1 closed the connection"]


def test_a_silent_peer_is_disconnected_after_two_seconds():
    with Leader() as leader, Peer(leader.port) as peer:
        began_s = time.monotonic()
        peer.read_hello()
        peer.sock.sendall(b"\x00")  # a first byte is no identity
        why = "it did not identify itself within 2 s"
        assert peer.read() == Refused(reason=why, is_final=False)
        assert peer.read() is None
        assert time.monotonic() - began_s > 1.9
        wait_until(lambda: leader.rejected, "the rejection")
        assert leader.rejected == [f"127.0.0.1 was rejected: {why}"]


def test_a_member_that_is_sent_away_again_is_told_why():
    with Leader() as leader, Peer(leader.port) as peer:
        peer.sock.sendall(encode_frame(join_after(peer.read_hello())))
        assert isinstance(peer.read(), Welcome)
        wait_until(lambda: leader.accepted, "the card")
        turn_away(leader.accepted[0][1], "node rank 1 has already joined")
        assert peer.read() == Refused(reason="node rank 1 has already joined", is_final=True)
        assert peer.read() is None


@contextlib.contextmanager
def listening(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A stranger on a port of its own; `talk` has each of its connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.05)
        is_over = threading.Event()

        def run() -> None:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    accepted, _ = listener.accept()
                    accepted.settimeout(PATIENCE_S)
                    with accepted, contextlib.suppress(OSError):
                        talk(accepted)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join(PATIENCE_S)


def say_nothing(sock: socket.socket) -> None:
    sock.recv(1)  # until the agent hangs up


def say_http(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def hang_up(sock: socket.socket) -> None:
    """Accept, and no more."""


def say_stopped(sock: socket.socket) -> None:
    sock.sendall(encode_frame(Stopped()))


def lie(sock: socket.socket) -> None:
    """A leader that does not know the key, and says Welcome to everybody."""
    sock.sendall(encode_frame(Hello(protocol=PROTOCOL, version=__version__, job="train", nonce=b"L" * 16)))
    sock.recv(1 << 16)
    sock.sendall(encode_frame(Welcome(proof=b"0" * 32)))
    sock.recv(1)


def test_nonces_do_not_repeat():
    nonces: list[bytes] = []

    def record(sock: socket.socket) -> None:
        sock.sendall(encode_frame(Hello(job="train", nonce=b"L" * 16)))
        nonces.extend(each.nonce for each in decode_frames(bytearray(sock.recv(1 << 16))))

    def stop_at_the_third_join() -> None:
        if len(nonces) >= 3:
            raise StoppedBySignal(2)

    with listening(record) as port, pytest.raises(StoppedBySignal):
        seek(port, check_signals=stop_at_the_third_join)
    with Leader() as leader:
        for _ in range(100):
            with Peer(leader.port) as peer:
                nonces.append(peer.read_hello().nonce)
    assert len(set(nonces)) == len(nonces) >= 103
    assert {len(nonce) for nonce in nonces} == {16}


STRANGERS = {
    "silent": (say_nothing, "a program listens there but sends nothing"),
    "http": (say_http, "a frame of 1213486160 bytes, more than 4194304: the peer is not allranks"),
    "hangs up": (hang_up, "it closed the connection"),
    "wrong first words": (say_stopped, "the program there is not an allranks leader"),
    "wrong key": (lie, "it does not know this job's secret"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_passed_over(kind):
    talk, _ = STRANGERS[kind]
    with Leader() as leader, listening(talk) as port, contextlib.closing(seek(port, leader.port)) as connection:
        assert connection.peer == f"127.0.0.1:{leader.port}"


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_alone_is_named_when_time_is_up(kind):
    talk, obstacle = STRANGERS[kind]
    with listening(talk) as port:
        with pytest.raises(NodeFaultError) as given_up:
            seek(port, deadline_s=1.4)
        assert str(given_up.value) == (
            f"no leader of job train within 1 s; last try: 127.0.0.1:{port} (test): {obstacle}; "
            "check that the first node is up and that its port is open from here"
        )


def test_strangers_who_say_nothing_hold_nobody_up():
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(Leader())
        silent = [stack.enter_context(listening(say_nothing)) for _ in range(10)]
        hints = [[Hint("127.0.0.1", port, "test")] for port in (*silent, leader.port)]
        began_s = time.monotonic()
        connection = seek(hints=lambda: hints)
        with contextlib.closing(connection):
            assert connection.peer == f"127.0.0.1:{leader.port}"
        assert time.monotonic() - began_s < 15  # one after another, they would have cost 20 s


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_better_address_that_answers_late_is_waited_for_a_moment(monkeypatch, is_in_time):
    monkeypatch.setattr("allranks.wire.seek.BETTER_S", PATIENCE_S if is_in_time else 0.2)

    def answer_late(sock: socket.socket) -> None:
        if is_in_time:
            time.sleep(0.6)  # the next address has answered
            with socket.create_connection(("127.0.0.1", leader.port)) as beyond:
                sock.sendall(beyond.recv(1 << 16))
                beyond.sendall(sock.recv(1 << 16))
                sock.sendall(beyond.recv(1 << 16))
                sock.recv(1)
        else:
            say_nothing(sock)

    with Leader() as leader, listening(answer_late) as port:
        hints = [[Hint("127.0.0.1", number, "test")] for number in (port, leader.port)]
        with contextlib.closing(seek(hints=lambda: hints)) as connection:
            assert connection.peer == f"127.0.0.1:{port if is_in_time else leader.port}"


def refuse_with_escapes(sock: socket.socket) -> None:
    sock.sendall(encode_frame(Hello(protocol=PROTOCOL, version=__version__, job="train", nonce=b"L" * 16)))
    sock.recv(1 << 16)
    sock.sendall(encode_frame(Refused(reason="\x1b[2J\n" + "x" * 10_000, is_final=True)))
    sock.recv(1)


def test_what_a_stranger_says_for_a_refusal_cannot_speak_to_the_terminal():
    with listening(refuse_with_escapes) as port, pytest.raises(WireError) as refused:
        seek(port)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_probe_is_let_go_without_a_word():
    with Leader() as leader:
        with Peer(leader.port) as peer:
            peer.read_hello()
            peer.sock.sendall(encode_frame(Probe()))
            assert peer.read() is None
        with contextlib.closing(seek(leader.port)):
            wait_until(lambda: leader.accepted, "the card")
        assert leader.rejected == []


def test_a_web_server_is_passed_over():
    # It waits for the client to speak, as the agent waits for the leader.
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with Leader() as leader, contextlib.closing(seek(server.server_port, leader.port)) as connection:
                assert connection.peer == f"127.0.0.1:{leader.port}"
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


def closed_port() -> int:
    with bind_port(0) as sock:
        return int(sock.getsockname()[1])


def test_a_closed_port_is_passed_over():
    port = closed_port()
    with Leader() as leader, contextlib.closing(seek(port, leader.port)) as connection:
        assert connection.peer == f"127.0.0.1:{leader.port}"


def test_a_host_without_a_name_is_passed_over():
    with Leader() as leader:
        hints = [
            [Hint("no-such-host.invalid", leader.port, "test")],
            [Hint("127.0.0.1", leader.port, "test")],
        ]
        connection = seek(hints=lambda: hints)
        with contextlib.closing(connection):
            assert connection.peer == f"127.0.0.1:{leader.port}"


def test_a_leader_with_another_key_lets_nobody_in():
    with Leader(secret=WRONG_KEY) as leader:
        with pytest.raises(WireError, match="it does not know this job's secret"):
            seek(leader.port)
        assert leader.accepted == []


def test_each_agent_finds_its_own_leader_among_neighbours():
    with Leader(job="train") as first, Leader(job="eval", port=first.port) as second:
        assert first.port != second.port
        for job, leader in (("train", first), ("eval", second)):
            connection = seek(
                hints=lambda job=job: collect_hints(
                    None, job=job, named=[Hint("127.0.0.1", first.port, "test")], guessed=[]
                ),
                job=job,
            )
            with contextlib.closing(connection):
                assert connection.peer == f"127.0.0.1:{leader.port}"
            wait_until(lambda leader=leader: len(leader.accepted) == 1, "the card")


def test_a_leader_that_comes_late_is_found():
    port = closed_port()
    told: list[str] = []
    with contextlib.ExitStack() as stack:

        def start_leader() -> None:
            stack.enter_context(Leader(port=port))

        timer = threading.Timer(1.5, start_leader)
        timer.start()
        with contextlib.closing(seek(port, told=told)):
            timer.join(PATIENCE_S)
    assert told[0] == f"127.0.0.1:{port} (test): connection refused"


def test_the_deadline_names_the_job_and_the_last_obstacle():
    port = closed_port()
    with pytest.raises(NodeFaultError) as given_up:
        seek(port, deadline_s=0.2)
    assert str(given_up.value) == (
        f"no leader of job train within 0 s; last try: 127.0.0.1:{port} (test): connection refused; "
        "check that the first node is up and that its port is open from here"
    )
    assert given_up.value.exit_code == 75


def test_a_key_that_never_appears_is_the_last_obstacle():
    with Leader() as leader:
        with pytest.raises(NodeFaultError, match=r"\(test\): the run directory does not have the job's secret yet;"):
            seek(leader.port, secret=None, deadline_s=0.2)
        assert leader.accepted == []


def test_a_leader_of_another_job_alone_is_named():
    with Leader(job="eval") as leader:
        with pytest.raises(NodeFaultError) as given_up:
            seek(leader.port, deadline_s=0.2)
        assert f"127.0.0.1:{leader.port} (test): leader of another job, eval;" in str(given_up.value)


def test_a_signal_ends_the_search():
    calls = []

    def stop_at_the_third_look() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise StoppedBySignal(2)

    with pytest.raises(StoppedBySignal) as stopped:
        seek(closed_port(), check_signals=stop_at_the_third_look)
    assert stopped.value.exit_code == 130


def test_a_version_with_other_fields_is_named():
    with Leader() as leader, Peer(leader.port) as peer:
        peer.read_hello()
        payload = msgspec.msgpack.encode({"type": "join", "protocol": 99, "version": "9.9", "who": "node02"})
        peer.sock.sendall(len(payload).to_bytes(4, "big") + payload)
        answer = peer.read()
    assert isinstance(answer, Refused)
    assert f"a message of allranks 9.9 (protocol 99), here is {__version__} (protocol {PROTOCOL})" in answer.reason


def test_without_any_hint_the_search_ends_at_its_deadline():
    with pytest.raises(NodeFaultError, match="no leader has announced itself"):
        seek(hints=list, deadline_s=0.2)


def test_a_host_that_cannot_be_a_name_is_passed_over():
    with pytest.raises(NodeFaultError, match=r"a\.\.b"):
        seek(hints=lambda: [[Hint("a..b", 29500, "--rdzv-endpoint")]], deadline_s=0.2)
