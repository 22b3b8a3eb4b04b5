"""The roll call over real sockets: who comes, who leaves when, who is a stranger, and what all are told."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from seen import PORTS, brief, facts, terms

from allranks import __version__
from allranks.model.card import Card, Facts, TestPorts
from allranks.model.errors import AllranksError, NodeFaultError, StoppedBySignal, WireError
from allranks.model.finding import Verdict
from allranks.model.pair import FULL, PairResult
from allranks.preflight import look, rollcall, second_look
from allranks.preflight.attend import Attendance
from allranks.preflight.judge import Judgement
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.rollcall import RollCall, dismiss, stop
from allranks.preflight.roster import Roster
from allranks.wire.accept import Acceptor, Rejection, Rejections
from allranks.wire.connection import LENGTH, Connection, decode_frames, encode_frame
from allranks.wire.leader_port import Hint, bind_port
from allranks.wire.protocol import PROTOCOL, Goodbye, Hello, Join, Message, Plan, Probe, Refused, Stopped, Test, Tested
from allranks.wire.secret import Secret, prove_join
from allranks.wire.seek import Search
from cards import make_card

KEY = Secret(b"swordfish", "test")
PATIENCE_S = 60
"""How long a test waits for what must come."""
SHORT_S = 2.5
"""How long a leader waits for a node that does not come; all others come within it, also on a busy machine."""


def card(index: int | None, *, host: str | None = None, ports: TestPorts | None = None, **more: object) -> Card:
    fields = {
        "host": host or f"node{(index or 0) + 1:02d}",
        "pid": 800 + (index or 0),
        "num_workers": 2,
        "data_address": f"127.0.0.{(index or 0) + 2}",
        "test_ports": ports,
    }
    return make_card(None if index is None else index + 1, **(fields | more))


# ---- the roster


class NoConnection:
    """Stands for a peer where nothing is said to it."""


def roster_of(num_nodes: int, *indices: int, **more: object) -> Roster:
    roster = Roster(terms(num_nodes, **more), cards={0: card(0)})
    for index in indices:
        assert roster.admit(card(index), NoConnection()) == index
    return roster


def test_nodes_that_say_their_rank_get_it():
    roster = roster_of(4, 3, 1)
    assert {index: card.host for index, card in roster.cards.items()} == {0: "node01", 3: "node04", 1: "node02"}


def test_nodes_that_do_not_say_their_rank_are_counted_in_order_of_arrival():
    roster = roster_of(4, 1)
    assert roster.admit(card(None, host="late"), NoConnection()) == 2
    assert not roster.is_complete
    assert roster.admit(card(None, host="later"), NoConnection()) == 3
    assert roster.is_complete
    assert {index: card.host for index, card in roster.cards.items()} == {
        0: "node01",
        1: "node02",
        2: "late",
        3: "later",
    }


def test_a_node_that_disconnected_leaves_its_number_to_the_next_one():
    roster = roster_of(4, 1, 2, 3)
    gone, _ = roster.remove(2)
    assert (gone.host, roster.is_complete, roster.missing()) == ("node03", False, (2,))
    assert roster.admit(card(None, host="late"), NoConnection()) == 2
    assert roster.admit(card(None, host="later"), NoConnection()) == "all 4 nodes have already joined"


def test_what_nodes_have_in_common_is_kept_once():
    def card_with(number: int, debug: str) -> Card:
        own = Facts(boot_id=f"boot-{number}", environment={"NCCL_DEBUG": debug}, packages={"torch": "2.9.0"})
        return card(number, facts=own)

    *cards, odd = card_with(1, "INFO"), card_with(2, "INFO"), card_with(3, "WARN")
    roster = roster_of(4)
    for each in (*cards, odd):
        roster.admit(each, NoConnection())
    assert [roster.cards[index] for index in (1, 2, 3)] == [*cards, odd]
    first, second, third = (roster.cards[index].facts for index in (1, 2, 3))
    assert first.environment is second.environment is not third.environment
    assert first.packages is second.packages is third.packages


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            1,
            "node rank 1 has already joined (node02, pid 801); give each node its own --node-rank (JobSet: one "
            "replicated Job with replicas: 1), and each job its own --rdzv-id",
        ),
        (
            0,
            "node rank 0 has already joined (node01, pid 800); give each node its own --node-rank (JobSet: one "
            "replicated Job with replicas: 1), and each job its own --rdzv-id",
        ),
        (2, "node rank 2 does not exist in a job of 2 nodes (--nnodes)"),
        (-1, "node rank -1 does not exist in a job of 2 nodes (--nnodes)"),
        (None, "all 2 nodes have already joined"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(index, text):
    roster = roster_of(2, 1)
    assert roster.admit(card(index, host="stray"), NoConnection()) == text
    assert [card.host for card in roster.cards.values()] == ["node01", "node02"]


@pytest.mark.parametrize(
    ("num_nodes", "names", "here", "missing"),
    [
        (2, (), (), "node rank 1"),
        (4, (), (2,), "node ranks 1, 3"),
        (20, (), (), "node ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 ..."),
        (17, (), (), "node ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
        (6, tuple(f"node0{number}" for number in range(1, 7)), (1, 2), "node[04-06]"),
        (6, tuple(f"node0{number}" for number in range(1, 7)), (1, 2, 3, 4), "node06"),
    ],
    ids=["one", "two", "many", "sixteen", "hosts", "host"],
)
def test_who_is_missing_is_named(num_nodes, names, here, missing):
    assert roster_of(num_nodes, *here, node_names=names).name_missing() == missing


# ---- real sockets


class Agent(threading.Thread):
    """Another node's agent: it looks for the leader and attends, or does what the test wants it to."""

    def __init__(
        self,
        port: int,
        own: Card,
        *,
        secret: Secret = KEY,
        behave: Callable[[Agent, Connection], None] | None = None,
        delay_s: float = 0.0,
        first_ports: tuple[int, ...] = (),
    ) -> None:
        super().__init__(daemon=True)
        self.mesh = Mesh()
        self.own = own if own.test_ports else card_with(own, self.mesh.ports)
        self.answer: Plan | Goodbye | None = None
        self.error: Exception | None = None
        self.is_in = threading.Event()
        self.is_over = threading.Event()
        self.messages: list[Message] = []
        self._hints = [[Hint("127.0.0.1", each, "test")] for each in (*first_ports, port)]
        self._secret, self._behave, self._delay_s = secret, behave, delay_s

    def run(self) -> None:
        time.sleep(self._delay_s)
        connection = None
        try:
            connection = Search(
                lambda: self._hints,
                job="4711",
                secret=lambda: self._secret,
                card=self.own,
            ).wait(
                deadline_s=PATIENCE_S,
                on_wait=lambda *_: None,
                check_signals=self._check,
            )
            self.is_in.set()
            if self._behave is not None:
                self._behave(self, connection)
            else:
                self.answer = self.attendance(connection).wait()
        except (AllranksError, OSError) as exc:
            self.error = exc
        finally:
            if connection is not None:
                connection.close()
            self.mesh.close()

    def attendance(self, connection: Connection) -> Attendance:
        return Attendance(
            connection,
            self.own,
            mesh=self.mesh,
            look_at_run_dir=lambda: None,
            patience_s=PATIENCE_S,
            check_signals=self._check,
        )

    def _check(self) -> None:
        if self.is_over.is_set():
            raise StoppedBySignal(15)

    def hear(self, connection: Connection, kind: type[Message]) -> Message:
        """Wait for a message of this kind."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            self._check()
            for message in connection.receive(at_most=1):
                self.messages.append(message)
                if isinstance(message, kind):
                    return message
            time.sleep(0.005)
        raise AssertionError(f"no {kind.__name__} came")


def card_with(own: Card, ports: TestPorts) -> Card:
    from msgspec.structs import replace

    return replace(own, test_ports=ports)


class HeldClock:
    """The leader's time, in place of its `time`: it stands still until the test lets it go on."""

    def __init__(self) -> None:
        self._at_s, self._since_s = time.monotonic(), math.inf
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return self._at_s + max(0.0, time.monotonic() - self._since_s)

    def pass_by(self, seconds: float) -> None:
        self._at_s += seconds

    def go_on(self) -> None:
        self._since_s = min(self._since_s, time.monotonic())


