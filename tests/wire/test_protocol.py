"""Frames: what goes in comes out, however the bytes are cut, and nothing that a stranger sends does harm."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from itertools import accumulate

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.card import Card, Facts, Gpu, Interface, JobDirectory, RdmaPort, TestPorts
from allranks.model.errors import WireError
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.pair import Effort, PairResult, PairTarget
from allranks.model.past import Crash, History, Past
from allranks.wire.connection import Connection, decode_frames, encode_frame
from allranks.wire.protocol import (
    PROTOCOL,
    Beat,
    Contact,
    Ended,
    Goodbye,
    Hello,
    Interrupted,
    Join,
    Member,
    Message,
    Order,
    Ping,
    Plan,
    Probe,
    Refused,
    Relay,
    Resign,
    Stop,
    Stopped,
    Test,
    Tested,
    Try,
    TryTarget,
    Welcome,
    WorkerEnd,
)
from cards import make_card

NUMBERS = st.integers(-(2**62), 2**62)
TEXTS = st.text(max_size=40)
AGES = st.floats(0, 1e15)
WORDS = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=40)
SEQS = st.integers(-1, 2**62)
BYTES = st.binary(max_size=40)
FLOATS = st.floats(allow_nan=False)
MAYBE_TEXT = st.none() | TEXTS

TEXT_LISTS = st.lists(TEXTS, max_size=3).map(tuple)
PORTS = st.builds(TestPorts, tcp=st.lists(NUMBERS, max_size=3).map(tuple), udp=NUMBERS)
FINDINGS = st.builds(
    Finding,
    cause=TEXTS,
    severity=st.sampled_from(Severity),
    confidence=st.sampled_from(Confidence),
    node=MAYBE_TEXT,
    ranks=st.lists(NUMBERS, max_size=3).map(tuple),
    message=TEXTS,
    evidence=st.lists(st.builds(Evidence, seen=TEXTS, source=MAYBE_TEXT), max_size=2).map(tuple),
    waiting=MAYBE_TEXT,
)
PLACES = st.builds(JobDirectory, purpose=TEXTS, path=TEXTS, free_bytes=st.none() | NUMBERS, problem=MAYBE_TEXT)
FACTS = st.builds(
    Facts,
    host_name=TEXTS,
    interfaces=st.lists(st.builds(Interface, TEXTS, TEXT_LISTS, st.booleans(), TEXT_LISTS), max_size=2).map(tuple),
    resolved=st.dictionaries(TEXTS, TEXT_LISTS, max_size=2),
    port_range=st.none() | st.tuples(NUMBERS, NUMBERS),
    environment=st.dictionaries(TEXTS, TEXTS, max_size=3),
    limits=st.dictionaries(TEXTS, st.none() | NUMBERS, max_size=2),
    load=st.none() | FLOATS,
    places=st.lists(PLACES, max_size=2).map(tuple),
    gpus=st.lists(st.builds(Gpu, index=NUMBERS, uuid=TEXTS, name=TEXTS, processes=TEXT_LISTS), max_size=2).map(tuple),
    rdma_ports=st.lists(
        st.builds(RdmaPort, device=TEXTS, port=NUMBERS, state=TEXTS, phys_state=TEXTS, rate=TEXTS, link_layer=TEXTS),
        max_size=2,
    ).map(tuple),
    unread=st.dictionaries(TEXTS, TEXTS, max_size=2),
)
CARDS = st.builds(
    Card,
    host=TEXTS,
    pid=NUMBERS,
    node_index=st.none() | NUMBERS,
    num_workers=NUMBERS,
    num_gpus=NUMBERS,
    problem=MAYBE_TEXT,
    problem_exit=NUMBERS,
    problem_finding=st.none() | FINDINGS,
    data_address=MAYBE_TEXT,
    attempt=st.none() | NUMBERS,
    test_ports=st.none() | PORTS,
    facts=st.none() | FACTS,
)


def in_a_row(nodes: list[tuple[str, int, str]]) -> tuple[Member, ...]:
    """Members whose ranks have no gaps, of names, numbers of workers and hosts."""
    firsts = accumulate((num_workers for _, num_workers, _ in nodes), initial=0)
    return tuple(
        Member(name=name, first_rank=first, num_workers=num_workers, host=host)
        for (name, num_workers, host), first in zip(nodes, firsts, strict=False)
    )


MEMBERS = st.lists(st.tuples(TEXTS, NUMBERS, TEXTS), max_size=4).map(in_a_row)
ENDS = st.builds(
    WorkerEnd,
    rank=NUMBERS,
    node=TEXTS,
    exit_code=NUMBERS,
    time_s=FLOATS,
    ended_by_us=st.booleans(),
    message=MAYBE_TEXT,
    traceback=MAYBE_TEXT,
    stderr_tail=MAYBE_TEXT,
    stderr_path=MAYBE_TEXT,
    could_not_start=st.booleans(),
)
CALLS = st.builds(
    CallSeen, group=WORDS, seq=NUMBERS, op=WORDS, sizes=st.lists(st.tuples(NUMBERS), max_size=2).map(tuple)
)
RANK_BEATS = st.builds(
    RankBeat,
    rank=NUMBERS,
    state=st.sampled_from(ProcessState),
    silent_s=st.none() | AGES,
    step=st.none() | NUMBERS,
    groups=st.lists(st.builds(GroupSeen, name=WORDS, enqueued=SEQS), max_size=2).map(tuple),
    calls=st.lists(CALLS, max_size=2).map(tuple),
    lags=st.lists(st.tuples(TEXTS, NUMBERS, NUMBERS), max_size=2).map(tuple),
)
LINKS = st.builds(
    LinkSeen, own_address=TEXTS, peer_address=WORDS, unacked_bytes=SEQS.map(abs), stalled_s=AGES, retransmits=NUMBERS
)
TRIES = st.builds(
    TrySeen,
    target=SEQS.map(abs),
    network=st.sampled_from(["data", "control"]),
    connects=st.booleans(),
    carries=st.none() | st.booleans(),
)
NODE_BEATS = st.builds(
    NodeBeat,
    node_index=NUMBERS,
    generation=NUMBERS,
    ranks=st.lists(RANK_BEATS, max_size=2).map(tuple),
    links=st.lists(LINKS, max_size=2).map(tuple),
    tries=st.lists(TRIES, max_size=2).map(tuple),
    try_ports=st.tuples(NUMBERS, NUMBERS),
)
TRY_TARGETS = st.builds(TryTarget, node_index=NUMBERS, network=TEXTS, address=TEXTS, port=NUMBERS)
CONTACTS = st.builds(Contact, node=NUMBERS, name=TEXTS, control_address=TEXTS, data_address=TEXTS, port=NUMBERS)
CRASHES = st.builds(
    Crash, cause=TEXTS, ranks=st.lists(NUMBERS, max_size=3).map(tuple), step=st.none() | NUMBERS, what=TEXTS
)
PASTS = st.builds(
    Past,
    history=st.builds(
        History,
        restarts_left=NUMBERS,
        retries_errors=st.booleans(),
        crashes=st.lists(CRASHES, max_size=2),
        faults=st.dictionaries(NUMBERS, NUMBERS, max_size=2),
        checkpoint=st.none() | NUMBERS,
    ),
    survived=st.lists(FINDINGS, max_size=2).map(tuple),
    excluded=st.lists(NUMBERS, max_size=3).map(tuple),
)
MESSAGES: dict[type, st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, protocol=NUMBERS, version=TEXTS, job=TEXTS, nonce=BYTES),
    Join: st.builds(
        Join,
        protocol=NUMBERS,
        version=TEXTS,
        job=TEXTS,
        nonce=BYTES,
        card=CARDS,
        proof=BYTES,
    ),
    Welcome: st.builds(Welcome, proof=BYTES),
    Refused: st.builds(Refused, reason=TEXTS, is_final=st.booleans()),
    Probe: st.just(Probe()),
    Test: st.builds(
        Test,
        token=BYTES,
        targets=st.lists(
            st.builds(PairTarget, node_index=NUMBERS, address=TEXTS, ports=PORTS, store_port=st.none() | NUMBERS),
            max_size=3,
        ).map(tuple),
        effort=st.builds(Effort, num_ports=NUMBERS, large_bytes=NUMBERS, num_datagrams=NUMBERS),
        within_s=FLOATS,
        is_one_by_one=st.booleans(),
        own_index=NUMBERS,
        own_address=MAYBE_TEXT,
        run_dir_nonce=MAYBE_TEXT,
    ),
    Tested: st.builds(
        Tested,
        round=NUMBERS,
        results=st.lists(
            st.builds(
                PairResult,
                source=NUMBERS,
                target=NUMBERS,
                num_open=NUMBERS,
                closed=st.dictionaries(NUMBERS, TEXTS, max_size=2),
                store=MAYBE_TEXT,
                large_s=st.none() | FLOATS,
                datagrams=st.dictionaries(NUMBERS, st.booleans(), max_size=2),
                clock_offset_s=st.none() | FLOATS,
                problem=MAYBE_TEXT,
            ),
            max_size=3,
        ).map(tuple),
        run_dir=st.none() | PLACES,
    ),
    Plan: st.builds(
        Plan,
        members=MEMBERS,
        node_index=NUMBERS,
        attempt=NUMBERS,
        store_address=TEXTS,
        store_port=NUMBERS,
        backend=TEXTS,
        backend_reason=TEXTS,
        generation=NUMBERS,
        max_restarts=NUMBERS,
        nodes=st.lists(NUMBERS, max_size=4).map(tuple),
        electors=st.lists(st.lists(NUMBERS, max_size=4).map(tuple), max_size=2).map(tuple),
        successors=st.lists(CONTACTS, max_size=2).map(tuple),
        past=st.none() | PASTS,
    ),
    Beat: st.builds(Beat, node=NODE_BEATS, ping_ns=NUMBERS, held_ns=NUMBERS),
    Ping: st.builds(Ping, sent_ns=NUMBERS, confirmed=NUMBERS),
    Try: st.builds(Try, targets=st.lists(TRY_TARGETS, max_size=2).map(tuple), within_s=FLOATS),
    Order: st.builds(Order, at_step=NUMBERS, why=TEXTS, leaves=st.booleans()),
    Ended: st.builds(Ended, end=ENDS, age_s=FLOATS, generation=NUMBERS),
    Interrupted: st.builds(Interrupted, signum=NUMBERS),
    Relay: st.builds(Relay, signum=NUMBERS),
    Stop: st.builds(
        Stop,
        signum=NUMBERS,
        at_once=st.lists(NUMBERS, max_size=3).map(tuple),
        grace_s=st.none() | FLOATS,
        saving_s=st.none() | FLOATS,
    ),
    Stopped: st.builds(Stopped, generation=NUMBERS),
    Resign: st.builds(Resign, past=PASTS),
    Goodbye: st.builds(
        Goodbye,
        exit_code=NUMBERS,
        summary=TEXTS,
        verdict=st.none()
        | st.builds(
            Verdict,
            job=TEXTS,
            attempt=NUMBERS,
            exit_code=NUMBERS,
            findings=st.lists(FINDINGS, max_size=3).map(tuple),
        ),
    ),
}
ANY_MESSAGE = st.one_of(list(MESSAGES.values()))


def test_every_message_of_the_protocol_is_tested_here():
    assert set(MESSAGES) == set(Message.__subclasses__())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_comes_out_as_it_went_in(kind):
    @given(MESSAGES[kind])
    def holds(message: Message) -> None:
        buffer = bytearray(encode_frame(message))
        assert decode_frames(buffer) == [message]
        assert buffer == b""

    holds()


@settings(deadline=None)
@given(st.lists(ANY_MESSAGE, max_size=6), st.data())
def test_frames_decode_the_same_wherever_the_bytes_are_cut(messages, data):
    stream = b"".join(map(encode_frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer, decoded = bytearray(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer += stream[start:end]
        decoded += decode_frames(buffer)
    assert decoded == messages
    assert buffer == b""


MANY = 4096
ALL = tuple(Member(name=f"gpu-b{i:04}", first_rank=8 * i, num_workers=8, host=f"gpu-b{i:04}") for i in range(MANY))
PLAN = Plan(members=ALL, node_index=0, attempt=0, store_address="10.0.0.1", store_port=29500, backend="nccl",
            backend_reason="a GPU for each rank")  # fmt: skip


def test_the_plans_of_many_nodes_are_encoded_once():
    plans = [msgspec.structs.replace(PLAN, node_index=index) for index in range(MANY)]
    began_s = time.process_time()
    frames = [encode_frame(plan) for plan in plans]
    assert time.process_time() - began_s < 0.5
    assert max(map(len, frames)) < 12 << 10
    assert decode_frames(bytearray(frames[0] + frames[-1])) == [plans[0], plans[-1]]


def test_plans_that_share_their_members_are_told_apart():
    plans = [msgspec.structs.replace(PLAN, node_index=1, generation=generation) for generation in (0, 1, 0)]
    assert [decode_frames(bytearray(encode_frame(plan))) for plan in plans] == [[plan] for plan in plans]


@pytest.mark.parametrize(
    ("common", "why"),
    [
        (zlib.compress(bytes(5 << 20)), "a Plan of more than 4194304 bytes, or a truncated one"),
        (zlib.compress(bytes(1000))[:-9], "a Plan of more than 4194304 bytes, or a truncated one"),
        (b"no zlib", "a Plan that cannot be decompressed"),
        (zlib.compress(b"\xc1"), "MessagePack data is malformed"),
    ],
)
def test_a_plan_that_is_none_is_a_wire_error(common, why):
    payload = msgspec.msgpack.encode({"type": "plan", "node_index": 1, "common": common})
    with pytest.raises(WireError, match=why):
        decode_frames(bytearray(frame(payload)))


def join_of(**changes: object) -> bytes:
    said = {"type": "join", "protocol": PROTOCOL, "version": "1.0", "job": "train", "nonce": b"n"}
    return msgspec.msgpack.encode(said | {"card": {"host": "node01"}, "proof": b"p"} | changes)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (zlib.compress(bytes(1 << 20)), "a Join of more than 524288 bytes, or a truncated one"),
        (zlib.compress(bytes(1000))[:-9], "a Join of more than 524288 bytes, or a truncated one"),
        (b"x, but no zlib", "a Join that cannot be decompressed"),
        (zlib.compress(join_of()), "missing required field"),
    ],
)
def test_a_join_that_is_none_is_a_wire_error(sent, why):
    with pytest.raises(WireError, match=why):
        decode_frames(bytearray(frame(sent)))


@pytest.mark.parametrize("pack", [bytes, zlib.compress])
def test_a_join_of_another_version_is_named_whatever_its_card_is(pack):
    payload = join_of(card=b"of another kind", protocol=PROTOCOL + 1, version="9.9")
    with pytest.raises(WireError, match=r"a message of allranks 9\.9 "):
        decode_frames(bytearray(frame(pack(payload))))


def test_the_card_of_a_node_with_many_gpus_takes_a_few_kilobytes():
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{i:08x}-5a1b-8c0d-2e4f6a8b0c1d", name="NVIDIA H100") for i in range(8))
    environment = {f"NCCL_SETTING_{i:02}": f"the value of setting {i}" for i in range(80)}
    join = Join(protocol=PROTOCOL, version="1.0", job="train", nonce=b"n", proof=b"p",
                card=make_card(1, facts=Facts(gpus=gpus, environment=environment)))  # fmt: skip
    sent = encode_frame(join)
    assert len(sent) < len(msgspec.msgpack.encode(join.card)) / 5
    assert decode_frames(bytearray(sent)) == [join]


def test_frames_decode_the_same_byte_by_byte():
    messages = [Interrupted(signum=3), Stopped(), Goodbye(exit_code=1, summary="rank 3 failed \u2717")]
    buffer, decoded = bytearray(), []
    for byte in b"".join(map(encode_frame, messages)):
        buffer.append(byte)
        decoded += decode_frames(buffer)
    assert decoded == messages


def test_at_most_leaves_the_next_frame_in_the_buffer():
    buffer = bytearray(encode_frame(Interrupted(signum=1)) + encode_frame(Interrupted(signum=2)))
    assert decode_frames(buffer, at_most=1) == [Interrupted(signum=1)]
    assert buffer == encode_frame(Interrupted(signum=2))
    assert decode_frames(buffer, at_most=1) == [Interrupted(signum=2)]


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS | BYTES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
# Maps that look like ours: the right tag, the right names, the wrong values.
ALMOST_OURS = st.builds(
    lambda tag, fields: msgspec.msgpack.encode({"type": tag, **fields}),
    st.sampled_from([kind.__struct_config__.tag for kind in MESSAGES]),
    st.dictionaries(
        st.sampled_from(
            [
                "protocol",
                "version",
                "job",
                "nonce",
                "card",
                "members",
                "end",
                "rank",
                "proof",
                "targets",
                "results",
                "common",
            ]
        ),
        ANYTHING,
        max_size=5,
    ),
)


@given(
    st.binary(max_size=200)
    | st.binary(max_size=200).map(frame)
    | ANYTHING.map(msgspec.msgpack.encode).map(frame)
    | ALMOST_OURS.map(frame)
)
@example(b"GET / HTTP/1.1\r\nHost: node01\r\n\r\n")
@example(b"SSH-2.0-OpenSSH_9.6\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
@example(frame(b""))
@example(frame(b"\x81\xa4type\xa4hel\xff"))
@example(frame(b"\xdd\xff\xff\xff\xff"))
@example(frame(b"\x82\xa4type\xa4plan\xa7members\xdd\xff\xff\xff\xff"))
def test_arbitrary_bytes_are_messages_or_a_wire_error(data):
    with contextlib.suppress(WireError):
        for message in decode_frames(bytearray(data)):
            assert isinstance(message, Message)


@given(ANY_MESSAGE, st.data())
def test_a_truncated_frame_waits_for_the_rest(message, data):
    whole = encode_frame(message)
    part = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
    before = bytes(part)
    assert decode_frames(part) == []
    assert part == before


def test_a_message_longer_than_four_mebibytes_is_not_sent():
    with pytest.raises(WireError) as refused:
        encode_frame(Goodbye(exit_code=1, summary="x" * (4 << 20)))
    assert str(refused.value) == "a Goodbye of 4194363 bytes is longer than 4194304"


def test_a_frame_longer_than_four_mebibytes_is_not_waited_for():
    with pytest.raises(WireError) as refused:
        decode_frames(bytearray(b"\x00\x40\x00\x01"))
    assert str(refused.value) == ("a frame of 4194305 bytes, more than 4194304: the peer is not allranks")


def test_a_frame_of_exactly_four_mebibytes_passes():
    message = Goodbye(exit_code=1, summary="x" * (4194304 - 59))
    encoded = encode_frame(message)
    assert len(encoded) == 4 + 4194304
    assert decode_frames(bytearray(encoded)) == [message]


Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of one loopback connection with small kernel buffers."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        near_sock = socket.socket()
        near_sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        near_sock.connect(listener.getsockname())
        far_sock, _ = listener.accept()
    near, far = Connection(near_sock, peer="far"), Connection(far_sock, peer="near")
    yield near, far
    near.close()
    far.close()


def wait_readable(connection: Connection, deadline_s: float = 10) -> None:
    ready, _, _ = select.select([connection], [], [], deadline_s)
    assert ready, f"nothing came from {connection.peer} within {deadline_s} s"


def receive_all(connection: Connection, deadline_s: float = 10) -> list[Message]:
    """Everything until the other side closes."""
    messages: list[Message] = []
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        wait_readable(connection, deadline_s)
        try:
            messages += connection.receive()
        except ConnectionError:
            return messages
    raise AssertionError(f"{connection.peer} did not close within {deadline_s} s")


def test_big_messages_reach_a_slow_reader_whole(pair):
    near, far = pair
    messages = [Goodbye(exit_code=index, summary=str(index) * (3 << 20)) for index in range(3)]
    for message in messages:
        near.send(message)
    assert near.flush()
    received: list[Message] = []
    until_s = time.monotonic() + 60
    while len(received) < 3 and time.monotonic() < until_s:
        received += far.receive()
        near.flush()
    assert received == messages
    assert not near.flush()


def test_a_small_message_leaves_nothing_unsent(pair):
    near, far = pair
    near.send(Interrupted(signum=7))
    assert not near.flush()
    wait_readable(far)
    assert far.receive() == [Interrupted(signum=7)]
    assert far.receive() == []


def test_a_peer_that_closes_is_a_connection_error_with_its_name(pair):
    near, far = pair
    near.close()
    wait_readable(far)
    with pytest.raises(ConnectionError, match=r"^near closed the connection$"):
        far.receive()


def test_messages_that_arrive_with_the_close_are_delivered_first(pair):
    near, far = pair
    near.send(Stopped())
    near.send(Goodbye(exit_code=0, summary=""))
    near.close()
    assert receive_all(far) == [Stopped(), Goodbye(exit_code=0, summary="")]


def test_a_frame_cut_off_by_the_close_is_a_connection_error(pair):
    near, far = pair
    near.sock.sendall(encode_frame(Interrupted(signum=7))[:-1])
    near.close()
    assert receive_all(far) == []


def test_sending_to_a_peer_that_is_gone_is_a_connection_error(pair):
    near, far = pair
    far.close()
    with pytest.raises(ConnectionError, match=r"^far: (Connection reset by peer|Broken pipe)$"):  # noqa: PT012
        for _ in range(1000):
            near.send(Goodbye(exit_code=0, summary="x" * 10000))
            wait_readable(near)


def test_garbage_on_a_connection_is_a_wire_error(pair):
    near, far = pair
    near.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_readable(far)
    with pytest.raises(WireError, match="the peer is not allranks"):
        far.receive()


def test_bytes_that_came_with_the_handshake_are_the_first_messages(pair):
    near, far = pair
    near.sock.sendall(encode_frame(Stopped()) + encode_frame(Stop(signum=15))[:5])
    wait_readable(far)
    assert far.receive(at_most=1) == [Stopped()]
    near.sock.sendall(encode_frame(Stop(signum=15))[5:])
    wait_readable(far)
    assert far.receive() == [Stop(signum=15)]


def test_the_own_address_is_plain(pair):
    near, _ = pair
    assert near.own_address == "127.0.0.1"


def test_the_kernel_is_told_when_a_silent_peer_is_gone(pair):
    near, _ = pair
    near.expect_alive_within(10)
    assert near.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10000
    assert near.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
    assert near.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 2
    assert near.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
    assert near.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_closing_twice_is_fine(pair):
    near, _ = pair
    near.close()
    near.close()


def test_deeply_nested_bytes_are_refused():
    payload = b"\x82\xa4type\xa7stopped\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        decode_frames(bytearray(len(payload).to_bytes(4, "big") + payload))


def test_what_was_said_before_a_reset_is_delivered(pair):
    near, far = pair
    near.send(Stopped())
    near.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    wait_readable(far)
    assert far.receive() == [Stopped()]


def test_messages_are_taken_one_by_one(pair):
    near, far = pair
    near.sock.sendall(encode_frame(Stopped()) + encode_frame(Goodbye(exit_code=0, summary="")))
    wait_readable(far)
    assert far.receive(at_most=1) == [Stopped()]
    assert far.receive(at_most=1) == [Goodbye(exit_code=0, summary="")]
