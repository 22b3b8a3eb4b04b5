"""How are the stacks of all nodes of a running job collected? Through one more SLURM step beside the job's own.

Phases:

1 `squeue` lists the job's current nodes; a node that SLURM has given up is not among them.
2 `srun --overlap` starts one probe per node, `allranks stack --here`: without GPUs, memory or CPUs of its own, so that
  it starts at once in a job that uses all of them. A heterogeneous job has one step for each of its components.
3 Every probe prints its document and ends. The document is split into short lines, because srun mixes the output of its
  tasks in pieces of 1 KiB, and site wrappers print banners around it.
4 The step ends when every node has answered, or when none has for `silence_s`; what is left of it is ended then.

Nothing else in the job changes: its steps continue, and no signal is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from allranks.host.slurm_command import require_slurm, run_slurm
from allranks.host.stacks import NodeStacks
from allranks.launch.look.stacks import StackReport
from allranks.launch.srun import Parcel, Steps, describe_missing, run_steps, step_command, step_env, words_of
from allranks.model.errors import AllranksError, UsageError
from allranks.model.hostlist import expand_hosts

SQUEUE_S = 20.0
STEP_MINUTES = 2
"""SLURM ends the step itself if this process is killed."""


@dataclass(frozen=True, slots=True)
class Component:
    """The part of a job that one srun reaches: the whole job, unless it is heterogeneous."""

    job_id: str
    het_group: str
    nodes: tuple[str, ...]


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
    for tool in ("squeue", "srun"):
        require_slurm(tool, env)
    clean = step_env(env)
    components = find_components(job, _squeue(job, clean))
    with run_steps(map(srun_command, components), clean) as steps:
        return _collect(job, [node for each in components for node in each.nodes], steps, silence_s=silence_s, say=say)


def find_components(job: str, rows: str) -> list[Component]:
    """Parse the output of squeue for a job, lines of `JobId|id as shown|state|nodes|reason`.

    Raises:
        UsageError: the id means several jobs.
        AllranksError: the job is not running.
    """
    found = [line.split("|", 4) for line in rows.splitlines() if line.count("|") >= 4]
    if not found:
        raise AllranksError(f"job {job} has ended; to see what happened: allranks why {job}")
    leaders = {shown.partition("+")[0] for _, shown, *_ in found}
    running = [row for row in found if row[2] == "RUNNING"]
    if not running:
        _, _, state, _, reason = found[0]
        why = f" ({reason})" if reason not in ("", "None") else ""
        raise AllranksError(f"job {job} is {state}{why}; expected a running job")
    if len(leaders) > 1:
        ids = ", ".join(sorted(row[1] for row in running))
        raise UsageError(f"job {job} is an array; give one of its running jobs: {ids}")
    return [
        Component(leader if plus else number, group if plus else "", tuple(dict.fromkeys(expand_hosts(nodes))))
        for number, shown, _, nodes, _ in running
        for leader, plus, group in [shown.partition("+")]
    ]


def srun_command(component: Component) -> list[str]:
    """Return the command that starts one probe on every node of a component."""
    return step_command(
        len(component.nodes),
        f"--jobid={component.job_id}",
        *([f"--het-group={component.het_group}"] if component.het_group else []),
        "--job-name=allranks-stack",
        "--overlap",  # beside steps that hold all resources
        "--gres=none",  # else it gets the job's GPUs; --gpus=0 is refused if SLURM knows no GPUs
        "--mem=0",
        "--propagate=NONE",
        "--chdir=/",  # this directory may not exist there
        verb=("stack", "--here", component.job_id),
        minutes=STEP_MINUTES,
    )


def _squeue(job: str, env: Mapping[str, str]) -> str:
    which = (f"--jobs={job.partition('+')[0]}", "--format=%A|%i|%T|%N|%r")
    answer = run_slurm("squeue", "--noheader", *which, env=env, deadline_s=SQUEUE_S)
    if answer.returncode != 0:
        words = words_of(answer.stderr.splitlines())
        error = UsageError if "nvalid job id" in words else AllranksError
        raise error(f"stack {job}: squeue: {words}")
    return answer.stdout


def _collect(
    job: str, wanted: Sequence[str], steps: Steps, *, silence_s: float, say: Callable[[str], None]
) -> StackReport:
    documents: dict[str, NodeStacks] = {}

    def take(parcel: Parcel) -> None:
        documents[parcel.sender] = parcel.read(NodeStacks)

    def describe_wait(waited_s: float) -> str:
        return describe_missing([node for node in wanted if node not in documents], len(wanted), waited_s)

    has_ended = steps.listen(
        take,
        is_complete=lambda: documents.keys() >= set(wanted),
        first_s=silence_s,
        next_s=silence_s,
        describe_wait=describe_wait,
        say=say,
    )
    if not documents and words_of(steps.words) and has_ended:
        raise AllranksError(f"stack {job}: no node answered; srun: {words_of(steps.words)}")
    silent = {
        node: _why_silent(node, steps.words, has_ended=has_ended, silence_s=silence_s)
        for node in wanted
        if node not in documents
    }
    return StackReport(job=job, documents=[documents[node] for node in wanted if node in documents], silent=silent)


def _why_silent(node: str, words: Sequence[str], *, has_ended: bool, silence_s: float) -> str:
    """Return why a node did not answer, in srun's words if it said something."""
    about = [line for line in words if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w.-])", line)]
    if about:
        return f"did not answer: {words_of(about)}"
    if has_ended:
        return "did not answer; srun gave no reason" + (f": {words_of(words)}" if words_of(words) else "")
    return f"did not answer within {silence_s:.0f} s"
