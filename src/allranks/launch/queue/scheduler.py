"""What does SLURM know about this job, and how is the job requeued, once, and without its faulty nodes?

    scheduler = Scheduler(job, env, run_dir, min_nodes=4, say=say)
    scheduler.decide(signal.SIGUSR1, can_save=True)    # what a signal means here (launch.queue.ending)
    scheduler.requeue(["node03"], cause="AR012 ...")

Without SLURM, there is no scheduler. The job's record of faulty nodes, `culprits.json`, is in its directory, above its
attempts, so an attempt that SLURM starts later finds it.

The agents requeue the job, not the batch script: they know the culprit, and it works for scripts that users wrote
themselves. If the batch host is lost, the script is gone, and the job would continue without it until its time limit.
The leader's agent acts; if the leader is lost, the first of the other agents does.

Phase 1  claim      one agent alone creates `requeued` in the attempt's directory
Phase 2  remember   the culprit is added to the job's record; after the third time the job ends       (`remember`)
Phase 3  plan       which nodes are excluded, how many nodes are requested                     (`plan_requeue`, pure)
Phase 4  requeue    everything in the job ends, this process too: SIGTERM, SIGKILL after KillWait
Phase 5  change     what the waiting job requests; SLURM accepts this only now

Signals are blocked in phases 4 and 5. Every failure is reported, with the command that does the step by hand.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from allranks.host.slurm import JobState, list_nodes
from allranks.host.slurm_command import shielded
from allranks.host.slurm_job import OwnJob, TimeLimit, change_waiting, find_eligible_s, find_job, requeue
from allranks.host.slurm_site import read_partition, read_site
from allranks.host.threads import start_thread
from allranks.launch.queue.ending import EndingDecision, Told, decide, why_no_requeue
from allranks.model.errors import AllranksError, Exit
from allranks.model.finding import fill_cause_id
from allranks.model.foreign import Unreadable, decode_json
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.readback import MAX_BYTES, Count, Name
from allranks.report.rundir import RunDir

ANSWER_S = 2.0
"""How long a decision waits for SLURM's answer; after that, it is made without the answer."""
CLAIM = "requeued"
CULPRITS = "culprits.json"
MOST_TIMES = 3
"""After this many attempts with the same culprit, another start does not help."""
PREEMPTED = "preempted"
"""In the run directory: SLURM has preempted this job with a grace period."""
LONGEST_GRACE_S = 900.0
"""Upper bound of the time that a preempted job is kept alive; sites give minutes."""
LOOK_S = 2.0


