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
from allranks.launch.inbox import SignalInbox
from allranks.launch.plan import Request, choose_data_path, plan_job
from allranks.launch.rendezvous import apply
from allranks.launch.step.parcels import send
from allranks.model.card import Card, Facts
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, StoppedBySignal
from allranks.model.identity import check_one_agent_per_node, world_from_env
from allranks.model.world import World
from allranks.preflight.called import Followed
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
    directory: str = ""
    """Where the leader announces itself; its starter creates and removes it. Empty: it is found by name only."""


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
        """Do nothing."""


def look_here(cluster: Cluster, env: Mapping[str, str]) -> Held:
    """Examine this machine only: no port, no other node."""
    return hold_alone(cluster, read_facts(env), read_card_facts(cluster.worker_env(env)))


def serve(order: Order, env: Mapping[str, str]) -> None:
    """Run on one node of a check that another process started, and send it the observations; raises as `take_part`."""
    world = world_from_env(env)
    send(str(world.rank), "here", world.hosts)
    found = take_part(order, world, env)
    if not isinstance(found, Goodbye):
        send(str(world.rank), "held" if isinstance(found, Held) else "card", found)


def take_part(
    order: Order, world: World, env: Mapping[str, str], *, judge: Callable[[Held], int] = lambda _: 0
) -> Held | Goodbye | Card:
    """Run the roll call as the leader, or answer it; returns the own node report if no leader answered.

    Args:
        order: what to do; its directory is the leader's and need not be visible from here.
        judge: returns the exit code that the leader sends to the others at the end.
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
    directory = Path(order.directory)
    # A directory that the leader creates here would be left behind.
    is_shared = bool(order.directory) and (world.rank != 0 or directory.is_dir())
    run_dir = RunDir(directory, plan.job) if is_shared else NoRunDir(plan.job)
    applicant = apply(plan, run_dir, env, problem=plan.problem, facts=read, check_signals=SignalInbox().check)
    # A check has no earlier attempt.
    applicant = replace(applicant, attempt=0, shares_run_dir=is_shared)
    try:
        with Entry(applicant) as entry:
            called = entry.take_part()
    except StoppedBySignal:
        raise
    except AllranksError as exc:
        card = hold_alone(cluster, facts, read()).seen.cards[0]
        return with_problem(msgspec.structs.replace(card, node_index=plan.node_index), exc)
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
        dismiss(called.peers, Goodbye(exit_code=judge(held), summary=""))
    return held


@contextlib.contextmanager
def step_directory(world: World, env: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Return the directory in which the tasks of a user's own step meet, and the environment for them.

    The first task creates and removes it. If it cannot, it makes its own key, and the others authenticate with munge.
    """
    name = f"{DIRECTORY_PREFIX}{world.job_id}.{world.step_id}"
    if world.rank != 0 or world.num_nodes == 1:
        yield str(Path.cwd() / name), env
        return
    with announcement_directory(name, Path.cwd) as directory:
        yield directory, env if directory else {**env, SECRET_VARIABLE: secrets.token_hex(32)}


@contextlib.contextmanager
def announcement_directory(name: str, *bases: Callable[[], Path]) -> Iterator[str]:
    """Create a directory in the first base that allows it, for the duration of the block; empty if none does."""
    with contextlib.ExitStack() as made:
        directory = ""
        for base in bases:
            with contextlib.suppress(OSError, RuntimeError):
                path = base() / name
                path.mkdir(mode=0o700)
                made.callback(shutil.rmtree, path, ignore_errors=True)
                directory = str(path)
                break
        yield directory


def hold_alone(cluster: Cluster, facts: NodeFacts, read: Facts) -> Held:
    """Return the observations of a check of one machine. Pure; it fails if cluster.toml does not fit, as `run` does."""
    path, problem = None, None
    try:  # choose the network as for several nodes: on one node, all traffic is on loopback
        path = choose_data_path(Request(), cluster, facts, num_nodes=2, origin={})
    except AllranksError as exc:
        problem = exc
    card = Card(
        host=facts.host,
        pid=os.getpid(),
        node_index=0,
        num_workers=max(1, facts.num_gpus),
        num_gpus=facts.num_gpus,
        num_promised_gpus=facts.num_promised_gpus,
        data_interface=path.interface if path else None,
        data_address=path.address if path else None,
        wanted_backend=cluster.train.backend,
        facts=read,
    )
    return Held(seen=Observations(cards={0: with_problem(card, problem)}), num_nodes=1, node_names=(facts.host,))


def with_problem(card: Card, problem: AllranksError | None) -> Card:
    """Return a node report with this reason why the node cannot take part; None: it can."""
    return msgspec.structs.replace(
        card,
        problem=as_utf8(str(problem)) if problem else None,
        problem_exit=problem.exit_code if problem else 0,
        problem_finding=problem.finding if problem else None,
    )
