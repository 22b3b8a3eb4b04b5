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

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from allranks.host.slurm_command import refuse_without_cluster, require_slurm
from allranks.host.stacks import NodeStacks
from allranks.launch.look.stacks import StackReport
from allranks.launch.step.parcels import Unpacker
from allranks.launch.step.srun import Output, run_steps, words_of
from allranks.model.errors import AllranksError, UsageError
from allranks.model.hostlist import expand_hosts, fold_hosts

SQUEUE_S = 20.0
NOTICE_AFTER_S = 3.0
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
        env: the caller's; srun gets it without the variables of an outer job or step.
        say: gets a line about the nodes that it waits for.

    Raises:
        UsageError: there is no such job, or the id means several.
        SetupError: SLURM's commands are missing, or have no cluster.
        AllranksError: the job is not running, or SLURM refuses.
    """
    if not re.fullmatch(r"\d+([_+]\d+)?", job):
        raise UsageError(f"stack {job!r}: expected a SLURM job id, for example 123 or 123_4; see squeue --me")
    for tool in ("squeue", "srun"):
        require_slurm(tool, env)
    clean = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    components = find_components(job, _squeue(job, clean))
    with run_steps(map(srun_command, components), clean) as output:
        return _collect(job, components, output, silence_s=silence_s, say=say)


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
    count = len(component.nodes)
    return [
        "srun",
        f"--jobid={component.job_id}",
        *([f"--het-group={component.het_group}"] if component.het_group else []),
        "--job-name=allranks-stack",
        "--overlap",  # beside steps that hold all resources
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--gres=none",  # else it gets the job's GPUs; --gpus=0 is refused if SLURM knows no GPUs
        "--mem=0",
        "--mpi=none",
        "--input=none",
        "--propagate=NONE",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--chdir=/",  # this directory may not exist there
        f"--time={STEP_MINUTES}",
        sys.executable,
        "-m",
        "allranks",
        "stack",
        "--here",
        component.job_id,
    ]


def _squeue(job: str, env: Mapping[str, str]) -> str:
    command = ["squeue", "--noheader", f"--jobs={job.partition('+')[0]}", "--format=%A|%i|%T|%N|%r"]
    try:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=SQUEUE_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise AllranksError(
            f"stack {job}: squeue did not answer within {SQUEUE_S:.0f} s: slurmctld is busy or down"
        ) from exc
    if result.returncode != 0:
        refuse_without_cluster("squeue", result.stderr)
        words = words_of(result.stderr.splitlines())
        error = UsageError if "nvalid job id" in words else AllranksError
        raise error(f"stack {job}: squeue: {words}")
    return result.stdout


def _collect(
    job: str, components: Sequence[Component], output: Output, *, silence_s: float, say: Callable[[str], None]
) -> StackReport:
    wanted = [node for component in components for node in component.nodes]
    documents: dict[str, NodeStacks] = {}
    unpacker, words = Unpacker(), list[str]()
    last_s = began_s = time.monotonic()
    was_told = False
    while not output.has_ended and set(wanted) - set(documents):
        now = time.monotonic()
        if now > last_s + silence_s:
            break
        if now > began_s + NOTICE_AFTER_S and not was_told:
            was_told = True
            late = fold_hosts([node for node in wanted if node not in documents])
            answered = f"{len(documents)} of {len(wanted)} nodes have answered"
            say(f"still waiting for {late} after {now - began_s:.0f} s; {answered}")
        for line in output.lines():
            if line.is_aside:
                words.append(line.text)
            elif parcel := unpacker.feed(line.text):
                with contextlib.suppress(msgspec.DecodeError):  # from another version of allranks
                    documents[parcel.sender] = msgspec.json.decode(parcel.content, type=NodeStacks)
                    last_s = time.monotonic()
    has_ended = output.has_ended
    if not documents and words_of(words) and has_ended:
        raise AllranksError(f"stack {job}: no node answered; srun: {words_of(words)}")
    silent = {
        node: _why_silent(node, words, has_ended=has_ended, silence_s=silence_s)
        for node in wanted
        if node not in documents
    }
    return StackReport(job=job, documents=[documents.pop(node) for node in wanted if node in documents], silent=silent)


def _why_silent(node: str, words: Sequence[str], *, has_ended: bool, silence_s: float) -> str:
    """Return why a node did not answer, in srun's words if it said something."""
    about = [line for line in words if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w.-])", line)]
    if about:
        return f"did not answer: {words_of(about)}"
    if has_ended:
        return "did not answer; srun gave no reason" + (f": {words_of(words)}" if words_of(words) else "")
    return f"did not answer within {silence_s:.0f} s"