class Call:
    """The leader's side, in the test's own thread."""

    def __init__(self) -> None:
        self.listener, self.side = bind_port(0), bind_port(0)
        self.port, self.side_port = (int(each.getsockname()[1]) for each in (self.listener, self.side))
        self.mesh = Mesh()
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.agents: list[Agent] = []
        self.call: RollCall | None = None
        self.took_s = 0.0

    def add(self, own: Card, **more: object) -> Agent:
        agent = Agent(self.port, own, **more)
        self.agents.append(agent)
        agent.start()
        return agent

    def hold(
        self, num_nodes: int, *, own: Card | None = None, check: Callable[[], None] = lambda: None, **more: object
    ) -> Judgement:
        about = terms(num_nodes, **({"join_s": PATIENCE_S, "store_port": self.port} | more))
        acceptors = [
            Acceptor(each, job="4711", attempt=about.attempt, secret=KEY) for each in (self.listener, self.side)
        ]
        self.call = RollCall(
            about,
            own or card(0, ports=self.mesh.ports),
            acceptors=acceptors,
            mesh=self.mesh,
            say=self.lines.append,
            on_event=lambda event, **fields: self.events.append((event, fields)),
            check_signals=check,
        )
        began_s = time.monotonic()
        try:
            return self.call.hold()
        finally:
            self.took_s = time.monotonic() - began_s

    def has_joined(self, node: str) -> bool:
        return any(event == "joined" and fields["node"] == node for event, fields in self.events)

    def has(self, event: str, count: int = 1) -> bool:
        return sum(each == event for each, _ in self.events) >= count

    def stop(self, judgement: Judgement) -> Verdict:
        """Give everybody the verdict, as a caller does."""
        assert self.call is not None
        verdict = Verdict(job="4711", attempt=0, exit_code=judgement.exit_code, findings=judgement.findings)
        stop(self.call.roster.peers, verdict)
        self.join_agents()
        return verdict

    def join_agents(self) -> None:
        for agent in self.agents:
            agent.join(PATIENCE_S)
            assert not agent.is_alive()

    def close(self) -> None:
        for agent in self.agents:
            agent.is_over.set()
        self.join_agents()
        for peer in self.call.roster.peers.values() if self.call else ():
            peer.close()
        self.mesh.close()
        self.listener.close()
        self.side.close()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """A roll call whose tests have a deadline of a good second."""
    monkeypatch.setattr(look, "TESTS_S", 1.0)
    monkeypatch.setattr(rollcall, "ANSWER_S", 0.3)
    monkeypatch.setattr(second_look, "CONFIRM_S", 0.8)
    made = Call()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """The time of the leader, for tests in which an agent that comes late on a busy machine would be silent."""
    monkeypatch.setattr(rollcall, "time", clock := HeldClock())
    return clock


