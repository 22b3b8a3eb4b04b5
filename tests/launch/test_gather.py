"""The gathering: who is let in, who is waited for, and what those who came are told."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from allranks.host.node import NodeFacts
from allranks.launch.gather import Roster, dismiss, gather, make_group
from allranks.launch.plan import JobPlan, Request, plan_job
from allranks.model.card import Card, Interface
from allranks.model.cluster import Cluster, GuardTable
from allranks.model.errors import NodeFaultError, SetupError, StoppedBySignal, UsageError, WireError
from allranks.model.identity import world_from_env
from allranks.wire.leader import Hint, bind_port
from allranks.wire.protocol import Connection, Goodbye, Member, Message
from allranks.wire.secret import Secret
from allranks.wire.seek import seek_leader

KEY = Secret(b"swordfish", "test")
FACTS = NodeFacts(host="node01", interfaces=(Interface("lo", ("127.0.0.1",), is_up=True),), num_gpus=0, num_cpus=4)
PATIENCE_S = 30
"""How long a test waits for what must come."""


def card(index: int | None, *, host: str | None = None, **more: object) -> Card:
    host = host or f"node{(index or 0) + 1:02d}"
    return Card(host=host, pid=800 + (index or 0), node_index=index, **({"num_workers": 2, "num_gpus": 0} | more))


def job_plan(
    num_nodes: int = 3, *, min_nodes: int | None = None, join_s: float = PATIENCE_S, **request: object
) -> JobPlan:
    asked = Request(
        min_nodes=min_nodes or num_nodes,
        max_nodes=num_nodes,
        node_rank=0,
        endpoint=Hint("node01", 29500, "--rdzv-endpoint"),
        rdzv_id="train",
        **request,
    )
    cluster = Cluster(guard=GuardTable(join_s=join_s))
    return plan_job(asked, world_from_env({}), cluster, FACTS, job="train", origin={})


def slurm_plan(num_nodes: int) -> JobPlan:
    env = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"node[01-{num_nodes:02d}]",
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
    }
    return plan_job(Request(), world_from_env(env), Cluster(), FACTS, job="train", origin={})


class NoConnection:
    """Stands for a peer where nothing is said to it."""


def roster_of(plan: JobPlan, *indices: int) -> Roster:
    roster = Roster(plan, cards={0: card(0)})
    for index in indices:
        assert roster.admit(card(index), NoConnection()) is None
    return roster


# ---- the roster


def test_nodes_that_say_their_rank_get_it():
    roster = roster_of(job_plan(4), 3, 1)
    assert {index: card.host for index, card in roster.cards.items()} == {0: "node01", 3: "node04", 1: "node02"}


def test_nodes_that_do_not_say_their_rank_are_counted_in_order_of_arrival():
    roster = roster_of(job_plan(4), 1)
    assert roster.admit(card(None, host="late"), NoConnection()) is None
    assert roster.admit(card(None, host="later"), NoConnection()) is None
    assert {index: card.host for index, card in roster.cards.items()} == {
        0: "node01",
        1: "node02",
        2: "late",
        3: "later",
    }


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            1,
            "node rank 1 is here already (node02, pid 801); give each node its own --node-rank, and each job its own "
            "--rdzv-id",
        ),
        (
            0,
            "node rank 0 is here already (node01, pid 800); give each node its own --node-rank, and each job its own "
            "--rdzv-id",
        ),
        (2, "node rank 2 does not exist in a job of 2 nodes (--nnodes)"),
        (-1, "node rank -1 does not exist in a job of 2 nodes (--nnodes)"),
        (None, "all 2 nodes are here already"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(index, text):
    roster = roster_of(job_plan(2), 1)
    assert roster.admit(card(index, host="stray"), NoConnection()) == text
    assert [card.host for card in roster.cards.values()] == ["node01", "node02"]


def test_a_node_that_left_may_come_again():
    roster, peer = roster_of(job_plan(3)), NoConnection()
    assert roster.admit(card(2), peer) is None
    assert roster.forget(peer) == "node03"
    assert roster.forget(peer) is None
    assert roster.admit(card(2), NoConnection()) is None


@pytest.mark.parametrize(
    ("plan", "here", "missing"),
    [
        (job_plan(2), (), "node rank 1"),
        (job_plan(4), (2,), "node ranks 1, 3"),
        (job_plan(20), (), "node ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 ..."),
        (job_plan(17), (), "node ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
        (slurm_plan(6), (1, 2), "node[04-06]"),
        (slurm_plan(6), (1, 2, 3, 4), "node06"),
    ],
    ids=["one", "two", "many", "sixteen", "hosts", "host"],
)
def test_who_is_missing_is_named(plan, here, missing):
    assert roster_of(plan, *here).missing() == missing


# ---- the group


def test_everybody_gets_the_same_plan_with_an_index_of_its_own():
    plan = job_plan(2)
    roster = Roster(plan, cards={1: card(1, num_workers=1), 0: card(0)})
    peer = NoConnection()
    roster.peers[1] = peer
    plans, peers = make_group(roster, attempt=3, store_address="10.0.0.1", store_port=29501)
    assert [plan.node_index for plan in plans] == [0, 1]
    assert (
        plans[0].members
        == plans[1].members
        == (
            Member(name="node01", first_rank=0, num_workers=2, host="node01"),
            Member(name="node02", first_rank=2, num_workers=1, host="node02"),
        )
    )
    assert (plans[1].attempt, plans[1].store_address, plans[1].store_port) == (3, "10.0.0.1", 29501)
    assert (plans[1].backend, plans[1].backend_reason) == ("gloo", "node01 has 0 GPUs for 2 ranks")
    assert peers == {1: peer}


def test_gaps_close_where_fewer_nodes_came_than_could():
    roster = roster_of(job_plan(5, min_nodes=2), 2, 4)
    plans, peers = make_group(roster, attempt=0, store_address="10.0.0.1", store_port=29501)
    assert [(m.name, m.first_rank) for m in plans[0].members] == [("node01", 0), ("node03", 2), ("node05", 4)]
    assert [plan.node_index for plan in plans] == [0, 1, 2]
    assert peers == {1: roster.peers[2], 2: roster.peers[4]}


def test_one_node_without_gpus_decides_the_backend_for_all():
    roster = Roster(job_plan(2), cards={0: card(0, num_gpus=2), 1: card(1, num_gpus=1)})
    plans, _ = make_group(roster, attempt=0, store_address="10.0.0.1", store_port=29501)
    assert (plans[1].backend, plans[1].backend_reason) == ("gloo", "node02 has 1 GPU for 2 ranks")


# ---- real sockets


class Agent(threading.Thread):
    """Another node's agent, as far as the gathering goes: it joins and listens until it is told something."""

    def __init__(self, port: int, own: Card, *, secret: Secret = KEY) -> None:
        super().__init__()
        self.heard: list[Message] = []
        self.refusal: WireError | None = None
        self.is_in = threading.Event()
        self.is_over = threading.Event()
        self._port, self._card, self._secret = port, own, secret

    def run(self) -> None:
        try:
            connection = seek_leader(
                lambda: [[Hint("127.0.0.1", self._port, "test")]],
                job="train",
                attempt=0,
                secret=lambda: self._secret,
                card=self._card,
                deadline_s=PATIENCE_S,
                on_wait=lambda *_: None,
                check_signals=lambda: None,
            )
        except WireError as exc:
            self.refusal = exc
            return
        self.is_in.set()
        until_s = time.monotonic() + PATIENCE_S
        with contextlib.closing(connection):
            while not self.heard and not self.is_over.is_set() and time.monotonic() < until_s:
                try:
                    self.heard += connection.receive()
                except ConnectionError:
                    return
                time.sleep(0.01)


