"""How are the stacks of all nodes of a running job collected? Through one more SLURM step beside the job's own.

Phases:

1 `scontrol` lists the job's current nodes; a node that SLURM has given up is not among them.
2 `srun --overlap` starts one probe per node, `allranks stack --here`: without GPUs, memory or CPUs of its own, so that
  it starts at once in a job that uses all of them. A heterogeneous job has one step for each of its components.
3 Every probe prints its document, in short lines (launch.srun), and ends.
4 The step ends when every node has answered, or when none has for `silence_s`; what is left of it is ended then.

Nothing else in the job changes: its steps continue, and no signal is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from allranks.host.slurm import JobState, find_jobs
from allranks.host.slurm_command import require_slurm
from allranks.host.stacks import NodeStacks
from allranks.launch.look.stack_groups import StackReport
from allranks.launch.srun import describe_missing, run_steps, step_command, step_env, words_of
from allranks.model.errors import AllranksError, UsageError
from allranks.model.hostlist import expand_hosts

ASK_S = 20.0


def probe_job(job: str, *, silence_s: float, env: Mapping[str, str], say: Callable[[str], None]) -> StackReport:
    """Return the stacks from the nodes of a running job.

    Args:
        job: SLURM's id: `123`, `123_4` of an array, `123+0` of a heterogeneous job.
        silence_s: the wait ends after this long without an answer.

    Raises:
        UsageError: there is no such job, or the id means several.
        SetupError: SLURM's commands are missing, or have no cluster.
        AllranksError: the job is not running, or SLURM refuses.
    """
    if not re.fullmatch(r"\d+([_+]\d+)?", job):
        raise UsageError(f"stack {job!r}: expected a SLURM job id, for example 123 or 123_4; see squeue --me")
    parts = ask_for_parts(job)
    require_slurm("srun", env)
    wanted = [node for part in parts for node in expand_hosts(part.nodes)]
    documents, lines = dict[str, NodeStacks](), list[str]()

    def late() -> list[str]:
        return [node for node in wanted if node not in documents]

    has_ended = run_steps(
        map(srun_command, parts),
        step_env(env),
        documents.__setitem__,
        kinds={"stacks": NodeStacks},
        words=lines,
        is_complete=lambda: not late(),
        on_wait=lambda waited_s: say(describe_missing(late(), len(wanted), waited_s)),
        first_s=silence_s,
        next_s=silence_s,
    )
    words = words_of(lines)
    if has_ended and not documents and words:
        raise AllranksError(f"stack {job}: no node answered; srun: {words}")
    why = "; srun gave no reason" + (f": {words}" if words else "") if has_ended else f" within {silence_s:.0f} s"
    silent = {node: f"did not answer{_words_about(node, lines) or why}" for node in late()}
    return StackReport(job=job, documents=[documents[node] for node in wanted if node in documents], silent=silent)


def ask_for_parts(job: str) -> list[JobState]:
    """Return what one srun each reaches: the job as the controller knows it, or each component of a heterogeneous one.

    Raises:
        UsageError: the id means several jobs, or none.
        SetupError: SLURM's commands are missing, or have no cluster.
        AllranksError: the job is not running.
    """
    return find_parts(job, find_jobs(job.partition("+")[0], deadline_s=ASK_S))


def find_parts(job: str, known: Sequence[JobState]) -> list[JobState]:
    """The same, of what the controller says of a job."""
    if not known:
        raise UsageError(f"job {job}: SLURM knows no such job; allranks list prints your jobs")
    active = [step for step in known if not step.is_finished]
    if not active:
        raise AllranksError(f"job {job} has ended; to see what happened: allranks why {job}")
    running = [step for step in active if step.state == "RUNNING"]
    if not running:
        why = f" ({active[0].reason})" if active[0].reason else ""
        raise AllranksError(f"job {job} is {active[0].state}{why}; expected a running job")
    if len({step.id.partition("+")[0] for step in active}) > 1:
        ids = ", ".join(step.id for step in running)
        raise UsageError(f"job {job} is an array; give one of its running jobs: {ids}")
    return running


def srun_command(part: JobState, verb: Sequence[str] = ("stack", "--here"), *, is_leased: bool = False) -> list[str]:
    """Return the command that starts one probe on every node of a job, or of a component.

    Args:
        verb: of the probe; it gets the job's id behind it.
        is_leased: as `step_command` says.
    """
    leader, _, group = part.id.partition("+")
    job_id, num_nodes = leader if group else part.number, len(expand_hosts(part.nodes))
    return step_command(
        num_nodes,
        f"--jobid={job_id}",
        *([f"--het-group={group}"] if group else []),
        f"--job-name=allranks-{verb[0]}",
        "--overlap",  # beside steps that hold all resources
        "--gres=none",  # else it gets the job's GPUs; --gpus=0 is refused if SLURM knows no GPUs
        "--mem=0",
        "--propagate=NONE",
        "--chdir=/",  # this directory may not exist there
        verb=(*verb, job_id),
        is_leased=is_leased,
    )


def _words_about(node: str, words: Sequence[str]) -> str:
    about = words_of(line for line in words if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w.-])", line))
    return f": {about}" if about else ""