def test_all_come_and_reach_each_other(call):
    for index in (1, 2, 3):
        call.add(card(index))
    judgement = call.hold(4)
    assert judgement.findings == ()
    assert judgement.is_go
    assert sorted((each.source, each.target) for each in call.call.observations.results) == [
        (a, b) for a in range(4) for b in range(4) if a != b
    ]
    assert {each.num_open for each in call.call.observations.results} == {8}
    assert {each.store for each in call.call.observations.results if each.target == 0} == {""}
    assert sorted(call.call.roster.peers) == [1, 2, 3]
    # On a busy machine an agent may connect to two hints; the connection that it drops is no more than an event.
    assert [event for event, _ in call.events if event not in ("joined", "stranger")] == ["leading"]
    assert call.lines == []
    assert call.took_s < 25


def test_of_many_nodes_each_sends_one_packet_of_the_mtu(call, monkeypatch):
    monkeypatch.setattr(look, "FULL_UP_TO", 2)
    monkeypatch.setattr(look, "SPARSE_TESTS_S", 2.0)
    on_ens = {"data_interface": "ens1f1"}
    for index in range(1, 6):
        call.add(card(index, facts=facts(index), **on_ens))
    judgement = call.hold(6, own=card(0, ports=call.mesh.ports, facts=facts(0), **on_ens))
    assert judgement.findings == ()
    results = call.call.observations.results
    probed = [each for each in results if each.datagrams]
    assert (len(results), [each.source for each in sorted(probed, key=lambda each: each.source)]) == (12, [*range(6)])
    assert {size for each in probed for size in each.datagrams} == {9000}
    assert {each.large_sent for each in probed} == {0}
    assert [event for event, _ in call.events if event == "second_look"] == []


