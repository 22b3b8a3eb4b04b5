"""What does one node do in a check? It examines itself and takes part in a roll call that starts no workers.

Phase 1  here    a message to the process that started the step, before anything that can hang
Phase 2  facts   the node report; each reader has its own deadline                            (host.node)
Phase 3  pairs   the roll call, as before a job: which nodes joined, which reach each other   (preflight.entry)
Phase 4  told    the leader sends its observations; a node without a leader sends its own report

A check of one node skips phase 3. Nothing is left behind: the leader writes into a directory that its starter creates
and removes, or writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from allranks.host.node import NodeFacts, begin_card_facts, read_card_facts, read_facts
from allranks.launch.plan import Request, plan_job
from allranks.launch.rendezvous import apply
from allranks.launch.srun import send
from allranks.model.card import Card, Facts
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, StoppedBySignal
from allranks.model.identity import check_one_agent_per_node, world_from_env
from allranks.model.world import World
from allranks.preflight.called import Followed
from allranks.preflight.datapath import DataPath, data_path_of_cluster
from allranks.preflight.entry import Entry
from allranks.preflight.judge import Observations
from allranks.preflight.rollcall import dismiss
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Goodbye, as_utf8
from allranks.wire.secret import SECRET_VARIABLE

ORDER_VARIABLE = "ALLRANKS_CHECK"
"""In the step's environment: what its members do."""
DIRECTORY_PREFIX = ".allranks-check-"


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """What the starter tells the members of a check."""

    cluster: Cluster
    join_s: float
    directory: str | None = None
    """Where the leader announces itself; its starter creates and removes it. None: the leader is found by name only."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of a check: those of the leader, or of a single node."""

    seen: Observations
    num_nodes: int
    node_names: tuple[str, ...]
    store_port: int | None = None


def name_at(names: Sequence[str], index: int) -> str:
    """Return the name of a node that may not have reported it."""
    return names[index] if index < len(names) else f"node rank {index}"


class NoRunDir(RunDir):
    """A run directory that writes nothing, for places that cannot or must not be written."""

    def __init__(self, job: str) -> None:
        super().__init__(Path("/nonexistent"), job)

    def create(self) -> None:
        """Do nothing."""

    def create_attempt(self, attempt: int | None) -> None:
        """Remember the number, create nothing."""
        self.attempt = attempt or 0


def look_here(cluster: Cluster, env: Mapping[str, str]) -> Held:
    """Examine this machine only: no port, no other node."""
    return hold_alone(cluster, read_facts(env), read_card_facts(cluster.worker_env(env)))


def serve(order: Order, env: Mapping[str, str], *, check_signals: Callable[[], None]) -> None:
    """Run on one node of a check that another process started, and send it the observations; raises as `take_part`."""
    world = world_from_env(env)
    send(str(world.rank), "here", world.hosts)
    match take_part(order, world, env, check_signals=check_signals, sum_up=lambda _: Goodbye(exit_code=0, summary="")):
        case Held() as held:
            send(str(world.rank), "held", held)
        case Card() as card:
            send(str(world.rank), "card", card)


def take_part(
    order: Order,
    world: World,
    env: Mapping[str, str],
    *,
    check_signals: Callable[[], None],
    sum_up: Callable[[Held], Goodbye],
) -> Held | Goodbye | Card:
    """Run the roll call as the leader, or answer it; returns the own node report if no leader answered.

    Args:
        order: what to do; its directory is the leader's and need not be visible from here.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
        sum_up: returns what the leader sends to the others at the end.
    Raises:
        AllranksError: this is no task that can take part in a check.
    """
    check_one_agent_per_node(world)
    guard = msgspec.structs.replace(order.cluster.guard, join_s=order.join_s)
    cluster = msgspec.structs.replace(order.cluster, guard=guard)
    if world.num_nodes == 1:
        return look_here(cluster, env)
    facts = read_facts(env)
    read = begin_card_facts(cluster.worker_env(env), names=world.hosts[:1])
    plan = plan_job(Request(), world, cluster, facts, job="check", origin={})
    directory = Path(order.directory) if order.directory else None
    if directory is not None and world.rank == 0 and not directory.is_dir():
        directory = None  # a directory created here would be left behind
    run_dir = NoRunDir(plan.job) if directory is None else RunDir(directory, plan.job)
    applicant = apply(plan, run_dir, env, problem=plan.problem, facts=read, check_signals=check_signals)
    # A check has no earlier attempt.
    applicant = replace(applicant, attempt=0, shares_run_dir=directory is not None)
    try:
        with Entry(applicant) as entry:
            called = entry.take_part()
    except StoppedBySignal:
        raise
    except AllranksError as exc:
        return _card(facts, read(), cluster=cluster, path=plan.data_path, problem=exc, node_index=plan.node_index)
    if isinstance(called, Followed):
        called.leader.close()
        assert isinstance(called.answer, Goodbye)
        return called.answer
    if called.acceptor is not None:
        called.acceptor.close()
    with called.listener:
        held = Held(
            seen=called.observations, num_nodes=plan.num_nodes, node_names=plan.node_names, store_port=called.port
        )
        dismiss(called.peers, sum_up(held))
    return held


@contextlib.contextmanager
def step_directory(world: World, env: Mapping[str, str]) -> Iterator[tuple[str | None, Mapping[str, str]]]:
    """Return the directory in which the tasks of a user's own step meet, and the environment for them.

    The first task creates and removes it. If it cannot, it makes its own key, and the others authenticate with munge.
    """
    path = Path.cwd() / f"{DIRECTORY_PREFIX}{world.job_id}.{world.step_id}"
    if world.rank != 0 or world.num_nodes == 1:
        yield str(path), env
        return
    try:
        path.mkdir(mode=0o700)
    except OSError:
        yield None, {**env, SECRET_VARIABLE: secrets.token_hex(32)}
        return
    try:
        yield str(path), env
    finally:
        shutil.rmtree(path, ignore_errors=True)


def hold_alone(cluster: Cluster, facts: NodeFacts, read: Facts) -> Held:
    """Return the observations of a check of one machine. Pure; it fails if cluster.toml does not fit, as `run` does."""
    path, problem = None, None
    try:  # choose the network as for several nodes: on one node, all traffic is on loopback
        path = data_path_of_cluster(cluster, facts, {})
    except AllranksError as exc:
        problem = exc
    card = _card(facts, read, cluster=cluster, path=path, problem=problem, node_index=0)
    return Held(seen=Observations(cards={0: card}), num_nodes=1, node_names=(facts.host,))


def _card(
    facts: NodeFacts,
    read: Facts,
    *,
    cluster: Cluster,
    path: DataPath | None,
    problem: AllranksError | None,
    node_index: int | None,
) -> Card:
    """The node report of a node without a leader."""
    return Card(
        host=facts.host,
        pid=os.getpid(),
        node_index=node_index,
        num_workers=max(1, facts.num_gpus),
        num_gpus=facts.num_gpus,
        num_promised_gpus=facts.num_promised_gpus,
        data_interface=path.interface if path else None,
        data_address=path.address if path else None,
        wanted_backend=cluster.train.backend,
        problem=as_utf8(str(problem)) if problem else None,
        problem_exit=problem.exit_code if problem else 0,
        problem_finding=problem.finding if problem else None,
        facts=read,
    )