@dataclass(slots=True)
class Scheduler:
    """SLURM, as the agents of one job see it."""

    job: OwnJob
    env: Mapping[str, str]
    run_dir: RunDir
    min_nodes: int
    """MIN of --nnodes MIN:MAX."""
    say: Callable[[str], None]
    _told: dict[int, Told] = field(default_factory=dict)
    """By signal: what SLURM has said so far."""

    def decide(self, signum: int, *, can_save: bool, shutdown_s: float) -> EndingDecision:
        """Return what a signal means for this job, from `launch.queue.ending.decide`."""
        if signum not in self._told:  # in a thread: nothing waits for slurmctld
            self._told[signum] = Told()
            if asking := start_thread(lambda: self._ask(signum), name="allranks-slurm"):
                asking.join(ANSWER_S)
        told = self._told[signum]
        return decide(signum, job=self.job, told=told, can_save=can_save, shutdown_s=shutdown_s)

    def find_kill_wait_s(self) -> float | None:
        """Return the seconds between SLURM's SIGTERM and its SIGKILL; None if it does not say."""
        with contextlib.suppress(AllranksError), shielded():
            return read_site().kill_wait_s
        return None

    def find_eligible_s(self) -> float | None:
        """Return since when this job could have begun, seconds since the epoch; None if SLURM does not say it."""
        return find_eligible_s(self.job.id)

    def requeue(self, nodes: Sequence[str] = (), *, cause: str = "") -> int:
        """Requeue the job, unless another agent has; on success SLURM ends this process soon after.

        Args:
            nodes: culprits; empty if the job is requeued for another reason, such as its time limit.
            cause: their cause, `AR012 node-failure`.
        Returns:
            The exit code of this process: 75 if the job was requeued because of a node, 0 without one; 78 if the same
            culprit failed for the third time; the exit code without SLURM if the job cannot be requeued.
        """
        job, exit_code = self.job, Exit.NODE_FAULT if nodes else Exit.OK
        try:
            self.run_dir.hold_attempt(make=False).open_new(CLAIM).close()
        except FileExistsError:
            return exit_code
        except OSError:
            pass  # an agent that cannot write acts, too
        culprits = remember(self.run_dir, nodes, cause=cause, attempt=self.run_dir.attempt)
        if any(culprit.is_hopeless for culprit in culprits if culprit.node in nodes):
            names = fold_hosts(list(nodes))
            self.say(f"job {job.id} ends: {names} was at fault in {MOST_TIMES} runs and cannot be replaced; {cause}")
            return Exit.SETUP
        by_hand = f"scontrol requeue {job.id}"
        try:
            state = find_job(job.id)
            if state is None:
                raise AllranksError("SLURM does not know this job")
            if state.is_pending:
                return exit_code  # another agent has requeued it
            if state.preempted_at:  # SLURM decides whether the job runs again, even if the user sent the warning signal
                self.outlast_preemption()
                return exit_code
            if no := why_no_requeue(job, state):
                self.say(f"job {job.id} does not go back into the queue: {no}")
                return exit_code
            partition = [node.name for node in list_nodes(partition=state.partition.partition(",")[0])]
            values, how = plan_requeue(state, job=job, culprits=culprits, partition=partition, min_nodes=self.min_nodes)
            with shielded():
                how = f", {how}" if how else ""
                self.say(f"job {job.id} goes back into the queue{how}; it resumes in its next run")
                requeue(job.id)
                if values:
                    by_hand = f"scontrol update JobId={job.id} " + " ".join(f"{k}={v}" for k, v in values.items())
                    change_waiting(job.id, **values)
        except AllranksError as exc:
            self.say(f"job {job.id}: {exc}; to do it by hand: {by_hand}")
        return exit_code

    def outlast_preemption(self) -> None:
        """Wait for SLURM to end this job, if it is being preempted with a grace period.

        SLURM requeues it only if it still runs then. For the leader's agent, after SIGTERM and the end of its workers.
        """
        try:
            state = find_job(self.job.id)
            if state is None or not state.preempted_at or state.state != "RUNNING":
                return
            rules = read_partition(state.partition)
        except AllranksError:
            return
        with contextlib.suppress(OSError):
            self.run_dir.hold(make=False).write_whole(PREEMPTED, b"")
        grace = f"grace period {rules.grace_s:.0f} s since {state.preempted_at}"
        self.say(f"preempted: waiting for SLURM to end this run of job {self.job.id}, {grace}")
        end_s = time.monotonic() + min(rules.grace_s + 60.0, LONGEST_GRACE_S)
        while state is not None and state.state == "RUNNING" and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            with contextlib.suppress(AllranksError):
                state = find_job(self.job.id)

    def stay_complete(self) -> None:
        """Keep SLURM from running a job again that was preempted once and has succeeded now. For the leader's agent.

        SLURM 24.11.5 never forgets that it preempted a job after a grace period: it requeues the job each time it ends
        with 0. Such a job ends only if it must not be requeued; SLURM then calls it PREEMPTED. Releases 20.11.4 and
        26.05.5 do not have this fault (SLURM's ticket 25682).
        """
        if not self.job.restarts or not self._was_preempted():
            return
        try:
            change_waiting(self.job.id, Requeue="0")
        except AllranksError as exc:
            self.say(f"job {self.job.id}: {exc}; if SLURM runs it again, end it by hand: scancel {self.job.id}")

    def _was_preempted(self) -> bool:
        folder = self.run_dir.look()
        return folder is not None and folder.has(PREEMPTED)

    def _ask(self, signum: int) -> None:
        told = Told()
        with contextlib.suppress(AllranksError):  # then the defaults are used
            if (state := find_job(self.job.id)) is not None:
                told = replace(
                    told, no_requeue=why_no_requeue(self.job, state), is_running=state.state == "RUNNING"
                )  # fmt: skip
                if told.is_running and state.preempted_at:
                    with contextlib.suppress(AllranksError), shielded():
                        told = replace(told, preempt_s=read_partition(state.partition).grace_s)
            self._told[signum] = told
            told = replace(told, left_s=TimeLimit(self.job, self.env).left_s(time.time()))
            if not told.is_running or told.preempt_s is not None:
                told = replace(told, kill_wait_s=self.find_kill_wait_s())
        self._told[signum] = told


