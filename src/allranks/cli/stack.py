"""`allranks stack`: where every rank of a hanging job is, whoever started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from allranks.cli import complete
from allranks.cli.options import log_dir_option, read_pids, timeout_option
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.report.rundir import LATEST

SILENCE_S = 20.0


@click.command("stack")
@click.option("--all-threads", is_flag=True, help="Show all threads, not only the main ones.")
@click.option(
    "--local", is_flag=True, help="Examine this machine only; without JOB, ranks of every job, whoever started them."
)
@click.option("--pid", "are_pids", is_flag=True, help="Take the arguments as process ids of this machine.")
@timeout_option(
    "--timeout",
    "silence_s",
    waits_for="for an answer of a node, counted from the previous answer",
    default=SILENCE_S,
    at_least=0.1,
    aliases=("--deadline",),
)
@log_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--here", is_flag=True, hidden=True)  # the probe on a node: prints what the head's command reads
@click.argument("targets", nargs=-1, metavar="[JOB | RUN | PID...]", shell_complete=complete.jobs)
def stack(
    targets: tuple[str, ...],
    all_threads: bool,
    local: bool,
    are_pids: bool,
    silence_s: float,
    log_dir: Path,
    as_json: bool,
    here: bool,
) -> int:
    """Show where every rank of a running JOB is: equal stacks are folded, different ones come first.

    \b
    allranks stack 1234                          a SLURM job, whoever started it
    allranks stack 1234_5 --all-threads
    allranks stack                               the newest run in runs/, on this machine
    allranks stack --local                       ranks on this machine: of torchrun, mp.spawn, Ray ...
    allranks stack --pid 4711 4712

    It reads the processes from outside (py-spy) without stopping them.
    """
    from allranks.host.job_processes import WantedStacks
    from allranks.host.node import name_of
    from allranks.host.slurm_command import NoSlurmError
    from allranks.host.stacks import look
    from allranks.launch.batch.follow import find_job
    from allranks.launch.look.stack_groups import StackReport, fold, render_stacks, split_jobs, stacks_to_json
    from allranks.report.runs import find_run, is_job_of_slurm
    from allranks.report.text import Style, say

    if (len(targets) > 1 and not are_pids) or (not targets and are_pids):
        raise UsageError("stack: expected one job or run, --pid with process ids, or --local")
    targets = targets or (() if local else (LATEST,))
    node = name_of(os.environ)
    if here:
        from allranks.launch.srun import send

        send(node, "stacks", look(WantedStacks(job=targets[0]), node=node))
        os._exit(Exit.OK)  # a thread may still wait for a file system that hangs
    if are_pids:
        pids = read_pids("stack", targets)
        reports = [StackReport(job="", documents=[look(WantedStacks(pids=pids), node=node)])]
    else:
        run = find_run(targets[0], log_dir) if targets and not is_job_of_slurm(targets[0]) else None
        if run is None and targets and not local:
            find_job(targets[0], log_dir=log_dir)  # a job of SLURM, or nothing
        job = run.id if run else "".join(targets)
        if run is not None and run.verdict is not None and not run.is_of_slurm:
            raise AllranksError(f"run {job} has ended; to see what happened: allranks why {job}")
        if local or (run is not None and not run.is_of_slurm):
            reports = split_jobs(look(WantedStacks(job=job), node=node))
        else:
            from allranks.launch.look.stack_step import probe_job

            try:
                reports = [probe_job(job, silence_s=silence_s, env=os.environ, say=say)]
            except NoSlurmError as exc:
                known = run or find_run(job, log_dir)
                if known is None or known.verdict is None:
                    raise
                raise AllranksError(f"job {job} has ended; to see what happened: allranks why {job}") from exc
    pairs = [(report, fold(report.documents, all_threads=all_threads)) for report in reports]
    style = Style.of(sys.stdout)
    text = "\n\n".join(render_stacks(report, groups, style) for report, groups in pairs)
    click.echo(stacks_to_json(pairs) if as_json else text)
    return Exit.OK if any(group.frames for _, groups in pairs for group in groups) else Exit.UNKNOWN
