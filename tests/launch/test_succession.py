"""What does an agent do when its leader is lost? The reducer alone, in time that is told."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allranks.launch.agent import Agent, AgentPhase
from allranks.launch.events import (  # fmt: skip
    Due,
    Event,
    Heard,
    Joined,
    Knocked,
    Lead,
    LeaderFound,
    Lost,
    NotFound,
    Reject,
    Seek,
    Send,
    Signalled,
    Started,
    Swept,
    Withdrew,
    WorkerEnded,
)
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import RETURN_S
from allranks.launch.succession import OPENS_S, RETRY_S, SEEK_S, find_end, is_led_elsewhere, why_not_lead
from allranks.model.card import Card
from allranks.model.past import History, Past
from allranks.wire.protocol import (
    Ended,
    Goodbye,
    Interrupted,
    Message,
    Ping,
    Plan,
    Resign,
    Srun,
    Stop,
    Stopped,
    WorkerEnd,  # fmt: skip
)

PAST = Past(history=History(restarts_left=3))


def card(node: int, *, generation: int = 0) -> Card:
    return Card(
        host=f"n{node}", pid=1, node_index=node, num_workers=1, num_gpus=0, agent_port=4000 + node,
        incarnation=10 + node, generation=generation,
    )  # fmt: skip


def plans(num_nodes: int, *, max_restarts: int = 3, generation: int = 0, **more: Any) -> dict[int, Plan]:
    return make_group(
        {node: card(node) for node in range(num_nodes)},
        addresses={node: f"10.0.0.{node}" for node in range(num_nodes)},
        past=PAST, wanted_backend="gloo", attempt=0, store_address="10.0.0.0", store_port=1, generation=generation,
        max_restarts=max_restarts, **more,
    )  # fmt: skip


class Node:
    """One node of several, whose worker runs."""

    def __init__(self, node: int, plan: Plan) -> None:
        self.now_s, self.node = 100.0, node
        self.agent = Agent(plan, now_s=self.now_s)
        self.effects: list[Any] = self.agent.step(Due(now_s=self.now_s))
        self.feed(Started, generation=plan.generation, pids={node: 9})
        self.feed(Heard, message=Ping(sent_ns=1, confirmed=plan.generation))

    def feed(self, kind: type[Event], **more: Any) -> None:
        self.effects += self.agent.step(kind(now_s=self.now_s, **more))

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-6:
            self.now_s += 0.1
            self.feed(Due)

    def join(self, node: int, *, generation: int = 0, number: int | None = None) -> None:
        number = node if number is None else number
        self.feed(Joined, connection=number, card=card(node, generation=generation), address=f"10.0.0.{node}")

    def all_of(self, kind: type) -> list[Any]:
        return [each for each in self.effects if isinstance(each, kind)]

    def sent(self, kind: type[Message]) -> list[Any]:
        return [each.message for each in self.all_of(Send) if isinstance(each.message, kind)]


def exited(rank: int) -> Ended:
    return Ended(end=WorkerEnd(rank=rank, node=f"n{rank}", exit_code=0, time_s=0.0), age_s=0.0)


def lost(node: int, num_nodes: int, **more: Any) -> Node:
    found = Node(node, plans(num_nodes, **more)[node])
    found.feed(Lost, reason="reset by peer")
    return found


def test_it_looks_for_its_leader_and_its_successors_while_the_worker_goes_on():
    node = lost(2, 4)
    (seek,) = node.all_of(Seek)
    assert [(each.node, each.control_address, each.port) for each in seek.contacts] == [
        (0, "10.0.0.0", 4000), (1, "10.0.0.1", 4001), (3, "10.0.0.3", 4003),
    ]  # fmt: skip
    node.wait(1.0)
    assert node.agent.phase is AgentPhase.WATCHING


@pytest.mark.parametrize(
    ("num_nodes", "max_restarts"),
    [pytest.param(2, 3, id="two nodes: only the leader's goes on"), pytest.param(4, 0, id="no restarts")],
)
def test_where_nobody_can_succeed_the_leader_only_the_leader_is_looked_for_and_not_for_long(
    num_nodes: int, max_restarts: int
):
    node = lost(1, num_nodes, max_restarts=max_restarts)
    (seek,) = node.all_of(Seek)
    assert [each.node for each in seek.contacts] == [0]
    node.wait(RETURN_S + RETRY_S + 0.2)
    assert (node.agent.phase, node.agent.is_leader_lost) == (AgentPhase.ENDING, True)


def test_the_same_leader_is_told_again_what_it_may_have_missed():
    node = Node(1, plans(3)[1])
    end = WorkerEnd(rank=1, node="n1", exit_code=1, time_s=0.0)
    node.feed(Lost, reason="reset by peer")
    node.feed(WorkerEnded, ended=Ended(end=end, age_s=0.5))
    node.wait(1.0)
    node.effects.clear()
    node.feed(LeaderFound, leader=0)
    (failed,) = node.sent(Ended)
    assert (failed.end, failed.generation, round(failed.age_s, 3)) == (end, 0, 1.5)
    assert node.agent.succession is None


def test_one_that_has_stopped_says_so_to_the_next_leader():
    node = Node(1, plans(3)[1])
    node.feed(Heard, message=Stop(signum=signal.SIGTERM))
    node.feed(WorkerEnded, ended=exited(1))
    node.wait(0.2)
    node.feed(Swept)
    node.feed(Lost, reason="reset by peer")
    node.effects.clear()
    node.feed(LeaderFound, leader=2)
    assert [type(each.message) for each in node.effects] == [Ended, Stopped]
    assert node.agent.leader_name == "n2"


@pytest.mark.parametrize(("node", "position"), [(1, 0), (2, 1), (4, 3)])
def test_the_successors_open_one_after_another_once_the_leader_may_be_given_up(node: int, position: int):
    one = lost(node, 5)
    one.wait(RETURN_S + position * OPENS_S - 0.2)
    assert one.agent.refuses(one.now_s) == "it does not lead yet"
    one.wait(0.3)
    assert one.agent.refuses(one.now_s) == ""


def test_an_agent_that_hears_its_leader_accepts_nobody():
    node = Node(1, plans(5)[1])
    node.join(2)
    assert node.effects[-1] == Reject(connection=2, reason="it follows a leader")


def test_with_the_majority_it_leads():
    node = lost(1, 6)
    node.wait(RETURN_S + 0.1)
    for joiner in (2, 3):
        node.join(joiner)
        node.wait(0.1)
        assert node.all_of(Lead) == []
    node.join(4)
    node.wait(0.1)
    (lead,) = node.all_of(Lead)
    assert {node: each.connection for node, each in lead.joined.items()} == {2: 2, 3: 3, 4: 4}
    assert (lead.lost, lead.plan.past, lead.plan.generation) == ((0, "reset by peer"), PAST, 0)
    node.feed(LeaderFound, leader=1)
    assert (node.agent.leader, node.agent.succession) == (1, None)


def test_one_that_comes_twice_counts_once_and_one_that_is_gone_not_at_all():
    node = lost(1, 6)
    node.wait(RETURN_S + 0.1)
    node.join(2)
    node.join(2, number=7)
    assert node.effects[-1] == Reject(connection=2, reason="it has connected again")
    node.join(3)
    node.feed(Withdrew, connection=3)
    node.join(4)
    node.wait(0.2)
    assert node.all_of(Lead) == []


@pytest.mark.parametrize(
    ("node", "generation", "reason"),
    [
        pytest.param(2, 1, "its generation 1 is newer than that of this agent", id="newer generation"),
        pytest.param(2, -1, "it has no ranks in generation 0", id="no workers yet"),
        pytest.param(9, 0, "it has no ranks in generation 0", id="no member"),
    ],
)
def test_who_cannot_help_it_to_lead_is_rejected(node: int, generation: int, reason: str):
    one = lost(1, 4)
    one.wait(RETURN_S + 0.1)
    one.join(node, generation=generation, number=5)
    assert one.effects[-1] == Reject(connection=5, reason=reason)


def test_an_agent_that_is_behind_does_not_lead():
    node = lost(1, 4)
    node.wait(RETURN_S + 0.1)
    node.join(2, generation=1, number=5)
    for joiner in (0, 3):
        node.join(joiner)
    node.wait(0.5)
    assert node.all_of(Lead) == []
    assert node.agent.refuses(node.now_s) == "it does not lead yet"


@pytest.mark.parametrize(("confirmed", "leads"), [(1, True), (0, False)])
def test_a_generation_that_not_all_have_begun_needs_the_majority_of_the_one_before(confirmed: int, leads: bool):
    node = Node(1, plans(3, generation=1, electors=((0, 1, 2, 3, 4, 5),))[1])
    node.agent._confirmed = confirmed
    node.feed(Lost, reason="reset by peer")
    node.wait(RETURN_S + 0.1)
    node.join(2, generation=1)
    node.wait(0.1)
    assert [lead.plan.electors for lead in node.all_of(Lead)] == ([()] if leads else [])


def test_who_has_followed_another_leader_does_not_go_back_to_the_one_before():
    node = lost(2, 5)
    node.feed(LeaderFound, leader=1)
    node.feed(Heard, message=Ping(sent_ns=1))
    node.feed(Lost, reason="reset by peer")
    *_, seek = node.all_of(Seek)
    assert [each.node for each in seek.contacts] == [1, 3, 4]


def test_after_a_resignation_nobody_waits_for_the_old_leader_and_its_word_counts():
    past = Past(history=History(restarts_left=1), excluded=(0,))
    node = Node(1, plans(4)[1])
    node.feed(Heard, message=Resign(past=past))
    (seek,) = node.all_of(Seek)
    assert [each.node for each in seek.contacts] == [2, 3]
    assert node.agent.refuses(node.now_s) == ""
    node.join(2)
    node.join(3)
    node.wait(0.1)
    (lead,) = node.all_of(Lead)
    assert (lead.has_resigned, lead.plan.past) == (True, past)


def test_nobody_found_ends_the_workers_with_the_code_that_asks_for_a_requeue():
    node = lost(2, 4)
    node.wait(SEEK_S + 0.2)
    assert (node.agent.phase, node.agent.is_leader_lost, node.agent.goodbye.exit_code) == (AgentPhase.ENDING, True, 75)
    assert node.agent.goodbye.summary == "the leader's agent on n0 is gone (reset by peer)"


def test_a_rejection_is_final():
    node = lost(2, 4)
    node.feed(NotFound, reason="the leader at n0 rejected this node: it is already in the job")
    assert node.agent.phase is AgentPhase.ENDING
    assert "already in the job" in node.agent.goodbye.summary


def test_those_that_have_joined_are_let_go_when_another_leader_is_found():
    node = lost(1, 6)
    node.wait(RETURN_S + 0.1)
    node.join(4)
    node.feed(LeaderFound, leader=2)
    assert Reject(connection=4, reason="this agent follows n2") in node.effects


@pytest.mark.parametrize("lets_go", [True, False])
def test_whom_an_agent_followed_that_never_led_costs_it_no_second_search(lets_go: bool):
    node = lost(2, 6)
    node.wait(10.0)
    node.feed(LeaderFound, leader=1)
    node.wait(8.0)
    if lets_go:
        node.feed(Lost, reason="reset by peer")
        assert next(each.node for each in node.all_of(Seek)[-1].contacts) == 0, "the leader may be back"
    node.wait(SEEK_S - 18.0 + 0.2)
    assert node.agent.phase is AgentPhase.ENDING
    assert "the leader's agent on n0 is gone" in node.agent.goodbye.summary


def test_a_leader_that_was_found_late_has_the_time_to_speak():
    node = lost(2, 6)
    node.wait(SEEK_S - 0.2)
    node.feed(LeaderFound, leader=1)
    node.wait(2.5)
    node.feed(Heard, message=Ping(sent_ns=2, confirmed=0))
    node.wait(10.0)
    assert (node.agent.phase, node.agent.goodbye) == (AgentPhase.WATCHING, None)


def test_the_leader_that_was_lost_and_is_found_again_leads_although_it_has_not_spoken_yet():
    node = lost(1, 2, can_change_leader=False)
    for _ in range(2):
        node.wait(RETURN_S + RETRY_S - 0.2)
        node.feed(LeaderFound, leader=0)
        node.wait(0.5)
        node.feed(Lost, reason="timed out")
    assert (node.agent.phase, node.agent.goodbye) == (AgentPhase.WATCHING, None)


def test_a_leader_that_has_spoken_may_be_lost_again():
    node = lost(2, 6)
    node.wait(10.0)
    node.feed(LeaderFound, leader=1)
    node.feed(Heard, message=Ping(sent_ns=2, confirmed=0))
    node.wait(15.0)
    assert node.agent.phase is AgentPhase.WATCHING
    node.feed(Lost, reason="reset by peer")
    node.wait(SEEK_S - 1.0)
    assert node.agent.phase is AgentPhase.WATCHING


def test_a_plan_that_waited_for_the_workers_is_dropped_with_its_leader():
    """Whoever leads next does not know that it was begun: another generation of the same number could begin."""
    node = Node(1, plans(4)[1])
    node.feed(Heard, message=plans(4, generation=1)[1])
    node.feed(Lost, reason="reset by peer")
    node.feed(WorkerEnded, ended=exited(1))
    node.wait(0.2)
    node.feed(Swept)
    assert (node.agent.phase, node.agent.plan.generation) == (AgentPhase.WAITING, 0)


def test_a_signal_ends_the_search_and_the_job_keeps_its_code():
    node = lost(1, 4)
    node.feed(Signalled, signum=signal.SIGTERM)
    node.wait(0.1)
    assert (node.agent.phase, node.agent.goodbye.exit_code) == (AgentPhase.ENDING, 143)
    assert node.sent(Interrupted) == [Interrupted(signum=signal.SIGTERM)]


def test_after_the_last_word_a_lost_leader_is_no_loss():
    node = Node(1, plans(4)[1])
    node.feed(Heard, message=Goodbye(exit_code=0, summary=""))
    node.feed(Lost, reason="closed")
    assert node.all_of(Seek) == []
    assert not node.agent.is_leader_lost


SRUN = Srun(node=0, address="10.0.0.0", port=6000)


def knocked(node: Node, listens: bool | None, *, for_s: float) -> None:
    """Have the leader's machine answer so for a while."""
    end_s = node.now_s + for_s
    while node.now_s < end_s - 1e-6:
        node.feed(Knocked, listens=listens)
        node.wait(0.5)