def test_the_listener_is_given_back_listening(call):
    call.add(card(1))
    call.hold(2)
    assert call.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    with socket.create_connection(("127.0.0.1", call.port), timeout=5), contextlib.closing(call.listener.accept()[0]):
        pass


def test_no_socket_is_left(call):
    gc.collect()
    made = Call()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for index in (1, 2):
        made.add(card(index))
    made.call, kept = None, made
    during = made.hold(3)
    made.stop(during)
    gc.collect()
    # The listeners and the mesh of the leader are still open, as before; what the agents brought is gone.
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    kept.close()


def test_everybody_hears_the_same_verdict(call):
    for index in (1, 2):
        call.add(card(index))
    call.add(card(3, problem="train.py: no such script", problem_exit=2))
    judgement = call.hold(4)
    assert brief(judgement) == [("AR512", "node04", "fail", "certain")]
    verdict = call.stop(judgement)
    summary = "AR512 node-cannot-start: node04: train.py: no such script"
    assert [agent.answer for agent in call.agents] == [Goodbye(exit_code=2, summary=summary, verdict=verdict)] * 3


def test_a_problem_of_the_leaders_own_node_stops_everybody(call):
    call.add(card(1))
    own = card(0, ports=call.mesh.ports, problem="ens1f1 is down", problem_exit=78)
    judgement = call.hold(2, own=own)
    assert brief(judgement) == [("AR512", "node01", "fail", "certain")]
    call.stop(judgement)
    assert call.agents[0].answer.exit_code == 78


# ---- phase 1


def test_a_missing_node_is_named_and_the_verdict_comes_in_time(call):
    came = call.add(card(1))
    judgement = call.hold(3, join_s=5)
    assert brief(judgement) == [("AR001", "node03", "fail", "certain")]
    assert re.fullmatch(
        r"the node's agent did not join within [5-9] s; 2 of 3 nodes joined", judgement.findings[0].message
    )
    assert judgement.exit_code == 75
    waiting = r"still waiting for node03 after [345] s; 2 of 3 nodes have joined"
    assert any(re.fullmatch(waiting, line) for line in call.lines)
    assert 5 < call.took_s < 30
    verdict = call.stop(judgement)
    assert came.answer.verdict == verdict


def test_the_wait_goes_on_while_nodes_arrive(call, clock):
    # The last one comes after join_s, but within a third of it after the one before.
    coming = [(1, 0.0), (2, 4.0), (3, 1.0)]

    def check() -> None:
        if len(call.agents) == sum(event == "joined" for event, _ in call.events):
            if coming:
                index, later_s = coming.pop(0)
                clock.pass_by(later_s)
                call.add(card(index))
            else:
                clock.go_on()

    judgement = call.hold(4, join_s=4.5, check=check)
    assert judgement.findings == ()
    assert sorted(call.call.roster.cards) == [0, 1, 2, 3]


def test_fewer_nodes_go_on_where_the_flag_allows_it(call, clock):
    call.add(card(2))
    judgement = call.hold(3, min_nodes=2, join_s=0.3, check=lambda: call.has_joined("node03") and clock.go_on())
    assert judgement.is_go
    assert sorted(call.call.roster.cards) == [0, 2]
    assert call.lines == ["continuing with 2 nodes (--nnodes 2:3)"]


def test_fewer_nodes_than_the_flag_allows_are_too_few(call):
    judgement = call.hold(3, min_nodes=2, join_s=0.3, node_names=())
    assert brief(judgement) == [("AR001", "node rank 1, node rank 2", "fail", "certain")]


def leave(agent: Agent, connection: Connection) -> None:
    """Go as soon as it is in."""