class Gathering:
    """What the leader's side of one gathering said."""

    def __init__(self) -> None:
        self.listener = bind_port(0)
        self.port = int(self.listener.getsockname()[1])
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.agents: list[Agent] = []
        self.roster: Roster | None = None

    def add_agent(self, own: Card, *, secret: Secret = KEY) -> Agent:
        agent = Agent(self.port, own, secret=secret)
        self.agents.append(agent)
        agent.start()
        return agent

    def gather(
        self, plan: JobPlan, own: Card | None = None, *, check_signals: Callable[[], None] = lambda: None
    ) -> Roster:
        self.roster = gather(
            plan,
            own or card(0),
            self.listener,
            attempt=0,
            secret=KEY,
            say=self.lines.append,
            on_event=lambda event, **fields: self.events.append((event, fields)),
            check_signals=check_signals,
        )
        return self.roster

    def join_agents(self) -> None:
        for agent in self.agents:
            agent.join(PATIENCE_S)
            assert not agent.is_alive()


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    made = Gathering()
    yield made
    for agent in made.agents:
        agent.is_over.set()
    made.join_agents()
    for peer in made.roster.peers.values() if made.roster else ():
        peer.close()
    made.listener.close()


def test_the_gathering_ends_when_all_have_come(gathering):
    for index in (1, 2):
        gathering.add_agent(card(index))
    roster = gathering.gather(job_plan(3))
    assert {index: card.host for index, card in sorted(roster.cards.items())} == {
        0: "node01",
        1: "node02",
        2: "node03",
    }
    assert set(roster.peers) == {1, 2}
    assert all(isinstance(peer, Connection) for peer in roster.peers.values())
    joined = sorted((event, fields["node"], fields["workers"]) for event, fields in gathering.events)
    assert joined == [("joined", "node02", 2), ("joined", "node03", 2)]
    assert gathering.lines == []


