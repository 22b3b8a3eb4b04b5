"""What does one node do in a check? It looks at itself and takes part in a roll call that starts nothing.

Phase 1  here    a line to whoever started the step, before anything that can hang
Phase 2  facts   the card, each reader with its deadline                                      (host.node)
Phase 3  pairs   the roll call, as before a job: who is here, who reaches whom                (preflight.entry)
Phase 4  told    the leader tells what it saw; who found no leader tells its own card

A node alone skips phase 3. Nothing is left behind: the leader writes into a directory that its starter made and removes,
or, where there is none, nowhere.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from allranks.host.node import NodeFacts, read_card_facts, read_facts
from allranks.launch.check.lines import pack
from allranks.launch.membership import apply
from allranks.launch.plan import JobPlan, Request, choose_data_path, plan_job
from allranks.model.card import Card, Facts
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, UsageError
from allranks.model.finding import Finding
from allranks.model.identity import World, check_one_agent_per_node, world_from_env
from allranks.preflight.entry import Called, Entry
from allranks.preflight.judge import Observations
from allranks.preflight.rollcall import dismiss
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Goodbye

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
    """Why a node got no answer from a leader."""

    card: Card
    exit_code: int


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
        cluster: where this machine should have its data interface; a machine that is none of its nodes need not.
        env: that the workers would get.
    """
    facts = read_facts(env)
    card = _own_card(cluster, facts, read_card_facts(env))
    return Held(seen=Observations(cards={0: card}), num_nodes=1, node_names=(facts.host,))


def serve(order: Order, env: Mapping[str, str], *, check_signals: Callable[[], None], tell: Callable[[str], None]) -> None:
    """Be one node of a check that another process started, and tell it what was seen.

    Args:
        order: what to do.
        env: this task's.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
        tell: takes lines for who started it.
    Raises:
        StoppedBySignal: check_signals raised it.
        AllranksError: this is no task of a step.
    """
    world = world_from_env(env)
    check_one_agent_per_node(world)
    host = env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    tell(pack(world.rank, "here", msgspec.json.encode(Here(host=host, node_names=world.hosts))))
    found = take_part(order, world, env, check_signals=check_signals)
    match found:
        case Held():
            tell(pack(world.rank, "held", msgspec.json.encode(found)))
        case Stopped():
            tell(pack(world.rank, "card", msgspec.json.encode(found.card)))


def take_part(
    order: Order, world: World, env: Mapping[str, str], *, check_signals: Callable[[], None]
) -> Held | Goodbye | Stopped:
    """Hold the roll call as the leader, or answer it.

    Args:
        order: what to do; its directory is the leader's and need not be visible from here.
        world: who this process is in its step.
        env: this task's.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
    Raises:
        StoppedBySignal: check_signals raised it.
        AllranksError: this is no task that can take part in a check.
    """
    facts = read_facts(env)
    cluster = msgspec.structs.replace(
        order.cluster, guard=msgspec.structs.replace(order.cluster.guard, join_s=order.join_s)
    )
    directory = Path(order.directory) if order.directory else None
    if directory is not None and world.rank == 0 and not directory.is_dir():
        directory = None  # not made from here: it would stay behind
    read = _read_facts(env, names=world.hosts[:1], run_dir=directory)
    if world.num_nodes == 1:
        card = _own_card(cluster, facts, read())
        return Held(seen=Observations(cards={0: card}), num_nodes=1, node_names=world.hosts or (facts.host,))
    plan = plan_job(Request(), world, cluster, facts, job="check", origin={})
    run_dir = NoRunDir(plan.job) if directory is None else RunDir(directory, plan.job)
    applicant = apply(plan, run_dir, env, problem=plan.problem, facts=read, check_signals=check_signals)
    # Without a directory there is nothing to look for in it; the key is then in the environment.
    applicant = replace(applicant, attempt=0, is_slurm=directory is not None)
    try:
        with Entry(applicant) as entry:
            called = entry.take_part()
            if isinstance(called, Called):
                called.listener.close()
                dismiss(called.peers, Goodbye(exit_code=0, summary=""))
                return _held(called, plan)
            called.leader.close()
            assert isinstance(called.answer, Goodbye)
            return called.answer
    except AllranksError as exc:
        if exc.exit_code > 128:
            raise
        return Stopped(_card(plan.data_path and plan, cluster, facts, read(), problem=exc, world=world), exc.exit_code)
