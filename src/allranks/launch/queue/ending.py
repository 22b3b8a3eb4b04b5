"""What does a signal mean for this job: save and go back into the queue, save and leave, or just stop? Pure.

Who sends what, measured with SLURM 22.05:

SIGUSR1   the warning that `--signal=USR1@120` asks for, or `scancel --signal=USR1`. A checkpoint, then the job goes
          back into the queue by itself. Sent up to 60 s early, and at once where the time limit is nearer than that.
SIGTERM   time limit, `scancel`, `scontrol requeue`, preemption. A checkpoint if the grace period allows one. Whether
          the job comes back is SLURM's business: a job that somebody cancelled must stay cancelled.
SIGINT and the others   somebody at a terminal.

Four things that are easily got wrong:

- SLURM may signal every process of the step, also workers in sessions of their own: always with proctrack/linuxproc,
  and with SignalChildrenProcesses=yes in cgroup.conf. A worker without a handler is ended by the warning itself, so
  workers are started with SIGUSR1 ignored; one that has a handler of its own gets it (`host.signals.catches`).
- The same holds for SIGTERM. A worker that has something to save leaves it to its agent (state/resumed/telling.py); one
  that has not is ended by it, which saves a moment.
- A job that is preempted with a grace period is put back only if it still runs when the period is over; one that ends
  by itself before that has failed, or is complete. So the leader waits: `launch.queue.requeue.outlast_preemption`.
- With a lost batch host the job goes on running without its script, until its time limit: whoever is left in the job
  has to put it back.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from allranks.host.slurm_job import OwnJob

DEFAULT_GRACE_S = 30.0
"""SLURM's own default of KillWait, where the site's is not known."""
SAFETY = 2.0
"""A checkpoint is begun when the grace period is so many times as long as the last ones took."""


class Ending(Enum):
    """What to do about a signal."""

    SAVE_AND_REQUEUE = "save_and_requeue"
    SAVE_AND_LEAVE = "save_and_leave"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, how long there is for it, and the line that says so."""

    ending: Ending
    grace_s: float | None
    """How long workers have for their checkpoint; None where nothing limits it."""
    line: str


def decide(
    signum: int,
    *,
    job: OwnJob | None,
    left_s: float | None = None,
    no_requeue: str = "",
    grace_s: float | None = None,
    save_s: float | None = None,
) -> Decision:
    """Decide what a signal means.

    Args:
        signum: what came.
        job: SLURM's, None without it.
        left_s: until the time limit.
        no_requeue: why the job cannot go back into the queue, from `why_no_requeue`; empty where it can.
        grace_s: between SIGTERM and SIGKILL here, KillWait or a partition's GraceTime; None where nobody said.
        save_s: how long a checkpoint takes; None where none has been written, 0 where there is nothing to save.
    """
    name = signal.Signals(signum).name
    if signum == signal.SIGUSR1:
        when = f", {left_s:.0f} s to the time limit" if left_s is not None else ""
        if save_s == 0:  # a job that went back with nothing saved would begin anew for ever
            line = f"{name}{when}: passed to the script; allranks itself has nothing to save"
            return Decision(ending=Ending.SAVE_AND_LEAVE, grace_s=None, line=line)
        if job is None:
            return Decision(
                ending=Ending.SAVE_AND_LEAVE, grace_s=None, line=f"{name}: saving a checkpoint, then the job ends"
            )
        if no_requeue:
            line = f"{name}{when}: saving a checkpoint, then job {job.id} ends: {no_requeue}"
            return Decision(ending=Ending.SAVE_AND_LEAVE, grace_s=left_s, line=line)
        line = f"{name}{when}: saving a checkpoint, then job {job.id} goes back into the queue and resumes from it"
        return Decision(ending=Ending.SAVE_AND_REQUEUE, grace_s=left_s, line=line)
    if signum == signal.SIGTERM and job is not None:
        grace_s = DEFAULT_GRACE_S if grace_s is None else grace_s
        if grace_s > SAFETY * (save_s or 0.0) and save_s != 0:
            line = f"{name} from SLURM: saving a checkpoint; SIGKILL follows in {grace_s:.0f} s"
            return Decision(ending=Ending.SAVE_AND_LEAVE, grace_s=grace_s, line=line)
        why = f"a checkpoint takes {save_s:.0f} s, SIGKILL follows in {grace_s:.0f} s" if save_s else "nothing to save"
        return Decision(ending=Ending.STOP, grace_s=grace_s, line=f"{name} from SLURM: ending the ranks; {why}")
    return Decision(ending=Ending.STOP, grace_s=None, line=f"{name}: ending the ranks")


def why_no_requeue(job: OwnJob, *, is_batch: bool, may_requeue: bool) -> str:
    """Return why a job cannot go back into the queue, and what to do about it; empty where it can.

    Args:
        job: the job.
        is_batch: whether it has a batch script, as `scontrol show job` says.
        may_requeue: its `Requeue=`.
    """
    if job.is_heterogeneous:
        return "allranks does not requeue heterogeneous jobs; submit it again, and it resumes"
    if not is_batch:
        return "SLURM requeues only jobs with a batch script (allranks submit writes one)"
    if not may_requeue:
        return "it was submitted with --no-requeue; submit it again, and it resumes"
    return ""