@pytest.mark.parametrize(
    ("answers", "leads"),
    [
        pytest.param([(False, 4.0)], True, id="its agent has ended"),
        pytest.param([(False, 2.0)], False, id="but what it wrote last may not be seen yet"),
        pytest.param([(True, 4.0)], False, id="its agent lives"),
        pytest.param([(None, 4.0)], False, id="its machine is lost"),
        pytest.param([(False, 3.0), (None, 1.0)], False, id="its machine is lost after its agent"),
        pytest.param([(False, 3.0), (True, 1.0), (False, 2.0)], False, id="somebody else had refused"),
    ],
)
def test_a_leader_beside_srun_is_succeeded_only_if_its_agent_alone_has_ended(answers: list, leads: bool):
    node = lost(1, 3, srun=SRUN)
    for listens, for_s in answers:
        knocked(node, listens, for_s=for_s)
    node.join(2)
    node.wait(0.2)
    assert bool(node.all_of(Lead)) is leads
    assert (node.all_of(Reject) == []) is leads, "who cannot lead keeps nobody from another successor"


def test_a_leader_elsewhere_needs_no_such_proof_and_neither_does_one_that_has_resigned():
    node = Node(2, plans(4, srun=SRUN)[2])
    node.feed(LeaderFound, leader=1)
    node.feed(Heard, message=Ping(sent_ns=1))
    node.feed(Lost, reason="reset by peer")
    node.wait(RETURN_S + 2 * OPENS_S + 0.1)
    assert node.agent.refuses(node.now_s) == ""
    node = Node(1, plans(4, srun=SRUN)[1])
    node.feed(Heard, message=Resign(past=PAST))
    assert node.agent.refuses(node.now_s) == ""