def test_everybody_hears_why_it_does_not_begin_when_one_does_not_come(gathering):
    came = gathering.add_agent(card(1))
    with pytest.raises(NodeFaultError) as given_up:
        gathering.gather(job_plan(3, join_s=2.0))
    text = str(given_up.value)
    assert re.match(r"node rank 2 did not come within \d s; 2 of 3 nodes are here$", text)
    gathering.join_agents()
    assert came.heard == [Goodbye(exit_code=75, summary=text)]


def test_fewer_nodes_go_on_where_the_flag_allows_it(gathering):
    gathering.add_agent(card(2))
    roster = gathering.gather(job_plan(3, min_nodes=2, join_s=2.0))
    assert sorted(roster.cards) == [0, 2]
    assert gathering.lines == ["going on with 2 nodes (--nnodes 2:3)"]


def test_fewer_nodes_than_the_flag_allows_are_too_few(gathering):
    with pytest.raises(NodeFaultError, match=r"^node ranks 1, 2 did not come within"):
        gathering.gather(job_plan(3, min_nodes=2, join_s=0.3))


def test_a_node_with_a_problem_stops_everybody(gathering):
    healthy = gathering.add_agent(card(1))
    broken = gathering.add_agent(card(2, problem="train.py: no such script", problem_exit=2))
    with pytest.raises(UsageError) as refused:
        gathering.gather(job_plan(3))
    assert str(refused.value) == "node03: train.py: no such script"
    gathering.join_agents()
    goodbye = Goodbye(exit_code=2, summary="node03: train.py: no such script")
    assert healthy.heard == [goodbye]
    assert broken.heard == [goodbye]


def test_a_problem_of_the_leaders_own_node_stops_everybody(gathering):
    other = gathering.add_agent(card(1))
    with pytest.raises(SetupError) as refused:
        gathering.gather(job_plan(2), card(0, problem="ens1f1 is down", problem_exit=78))
    assert str(refused.value) == "node01: ens1f1 is down"
    gathering.join_agents()
    assert other.heard == [Goodbye(exit_code=78, summary="node01: ens1f1 is down")]


