"""What does a job ask SLURM about itself, and how is it requeued? From inside the job.

    >>> own_job({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4"})
    OwnJob(id='12_4', restarts=0, num_nodes=1, is_heterogeneous=False)

Measured with SLURM 22.05 in the lab:

- `scontrol requeue` may come from a step of the job, also from a node that is not the batch host's, and also when the
  batch host is gone. It ends the job at once: SIGTERM to everything in it, SIGKILL after KillWait.
- What a job asks for (nodes left out, how many) can be changed as soon as `scontrol requeue` has returned, while the
  old run is still COMPLETING; not before, and sometimes only after being told to "try again in a bit".
- With a node lost, the old run is COMPLETING until SLURM has given the node up, SlurmdTimeout and a bit.
- A job that has lost a node asks for one less from then on, unless it is told to ask for all again.
- It starts again 121 s later at the earliest (BeginTime), so that its old credentials have run out.
- A job that asks for a node by name and leaves it out, or for more nodes than are left, waits for ever: BadConstraints.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.host.slurm import JobState, find_jobs
from allranks.host.slurm_command import refusal_of, run_slurm, shielded, words_of
from allranks.model.errors import SetupError, UsageError

ASK_S = 20.0
"""Deadline of what an agent asks while the job runs: two of a controller's MessageTimeouts."""

AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class OwnJob:
    """The job that this process runs in, as its environment says."""

    id: str
    """As SLURM's commands take it: `12`, `12_4` for a task of an array."""
    restarts: int
    """How often it has begun again."""
    num_nodes: int
    """How many nodes it began with; SLURM's own count shrinks when it takes a lost node away."""
    is_heterogeneous: bool


def own_job(env: Mapping[str, str]) -> OwnJob | None:
    """Return the job that an environment belongs to; None outside of SLURM."""
    job = env.get("SLURM_JOB_ID")
    if not job:
        return None
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return OwnJob(
        id=f"{array}_{task}" if array and task else job,
        restarts=_number(env.get("SLURM_RESTART_COUNT"), 0),
        num_nodes=_number(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES"), 1),
        is_heterogeneous="SLURM_HET_SIZE" in env,
    )


def find_job(job_id: str) -> JobState | None:
    """Return what the controller knows of one job; None where it knows nothing.

    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    with shielded():  # SLURM ends what a job starts while it is signalled
        return next(iter(find_jobs(job_id, deadline_s=ASK_S)), None)


def find_eligible_s(job_id: str) -> float | None:
    """Return since when a job could have begun, seconds since the epoch; None where SLURM does not say."""
    try:
        job = find_job(job_id)
    except (SetupError, UsageError):
        return None
    return parse_end_s(job.eligible) if job is not None else None


def is_running(job_id: str) -> bool | None:
    """Whether a job has processes: not if it has ended, or waits; None where SLURM does not say."""
    try:
        job = find_job(job_id)
    except (SetupError, UsageError):
        return None
    return job is not None and not job.is_finished and not job.is_pending


class TimeLimit:
    """When does SLURM end this job? Asked at most once; a job's limit is rarely changed."""

    def __init__(self, job: OwnJob, env: Mapping[str, str]) -> None:
        self._job_id = job.id
        said = env.get("SLURM_JOB_END_TIME", "")  # since 23.02
        self._end_s = float(said) if said.isdigit() else None
        self._is_known = self._end_s is not None

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds that are left; None where there is no limit, or SLURM does not say.

        Args:
            now_s: seconds since the epoch.
        """
        if not self._is_known:
            self._is_known = True  # a controller that does not answer now is not asked at every step
            self._end_s = _ask_end_s(self._job_id)
        return None if self._end_s is None else self._end_s - now_s


def parse_end_s(text: str) -> float | None:
    """Read `squeue -o %e`, SLURM's local time, as seconds since the epoch.

    >>> parse_end_s("NONE"), parse_end_s("N/A")
    (None, None)
    """
    for line in text.splitlines():
        try:
            return time.mktime(time.strptime(line.strip(), "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None


def requeue(job_id: str) -> None:
    """Put a running job back into the queue. All of it ends, this process with it.

    Raises:
        SetupError: SLURM refuses: it is no batch job, or was submitted with --no-requeue.
    """
    with shielded():
        answer = run_slurm("scontrol", "requeue", job_id, deadline_s=ASK_S)
    if answer.returncode != 0:
        raise refusal_of("scontrol", words_of(answer))


def change_waiting(job_id: str, **values: str) -> None:
    """Change what a job asks for when it waits. Just after a requeue SLURM may have to be asked again, for seconds.

    Args:
        job_id: which.
        values: under scontrol's names: `ExcNodeList`, `ReqNodeList`, `NumNodes`, `NumTasks`, `Requeue`.
    Raises:
        SetupError: SLURM refuses.
    """
    command = ["scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in values.items())]
    end_s = time.monotonic() + ASK_S
    with shielded():
        answer = run_slurm(*command, deadline_s=ASK_S)
        while answer.returncode != 0 and "try again" in answer.stderr and time.monotonic() < end_s:
            time.sleep(AGAIN_S)
            answer = run_slurm(*command, deadline_s=ASK_S)
    if answer.returncode != 0:
        raise refusal_of("scontrol", words_of(answer))


def set_comment_in_accounting(number: str, comment: str) -> None:
    """Set the comment of a job that has ended, as sacct shows it.

    `scontrol update` refuses every change of such a job, also while it is COMPLETING, and from an epilog, and by root
    (seen with 22.05; `_update_job` in src/slurmctld/job_mgr.c of 26.11). sacctmgr changes what slurmdbd keeps of it.

    Args:
        number: SLURM_JOB_ID; a task of an array has its own.
        comment: one line; quotes and backslashes are left out: slurmdbd puts it between quotes into SQL.
    Raises:
        SetupError: there is no accounting, or it does not know the job.
    """
    said = re.sub(r"""["'`\\]""", "", comment)
    command = ["--immediate", "modify", "job", "where", f"jobid={number}", "set", f"comment={said}"]
    answer = run_slurm("sacctmgr", *command, deadline_s=ASK_S)
    if answer.returncode != 0 or "othing modified" in answer.stdout:
        raise refusal_of("sacctmgr", words_of(answer))


def _ask_end_s(job_id: str) -> float | None:
    try:
        with shielded():
            answer = run_slurm("squeue", "-h", "-j", job_id, "-o", "%e", deadline_s=ASK_S)
    except SetupError:
        return None
    return parse_end_s(answer.stdout) if answer.returncode == 0 else None


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isdigit() else otherwise
