"""What does a signal mean for this job: save and requeue, save and end, or only end? Pure.

Who sends what, measured with SLURM 22.05:

SIGUSR1   the warning that `--signal=USR1@120` asks for, or `scancel --signal=USR1`. The job saves a checkpoint and
          requeues itself. SLURM sends it up to 60 s early, and at once if less time than that is left.
SIGTERM   time limit, `scancel`, `scontrol requeue`, preemption. The job saves a checkpoint if there is a grace period.
          SLURM decides whether the job runs again: a cancelled job must stay cancelled.
SIGINT and the others   a user at a terminal.

Four facts that are easy to miss:

- SLURM may signal every process of the step, also workers in their own sessions: always with proctrack/linuxproc, and
  with SignalChildrenProcesses=yes in cgroup.conf. A worker without a handler would be killed by the warning, so workers
  start with SIGUSR1 ignored; a worker with its own handler receives it (`host.signals.catches`).
- The same holds for SIGTERM. A worker that has something to save leaves the decision to its agent
  (state/resumed/telling.py); a worker that has nothing to save is ended by it, which saves time.
- A job that is preempted with a grace period is requeued only if it still runs at the end of the period; if it ends
  earlier, it has failed or is complete. So the leader waits: `Scheduler.outlast_preemption`.
- If the batch host is lost, the job continues without its script until the time limit: the remaining agents must
  requeue it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.model.errors import Exit

DEFAULT_GRACE_S = 30.0
"""SLURM's default of KillWait, used if the site's value is unknown."""


class Ending(Enum):
    """How the workers are to end."""

    SAVE_AND_REQUEUE = "save_and_requeue"
    """The time limit is near: save, and come again."""
    SAVE_AND_LEAVE = "save_and_leave"
    SAVE_AND_GROW = "save_and_grow"
    """A node has come: save, and start again with it. No signal means that."""
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, how much time there is for it, and the line that reports it."""

    ending: Ending
    grace_s: float | None
    """Time for the workers' checkpoint; None if nothing limits it."""
    line: str


def decide(
    signum: int,
    *,
    job: OwnJob | None,
    left_s: float | None = None,
    no_requeue: str = "",
    grace_s: float | None = None,
    can_save: bool = True,
) -> Decision:
    """Decide what a signal means.

    Args:
        left_s: until the time limit.
        no_requeue: why the job cannot be requeued, from `why_no_requeue`; empty if it can.
        grace_s: time between SIGTERM and SIGKILL: KillWait or a partition's GraceTime; None if unknown.
        can_save: whether there is something to save.
    """
    line, ending, what = signal.Signals(signum).name, Ending.STOP, "ending the ranks"
    limit_s = None
    if signum == signal.SIGUSR1:
        line += f", {left_s:.0f} s to the time limit" if left_s is not None else ""
        ending, limit_s = Ending.SAVE_AND_LEAVE, left_s
        if not can_save:  # a job requeued with nothing saved would start from the beginning each time
            limit_s, what = None, "passed to the script; allranks itself has nothing to save"
        elif job is None:
            what = "saving a checkpoint, then the job ends"
        elif no_requeue:
            what = f"saving a checkpoint, then job {job.id} ends: {no_requeue}"
        else:
            what = f"saving a checkpoint, then job {job.id} goes back into the queue and resumes from it"
            ending = Ending.SAVE_AND_REQUEUE
    elif signum == signal.SIGTERM and job is not None:
        line += " from SLURM"
        limit_s = DEFAULT_GRACE_S if grace_s is None else grace_s
        if can_save and limit_s > 0:
            ending, what = Ending.SAVE_AND_LEAVE, f"saving a checkpoint; SIGKILL follows in {limit_s:.0f} s"
        else:
            what += f"; {'no time' if can_save else 'nothing'} to save"
    return Decision(ending=ending, grace_s=limit_s, line=f"{line}: {what}")


def goes_back(exit_code: int, *, is_to_requeue: bool, interrupted_by: int | None, has_restarts: bool) -> bool:
    """Whether the leader's agent requeues the job at its end; one that somebody told to stop is never requeued.

    Args:
        is_to_requeue: whether all ranks saved before the time limit.
        interrupted_by: the first stop signal that any agent got, also one that came after the verdict.
        has_restarts: whether the user wants the job to survive faults.
    """
    return interrupted_by is None and (is_to_requeue or (exit_code == Exit.NODE_FAULT and has_restarts))


def why_no_requeue(job: OwnJob, state: JobState) -> str:
    """Return why a job cannot be requeued, and what to do about it; empty if it can."""
    if job.is_heterogeneous:
        return "allranks does not requeue heterogeneous jobs; submit it again, and it resumes"
    if not state.is_batch:
        return "SLURM requeues only jobs with a batch script (allranks submit writes one)"
    if not state.may_requeue:
        return "it was submitted with --no-requeue; submit it again, and it resumes"
    return ""