def test_of_two_nodes_with_one_rank_the_second_is_sent_away(gathering):
    first = gathering.add_agent(card(1))
    second: list[Agent] = []

    def send_the_others() -> None:
        if first.is_in.is_set() and not second:
            second.append(gathering.add_agent(card(1, host="twin")))
        if second and gathering.lines and len(gathering.agents) == 2:
            gathering.add_agent(card(2))

    roster = gathering.gather(job_plan(3), check_signals=send_the_others)
    assert {index: card.host for index, card in sorted(roster.cards.items())} == {
        0: "node01",
        1: "node02",
        2: "node03",
    }
    why = (
        "node rank 1 is here already (node02, pid 801); give each node its own --node-rank, and each job its own "
        "--rdzv-id"
    )
    assert gathering.lines == [f"twin was refused: {why}"]
    assert ("refused", {"node": "twin", "reason": why}) in gathering.events


def test_strangers_are_named_and_the_gathering_goes_on(gathering):
    stranger = gathering.add_agent(card(1, host="stranger"), secret=Secret(b"haddock", "test"))

    def send_the_right_one() -> None:
        if stranger.refusal and len(gathering.agents) == 1:
            gathering.add_agent(card(1))

    roster = gathering.gather(job_plan(2), check_signals=send_the_right_one)
    assert roster.cards[1].host == "node02"
    text = "127.0.0.1 was refused: it does not know this job's secret (the leader's comes from test)"
    assert gathering.lines == [text]
    assert ("stranger", {"peer": "127.0.0.1", "reason": text}) in gathering.events


def test_a_node_that_came_and_left_is_waited_for_again(gathering):
    restless = gathering.add_agent(card(1))

    def leave_and_come_again() -> None:
        if restless.is_in.is_set():
            restless.is_over.set()
        if gathering.lines and len(gathering.agents) == 1:
            gathering.add_agent(card(1, host="node02-again"))
            gathering.add_agent(card(2))

    roster = gathering.gather(job_plan(3), check_signals=leave_and_come_again)
    assert roster.cards[1].host == "node02-again"
    assert gathering.lines == ["node02 came and left again"]
    assert ("left", {"node": "node02"}) in gathering.events


def test_a_signal_to_the_leader_reaches_everybody(gathering):
    agent = gathering.add_agent(card(1))

    def stop_when_it_is_in() -> None:
        if any(event == "joined" for event, _ in gathering.events):
            raise StoppedBySignal(15)

    with pytest.raises(StoppedBySignal):
        gathering.gather(job_plan(3), check_signals=stop_when_it_is_in)
    gathering.join_agents()
    assert agent.heard == [Goodbye(exit_code=143, summary="stopped by SIGTERM")]


def test_nccl_without_gpus_is_told_to_everybody(gathering):
    agent = gathering.add_agent(card(1, num_gpus=1))
    plan = job_plan(2, backend="nccl")
    roster = gathering.gather(plan, card(0, num_gpus=2))
    with pytest.raises(SetupError) as refused:
        make_group(roster, attempt=0, store_address="10.0.0.1", store_port=29501)
    gathering.join_agents()
    assert agent.heard == [Goodbye(exit_code=78, summary=str(refused.value))]
    assert "node02 has 1 GPU for 2 ranks" in str(refused.value)


def test_the_listener_is_given_back_listening(gathering):
    gathering.add_agent(card(1))
    gathering.gather(job_plan(2))
    assert gathering.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def test_dismissing_a_peer_that_is_gone_is_fine(gathering):
    agent = gathering.add_agent(card(1))
    roster = gathering.gather(job_plan(2))
    agent.is_over.set()
    agent.join(PATIENCE_S)
    dismiss(roster, NodeFaultError("node02 is gone"))
    dismiss(roster, NodeFaultError("node02 is gone"))
