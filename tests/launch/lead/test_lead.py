"""What the leader makes of what agents tell it: real lines, with the test at the agents' ends of them."""

from __future__ import annotations

import contextlib
import io
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from allranks.guard.guard_verdict import GuardVerdict, name_fault
from allranks.guard.verdict import Guard
from allranks.host.node import NodeFacts
from allranks.launch.events import Due, Effect, Heard, Send, Show
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Terms
from allranks.launch.lead.driver import LeaderDriver
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.plan import Request, plan_job
from allranks.launch.queue import ending
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.worker_group import WorkerGroup
from allranks.model.beat import NodeBeat, RankBeat
from allranks.model.card import Card
from allranks.model.cluster import Cluster, GuardTable
from allranks.model.identity import world_from_env
from allranks.model.past import History, Past
from allranks.report.rundir import RunDir
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.leader_port import Hint, bind_port
from allranks.wire.protocol import (
    Beat,
    Ended,
    Goodbye,
    Interrupted,
    Message,
    Order,
    Ping,
    Plan,
    Refused,
    Stop,
    Stopped,
    WorkerEnd,
)
from allranks.wire.secret import Secret
from allranks.wire.seek import Search

KEY = Secret(b"swordfish", "test")
PATIENCE_S = 40


def card(index: int) -> Card:
    return Card(host=f"node{index + 1:02}", pid=800 + index, node_index=index, num_workers=1, num_gpus=0)


class FakeScheduler:
    """Every signal warns of the time limit."""

    def find_eligible_s(self) -> float | None:
        return None

    def decide(self, signum: int, *, can_save: bool, shutdown_s: float) -> ending.EndingDecision:
        return ending.EndingDecision(ending=ending.Ending.SAVE_AND_REQUEUE, save_s=None, handler_s=30.0, line="saving")