@pytest.mark.parametrize(("listens", "gives_up_s"), [(None, RETURN_S + RETRY_S), (True, SEEK_S), (False, SEEK_S)])
def test_where_srun_s_machine_is_silent_nobody_looks_for_long(listens: bool | None, gives_up_s: float):
    node = lost(2, 4, srun=SRUN)
    knocked(node, listens, for_s=gives_up_s - 1.0)
    assert node.agent.phase is AgentPhase.WATCHING
    node.wait(1.2)
    assert node.agent.phase is AgentPhase.ENDING
    at = {None: "its machine does not answer", True: "its port answers", False: "its port is closed"}[listens]
    assert node.agent.goodbye.summary == f"the leader's agent on n0 is gone (reset by peer; {at})"


def test_a_leader_that_went_on_without_the_majority_or_has_ended_the_job_is_not_succeeded():
    minority = {"event": "minority", "generation": 0, "leader": "n0"}
    assert why_not_lead([minority], "n0") == "n0 had gone on without the majority of the nodes"
    assert why_not_lead([minority], "n1") is None
    assert why_not_lead([ended(is_cut_off=False)], "n0") == "the job has ended"
    assert why_not_lead([ended(is_cut_off=True)], "n0") is None


def test_how_a_leader_ended_is_known_of_its_last_time():
    killed = {"event": "agent_ended", "node": "n0", "signal": 9}
    assert find_end([killed], "n0") == killed
    assert find_end([killed, took_over("n1", 0)], "n1") is None
    assert find_end([killed, took_over("n1", 0), took_over("n0", 1)], "n0") is None, "it is back since, and was lost"


