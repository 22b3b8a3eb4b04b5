"""How is a job requeued, once, and without its faulty nodes?

    requeue_once(job, run_dir=run_dir.path, attempt=2, nodes=["node03"], cause="AR012 node-failure", say=say)

The agents requeue it, not the batch script: they know the culprit, and it works for scripts that users wrote
themselves. If the batch host is lost, the script is gone, and the job would continue without it until its time limit.
The leader's agent acts; if the leader is lost, the first of the other agents does.

Phase 1  claim      one agent alone creates `requeue.json` in the attempt's directory Phase 2  remember   the culprit is
added to the job's record; after the third time the job ends  (launch.queue.exclusion) Phase 3  plan       which nodes
are excluded, how many nodes are requested                        (`plan_requeue`, pure) Phase 4  requeue    everything
in the job ends, this process too: SIGTERM, SIGKILL after KillWait Phase 5  change     what the waiting job requests;
SLURM accepts this only now

Signals are blocked in phases 4 and 5. Every failure is reported, with the command that does the step by hand.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.host.slurm import JobState, list_nodes
from allranks.host.slurm_command import shielded
from allranks.host.slurm_job import OwnJob, change_waiting, find_job, requeue
from allranks.host.slurm_site import read_partition, read_site
from allranks.launch.queue.ending import why_no_requeue
from allranks.launch.queue.exclusion import (
    MOST_TIMES,
    Culprit,
    choose_excluded,
    is_hopeless,
    read_culprits,
    remember,
    write_culprits,
)
from allranks.model.errors import AllranksError, Exit
from allranks.model.hostlist import expand_hosts, fold_hosts

CLAIM = "requeue.json"
PREEMPTED = "preempted.json"
"""In the run directory: SLURM has preempted this job with a grace period."""
LONGEST_GRACE_S = 900.0
"""Upper bound of the time that a preempted job is kept alive; sites give minutes."""
LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """What the waiting job requests."""

    values: dict[str, str]
    """Under scontrol's names; empty if nothing changes."""
    line: str
    """The text for the user."""


def plan_requeue(
    state: JobState, *, job: OwnJob, culprits: Sequence[Culprit], partition: Sequence[str], min_nodes: int
) -> QueuePlan:
    """Decide what a job requests when it waits again.

    If the user named nodes, only these are used. A culprit that the job needs is not excluded; otherwise the job would
    wait forever.

    Args:
        state: the job, as SLURM reports it.
        job: the same job, from its own environment.
        culprits: all nodes that have been at fault.
        partition: nodes of its partition.
        min_nodes: MIN of --nnodes MIN:MAX.
    """
    asked = expand_hosts(state.asked_nodes) if state.asked_nodes else []
    own = expand_hosts(state.excluded_nodes) if state.excluded_nodes else []
    closed = set(own) - {each.node for each in culprits}  # nodes that the user excluded: SLURM assigns none of them
    pool = [name for name in dict.fromkeys(asked if len(asked) >= job.num_nodes else partition) if name not in closed]
    chosen, stay = choose_excluded(culprits, nodes=pool, needed=min_nodes)
    out = [name for name in pool if name in chosen]
    values = {}
    if set(out) - set(own):
        values["ExcNodeList"] = fold_hosts(list(dict.fromkeys([*own, *out])))
    if set(out) & set(asked):
        values["ReqNodeList"] = fold_hosts([name for name in asked if name not in out])
    num_nodes = min(job.num_nodes, len(pool) - len(out))
    if num_nodes != state.num_nodes:
        values["NumNodes"] = str(num_nodes)
    parts = []
    if out:
        parts.append(f"without {fold_hosts(out)}")
    if num_nodes != job.num_nodes:
        parts.append(f"on {num_nodes} nodes instead of {job.num_nodes}")
    if stay:
        parts.append(
            f"{fold_hosts(list(stay))} is not excluded, because the job needs {min_nodes} of {len(pool)} nodes"
        )
    return QueuePlan(values=values, line=", ".join(parts))


