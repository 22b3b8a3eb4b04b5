"""A hostile or broken member may spoil its own job: it crashes nobody, holds nobody up, writes on no terminal."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import card as sound_card
from seen import good, mesh, terms
from test_rollcall import KEY, PATIENCE_S, Agent, Call, be_silent, brief, call, card, clock  # noqa: F401  (a fixture)

from allranks import __version__
from allranks.model.card import Card, Code, Facts, Gid, Gpu, Interface, JobDirectory, RdmaPort, TestPorts
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.pair import PairResult
from allranks.preflight import rollcall
from allranks.preflight.judge import Judgement, Observations, Stranger, judge
from allranks.preflight.second_look import merge, plan_confirmation, plan_quiet_look
from allranks.preflight.vet import find_nonsense, is_plausible, vet_card
from allranks.report.text import Style, render_findings, say
from allranks.wire.connection import Connection, decode_frames, encode_frame
from allranks.wire.protocol import PROTOCOL, Goodbye, Hello, Join, Test, Tested
from allranks.wire.secret import Secret, prove_join

UTF8 = Style(is_unicode=True, has_colour=False, width=100)
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n✗ AR999 fake   node01\x9b31m\u202e"


def assert_harmless(judgement: Judgement) -> None:
    """Nothing raw on the terminal, no line that looks like a finding of ours, and a verdict that can be sent."""
    text = render_findings(judgement.findings, UTF8)
    assert not CONTROLS.search(text)
    assert not re.search("^✗ AR999", text, re.MULTILINE)
    for result in judgement.results:
        assert not CONTROLS.search(f"{result.cause} {result.node} {result.note}")
    verdict = Verdict(job="4711", attempt=0, exit_code=judgement.exit_code, findings=judgement.findings)
    assert 0 <= judgement.exit_code < 256
    encode_frame(Goodbye(exit_code=judgement.exit_code, summary="", verdict=verdict))
    assert Verdict.from_json(verdict.to_json()) == verdict


# ---- cards

NUMBERS = st.sampled_from([0, -1, 1, 2**31, -(2**63), 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXTS = st.sampled_from([ESCAPES, "", " ", "node01", "n[1-3]", "n[", "a,b", "-rf", "::1", "0", "\x00"]) | st.text(
    max_size=30
)
MAYBE = st.none() | TEXTS
LISTS = st.lists(TEXTS, max_size=4).map(tuple)
FACTS = st.builds(
    Facts,
    host_name=TEXTS,
    boot_id=MAYBE,
    kernel=MAYBE,
    interfaces=st.lists(
        st.builds(Interface, TEXTS, LISTS, st.booleans(), LISTS, st.none() | NUMBERS, st.none() | NUMBERS, kind=TEXTS),
        max_size=3,
    ).map(tuple),
    resolved=st.dictionaries(TEXTS, LISTS, max_size=3),
    port_range=st.none() | st.tuples(NUMBERS, NUMBERS),
    python_version=TEXTS,
    packages=st.dictionaries(TEXTS, TEXTS, max_size=3),
    environment=st.dictionaries(
        TEXTS | st.sampled_from(["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"]),
        TEXTS,
        max_size=4,
    ),
    limits=st.dictionaries(st.sampled_from(["memlock_bytes", "nofile", "x"]), st.none() | NUMBERS, max_size=3),
    num_cpus=NUMBERS,
    load=st.none() | FLOATS,
    places=st.lists(
        st.builds(
            JobDirectory,
            purpose=TEXTS | st.just("run directory"),
            path=TEXTS,
            free_bytes=st.none() | NUMBERS,
            nonce=MAYBE,
        ),
        max_size=3,
    ).map(tuple),
    clock_s=FLOATS,
    driver_version=MAYBE,
    code=st.none()
    | st.builds(
        Code, script=TEXTS, digest=TEXTS, beside=st.none() | st.dictionaries(TEXTS, st.none() | TEXTS, max_size=3)
    ),
    rdma_ports=st.lists(
        st.builds(
            RdmaPort,
            device=TEXTS,
            port=NUMBERS,
            state=TEXTS | st.just("ACTIVE"),
            phys_state=TEXTS,
            rate=TEXTS,
            link_layer=TEXTS | st.just("Ethernet"),
            active_mtu=st.none() | NUMBERS,
            gids=st.lists(st.builds(Gid, index=NUMBERS, kind=TEXTS, gid=TEXTS, netdev=MAYBE), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    gpus=st.lists(
        st.builds(Gpu, index=NUMBERS, uuid=TEXTS, name=TEXTS, memory_used_mib=st.none() | NUMBERS, processes=LISTS),
        max_size=2,
    ).map(tuple),
    cuda_init=st.none() | NUMBERS,
    fabric_manager=MAYBE,
    xids=LISTS,
    unread=st.dictionaries(st.sampled_from(["gpus", "interfaces", "environment", "packages"]), TEXTS, max_size=2),
)
FINDINGS = st.builds(
    Finding,
    cause=TEXTS | st.sampled_from(["AR204 mtu-blackhole", "AR599 healthy", "AR210", "AR512 node-cannot-start"]),
    severity=st.sampled_from(Severity),
    confidence=st.sampled_from(Confidence),
    node=MAYBE,
    interface=MAYBE,
    ranks=st.lists(NUMBERS, max_size=3).map(tuple),
    message=TEXTS,
    evidence=st.lists(st.builds(Evidence, seen=TEXTS, source=MAYBE), max_size=2).map(tuple),
    fix=MAYBE,
    waiting=MAYBE,
)
CARDS = st.builds(
    Card,
    host=TEXTS,
    pid=NUMBERS,
    node_index=st.none() | NUMBERS,
    num_workers=NUMBERS,
    num_gpus=NUMBERS,
    num_promised_gpus=st.none() | NUMBERS,
    problem=MAYBE,
    problem_exit=NUMBERS,
    problem_finding=st.none() | FINDINGS,
    data_interface=MAYBE,
    data_address=MAYBE | st.just("127.0.0.2"),
    endpoint=MAYBE,
    wanted_port=st.none() | NUMBERS,
    port_holder=MAYBE,
    wanted_backend=TEXTS,
    attempt=st.none() | NUMBERS,
    came_by=MAYBE,
    test_ports=st.none() | st.builds(TestPorts, tcp=st.lists(NUMBERS, max_size=3).map(tuple), udp=NUMBERS),
    facts=st.none() | FACTS,
)


@given(st.lists(CARDS, min_size=1, max_size=4), st.booleans())
def test_whatever_cards_say_they_are_judged(cards, has_sound_ones):
    everybody = dict(enumerate(cards))
    if has_sound_ones:
        everybody |= {index: sound_card(index) for index in range(10, 13)}
    seen = Observations(
        cards=everybody,
        results=tuple(mesh(4).values()),
        left={2: ESCAPES},
        silent=frozenset({0, 99}),
        strangers=(Stranger("AR406", ESCAPES, ESCAPES),),
    )
    judgement = judge(seen, terms(20))
    assert_harmless(judgement)
    for each in everybody.values():
        vetted = vet_card(each)
        assert vet_card(vetted) == vetted
        assert (vetted.problem is None) <= (each.problem is None)


ABSURD = {
    "3 MB": {"endpoint": "x" * 3_000_000},
    "a million workers": {"num_workers": 1_000_000},
    "minus one worker": {"num_workers": -1},
    "minus one GPU": {"num_gpus": -1},
    "no address": {"data_address": "eth0"},
    "an escape for an address": {"data_address": ESCAPES},
    "port 0": {"test_ports": TestPorts(tcp=(0,), udp=1)},
    "port 70000": {"test_ports": TestPorts(tcp=(40001,), udp=70000)},
    "no ports": {"test_ports": TestPorts(tcp=(), udp=1)},
    "65535 ports": {"test_ports": TestPorts(tcp=tuple(range(1, 65536)), udp=1)},
    "thousands of modules": {
        "facts": Facts(code=Code(script="a", digest="b", beside={f"m{number}.py": None for number in range(5000)}))
    },
    "a huge environment": {"facts": Facts(environment={f"NCCL_{number}": "" for number in range(5000)})},
}


@pytest.mark.parametrize("kind", ABSURD)
def test_a_card_that_makes_no_sense_is_its_nodes_problem(kind):
    own = msgspec.structs.replace(sound_card(2), **ABSURD[kind])
    judgement = judge(Observations(cards={0: sound_card(0), 1: sound_card(1), 2: own}), terms(3))
    assert brief(judgement) == [("AR512", "node03", "fail", "certain")]
    assert judgement.findings[0].message.startswith("the node report is invalid: ")
    assert judgement.exit_code == 78
    assert_harmless(judgement)


@pytest.mark.parametrize("kind", ["no address", "port 70000", "65535 ports", "a million workers"])
def test_a_card_that_makes_no_sense_stops_the_roll_call_at_once(call, kind):  # noqa: F811
    call.add(card(1))
    call.add(msgspec.structs.replace(card(2), **ABSURD[kind]))
    judgement = call.hold(3)
    assert [row[:2] for row in brief(judgement)] == [("AR512", "node03")]
    assert call.took_s < 6
    verdict = call.stop(judgement)
    assert {agent.answer.verdict for agent in call.agents} == {verdict}


def test_a_card_full_of_escapes_leaves_none_on_the_terminal(call, capfd):  # noqa: F811
    call.add(card(1, host=ESCAPES, problem=ESCAPES, facts=Facts(environment={ESCAPES: ESCAPES}, kernel=ESCAPES)))
    call.add(card(1, host=ESCAPES), secret=Secret(b"haddock", "test"))

    def check() -> None:
        if call.has("stranger") and len(call.agents) == 2:
            call.add(card(1, host=ESCAPES))  # the second with its rank
        if call.has("refused") and len(call.agents) == 3:
            call.add(card(2), delay_s=0.1)

    judgement = call.hold(3, check=check)
    assert_harmless(judgement)
    assert len(call.lines) == 2
    for line in call.lines:
        assert not CONTROLS.search(line)
        assert "\n" not in line
        say(line + ESCAPES)
    printed = capfd.readouterr().err
    assert not CONTROLS.search(printed)
    assert len(printed.splitlines()) == 2


# ---- reports

RESULTS = st.builds(
    PairResult,
    source=st.integers(0, 5) | NUMBERS,
    target=st.integers(0, 5) | NUMBERS,
    num_open=st.integers(0, 8) | NUMBERS,
    closed=st.dictionaries(st.integers(1, 65535) | NUMBERS, TEXTS | st.just("no answer in 1.6 s"), max_size=3),
    store=MAYBE,
    large_s=st.none() | FLOATS,
    large_sent=st.integers(0, 99999) | NUMBERS,
    delivery_mbit_s=st.none() | FLOATS,
    retransmits=st.integers(0, 9) | NUMBERS,
    unacked_bytes=st.integers(0, 9) | NUMBERS,
    datagrams_sent=st.sampled_from([0, 40, 200]) | NUMBERS,
    datagrams_lost=st.sampled_from([0, 14, 40, 200]) | NUMBERS,
    datagrams=st.dictionaries(st.sampled_from([1500, 9000]) | NUMBERS, st.booleans(), max_size=2),
    rtt_s=st.none() | FLOATS,
    clock_offset_s=st.none() | FLOATS,
    problem=MAYBE,
)


@given(st.lists(RESULTS, max_size=30), st.lists(RESULTS, max_size=20))
def test_whatever_is_reported_is_judged(results, quiet):
    merged = merge(results, [])
    plan_confirmation(merged)
    plan_quiet_look(merged)
    cards = {index: sound_card(index) for index in range(6)}
    judgement = judge(Observations(cards=cards, results=tuple(merged), quiet=tuple(quiet)), terms(6))
    assert_harmless(judgement)
    assert not [result for result in judgement.results if result.status == "crash"]


NONSENSE = {
    "nan": {"large_s": math.nan},
    "infinity": {"clock_offset_s": math.inf},
    "negative time": {"rtt_s": -1.0},
    "negative count": {"datagrams_lost": -1},
    "more lost than sent": {"datagrams_lost": 41},
    "port 70000": {"closed": {70000: "no answer"}},
    "a thousand ports": {"closed": dict.fromkeys(range(1, 1000), "no answer")},
    "a long reason": {"closed": {40001: "x" * 100_000}},
    "nan for a rate": {"delivery_mbit_s": math.nan},
    "more than 64 bits can hold of bytes": {"large_sent": 2**62},
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_result_that_cannot_be_is_told(kind):
    assert is_plausible(good(2, 1))
    assert not is_plausible(good(2, 1, **NONSENSE[kind]))
    assert find_nonsense(Tested(results=(good(2, 0), good(2, 1, **NONSENSE[kind])), round=1)) == (
        "its test result for node 1 is impossible"
    )


def report(*results: PairResult, **more: object) -> Callable[[Agent, Connection], None]:
    """Answer every Test with these."""

    def behave(agent: Agent, connection: Connection) -> None:
        for _ in range(3):
            test = agent.hear(connection, Test)
            connection.send(Tested(results=results, round=test.round, **more))
        agent.is_over.wait(PATIENCE_S)

    return behave


def test_a_report_that_cannot_be_ends_the_membership(call):  # noqa: F811
    call.add(card(1))
    call.add(card(2), behave=report(good(2, 0, large_s=math.nan)))
    judgement = call.hold(3)
    assert ("AR012", "node03") in [row[:2] for row in brief(judgement)]
    (finding,) = [each for each in judgement.findings if each.cause_id == "AR012"]
    assert finding.evidence[0].seen == "node03: its test result for node 0 is impossible"


def test_nobody_speaks_for_other_nodes_nor_of_those_that_do_not_exist(call):  # noqa: F811
    call.add(card(1))
    lies = [good(0, 1, num_open=0, closed={40001: "no answer in 1.6 s"}, datagrams_lost=40, datagrams={})]
    lies += [msgspec.structs.replace(lies[0], source=1, target=0), good(2, 99), good(99, 2), good(-1, 2), good(2, 2)]
    call.add(card(2), behave=report(*lies, run_dir=JobDirectory(purpose="run directory", path="/")))
    judgement = call.hold(3)
    assert {finding.node for finding in judgement.findings} <= {"node03"}
    assert {(each.source, each.target) for each in call.call.observations.results} <= {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


# ---- connections


def join_by_hand(port: int, own: Card) -> tuple[socket.socket, bytes]:
    """Connect, hear the Hello, and return the Join that would be let in."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    buffer = bytearray()
    while not (heard := decode_frames(buffer, at_most=1)):
        buffer += sock.recv(1 << 12)
    hello = heard[0]
    assert isinstance(hello, Hello)
    said = Join(protocol=PROTOCOL, version=__version__, job="4711", nonce=b"n" * 16, card=own)
    return sock, encode_frame(prove_join(KEY, said, leader_nonce=hello.nonce))


