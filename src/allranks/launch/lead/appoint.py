"""Create a leader of a job and its driver: terms, connections to all agents, side port, link to SLURM."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.lead.course import Terms
from allranks.launch.lead.driver import LeaderDriver
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import Node, State
from allranks.launch.plan import LOOPBACK, JobPlan
from allranks.launch.queue import ending
from allranks.launch.queue.revival import Revivals, own_command
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.rendezvous import Rendezvous
from allranks.model.finding import Finding
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.protocol import Plan


def appoint_leader(
    plan: JobPlan,
    rendezvous: Rendezvous,
    own: Connection,
    run_dir: RunDir,
    scheduler: Scheduler | None,
    env: Mapping[str, str],
    *,
    show: Callable[[Sequence[Finding]], None],
) -> LeaderDriver:
    """Return the driver of a leader that has begun the first generation.

    Args:
        plan: of this agent.
        rendezvous: the leader's, after the roll call.
        own: its end of the line to the agent in this process.
        run_dir: of the job.
        scheduler: None outside of SLURM.
        env: this agent's.
        show: prints findings.
    """
    own_address, connections = rendezvous.own_address or LOOPBACK, {0: own, **rendezvous.peers}
    group = rendezvous.group
    assert group.past is not None
    leader = Leader(
        _terms_of(plan, group, group.store_address, group.store_port),
        guard=Guard(plan.guard, job=plan.job),
        past=group.past,
        nodes={
            index: Node(card=card, name=card.host, address=connections[index].peer_address or own_address)
            for index, card in rendezvous.cards.items()
        },
        plan=group,
        now_s=time.monotonic(),
    )
    return _drive(leader, connections, rendezvous.acceptor, plan, run_dir, scheduler, env, show=show)


def appoint_successor(
    effect: events.Lead,
    connections: Mapping[int, Connection],
    plan: JobPlan,
    rendezvous: Rendezvous,
    run_dir: RunDir,
    scheduler: Scheduler | None,
    env: Mapping[str, str],
    *,
    node: int,
    store_port: int,
    show: Callable[[Sequence[Finding]], None],
) -> LeaderDriver:
    """Return the driver of a leader that takes the place of a lost one.

    Args:
        effect: what this agent knows of the job, and who has joined it.
        connections: to the agents that have joined it, by node, and to the agent in this process.
        plan: of this agent.
        rendezvous: this agent's, after the roll call.
        run_dir: of the job.
        scheduler: None outside of SLURM.
        env: this agent's.
        node: index of this node in the job.
        store_port: where rank 0 will have its store.
        show: prints findings.
    """
    own_address = rendezvous.own_address or LOOPBACK
    store_address = plan.data_path.address if plan.data_path else own_address
    assert rendezvous.card is not None
    cards = {node: msgspec.structs.replace(rendezvous.card, generation=effect.plan.generation), **effect.cards}
    leader = Leader(
        _terms_of(plan, effect.plan, store_address, store_port, own=node),
        guard=Guard(plan.guard, job=plan.job),
        past=effect.past,
        nodes={
            index: Node(
                card=card, name=card.host, address=effect.addresses.get(index) or own_address, state=State.RUNNING
            )
            for index, card in cards.items()
        },
        plan=effect.plan,
        now_s=time.monotonic(),
    )
    leader.take_over(effect.lost, time.monotonic(), has_resigned=effect.has_resigned)
    return _drive(leader, connections, rendezvous.acceptor, plan, run_dir, scheduler, env, show=show)


def _terms_of(plan: JobPlan, group: Plan, store_address: str, store_port: int, *, own: int = 0) -> Terms:
    return Terms(
        job=plan.job,
        attempt=group.attempt,
        wanted_backend=plan.wanted_backend,
        store_address=store_address,
        store_port=store_port,
        num_nodes=plan.num_nodes,
        min_nodes=plan.min_nodes,
        max_restarts=plan.request.max_restarts,
        capacity_s=plan.request.capacity_s,
        gone_s=plan.guard.gone_s,
        can_change_leader=len(group.successors) > 1,
        own=own,
    )


def _drive(
    leader: Leader,
    connections: Mapping[int, Connection],
    acceptor: Acceptor | None,
    plan: JobPlan,
    run_dir: RunDir,
    scheduler: Scheduler | None,
    env: Mapping[str, str],
    *,
    show: Callable[[Sequence[Finding]], None],
) -> LeaderDriver:
    def on_signal(signum: int, save_s: float | None) -> ending.Decision:
        if scheduler is None:
            return ending.decide(signum, job=None, save_s=save_s)
        return scheduler.decide(signum, save_s=save_s)

    has_revivals = acceptor is not None and scheduler is not None and plan.request.max_restarts
    return LeaderDriver(
        leader,
        connections,
        acceptor=acceptor,
        gone_s=plan.guard.gone_s,
        checkpoints=run_dir.checkpoints_path(plan.request.checkpoint_dir),
        say=_add_what_follows(say, job=plan.job, hang_s=plan.guard.hang_s),
        show=show,
        on_event=run_dir.add_event,
        on_signal=on_signal,
        reviver=_expect_nodes_back(plan, run_dir, scheduler, env) if has_revivals and scheduler else None,
        node_names=plan.node_names,
    )


def _add_what_follows(say: Callable[[str], None], *, job: str, hang_s: float) -> Callable[[str], None]:
    """Return `say` that adds to a job's first line about a slow rank when the job will end, and what to look at."""
    follows = [f"the job ends after {hang_s:g} s of this (--hang-timeout); allranks stack {job} shows all ranks"]

    def say_all(line: str) -> None:
        say(f"{line}; {follows.pop()}" if follows and line.startswith("slow: ") else line)

    return say_all


def _expect_nodes_back(plan: JobPlan, run_dir: RunDir, scheduler: Scheduler, env: Mapping[str, str]) -> Revivals:
    return Revivals(
        own_command(),
        job=scheduler.job,
        env=env,
        log=lambda node: run_dir.create_node(node) / "back.log",
        patience_s=plan.request.capacity_s,
    )