def took_over(leader: str, generation: int) -> dict:
    return {"event": "took_over", "generation": generation, "leader": leader}


def restarting(leader: str, generation: int) -> dict:
    return {"event": "restarting", "generation": generation, "leader": leader}


def paused(leader: str, generation: int) -> dict:
    return {"event": "paused", "generation": generation, "leader": leader, "nodes": 2, "at_least": 3}


def ended(*, is_cut_off: bool) -> dict:
    return {"event": "ended", "leader": "n0", "exit_code": 0, "is_cut_off": is_cut_off}


PASSED_OVER = {"event": "took_over", "generation": 2, "leader": "n2", "after": "n0"}
EVENTS = {
    # name: (lines of events.jsonl, whether others go on without n0, which has led generation 3)
    "nothing": ([], False),
    "another leader": ([took_over("n2", 3)], True),
    "it had taken over itself": ([took_over("n0", 3)], False),
    "it had, and another one has since": ([took_over("n0", 3), took_over("n2", 3)], True),
    "another one had, and it has since": ([took_over("n2", 3), took_over("n0", 3)], False),
    "another leader, before": ([took_over("n2", 2)], False),
    "another leader, before, to which it was lost": ([PASSED_OVER], False),
    "others that did not get its Plan": ([restarting("n0", 3), PASSED_OVER], True),
    "the others have started again": ([restarting("n2", 4)], True),
    "the others have started twice, and the first line is not here yet": ([restarting("n2", 5)], True),
    "another leader waits for nodes": ([took_over("n0", 3), paused("n2", 3)], True),
    "another leader waited for nodes, before": ([paused("n2", 3), took_over("n0", 3)], False),
    "it waits for nodes itself": ([paused("n0", 3)], False),
    "its own restart": ([restarting("n0", 4)], False),
    "the job's end": ([ended(is_cut_off=False)], True),
    "the end of a leader that was cut off": ([ended(is_cut_off=True)], False),
}


@pytest.mark.parametrize("case", EVENTS)
def test_the_run_directory_tells_whether_others_go_on(case: str):
    told, goes_on = EVENTS[case]
    assert is_led_elsewhere(told, 3, "n0") is goes_on