WORDS: dict[str, Callable[[bytes], list[bytes]]] = {
    "nothing": lambda join: [],
    "half a frame": lambda join: [join[: len(join) // 2]],
    "a frame of 10 MB": lambda join: [(10 << 20).to_bytes(4, "big"), b"x" * 4096],
    "http": lambda join: [b"GET / HTTP/1.1\r\n\r\n"],
    "a length and nothing": lambda join: [b"\x00\x01\x00\x00"],
    "an empty frame": lambda join: [b"\x00\x00\x00\x00"],
    "a test instead of a join": lambda join: [encode_frame(Tested(results=(), round=1))],
    "a join and garbage": lambda join: [join, b"\xff" * 64],
    "a join and half a frame": lambda join: [join, b"\x00\x00\x10\x00abc"],
}


@pytest.mark.parametrize("is_hanging_up", [True, False], ids=["and leaves", "and stays"])
@pytest.mark.parametrize("words", WORDS)
def test_whatever_a_connection_says_the_others_are_called(call, clock, monkeypatch, words, is_hanging_up):  # noqa: F811
    monkeypatch.setattr(rollcall, "ANSWER_S", 5.0)
    is_over = threading.Event()
    others: list[threading.Thread] = []

    def intrude() -> None:
        with contextlib.suppress(OSError):
            sock, join = join_by_hand(call.port, card(2, ports=TestPorts(tcp=(1,), udp=1)))
            with sock:
                for part in WORDS[words](join):
                    sock.sendall(part)
                if not is_hanging_up:
                    is_over.wait(PATIENCE_S)

    def check() -> None:
        if not others:
            others.append(threading.Thread(target=intrude, daemon=True))
            others[0].start()
            call.add(card(1), delay_s=0.05)
        if call.has_joined("node02") or time.monotonic() > began_s + PATIENCE_S:
            clock.go_on()

    began_s = time.monotonic()
    judgement = call.hold(3, check=check, join_s=0.3)
    assert time.monotonic() - began_s < 45  # who stays does so for PATIENCE_S
    is_over.set()
    assert judgement.findings  # node03 never came properly
    assert {finding.node for finding in judgement.findings if finding.severity == "fail"} <= {"node03"}
    assert {finding.cause_id for finding in judgement.findings} <= {"AR001", "AR012", "AR406"}
    assert_harmless(judgement)
    others[0].join(PATIENCE_S)


TEST_WORDS = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "half a frame": encode_frame(Tested(results=(good(2, 0),), round=1))[:-3],
    "a frame too long": b"\xff\xff\xff\xff",
    "a hello": encode_frame(Hello(protocol=PROTOCOL, version="x", job="4711", nonce=b"n")),
}


@pytest.mark.parametrize("words", TEST_WORDS)
def test_whatever_a_member_says_to_a_test_the_others_are_tested(call, words):  # noqa: F811
    def behave(agent: Agent, connection: Connection) -> None:
        agent.hear(connection, Test)
        connection.sock.sendall(TEST_WORDS[words])
        be_silent(agent, connection)

    call.add(card(1))
    call.add(card(2), behave=behave)
    judgement = call.hold(3)
    assert call.took_s < 45  # who is silent is so for PATIENCE_S
    assert {finding.node for finding in judgement.findings} == {"node03"}
    assert [each.source for each in call.call.observations.results if {each.source, each.target} == {0, 1}]
    assert_harmless(judgement)


def test_a_flood_of_reports_holds_nobody_up(call):  # noqa: F811
    def behave(agent: Agent, connection: Connection) -> None:
        test = agent.hear(connection, Test)
        flood = encode_frame(Tested(results=(), round=test.round)) * 2000
        connection.sock.setblocking(True)
        with contextlib.suppress(OSError):
            for _ in range(20):
                connection.sock.sendall(flood)
        be_silent(agent, connection)

    call.add(card(1))
    call.add(card(2), behave=behave)
    judgement = call.hold(3)
    assert call.took_s < 45  # who is silent is so for PATIENCE_S
    assert_harmless(judgement)
    assert isinstance(call, Call)
