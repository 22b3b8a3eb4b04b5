"""What does an agent do when something happens? The reducer alone, in time that is told."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allranks.launch.agent import BOOK_S, LEADER_SILENT_S, PEERS_S, SWEEP_S, Agent, AgentPhase
from allranks.launch.events import (
    Due,
    Effect,
    EndingFacts,
    Event,
    Forward,
    Heard,
    KeepEvidence,
    Lost,
    Observed,
    PassOn,
    Say,
    Send,
    Sensed,
    Signal,
    Signalled,
    Start,
    Started,
    Sweep,
    Swept,
    WorkerEnded,
    WorkerFailed,
    WriteBook,
)  # fmt: skip
from allranks.model.beat import NodeBeat, RankBeat
from allranks.model.membership import Member
from allranks.wire.protocol import (
    Beat,
    Ended,
    Goodbye,
    Interrupted,
    Message,
    Order,
    Ping,
    Plan,
    Relay,
    Stop,
    Stopped,
    WorkerEnd,
)  # fmt: skip

KILL, TERM, INT, WARNING = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


def plan(generation: int = 0) -> Plan:
    members = tuple(Member(name=f"n{i}", first_rank=2 * i, num_workers=2, host=f"n{i}") for i in (0, 1))
    return Plan(
        members=members, node_index=1, attempt=0, store_address="", store_port=1, backend="gloo", backend_reason="",
        generation=generation, max_restarts=2,
    )  # fmt: skip


class Node:
    """The second of two nodes; ranks 2 and 3."""

    def __init__(self, *, steps: int | None = None, is_started: bool = True) -> None:
        self.now_s = 100.0
        self.agent = Agent(plan(), now_s=self.now_s)
        self.effects: list[Effect] = self.agent.step(Due(now_s=self.now_s))
        self.is_sweeping_slow = False
        if is_started:
            self.start()
            ranks = tuple(RankBeat(rank=rank, pid=rank, step=steps) for rank in (2, 3))
            self.feed(Observed, beat=NodeBeat(node_index=1, generation=0, ranks=ranks))

    def start(self, generation: int = 0) -> None:
        self.feed(Started, generation=generation, pids={2: 12, 3: 13})

    def feed(self, kind: type[Event], **more: Any) -> None:
        for effect in self.agent.step(kind(now_s=self.now_s, **more)):
            self.effects.append(effect)
            if isinstance(effect, Sweep) and not self.is_sweeping_slow:
                self.feed(Swept, left=("wandb (pid 9)",))

    def hear(self, message: Message) -> None:
        self.feed(Heard, message=message)

    def end(self, *ranks: int, code: int = 0, generation: int = 0) -> None:
        for rank in ranks:
            end = WorkerEnd(rank=rank, node="n1", exit_code=code, time_s=0.0)
            self.feed(WorkerEnded, ended=Ended(end=end, age_s=0.0, generation=generation))

    def wait(self, seconds: float, *, every_s: float = 0.1, is_leader_heard: bool = False) -> None:
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            if is_leader_heard:
                self.hear(Ping(sent_ns=1))
            self.feed(Due)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind)]

    @property
    def signals(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(each.signum, each.ranks) for each in self.effects if isinstance(each, Signal)]

    @property
    def lines(self) -> list[str]:
        return [each.text for each in self.effects if isinstance(each, Say)]


def test_a_generation_ends_and_the_next_begins():
    node = Node()
    node.hear(Stop(signum=TERM))
    node.end(2, 3, code=-TERM)
    node.wait(0.1)
    assert node.agent.phase is AgentPhase.WAITING
    assert [each.generation for each in node.sent(Stopped)] == [0]
    node.hear(plan(1))
    node.start(1)
    node.end(2, 3, generation=1)
    node.hear(Stop(signum=TERM))
    node.wait(0.1)
    node.hear(Goodbye(exit_code=0, summary=""))
    node.wait(0.1)
    assert (node.agent.phase, node.agent.goodbye.exit_code) == (AgentPhase.GONE, 0)


def test_the_book_is_written_every_minute_and_when_all_workers_have_ended():
    node = Node()

    def num_written() -> int:
        return [type(effect) for effect in node.effects].count(WriteBook)

    node.wait(BOOK_S - 1, is_leader_heard=True)
    assert num_written() == 0
    node.wait(2, is_leader_heard=True)
    assert num_written() == 1
    node.wait(BOOK_S, is_leader_heard=True)
    assert num_written() == 2
    node.hear(Stop(signum=TERM))
    node.end(2)
    node.wait(0.1)
    assert num_written() == 2
    node.end(3)
    node.wait(0.1)
    assert [type(effect) for effect in node.effects[-2:]] == [WriteBook, Send]


def test_a_worker_that_outlives_the_signal_is_named_and_killed_after_its_grace():
    node = Node()
    node.hear(Stop(signum=TERM))
    node.end(2)
    node.wait(2.9)
    assert node.lines == ["rank 3 has not ended after SIGTERM yet; SIGKILL in 2 s"]
    assert node.signals == [(TERM, (2, 3))]
    node.wait(0.2)
    assert node.signals == [(TERM, (2, 3)), (KILL, (3,))]


def test_a_worker_that_the_kernel_holds_is_named_and_no_longer_waited_for():
    node = Node()
    node.hear(Stop(signum=TERM))
    node.wait(4.2)
    assert node.lines[-1] == "rank 3 (pid 13) is unkillable: it hangs in the kernel (state D in ps)"
    assert node.agent.phase is AgentPhase.WAITING
    node.hear(plan(1))
    node.start(1)
    node.end(3, code=-KILL, generation=0)
    assert node.sent(Ended)[0].generation == 0
    node.hear(Stop(signum=TERM))
    node.end(2, generation=1)
    node.wait(1.0)
    assert node.agent.phase is AgentPhase.ENDING  # rank 3 of generation 1 still runs


def test_time_in_which_the_agent_itself_did_not_run_is_not_the_workers():
    node = Node()
    node.hear(Stop(signum=TERM))
    node.wait(0.1)
    node.now_s += 3600.0
    node.feed(Due)
    assert (node.lines, node.signals) == ([], [(TERM, (2, 3))])


def test_blocked_ranks_are_killed_at_once_and_what_they_did_is_kept_before():
    node = Node()
    node.hear(Stop(signum=TERM, at_once=(3,), grace_s=5.0))
    kinds = [type(each) for each in node.effects]
    assert kinds.index(KeepEvidence) < kinds.index(Signal)
    assert node.signals == [(KILL, (3,)), (TERM, (2,))]


def test_the_failure_of_a_worker_that_still_leaves_is_told_once_and_its_end_waited_for():
    node = Node()
    node.hear(Stop(signum=TERM, grace_s=3.0))
    failed = WorkerEnd(rank=2, node="node02", exit_code=1, time_s=1.0, message="ValueError: x")
    node.feed(WorkerFailed, ended=Ended(end=failed, age_s=0.0))
    node.wait(0.5)
    assert (node.agent.phase, [each.end.rank for each in node.sent(Ended)]) == (AgentPhase.ENDING, [2])
    node.end(2, 3)
    assert [each.end.rank for each in node.sent(Ended)] == [2, 3]
    assert node.sent(Ended)[0].end == failed
    node.wait(SWEEP_S + 0.2)
    assert node.agent.phase is AgentPhase.WAITING


def test_left_overs_that_do_not_end_hold_up_nothing():
    node = Node()
    node.is_sweeping_slow = True
    node.end(2, 3)
    node.hear(Stop(signum=TERM))
    node.wait(SWEEP_S + 0.2)
    assert node.agent.phase is AgentPhase.WAITING


@pytest.mark.parametrize(
    ("signals", "steps", "ended_by"),
    [
        pytest.param([TERM], None, TERM, id="SIGTERM, nothing to save"),
        pytest.param([TERM], 7, None, id="SIGTERM, and the ranks can save"),
        pytest.param([TERM, TERM], 7, TERM, id="SIGTERM twice"),
        pytest.param([INT], 7, INT, id="Ctrl-C"),
        pytest.param([WARNING], 7, None, id="the time limit is near"),
        pytest.param([WARNING, WARNING, TERM], 7, None, id="it is near, and then there"),
        pytest.param([WARNING, INT], 7, INT, id="Ctrl-C after a warning"),
    ],
)
def test_a_signal_ends_the_workers_or_is_left_to_the_leader(signals: list[int], steps: int | None, ended_by: int):
    node = Node(steps=steps)
    for signum in signals:
        node.feed(Signalled, signum=signum)
    node.wait(0.5)
    assert node.signals == ([(ended_by, (2, 3))] if ended_by else [])
    assert [each.signum for each in node.sent(Interrupted)] == list(dict.fromkeys(signals))


def test_workers_that_are_told_to_end_while_they_are_started_are_ended_then():
    node = Node(is_started=False)
    node.hear(Stop(signum=TERM))
    assert node.signals == []
    node.start()
    assert node.signals == [(TERM, (2, 3))]


@pytest.mark.parametrize("signum", [None, TERM])
def test_a_lost_leader_ends_the_workers_and_a_cancelled_job_keeps_its_code(signum: int | None):
    node = Node()
    if signum:
        node.feed(Signalled, signum=signum)
    node.feed(Lost, reason="n0 closed the connection")
    assert node.agent.is_leader_lost
    node.end(2, 3)
    node.wait(0.2)
    assert (node.agent.phase, node.agent.goodbye.exit_code) == (AgentPhase.GONE, 75 if signum is None else 143)


def test_an_interrupted_agent_waits_for_the_verdict_of_a_leader_that_it_hears():
    node = Node()
    node.feed(Signalled, signum=INT)
    node.end(2, 3)
    node.wait(300.0, is_leader_heard=True)  # another node saves
    node.wait(PEERS_S - 1.0)
    assert node.agent.phase is AgentPhase.WAITING
    node.wait(2.0)
    assert (node.agent.phase, node.agent.goodbye.exit_code) == (AgentPhase.GONE, 130)


def test_a_leader_that_says_nothing_is_left():
    node = Node()
    node.wait(LEADER_SILENT_S + 1.0, every_s=1.0)
    assert node.agent.phase is AgentPhase.ENDING
    assert node.agent.is_leader_lost


def test_a_plan_that_comes_before_all_have_ended_begins_when_they_have():
    """The agent had lost its leader, and with it the Stop."""
    node = Node()
    node.hear(plan(1))
    assert node.signals == [(TERM, (2, 3))]
    node.end(2, 3, code=-TERM)
    node.wait(0.2)
    assert [each.plan.generation for each in node.effects if isinstance(each, Start)] == [0, 1]
    assert node.sent(Stopped) == []


def test_such_a_plan_is_not_begun_where_a_stop_followed_it():
    node = Node()
    node.hear(plan(1))
    node.hear(Stop(signum=TERM))
    node.end(2, 3, code=-TERM)
    node.wait(0.2)
    assert [each.plan.generation for each in node.effects if isinstance(each, Start)] == [0]
    assert node.sent(Stopped) == [Stopped(generation=1)]


def test_a_plan_that_comes_twice_is_begun_once():
    node = Node()
    node.hear(Stop(signum=TERM))
    node.end(2, 3, code=-TERM)
    node.wait(0.2)
    for _ in range(2):
        node.hear(plan(1))
        node.hear(plan(0))
    assert [each.plan.generation for each in node.effects if isinstance(each, Start)] == [0, 1]
    assert node.agent.ending is None


def test_a_message_that_no_leader_sends_loses_the_leader():
    node = Node()
    node.hear(Stopped())
    assert node.agent.goodbye.summary == (
        "the leader's agent on n0 is gone (it sent Stopped, which a leader does not send now)"
    )


def test_the_last_ping_is_said_back_with_its_age():
    node = Node()
    node.hear(Ping(sent_ns=17))
    node.now_s += 0.25
    node.feed(Observed, beat=NodeBeat(node_index=1, generation=0, ranks=()))
    beat = node.sent(Beat)[-1]
    assert (beat.ping_ns, beat.held_ns) == (17, 250_000_000)


def test_ends_and_orders_are_passed_on():
    node = Node()
    node.end(2)
    node.end(3, code=1)
    assert [(each.end.rank, each.end.exit_code) for each in node.sent(Ended)] == [(2, 0), (3, 1)]
    order = Order(at_step=8, why="save")
    node.hear(order)
    assert node.effects[-1] == PassOn(order=order)


def hold(*signums: int, begun_s: float | None = None) -> EndingFacts:
    return EndingFacts(handles=frozenset(signums), begun_s={} if begun_s is None else dict.fromkeys(signums, begun_s))


@pytest.mark.parametrize("word", [Relay(signum=WARNING), Order(at_step=8, why="save", signum=WARNING)])
def test_a_warning_is_passed_on_to_who_handles_it_and_has_not_got_it(word: Message):
    node = Node()
    node.feed(Signalled, signum=WARNING)
    node.feed(Sensed, ranks={2: hold(WARNING), 3: hold(WARNING)})
    node.hear(word)
    node.feed(
        Sensed, ranks={2: hold(WARNING), 3: hold(WARNING, begun_s=node.now_s + 0.1)}
    )  # SLURM has signalled rank 3
    node.wait(1.0)
    assert [each for each in node.effects if isinstance(each, Forward)] == [Forward(signum=WARNING, ranks=(2,))]
    node.wait(10.0)
    node.hear(word)
    node.wait(1.0)
    told = [each.ranks for each in node.effects if isinstance(each, Forward)]
    assert told == [(2,), (2, 3)], "what began before is an answer to another one"


def test_a_flood_of_signals_is_told_to_the_next_leader_once():
    node = Node()
    for _ in range(1000):
        node.feed(Signalled, signum=WARNING)
    assert len(node.sent(Interrupted)) == 1
    before = len(node.agent._signals)
    for _ in range(1000):
        node.feed(Signalled, signum=WARNING)
    assert len(node.agent._signals) == before <= 2


def test_a_signal_that_means_nothing_is_told_and_ends_nobody():
    node = Node()
    node.feed(Signalled, signum=signal.SIGUSR2)
    node.wait(1.0)
    assert [each.signum for each in node.sent(Interrupted)] == [signal.SIGUSR2]
    assert (node.signals, node.agent.interrupted_by, node.agent.phase) == ([], None, AgentPhase.WATCHING)


def test_a_rank_that_handles_the_signal_may_save_and_the_leader_may_hasten_it():
    node = Node()
    node.feed(Sensed, ranks={2: hold(TERM)})
    node.feed(Signalled, signum=TERM)
    node.wait(10.0, is_leader_heard=True)
    assert node.signals == [(TERM, (3,)), (KILL, (3,))]
    assert [(each.ranks, each.ends) for each in node.effects if isinstance(each, Forward)] == [((2,), True)]
    node.hear(Stop(signum=TERM, saving_s=1.0, interrupted_by=TERM))
    node.wait(0.9)
    assert node.signals[2:] == []
    node.wait(0.2)
    assert node.signals[2:] == [(KILL, (2,))]


@pytest.mark.parametrize(("is_slurm", "ended_by"), [(True, []), (False, [(TERM, (2, 3))])])
def test_a_second_sigterm_of_slurm_is_the_end_of_a_grace_period_and_not_impatience(is_slurm: bool, ended_by: list[Any]):
    node = Node(steps=7)
    node.agent._is_slurm = is_slurm
    for _ in range(2):
        node.feed(Signalled, signum=TERM)
        node.wait(0.5)
    assert node.signals == ended_by


def test_a_worker_that_does_not_exit_after_an_exception_is_told_and_still_ended():
    node = Node()
    end = WorkerEnd(rank=3, node="n1", exit_code=1, time_s=0.0, message="ValueError: bad", lingers="thread upload")
    node.feed(WorkerFailed, ended=Ended(end=end, age_s=3.0, generation=0))
    assert node.sent(Ended)[-1].end == end
    node.hear(Stop(signum=TERM))
    assert node.signals == [(TERM, (2, 3))]
    node.end(2, 3, code=-TERM)
    node.wait(0.1)
    assert node.sent(Stopped)