def test_a_node_that_came_and_left_is_waited_for_again(call):
    call.add(card(1), behave=leave)

    def come_again() -> None:
        if call.has("left") and len(call.agents) == 1:
            call.add(card(1, host="node02-again"))
            call.add(card(2))

    judgement = call.hold(3, check=come_again)
    assert judgement.findings == ()
    assert call.call.roster.cards[1].host == "node02-again"
    assert call.lines == ["node02 joined, then disconnected"]


def test_a_node_that_left_for_good_is_named(call, clock):
    call.add(card(1), behave=leave)
    judgement = call.hold(2, join_s=0.3, check=lambda: call.has("left") and clock.go_on())
    assert brief(judgement) == [("AR012", "node02", "fail", "certain")]
    # As the kernel has it: reset, where the leader's last word was still unread.
    seen = judgement.findings[0].evidence[0].seen
    assert re.fullmatch(r"node02: 127\.0\.0\.1( closed the connection|: Connection reset by peer)", seen)
    assert judgement.exit_code == 75


def test_a_node_that_left_stops_nobody_where_the_flag_allows_fewer(call, clock):
    call.add(card(1), behave=leave)
    call.add(card(2))

    def check() -> None:
        if call.has("left") and call.has_joined("node03"):
            clock.go_on()

    assert call.hold(3, min_nodes=2, join_s=0.3, check=check).is_go


# ---- phase 2


def leave_at_test(agent: Agent, connection: Connection) -> None:
    agent.hear(connection, Test)


def report_nothing_and_leave(agent: Agent, connection: Connection) -> None:
    test = agent.hear(connection, Test)
    connection.send(Tested(results=(), round=test.round))


def leave_at_second_test(agent: Agent, connection: Connection) -> None:
    """Report a failure that asks for a confirmation, and go when it is ordered."""
    test = agent.hear(connection, Test)
    closed = {PORTS[0]: "connected, but no answer in 1.6 s"}
    connection.send(
        Tested(
            results=tuple(
                PairResult(source=test.own_index, target=target.node_index, num_open=7, closed=closed)
                for target in test.targets
            ),
            round=test.round,
        )
    )
    agent.hear(connection, Test)


def report_late(agent: Agent, connection: Connection) -> None:
    """Ask for a confirmation, and send the report of the first round again before the one of the second."""
    leave_at_second_test(agent, connection)
    (first, second) = [each for each in agent.messages if isinstance(each, Test)]
    refused = tuple(PairResult(source=2, target=target, closed={PORTS[0]: "refused"}) for target in (0, 1))
    connection.send(Tested(results=refused, round=first.round))
    time.sleep(0.1)
    fine = tuple(PairResult(source=2, target=each.node_index, num_open=8, store="") for each in second.targets)
    connection.send(Tested(results=fine, round=second.round))
    be_silent(agent, connection)


def test_a_late_report_counts_for_no_later_round(call):
    call.add(card(1))
    call.add(card(2), behave=report_late)
    call.hold(3)
    of_it = [each for each in call.call.observations.results if each.source == 2]
    assert [(each.target, each.num_open, each.closed) for each in of_it] == [(0, 8, {}), (1, 8, {})]
    assert ("late_report", {"node": "node03", "round": 1}) in call.events


def be_silent(agent: Agent, connection: Connection) -> None:
    agent.is_over.wait(PATIENCE_S)


@pytest.mark.parametrize("behave", [leave_at_test, leave_at_second_test])
def test_a_node_that_leaves_during_the_tests_is_named(call, behave):
    call.add(card(1))
    call.add(card(2), behave=behave)
    judgement = call.hold(3)
    assert brief(judgement)[0] == ("AR012", "node03", "fail", "certain")
    assert {finding.node for finding in judgement.findings} == {"node03"}
    assert call.took_s < 30
    verdict = call.stop(judgement)
    assert call.agents[0].answer.verdict == verdict


def test_a_node_that_leaves_after_its_report_does_no_harm(call):
    call.add(card(1))
    call.add(card(2), behave=report_nothing_and_leave)
    judgement = call.hold(3)
    # Noticed or not, nobody else is blamed.
    assert {finding.node for finding in judgement.findings} <= {"node03"}
    assert call.took_s < 30


