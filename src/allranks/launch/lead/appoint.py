"""Create the leader of a job and its driver: terms, connections to all agents, side port, link to SLURM."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from allranks.guard.verdict import Guard
from allranks.launch.lead.course import Terms
from allranks.launch.lead.driver import LeaderDriver
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import Node
from allranks.launch.lead.recovery import History
from allranks.launch.plan import LOOPBACK, JobPlan
from allranks.launch.queue import ending
from allranks.launch.queue.revival import Revivals, own_command
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.rendezvous import Rendezvous
from allranks.model.finding import Finding
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.wire.connection import Connection


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

    def on_signal(signum: int, save_s: float | None) -> ending.Decision:
        if scheduler is None:
            return ending.decide(signum, job=None, save_s=save_s)
        return scheduler.decide(signum, save_s=save_s)

    guard, request = plan.guard, plan.request
    acceptor = rendezvous.acceptor
    if acceptor is not None and not request.max_restarts:
        acceptor.close()
        acceptor = None
    own_address, connections = rendezvous.own_address or LOOPBACK, {0: own, **rendezvous.peers}
    leader = Leader(
        Terms(
            job=plan.job,
            attempt=rendezvous.group.attempt,
            wanted_backend=plan.wanted_backend,
            store_address=rendezvous.store_address,
            store_port=rendezvous.group.store_port,
            num_nodes=plan.num_nodes,
            min_nodes=plan.min_nodes,
            max_restarts=request.max_restarts,
            capacity_s=request.capacity_s,
        ),
        guard=Guard(guard, job=plan.job),
        history=History(restarts_left=request.max_restarts, retries_errors=request.retries_errors),
        nodes={
            index: Node(card=card, name=card.host, address=connections[index].peer_address or own_address)
            for index, card in rendezvous.cards.items()
        },
        plans=rendezvous.plans,
        now_s=time.monotonic(),
    )
    return LeaderDriver(
        leader,
        connections,
        acceptor=acceptor,
        gone_s=guard.gone_s,
        checkpoints=run_dir.checkpoints_path(request.checkpoint_dir),
        say=_add_what_follows(say, job=plan.job, hang_s=guard.hang_s),
        show=show,
        on_event=run_dir.add_event,
        on_signal=on_signal,
        reviver=_expect_nodes_back(plan, run_dir, scheduler, env) if acceptor is not None and scheduler else None,
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
