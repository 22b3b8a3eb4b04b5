"""What does a signal mean for this job: save and requeue, save and end, or only end? Pure.

Who sends what, measured with SLURM 22.05:

SIGUSR1   the warning that `--signal=USR1@120` asks for, or `scancel --signal=USR1`. The job saves a checkpoint and
          requeues itself. SLURM sends it up to 60 s early, and at once if less time than that is left.
SIGTERM   time limit, `scancel`, `scontrol requeue`, preemption, `--signal=TERM@120`, a `kill`. The job saves a
          checkpoint if there is time. SLURM decides whether the job runs again: a cancelled job must stay cancelled.
SIGINT and the others   a user at a terminal.

How long a job has after SIGTERM: to SLURM's SIGKILL, KillWait; at a preemption with a grace period GraceTime and then
KillWait; where the job still RUNS by all that SLURM knows, as after `--signal=TERM@120`, to the time limit. Outside of
SLURM --shutdown-timeout says it, and so it does for ranks that handle the signal themselves. SPARE_S is kept back.

Four facts that are easy to miss:

- SLURM may signal every process of the step, also workers in their own sessions: always with proctrack/linuxproc, and
  with SignalChildrenProcesses=yes in cgroup.conf. A worker without a handler would be killed by the warning, so workers
  start with SIGUSR1 and SIGUSR2 ignored; a worker with its own handler receives them, once (launch.grace).
- The same holds for SIGTERM. A worker that has something to save leaves the decision to its agent
  (state/resumed/telling.py); a worker that has nothing to save is ended by it, which saves time.
- A job that is preempted with a grace period is requeued only if it still runs at the end of the period; if it ends
  earlier, it has failed or is complete. So the leader waits: `Scheduler.outlast_preemption`.
- If the batch host is lost, the job continues without its script until the time limit: the remaining agents must
  requeue it.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from enum import Enum

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.launch.lead.course import SHUTDOWN_S, SPARE_S
from allranks.model.errors import Exit

KILL_WAIT_S = 30.0
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
class EndingDecision:
    """What to do, how much time there is for it, and the line that reports it."""

    ending: Ending
    save_s: float | None
    """Time for a checkpoint of the session; None if nothing limits it."""
    handler_s: float
    """Time for ranks that handle the signal themselves."""
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What SLURM says of a job that has got a signal."""

    left_s: float | None = None
    """Until the time limit; None: there is none, or it is unknown."""
    no_requeue: str = ""
    """Why the job cannot be requeued, from `why_no_requeue`; empty if it can."""
    kill_wait_s: float | None = None
    """The site's, between SIGTERM and SIGKILL; None if unknown."""
    preempt_s: float | None = None
    """GraceTime of its partition, where the job makes room for another; SIGTERM comes at its beginning and its end."""
    is_running: bool = False
    """SLURM is not ending it: whoever has sent the signal has asked for it, or done it by hand."""

    @property
    def until_kill_s(self) -> float | None:
        """From SIGTERM to SLURM's SIGKILL; None: nothing limits it."""
        if self.is_running and self.preempt_s is None:
            return self.left_s
        kill_wait_s = KILL_WAIT_S if self.kill_wait_s is None else self.kill_wait_s
        return kill_wait_s + (self.preempt_s or 0.0)


def decide(
    signum: int,
    *,
    job: OwnJob | None,
    told: Told = Told(),
    can_save: bool = True,
    shutdown_s: float = SHUTDOWN_S,
) -> EndingDecision:
    """Decide what a signal means.

    Args:
        told: what SLURM says of the job.
        can_save: whether there is something to save.
        shutdown_s: `--shutdown-timeout`.
    """
    line, ending, what = signal.Signals(signum).name, Ending.STOP, "ending the ranks"
    until_s = told.until_kill_s if job is not None else None
    save_s, handler_s = _less_spare(until_s), min(shutdown_s, _less_spare(until_s) or math.inf)
    if signum == signal.SIGUSR1:
        line += f", {told.left_s:.0f} s to the time limit" if told.left_s is not None else ""
        ending, save_s = Ending.SAVE_AND_LEAVE, _less_spare(told.left_s)
        if not can_save:  # a job requeued with nothing saved would start from the beginning each time
            save_s, what = None, "passed to the ranks that handle it; allranks itself has nothing to save"
        elif job is None:
            what = "saving a checkpoint, then the job ends"
        elif told.no_requeue:
            what = f"saving a checkpoint, then job {job.id} ends: {told.no_requeue}"
        else:
            what = f"saving a checkpoint, then job {job.id} goes back into the queue and resumes from it"
            ending = Ending.SAVE_AND_REQUEUE
    elif signum == signal.SIGTERM:
        line += " from SLURM" if job is not None and (not told.is_running or told.preempt_s is not None) else ""
        save_s = handler_s if save_s is None else save_s
        if can_save and until_s != 0:
            kill = f"SIGKILL follows in {shutdown_s if until_s is None else until_s:.0f} s"
            is_early = job is not None and told.is_running and told.preempt_s is None and until_s is not None
            ending, what = Ending.SAVE_AND_LEAVE, "saving a checkpoint; "
            what += f"{until_s:.0f} s to the time limit" if is_early else kill
        elif job is not None:
            what += f"; {'no time' if can_save else 'nothing'} to save"
    return EndingDecision(ending=ending, save_s=save_s, handler_s=handler_s, line=f"{line}: {what}")


def _less_spare(until_s: float | None) -> float | None:
    return None if until_s is None else max(1.0, until_s - SPARE_S)


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