def test_a_node_that_does_not_report_is_named_at_the_deadline(call):
    call.add(card(1))
    call.add(card(2), behave=be_silent)
    judgement = call.hold(3)
    assert brief(judgement) == [("AR001", "node03", "fail", "certain")]
    assert judgement.findings[0].message == "the node's agent joined, then stopped answering"
    assert call.took_s < 30
    call.agents[1].is_over.set()
    verdict = call.stop(judgement)
    assert call.agents[0].answer.verdict == verdict


def test_a_node_that_answers_nobody_is_named(call):
    """Its agent reports, but nothing answers at the address that its card gives."""
    call.add(card(1))
    call.add(card(2, ports=TestPorts(tcp=tuple(range(1, 9)), udp=9)))
    call.add(card(3))
    judgement = call.hold(4)
    assert [row[1] for row in brief(judgement)] == ["node03"]


# ---- strangers


def once(call: Call, agent: Agent, then: Callable[[], None]) -> Callable[[], None]:
    """A check that does something once, when an agent has been refused."""
    done: list[bool] = []

    def check() -> None:
        if agent.error is not None and not done:
            done.append(True)
            then()

    return check


def test_the_second_of_two_nodes_with_one_rank_is_refused(call):
    first = call.add(card(1))
    second: list[Agent] = []

    def send_the_others() -> None:
        if first.is_in.is_set() and not second:
            second.append(call.add(card(1, host="twin")))
        if second and second[0].error is not None and len(call.agents) == 2:
            call.add(card(2))

    judgement = call.hold(3, check=send_the_others)
    why = (
        "node rank 1 has already joined (node02, pid 801); give each node its own --node-rank (JobSet: one "
        "replicated Job with replicas: 1), and each job its own --rdzv-id"
    )
    assert call.lines == [f"twin was rejected: {why}"]
    assert ("refused", {"node": "twin", "reason": why}) in call.events
    assert brief(judgement) == [("AR405", "twin", "warn", "certain")]
    assert judgement.is_go
    assert call.call.roster.cards[1].host == "node02"
    assert isinstance(second[0].error, WireError)


def test_a_left_over_of_an_earlier_attempt_is_refused(call):
    stale = call.add(card(1, host="stale", attempt=0))
    check = once(call, stale, lambda: call.add(card(1, attempt=1)))
    judgement = call.hold(2, attempt=1, check=check)
    assert brief(judgement) == [("AR404", "stale", "warn", "certain")]
    assert judgement.is_go
    assert "it belongs to attempt 0, this is attempt 1" in str(stale.error)


def test_somebody_without_the_secret_is_refused(call):
    stranger = call.add(card(1, host="stranger"), secret=Secret(b"haddock", "test"))
    judgement = call.hold(2, check=once(call, stranger, lambda: call.add(card(1))))
    text = "127.0.0.1 was rejected: it does not know this job's secret (the leader's comes from test)"
    assert call.lines == [text]
    assert brief(judgement) == [("AR406", "stranger", "warn", "certain")]
    assert call.call.roster.cards[1].host == "node02"


def talk(port: int, *said: bytes, hold_s: float = 0.0) -> Callable[[], None]:
    """Connect, say something, and hang up; once."""
    done: list[bool] = []

    def check() -> None:
        if not done:
            done.append(True)

            def run() -> None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                    sock.recv(1 << 12)
                    for part in said:
                        sock.sendall(part)
                    time.sleep(hold_s)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 12):
                        pass

            threading.Thread(target=run, daemon=True).start()

    return check


def test_garbage_is_refused(call):
    say_it = talk(call.port, b"GET / HTTP/1.1\r\n\r\n")

    def check() -> None:
        say_it()
        if call.has("stranger") and not call.agents:
            call.add(card(1))

    judgement = call.hold(2, check=check)
    assert brief(judgement) == [("AR406", "127.0.0.1", "warn", "certain")]
    assert judgement.is_go


def test_a_probe_leaves_no_trace(call):
    probes = [talk(call.port, encode_frame(Probe())) for _ in range(3)]
    began_s = time.monotonic()

    def check() -> None:
        for probe in probes:
            probe()
        if time.monotonic() - began_s > 0.5 and not call.agents:
            call.add(card(1))

    judgement = call.hold(2, check=check)
    assert judgement.findings == ()
    assert [event for event, _ in call.events] == ["leading", "joined"]
    assert call.lines == []


