"""Where do the looks at a job come from? From this machine, or from a probe on each node of a SLURM job.

    for look in watch_here("node01:29500").looks: ...

A SLURM job is watched through one more step beside its own:

1 `scontrol` lists the job's nodes. `srun --overlap` starts one probe per node, `allranks watch --probe`, without CPUs,
  GPUs or memory of its own. The step has no time limit but the job's.
2 A probe sends a NodeLook some times a second, as short lines (launch.srun), until the end of its standard input, or
  until nothing has come in there for LEASE_S: so none is left when the watcher or srun is killed.
3 SIGTERM (the job ends): it sends a last look, and ends.
4 The step has ended. If SLURM still has the job running, it is started again: the watcher was suspended for long.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from allranks.host.job_processes import FoundProcess, WantedStacks, find_processes
from allranks.host.node import name_of
from allranks.host.slurm import JobState
from allranks.host.slurm_command import require_slurm
from allranks.launch.look.stack_step import ask_for_parts, srun_command
from allranks.launch.srun import LEASE_S, follow_steps, send, step_env, words_of
from allranks.model.errors import AllranksError
from allranks.model.hostlist import expand_hosts
from allranks.model.node_look import NodeLook, ProcessRole
from allranks.report.runs import name_script
from allranks.report.text import count_of, one_line
from allranks.watch.node import NodeWatcher

EVERY_S = 0.25
NODES_AT_FULL_RATE = 32
"""Of larger jobs each node is looked at more rarely: one process reads all looks."""
REST_S, RESTART_S = 2.0, 30.0
"""Once all ranks of a job have ended for so long, it has ended; the second if a launcher is left, which may start them
again."""


class Watched(NamedTuple):
    """A job that is watched."""

    job: str
    nodes: Sequence[str]
    looks: Generator[NodeLook | None]
    """Some a second, of each node; None: none has come. It ends when the job has ended."""
    stack: Sequence[str]
    """Arguments with which `allranks stack` looks at the same processes."""


def find_jobs_here() -> dict[str, list[FoundProcess]]:
    """Return the ranks of each job on this machine by its name, or where it has none by `pid` and who started them."""
    jobs: dict[str, list[FoundProcess]] = {}
    for process in find_processes(WantedStacks()):
        if process.role is ProcessRole.WORKER and process.rank is not None and process.stat.state != "Z":
            jobs.setdefault(process.job, []).append(process)
    return jobs


def add_ranks_below(pids: Sequence[int], jobs: Mapping[str, Sequence[FoundProcess]]) -> tuple[int, ...]:
    """Return processes with the ranks that they started: who names a launcher means its ranks."""
    below = (rank.pid for ranks in jobs.values() for rank in ranks if not {*_list_above(rank)}.isdisjoint(pids))
    return tuple(dict.fromkeys((*pids, *below)))


def _list_above(process: FoundProcess) -> Iterator[int]:
    while (above := process.above) is not None:
        yield above.pid
        process = above


def list_jobs(jobs: Mapping[str, Sequence[FoundProcess]]) -> list[str]:
    """Return a line for each job here: the command that watches it, and `3 ranks of train.py in /home/ada/gpt`."""
    lines = []
    for name, ranks in jobs.items():
        pids, folder = " ".join(str(process.pid) for process in ranks), ""
        with contextlib.suppress(OSError):
            folder = f" in {Path(f'/proc/{ranks[0].pid}/cwd').readlink()}"
        is_spawned = re.search(r"multiprocessing\.(spawn|forkserver)", str(ranks[0].command))  # `python -c ...`
        script = name_script(((is_spawned and ranks[0].above) or ranks[0]).command)
        words = f"{count_of(len(ranks), 'rank')} of {script}{folder}, pid {ranks[0].pid}"
        lines.append((f"allranks watch {shlex.quote(name) if has_name(name) else f'--pid {pids}'}", one_line(words)))
    width = max((len(command) for command, _ in lines), default=0)
    return [f"  {command:<{width}}    {words}" for command, words in lines]


def has_name(job: str) -> bool:
    """Whether the processes of a job here are found by its name."""
    return bool(job) and not job.startswith("pid ")


def watch_here(job: str, *, pids: tuple[int, ...] = (), asks: bool) -> Watched:
    """Watch a job's processes on this machine, or these; `asks`: torch, too, where that is on."""
    stack = ("--pid", *map(str, pids)) if pids else ("--local", *filter(None, [job]))
    wanted, node = WantedStacks(pids=pids) if pids else WantedStacks(job=job), name_of(os.environ)
    looks = _look_again(wanted, node, every_s=EVERY_S, asks=asks)
    return Watched(job or "ranks", [node], _until_it_ends(looks), stack)


def _look_again(wanted: WantedStacks, node: str, *, every_s: float, asks: bool) -> Generator[NodeLook]:
    with contextlib.closing(NodeWatcher(wanted, node=node, asks=asks)) as watcher:
        while True:
            now_s = time.monotonic()
            yield watcher.look(now_s)
            watcher.wait(now_s + every_s - time.monotonic())


def _until_it_ends(looks: Generator[NodeLook]) -> Generator[NodeLook]:
    live_s = time.monotonic()
    with contextlib.closing(looks):
        for look in looks:
            yield look
            living = {process.role for process in look.processes if process.end is None}
            live_s = look.at_s if living & {ProcessRole.WORKER, ProcessRole.CHILD} else live_s
            if look.at_s - live_s > (RESTART_S if living else REST_S):
                return


def watch_job(job: str, *, env: Mapping[str, str], asks: bool) -> Watched:
    """Watch a running SLURM job on all its nodes; `asks`: torch, too, where that is on.

    Raises:
        UsageError: there is no such job, or the id means several.
        SetupError: SLURM's commands are missing, or have no cluster.
        AllranksError: the job is not running; or, of the looks: SLURM refuses the step.
    """
    parts = ask_for_parts(job)
    require_slurm("srun", env)
    nodes = [node for part in parts for node in expand_hosts(part.nodes)]
    every_s = EVERY_S * max(1.0, len(nodes) / NODES_AT_FULL_RATE)
    verb = ("watch", *["--ask"] * asks, "--probe", f"{every_s:g}")
    return Watched(job, nodes, _follow(job, parts, verb, step_env(env)), (job,))


def _follow(job: str, parts: list[JobState], verb: Sequence[str], env: Mapping[str, str]) -> Generator[NodeLook | None]:
    while True:
        words, has_answered = list[str](), False
        commands = [srun_command(part, verb, is_leased=True) for part in parts]
        steps = follow_steps(commands, env, kinds={"look": NodeLook}, words=words, is_leased=True)
        with contextlib.closing(steps):
            for document in steps:
                has_answered |= document is not None
                yield None if document is None else document[1]
        try:
            parts = ask_for_parts(job)
        except AllranksError:  # the job has ended
            return
        if not has_answered:
            raise AllranksError(f"watch {job}: no node answered; srun: {words_of(words) or 'no reason given'}")


def probe(job: str, *, every_s: float, asks: bool) -> None:
    """Send looks at a job's part on this node to whoever started the step, as long as standard input lives."""
    node, is_told, heard_s = name_of(os.environ), list[int](), time.monotonic()
    signal.signal(signal.SIGTERM, lambda signum, _: is_told.append(signum))
    for look in _look_again(WantedStacks(job=job), node, every_s=every_s, asks=asks):
        is_last = bool(is_told)
        send(node, "look", look)
        if select.select([0], [], [], 0)[0]:
            if not os.read(0, 1 << 12):
                return
            heard_s = time.monotonic()
        if is_last or time.monotonic() > heard_s + LEASE_S:
            return
