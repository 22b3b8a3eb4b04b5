"""What does one node do in a check? It looks at itself and takes part in a roll call that starts nothing.

Phase 1  here    a line to whoever started the step, before anything that can hang
Phase 2  facts   the card, each reader with its deadline                                      (host.node)
Phase 3  pairs   the roll call, as before a job: who is here, who reaches whom                (preflight.entry)
Phase 4  told    the leader tells what it saw; who found no leader tells its own card

A node alone skips phase 3. Nothing is left behind: the leader writes into a directory that its starter made and
removes or, where there is none, nowhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from allranks.host.node import NodeFacts, begin_card_facts, read_card_facts, read_facts
from allranks.launch.plan import DataPath, Request, choose_data_path, plan_job
from allranks.launch.rendezvous import apply
from allranks.launch.step.parcels import pack
from allranks.model.card import Card, Facts
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, StoppedBySignal
from allranks.model.identity import check_one_agent_per_node, world_from_env
from allranks.model.world import World
from allranks.preflight.entry import Entry, Followed
from allranks.preflight.judge import Observations
from allranks.preflight.rollcall import dismiss
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Goodbye, as_utf8
from allranks.wire.secret import SECRET_VARIABLE

ORDER_VARIABLE = "ALLRANKS_CHECK"
"""In the step's environment: what its members are to do."""
DIRECTORY_PREFIX = ".allranks-check-"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a check are told by who started them."""

    cluster: Cluster
    join_s: float
    directory: str | None = None
    """Where the leader announces itself; made and removed by the starter. None: it is found by name only."""


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a node."""

    host: str
    node_names: tuple[str, ...]
    """The step's, in its order."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a check saw: the leader's document, or one node's alone."""

    seen: Observations
    num_nodes: int
    node_names: tuple[str, ...]
    store_port: int | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """A node that got no answer from a leader; the card's problem says why."""

    card: Card


class NoRunDir(RunDir):
    """Where nothing can, or may, be written."""

    def __init__(self, job: str) -> None:
        super().__init__(Path("/nonexistent"), job)

    def create(self) -> None:
        """Make nothing."""

    def create_attempt(self, attempt: int | None) -> None:
        """Take the number alone."""
        self.attempt = attempt or 0

    def write_roll_call(self, observations: object) -> None:
        """Write nothing."""

    def add_event(self, event: str, **fields: object) -> None:
        """Write nothing."""


def look_here(cluster: Cluster, env: Mapping[str, str]) -> Held:
    """Look at this machine alone: no port, no other node.

    Args:
        cluster: where this machine should have its data interface.
        env: that the workers would get.
    """
    return hold_alone(cluster, read_facts(env), read_card_facts(cluster.worker_env(env)))


def serve(
    order: Order, env: Mapping[str, str], *, check_signals: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Be one node of a check that another process started, and tell it what was seen.

    Args:
        order: what to do.
        env: this task's.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
        tell: takes lines for who started it.
    Raises:
        StoppedBySignal: check_signals raised it.
        AllranksError: this is no task that can take part in a check.
    """
    world = world_from_env(env)
    here = Here(host=world.node_name or name_of(env), node_names=world.hosts)
    tell(pack(str(world.rank), "here", msgspec.json.encode(here)))
    match take_part(order, world, env, check_signals=check_signals, sum_up=lambda _: Goodbye(exit_code=0, summary="")):
        case Held() as held:
            tell(pack(str(world.rank), "held", msgspec.json.encode(held)))
        case Stopped(card=card):
            tell(pack(str(world.rank), "card", msgspec.json.encode(card)))


def take_part(
    order: Order,
    world: World,
    env: Mapping[str, str],
    *,
    check_signals: Callable[[], None],
    sum_up: Callable[[Held], Goodbye],
) -> Held | Goodbye | Stopped:
    """Hold the roll call as the leader, or answer it.

    Args:
        order: what to do; its directory is the leader's and need not be visible from here.
        world: who this process is in its step.
        env: this task's.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
        sum_up: what the leader tells the others at the end.
    Raises:
        StoppedBySignal: check_signals raised it.
        AllranksError: this is no task that can take part in a check.
    """
    check_one_agent_per_node(world)
    guard = msgspec.structs.replace(order.cluster.guard, join_s=order.join_s)
    cluster = msgspec.structs.replace(order.cluster, guard=guard)
    facts = read_facts(env)
    if world.num_nodes == 1:
        return hold_alone(cluster, facts, read_card_facts(cluster.worker_env(env)))
    read = begin_card_facts(cluster.worker_env(env), names=world.hosts[:1])
    plan = plan_job(Request(), world, cluster, facts, job="check", origin={})
    directory = Path(order.directory) if order.directory else None
    if directory is not None and world.rank == 0 and not directory.is_dir():
        directory = None  # made from here it would stay behind
    run_dir = NoRunDir(plan.job) if directory is None else RunDir(directory, plan.job)
    applicant = apply(plan, run_dir, env, problem=plan.problem, facts=read, check_signals=check_signals)
    # A requeued job has no earlier check.
    applicant = replace(applicant, attempt=0, shares_run_dir=directory is not None)
    try:
        with Entry(applicant) as entry:
            called = entry.take_part()
    except StoppedBySignal:
        raise
    except AllranksError as exc:
        return Stopped(
            _card(facts, read(), cluster=cluster, path=plan.data_path, problem=exc, node_index=plan.node_index)
        )
    if isinstance(called, Followed):
        called.leader.close()
        assert isinstance(called.answer, Goodbye)
        return called.answer
    if called.door is not None:
        called.door.shut()
    with called.listener:
        held = Held(
            seen=called.observations,
            num_nodes=plan.num_nodes,
            node_names=plan.node_names,
            store_port=called.port,
        )
        dismiss(called.peers, sum_up(held))
    return held


@contextlib.contextmanager
def step_directory(world: World, env: Mapping[str, str]) -> Iterator[tuple[str | None, Mapping[str, str]]]:
    """Give the tasks of a step that a user started the directory in which they meet, and the environment to do so.

    The first task makes and removes it. Where it cannot, its key is its own, and the others prove themselves by munge.
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


def name_of(env: Mapping[str, str]) -> str:
    """Return this node's name, the scheduler's where there is one."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0] or "localhost"


def hold_alone(cluster: Cluster, facts: NodeFacts, read: Facts) -> Held:
    """Return what a check of one machine has seen, pure; a cluster.toml that does not fit it stops `run` there, too."""
    path, problem = None, None
    try:  # as if the job had more nodes: on one alone all traffic is on loopback
        path = choose_data_path(Request(), cluster, facts, num_nodes=2, origin={})
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
    """What a node that speaks with no leader says of itself."""
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