def test_a_port_scan_is_one_line_and_one_event_for_each_kind(call):
    """Of junk with any length of a frame, HTTP, TLS and SSH: none is a message of ours."""
    words = [LENGTH.pack(2**24 + 65537 * number) for number in range(40)]
    words += [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-OpenSSH_9.6\r\n"]
    words += [LENGTH.pack(5) + b"\xc1junk"]
    for number in range(40):  # they do not know the key, whatever they call themselves
        own = card(1, host=f"name-{number}")
        join = Join(protocol=PROTOCOL, version=__version__, job="4711", nonce=bytes(16), card=own, proof=bytes(32))
        words.append(encode_frame(join))

    def scan() -> None:
        for each in words:
            with socket.create_connection(("127.0.0.1", call.port), timeout=PATIENCE_S) as sock:
                sock.sendall(each)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(1 << 12):
                        pass

    scanner = threading.Thread(target=scan)

    def check() -> None:
        if scanner.ident is None:
            scanner.start()
        elif not scanner.is_alive() and not call.agents:
            call.add(card(1))

    judgement = call.hold(2, check=check)
    assert call.lines == [
        "127.0.0.1 was rejected: it sent a frame of 16777216 bytes, more than 524288: the peer is not allranks",
        "127.0.0.1 was rejected: it does not know this job's secret (the leader's comes from test)",
    ]
    assert len([event for event, _ in call.events if event == "stranger"]) == 2
    assert brief(judgement) == [("AR406", "127.0.0.1", "warn", "certain"), ("AR406", "name-0", "warn", "certain")]


def test_of_many_hosts_that_are_rejected_some_are_named():
    rejections = Rejections()
    told = [
        rejections.is_news(Rejection(kind=kind, cause_id=None, host="x", address=address, reason=""))
        for address in (f"10.0.{n // 256}.{n % 256}" for n in range(1000))
        for kind in ("secret", "version")
    ]
    assert sum(told) == 2 * 32


def test_the_side_port_lets_in_where_the_main_port_is_not_answered(call):
    with socket.create_server(("127.0.0.1", 0)) as swallowing:
        agent = Agent(call.side_port, card(1), first_ports=(swallowing.getsockname()[1],))
        call.agents.append(agent)
        agent.start()
        judgement = call.hold(2)
        assert judgement.is_go
        assert call.took_s < 20


# ---- signals


def test_a_signal_to_the_leader_in_phase_1_reaches_everybody(call):
    agent = call.add(card(1))

    def stop_when_it_is_in() -> None:
        if call.has("joined"):
            raise StoppedBySignal(15)

    with pytest.raises(StoppedBySignal):
        call.hold(3, check=stop_when_it_is_in)
    call.join_agents()
    assert agent.answer == Goodbye(exit_code=143, summary="stopped by SIGTERM")


def test_a_signal_to_the_leader_in_phase_2_reaches_everybody(call):
    def hear_all(agent: Agent, connection: Connection) -> None:
        agent.hear(connection, Test)
        agent.answer = agent.hear(connection, Goodbye)

    agent = call.add(card(1), behave=hear_all)

    def stop_when_it_tests() -> None:
        if any(isinstance(message, Test) for message in agent.messages):
            raise StoppedBySignal(2)

    with pytest.raises(StoppedBySignal):
        call.hold(2, check=stop_when_it_tests)
    call.join_agents()
    assert agent.answer == Goodbye(exit_code=130, summary="stopped by SIGINT")


def test_a_signal_to_an_agent_ends_its_wait(call):
    agent = call.add(card(1))

    def stop_the_agent() -> None:
        if call.has("joined"):
            agent.is_over.set()

    judgement = call.hold(3, join_s=SHORT_S, check=stop_the_agent)
    assert isinstance(agent.error, StoppedBySignal)
    assert ("AR012", "node02", "fail", "certain") in brief(judgement)


# ---- the leader dies


TEST = Test(token=b"t" * 16, targets=(), effort=FULL, within_s=0.2)
LAST_WORDS: dict[str, tuple[Message, ...]] = {
    "after the welcome": (),
    "after the test was ordered": (TEST,),
    "after a second look was ordered": (TEST, TEST),
}


@pytest.mark.parametrize("phase", LAST_WORDS)
def test_an_agent_whose_leader_dies_says_so(phase):
    with bind_port(0) as listener, selectors.DefaultSelector() as selector:
        accepted: list[Connection] = []
        acceptor = Acceptor(listener, job="4711", attempt=0, secret=KEY)
        acceptor.attach(selector, on_peer=lambda peer, _: accepted.append(peer), on_rejected=print, say=print)
        agent = Agent(listener.getsockname()[1], card(1))
        agent.start()
        until_s = time.monotonic() + PATIENCE_S
        while not accepted and time.monotonic() < until_s:
            for key, mask in selector.select(0.05):
                key.data(mask)
        peer = accepted[0]
        for message in LAST_WORDS[phase]:
            peer.send(message)
            reported: list[Message] = []
            while not reported and time.monotonic() < until_s:
                reported = peer.receive()
            assert isinstance(reported[0], Tested)
        peer.close()
        acceptor.detach()
        agent.join(PATIENCE_S)
    assert isinstance(agent.error, NodeFaultError)
    assert re.match(
        r"the leader disconnected before the job started: 127.0.0.1:\d+ closed the connection$", str(agent.error)
    )


def test_an_agent_that_is_refused_after_all_says_why(call):
    def refuse(agent: Agent, connection: Connection) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
            near = socket.create_connection(server.getsockname())
            made = stack.enter_context(contextlib.closing(Connection(near, peer="leader")))
            far = stack.enter_context(server.accept()[0])
            far.sendall(encode_frame(Refused(reason="too late", is_final=True)))
            agent.attendance(made).wait()

    agent = call.add(card(1), behave=refuse)
    call.hold(2, join_s=0.5)
    call.join_agents()
    assert isinstance(agent.error, WireError)
    assert str(agent.error) == "the leader rejected this node: too late"


# ---- farewell


def test_dismissing_a_peer_that_is_gone_is_fine(call):
    agent = call.add(card(1))
    call.hold(2)
    agent.is_over.set()
    agent.join(PATIENCE_S)
    for _ in range(2):
        dismiss(call.call.roster.peers, Goodbye(exit_code=75, summary="node02 is gone"))


def test_a_verdict_that_is_too_long_to_be_sent_is_told_in_short(call):
    agent = call.add(card(1))
    call.hold(2)
    dismiss(call.call.roster.peers, Goodbye(exit_code=75, summary="x" * (5 << 20)))
    call.join_agents()
    assert agent.answer == Goodbye(exit_code=75, summary="x" * 1000)


def test_words_that_no_agent_says_end_its_membership(call):
    def babble(agent: Agent, connection: Connection) -> None:
        connection.send(Stopped())
        agent.is_over.wait(PATIENCE_S)

    call.add(card(1), behave=babble)
    judgement = call.hold(2, join_s=SHORT_S)
    assert brief(judgement) == [("AR012", "node02", "fail", "certain")]
    assert judgement.findings[0].evidence[0].seen == "node02: it sent Stopped, which no agent sends in this phase"


def test_a_join_by_hand_is_heard_byte_by_byte(call):
    def join() -> None:
        with socket.create_connection(("127.0.0.1", call.port), timeout=5) as sock:
            buffer = bytearray()
            while not (heard := decode_frames(buffer, at_most=1)):
                buffer += sock.recv(1 << 12)
            hello = heard[0]
            assert isinstance(hello, Hello)
            own = card(1, ports=TestPorts(tcp=(1,), udp=1))
            said = Join(protocol=PROTOCOL, version=__version__, job="4711", nonce=b"n" * 16, card=own)
            for byte in encode_frame(prove_join(KEY, said, leader_nonce=hello.nonce)):
                sock.sendall(bytes([byte]))
            while sock.recv(1 << 12):
                pass

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    judgement = call.hold(2)
    assert call.has("joined")
    assert [row[:2] for row in brief(judgement)] == [("AR001", "node02")]  # it never reported
    call.close()
    thread.join(PATIENCE_S)