def requeue_once(
    job: OwnJob,
    *,
    run_dir: Path,
    attempt: int,
    say: Callable[[str], None],
    nodes: Sequence[str] = (),
    cause: str = "",
    min_nodes: int | None = None,
) -> int:
    """Requeue the job, unless another agent has; returns the exit code of this process.

    On success SLURM ends this process soon after.

    Args:
        job: this job.
        run_dir: the job's directory, above its attempts.
        attempt: number of this attempt.
        say: one line for people.
        nodes: culprits; empty if the job is requeued for another reason, such as its time limit.
        cause: their cause, `AR012 node-failure`.
        min_nodes: smallest number of nodes; None for as many as it has.
    Returns:
        75 if it was requeued because of a node, 0 without one; 78 if the same culprit failed for the third time; the
        exit code without SLURM if the job cannot be requeued.
    """
    exit_code = Exit.NODE_FAULT if nodes else Exit.OK
    if not _claim(run_dir / f"attempt_{attempt}", job):
        return exit_code
    culprits = remember(read_culprits(run_dir), nodes, cause=cause, attempt=attempt)
    write_culprits(run_dir, culprits)
    if is_hopeless(culprits, nodes):
        names = fold_hosts(list(nodes))
        say(f"job {job.id} ends: {names} was at fault in {MOST_TIMES} runs and cannot be replaced; {cause}")
        return Exit.SETUP
    by_hand = f"scontrol requeue {job.id}"
    try:
        state = find_job(job.id)
        if state is None:
            raise AllranksError("SLURM does not know this job")
        if state.is_pending:
            return exit_code  # another agent has requeued it
        if state.preempted_at:  # SLURM decides whether the job runs again, even if the user sent the warning signal
            outlast_preemption(job, run_dir=run_dir, say=say)
            return exit_code
        if no := why_no_requeue(job, is_batch=state.is_batch, may_requeue=state.may_requeue):
            say(f"job {job.id} does not go back into the queue: {no}")
            return exit_code
        partition = [node.name for node in list_nodes(partition=state.partition.partition(",")[0])]
        plan = plan_requeue(
            state, job=job, culprits=culprits, partition=partition, min_nodes=min_nodes or job.num_nodes
        )
        with shielded():
            how = f", {plan.line}" if plan.line else ""
            say(f"job {job.id} goes back into the queue{how}; it resumes in its next run")
            requeue(job.id)
            if plan.values:
                by_hand = f"scontrol update JobId={job.id} " + " ".join(f"{k}={v}" for k, v in plan.values.items())
                change_waiting(job.id, **plan.values)
    except AllranksError as exc:
        say(f"job {job.id}: {exc}; to do it by hand: {by_hand}")
    return exit_code


def outlast_preemption(job: OwnJob, *, run_dir: Path, say: Callable[[str], None]) -> bool:
    """Wait for SLURM to end a job that it preempts with a grace period; returns whether it is being preempted.

    SLURM requeues it only if it still runs then. For the leader's agent, after SIGTERM and the end of its workers.

    Args:
        job: this job.
        run_dir: the job's directory, which keeps that it was preempted, for `stay_complete`.
        say: one line for people.
    """
    try:
        state = find_job(job.id)
        if state is None or not state.preempted_at or state.state != "RUNNING":
            return False
        rules = read_partition(state.partition)
    except AllranksError:
        return False
    with contextlib.suppress(OSError):
        (run_dir / PREEMPTED).write_text(json.dumps({"job": job.id, "at": state.preempted_at}))
    grace = f"grace period {rules.grace_s:.0f} s since {state.preempted_at}"
    say(f"preempted: waiting for SLURM to end this run of job {job.id}, {grace}")
    end_s = time.monotonic() + min(rules.grace_s + 60.0, LONGEST_GRACE_S)
    while time.monotonic() < end_s:
        time.sleep(LOOK_S)
        try:
            state = find_job(job.id)
        except AllranksError:
            continue
        if state is None or state.state != "RUNNING":
            break
    return True


def stay_complete(job: OwnJob, *, run_dir: Path, say: Callable[[str], None]) -> None:
    """Keep SLURM from running a job again that was preempted once and has succeeded now. For the leader's agent.

    SLURM 24.11.5 never forgets that it preempted a job after a grace period: it requeues the job each time it ends with
    0. Such a job ends only if it must not be requeued; SLURM then calls it PREEMPTED. Releases 20.11.4 and 26.05.5 do
    not have this fault (SLURM's ticket 25682).

    Args:
        job: this job.
        run_dir: the job's directory, above its attempts.
        say: one line for people.
    """
    if not job.restarts or not (run_dir / PREEMPTED).exists():
        return
    try:
        change_waiting(job.id, Requeue="0")
    except AllranksError as exc:
        say(f"job {job.id}: {exc}; if SLURM runs it again, end it by hand: scancel {job.id}")


def read_grace_s(state: JobState | None) -> float | None:
    """Return how long the workers of a job live after SIGTERM; None if SLURM does not say."""
    try:
        with shielded():
            if state is not None and state.preempted_at and state.state == "RUNNING":
                return read_partition(state.partition).grace_s
            return read_site().kill_wait_s
    except AllranksError:
        return None


def _claim(attempt_path: Path, job: OwnJob) -> bool:
    """Whether this agent is the one that acts. It also acts if the directory cannot be written."""
    try:
        with (attempt_path / CLAIM).open("x") as file:
            json.dump({"job": job.id, "time_s": round(time.time(), 3)}, file)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