class NodeAtFault(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was at fault."""

    node: Name
    cause: Name
    """Of the latest attempt, `AR012 node-failure`."""
    cause_id: str = ""
    """The id alone, for programs; always that of `cause`."""
    attempts: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=1 << 16)]
    """Attempts in which the node was at fault, each once: an attempt that restarts five times counts once."""

    def __post_init__(self) -> None:
        fill_cause_id(self)

    @property
    def is_hopeless(self) -> bool:
        """Whether another start does not help: an excluded node cannot get there, only one that the job needs can."""
        return len(self.attempts) >= MOST_TIMES


def remember(run_dir: RunDir, nodes: Iterable[str], *, cause: str, attempt: int) -> tuple[NodeAtFault, ...]:
    """Add the culprits of one attempt to the job's record, atomically, and return it; a full disk does not stop a job.

    Args:
        attempt: number of the attempt, SLURM_RESTART_COUNT.
    Returns:
        All culprits, in the order of their first fault.
    """
    known = {culprit.node: culprit for culprit in read_culprits(run_dir)}
    for node in nodes:
        before = known[node].attempts if node in known else ()
        known[node] = NodeAtFault(node=node, cause=cause, attempts=tuple(sorted({*before, attempt})))
    culprits = tuple(known.values())
    with contextlib.suppress(OSError):
        run_dir.hold(make=False).write_whole(CULPRITS, msgspec.json.format(msgspec.json.encode(culprits)) + b"\n")
    return culprits


def plan_requeue(
    state: JobState, *, job: OwnJob, culprits: Sequence[NodeAtFault], partition: Sequence[str], min_nodes: int
) -> tuple[dict[str, str], str]:
    """Return what a job requests when it waits again, under scontrol's names, and the same as text for the user.

    If the user named nodes, only these are used. A job that excludes too many nodes would wait forever, so the worst
    culprits are excluded first, as long as enough nodes remain.

    Args:
        state: the job, as SLURM reports it.
        job: the same job, from its own environment.
    """
    asked = expand_hosts(state.asked_nodes) if state.asked_nodes else []
    own = expand_hosts(state.excluded_nodes) if state.excluded_nodes else []
    # Nodes that the user excluded: SLURM assigns none of them.
    closed = set(own) - {culprit.node for culprit in culprits}
    pool = [name for name in dict.fromkeys(asked if len(asked) >= job.num_nodes else partition) if name not in closed]
    by_guilt = sorted(culprits, key=lambda culprit: (-len(culprit.attempts), -culprit.attempts[-1]))
    worst_first = [culprit.node for culprit in by_guilt if culprit.node in pool]
    spare = max(0, len(pool) - min_nodes)
    chosen, stay = worst_first[:spare], worst_first[spare:]
    out = [name for name in pool if name in chosen]
    values = {}
    if set(out) - set(own):
        values["ExcNodeList"] = fold_hosts(list(dict.fromkeys([*own, *out])))
    if set(out) & set(asked):
        values["ReqNodeList"] = fold_hosts([name for name in asked if name not in out])
    num_nodes = min(job.num_nodes, len(pool) - len(out))
    # A job from which SLURM has taken a lost node asks for its first number again when it was requeued.
    if {num_nodes, state.num_nodes} != {job.num_nodes}:
        values["NumNodes"] = str(num_nodes)
    per_node, rest = divmod(state.num_tasks, job.num_nodes)
    if num_nodes < job.num_nodes and per_node and not rest:  # else as many nodes as before: BadConstraints
        values["NumTasks"] = str(num_nodes * per_node)
    parts = [f"without {fold_hosts(out)}"] if out else []
    if num_nodes != job.num_nodes:
        parts.append(f"on {num_nodes} nodes instead of {job.num_nodes}")
    if stay:
        parts.append(f"{fold_hosts(stay)} is not excluded, because the job needs {min_nodes} of {len(pool)} nodes")
    return values, ", ".join(parts)


def describe_return(culprits: Sequence[NodeAtFault], *, attempt: int) -> str:
    """Return why this attempt of the job began; empty if no node ended the one before.

    >>> describe_return([NodeAtFault(node="node01", cause="AR012 node-failure", attempts=(0,))], attempt=1)
    'run 2 of this job: the previous run lost node01 (AR012 node-failure); resuming from its checkpoints'
    """
    last = [culprit for culprit in culprits if attempt - 1 in culprit.attempts]
    lost = f"the previous run lost {fold_hosts([culprit.node for culprit in last])} ({last[0].cause})" if last else ""
    return f"run {attempt + 1} of this job: {lost}; resuming from its checkpoints" if lost else ""


def read_culprits(run_dir: RunDir) -> tuple[NodeAtFault, ...]:
    """Return the job's record; empty if the file is missing or cannot be read."""
    folder = run_dir.look()
    with contextlib.suppress(OSError):
        return parse_culprits(folder.read(CULPRITS, at_most=MAX_BYTES)) if folder is not None else ()
    return ()


def parse_culprits(data: bytes) -> tuple[NodeAtFault, ...]:
    """Return the record in a file; empty if this is none."""
    try:
        return tuple(decode_json(data, tuple[NodeAtFault, ...]))
    except Unreadable:
        return ()