class Job:
    """A leader of three nodes with one rank each, and the agents' ends of its lines."""

    def __init__(self, log_dir: Path, *, guard: Guard | None = None, max_restarts: int = 0) -> None:
        self.listener = bind_port(0)
        self.stderr = io.StringIO()
        terms = Terms(
            job="train", wanted_backend="gloo", store_address="127.0.0.1", store_port=29501, num_nodes=3, min_nodes=2,
            capacity_s=30.0,
        )  # fmt: skip
        cards = {index: card(index) for index in range(3)}
        self.leader = Leader(
            terms,
            guard=guard or Guard(GuardTable()),
            past=Past(history=History(restarts_left=max_restarts)),
            nodes={i: ConnectedNode(card=card, name=card.host, address="127.0.0.1") for i, card in cards.items()},
            plan=make_group(
                cards, wanted_backend="gloo", attempt=0, store_address="127.0.0.1", store_port=29501,
                max_restarts=max_restarts,
            )[0],
            now_s=time.monotonic(),
        )  # fmt: skip
        self.selector = selectors.DefaultSelector()
        self.agents: list[Connection] = []
        self.heard: list[list[Message]] = [[], [], []]
        connections = {}
        for index in range(3):
            own, others = socket.socketpair()
            connections[index] = Connection(own, peer=f"node{index + 1:02}")
            self.agents.append(Connection(others, peer="the leader"))
        facts = NodeFacts(host="node01", interfaces=(), num_gpus=0, num_cpus=2)
        plan = plan_job(Request(), world_from_env({}), Cluster(), facts, job="train", origin={})
        workers = WorkerGroup(job=plan, command=[], run_dir=RunDir(log_dir, "train"), hidden=(), env={})
        self.acceptor = Acceptor(self.listener, job="train", attempt=0, secret=KEY)
        self.driver = LeaderDriver(
            self.leader, workers, cast("Scheduler", FakeScheduler()),
            selector=self.selector, connections=connections, acceptor=self.acceptor,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """What the leader has said."""
        return [line.removeprefix("allranks: ") for line in self.stderr.getvalue().splitlines()]

    def tell(self, index: int, message: Message) -> None:
        self.agents[index].send(message)

    def turn(self) -> None:
        """One turn of the loop that the leader lives in, and of its agents' ears."""
        for key, _ in self.selector.select(0.02):
            key.data(key.fileobj)
        self.acceptor.turn(time.monotonic())
        self.driver.turn(time.monotonic())
        for index, agent in enumerate(self.agents):
            with contextlib.suppress(ConnectionError):
                self.heard[index] += [each for each in agent.receive() if not isinstance(each, Ping)]

    def run_until(self, is_so: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"{what}: not in {PATIENCE_S} s"
            self.turn()

    def has_heard(self, kind: type, *agents: int) -> bool:
        return all(any(isinstance(each, kind) for each in self.heard[agent]) for agent in agents)

    def stop_all(self) -> None:
        """The leader ends the workers, and all agents say that theirs have ended."""
        self.run_until(lambda: self.has_heard(Stop, 0, 1, 2), "the Stop")
        for index in range(3):
            self.tell(index, Stopped())

    def close(self) -> None:
        self.driver.close()
        self.acceptor.close()
        for agent in self.agents:
            agent.close()
        self.selector.close()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def make(**more: Any) -> Job:
            job = Job(tmp_path, **more)
            stack.callback(job.close)
            stack.enter_context(contextlib.redirect_stderr(job.stderr))
            return job

        yield make


def failed(rank: int, *, age_s: float, clock_s: float) -> Ended:
    end = WorkerEnd(
        rank=rank, node=f"node{rank + 1:02}", exit_code=1, time_s=clock_s, message=f"ValueError: {'abc'[rank]}"
    )
    return Ended(end=end, age_s=age_s)


def exited(rank: int, *, generation: int = 0, is_finished: bool = False) -> Ended:
    end = WorkerEnd(rank=rank, node=f"node{rank + 1:02}", exit_code=0, time_s=0.0, is_finished=is_finished)
    return Ended(end=end, age_s=0.0, generation=generation)


def test_a_rejected_peer_is_reported_once(make_job: Callable[..., Job]) -> None:
    job = make_job()

    def connect(times: int, words: bytes = b"") -> None:
        for _ in range(times):
            with socket.create_connection(job.listener.getsockname()[:2], timeout=10) as peer:
                job.run_until(lambda peer=peer: select.select([peer], [], [], 0)[0], "the leader's greeting")
                peer.sendall(words)

    connect(3)  # a port check
    connect(3, b"GET / HTTP/1.1\r\n\r\n")
    connect(1, b"SSH-2.0-OpenSSH_9.6\r\n")
    job.run_until(lambda: job.lines, "the report")
    for _ in range(20):
        job.turn()
    (line,) = job.lines
    assert "was rejected" in line


@pytest.mark.parametrize("first", [0, 2])
def test_who_failed_first_is_told_by_the_ages_whatever_the_nodes_clocks_say(
    make_job: Callable[..., Job], first: int
) -> None:
    job = make_job()
    for rank in range(3):  # the clock of whoever was first is an hour ahead
        is_first = rank == first
        job.tell(rank, failed(rank, age_s=30.0 if is_first else 0.1 * rank, clock_s=5000.0 if is_first else 1400.0))
    job.stop_all()
    job.run_until(lambda: job.leader.verdict, "the verdict")
    assert job.leader.verdict is not None
    assert job.leader.verdict.findings[0].ranks == (first,)


class Noting(Guard):
    """A guard that notes when workers ended."""

    def __init__(self) -> None:
        super().__init__(GuardTable())
        self.ends_s: list[float] = []

    def ended(self, end: WorkerEnd, now_s: float, *, wall_s: float | None = None) -> None:
        self.ends_s.append(end.time_s)


def test_failures_of_one_node_keep_their_order_however_late_each_of_them_is_heard(make_job: Callable[..., Job]) -> None:
    guard, now_s = Noting(), time.monotonic()
    leader = make_job(guard=guard).leader
    # Told 1.0 s after it happened, and heard 2 s later; the next one was told just before it was heard.
    for age_s, clock_s in ((1.0, 100.0), (2.8, 100.2)):
        leader.step(Heard(now_s=now_s, node=0, message=failed(0, age_s=age_s, clock_s=clock_s)))
    assert guard.ends_s == pytest.approx([now_s - 1.0, now_s - 0.8])


def crashed(rank: int, *, generation: int = 0) -> Ended:
    end = WorkerEnd(rank=rank, node=f"node{rank + 1:02}", exit_code=-11, time_s=0.0)
    return Ended(end=end, age_s=0.0, generation=generation)


@pytest.mark.parametrize("is_second", [False, True], ids=["one crash", "and an error"])
def test_what_broke_before_the_signal_came_decides_whether_the_job_restarts(
    make_job: Callable[..., Job], is_second: bool
) -> None:
    leader, now_s = make_job(max_restarts=2).leader, time.monotonic()

    def step(after_s: float, message: Message | None = None, node: int = 0) -> list[Effect]:
        at_s = now_s + after_s
        return leader.step(Due(now_s=at_s) if message is None else Heard(now_s=at_s, node=node, message=message))

    step(0.0, crashed(0))
    assert not any(isinstance(each, Send) and isinstance(each.message, Stop) for each in step(0.2))
    effects = step(0.3)
    assert any(isinstance(each, Send) and isinstance(each.message, Stop) for each in effects)
    assert not any(isinstance(each, Show) for each in effects)
    if is_second:
        step(0.5, failed(1, age_s=0.2, clock_s=0.0), node=1)
    for node in range(3):
        step(0.6, Stopped(), node=node)
    (shown,) = [each for each in step(0.7) if isinstance(each, Show)]
    assert [finding.ranks for finding in shown.findings] == [(0,), (1,)] if is_second else [(0,)]
    assert (leader.verdict.exit_code if leader.verdict else None) == (139 if is_second else None)
    assert leader.phase == ("over" if is_second else "forming")
    assert leader._history.restarts_left == (2 if is_second else 1)
    assert len(leader._history.crashes) == 1 + is_second


def test_the_verdict_waits_for_the_ends_of_all_ranks_for_a_second_at_most(make_job: Callable[..., Job]) -> None:
    leader, now_s = make_job().leader, time.monotonic()
    leader.step(Heard(now_s=now_s, node=0, message=crashed(0)))
    shown_s = [
        tenth / 10
        for tenth in range(1, 40)
        if any(isinstance(each, Show) for each in leader.step(Due(now_s=now_s + tenth / 10)))
    ]
    assert shown_s == [1.3]  # a quarter of a second for others to break, and one for them to end


class Told(Guard):
    """A guard that comes to one fault, once."""

    def __init__(self, judged: GuardVerdict) -> None:
        super().__init__(GuardTable())
        self._told: GuardVerdict | None = judged

    def judge(self, now_s: float) -> GuardVerdict | None:
        told, self._told = self._told, None
        return told


def come_back(job: Job, index: int) -> str:
    """A new agent of a node asks to be let in; returns what it is told, or what the leader says of it."""
    port = job.listener.getsockname()[1]
    lines: list[Connection] = []

    def seek() -> None:
        lines.append(
            Search(
                lambda: [[Hint("127.0.0.1", port, "test")]],
                job="train", secret=lambda: KEY, card=card(index),
            ).wait(deadline_s=PATIENCE_S, on_wait=lambda *_: None, check_signals=lambda: None)
        )  # fmt: skip

    thread = threading.Thread(target=seek)
    thread.start()
    job.run_until(lambda: not thread.is_alive(), "the handshake")
    answers: list[str] = []

    def has_answer() -> bool:
        with contextlib.suppress(ConnectionError):
            answers.extend(each.reason for each in lines[0].receive() if isinstance(each, Refused))
        answers.extend(line for line in job.lines if "waits for the next restart" in line)
        return bool(answers)

    with contextlib.closing(lines[0]):
        job.run_until(has_answer, "an answer")
    return answers[0]


@pytest.mark.parametrize(
    ("is_here", "answer"),
    [
        pytest.param(True, "node rank 2 was at fault and is excluded for the rest of this job", id="still here"),
        pytest.param(False, "node03 has joined and waits for the next restart", id="gone before"),
    ],
)
def test_a_node_that_was_left_out_may_come_back_only_where_its_agent_was_gone(
    make_job: Callable[..., Job], is_here: bool, answer: str
) -> None:
    finding = name_fault("AR210", "its link is down", node="node03", fix="")
    job = make_job(guard=Told(GuardVerdict(findings=(finding,), exit_code=75, nodes=(2,), cures=True)), max_restarts=1)
    job.run_until(lambda: job.has_heard(Stop, 0, 1, 2), "the Stop")
    for index in (0, 1):
        job.tell(index, Stopped())
    if is_here:
        job.tell(2, Stopped())
    else:
        job.agents[2].close()
    job.run_until(lambda: job.has_heard(Plan, 0, 1), "the next generation")
    (plan,) = (each for each in job.heard[0] if isinstance(each, Plan))
    assert [member.name for member in plan.members] == ["node01", "node02"]
    assert job.has_heard(Goodbye, 2) is is_here
    assert come_back(job, 2) == answer


def test_the_late_end_of_an_old_worker_is_not_that_of_the_new_one_with_its_rank(make_job: Callable[..., Job]) -> None:
    """The kernel held rank 0 of generation 0, for example for a file system, until generation 1 ran."""
    finding = name_fault("AR210", "its link is down", node="node03", fix="")
    job = make_job(guard=Told(GuardVerdict(findings=(finding,), exit_code=75, nodes=(2,), cures=True)), max_restarts=1)
    job.stop_all()
    job.run_until(lambda: job.has_heard(Plan, 0, 1), "the next generation")
    for agents in job.heard:
        agents.clear()
    job.tell(0, failed(0, age_s=0.0, clock_s=1400.0))
    job.tell(0, Stopped())
    for rank in (0, 1):
        job.tell(rank, exited(rank, generation=1))
    job.run_until(lambda: job.has_heard(Stop, 0, 1), "the Stop")
    for index in (0, 1):
        job.tell(index, Stopped(generation=1))
    job.run_until(lambda: job.leader.verdict, "the verdict")
    assert job.leader.verdict is not None
    assert job.leader.verdict.exit_code == 0
    assert [each.cause_id for each in job.leader.verdict.findings] == ["AR210"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_job_that_made_all_its_steps_is_not_put_back_into_the_queue(
    make_job: Callable[..., Job], is_finished: bool
) -> None:
    """SLURM's warning came while the last steps were made."""
    job = make_job()
    job.tell(0, Beat(node=NodeBeat(node_index=0, generation=0, ranks=(RankBeat(rank=0, step=99),))))
    job.tell(0, Interrupted(signum=signal.SIGUSR1))
    job.run_until(lambda: job.has_heard(Order, 0, 1, 2), "the order to save")
    for rank in range(3):
        job.tell(rank, exited(rank, is_finished=is_finished and rank == 1))
    job.stop_all()
    job.run_until(lambda: job.leader.verdict, "the verdict")
    assert job.leader.is_to_requeue is not is_finished
    assert job.leader.verdict is not None
    assert job.leader.verdict.exit_code == 0


class CountingGuard(Guard):
    """Says how often it was asked."""

    num_asked = 0

    def judge(self, now_s: float) -> GuardVerdict | None:
        self.num_asked += 1
        return super().judge(now_s)


@pytest.mark.parametrize(("num_nodes", "num_asked"), [(3, 100), (64, 100), (2064, 10)])
def test_the_guard_of_thousands_of_nodes_is_asked_rarely_and_at_once_after_an_end(
    num_nodes: int, num_asked: int
) -> None:
    cards = {index: card(index) for index in range(num_nodes)}
    guard, store = CountingGuard(GuardTable()), {"store_address": "127.0.0.1", "store_port": 29501}
    leader = Leader(
        Terms(
            job="train", wanted_backend="gloo", num_nodes=num_nodes, min_nodes=num_nodes,
            capacity_s=30.0, **store,
        ),
        guard=guard,
        past=Past(history=History(restarts_left=0)),
        nodes={i: ConnectedNode(card=card, name=card.host, address="127.0.0.1") for i, card in cards.items()},
        plan=make_group(cards, wanted_backend="gloo", attempt=0, **store)[0],
        now_s=0.0,
    )  # fmt: skip
    for tick in range(1, 101):
        leader.step(Due(now_s=tick * 0.01))
    assert guard.num_asked == num_asked
    leader.step(Heard(now_s=1.001, node=1, message=failed(1, age_s=0.0, clock_s=1.0)))
    leader.step(Due(now_s=1.002))
    assert guard.num_asked == num_asked + 1
