"""`allranks stack`: who is where in a job that hangs, also in one that allranks did not start."""

from __future__ import annotations

import os
import sys

import click
import msgspec

from allranks.model.errors import Exit, UsageError

SILENCE_S = 20.0


@click.command("stack")
@click.option("--all-threads", is_flag=True, help="Not the main threads only.")
@click.option("--local", is_flag=True, help="Look on this machine only; without JOB at every process that has a RANK.")
@click.option("--pid", "are_pids", is_flag=True, help="The arguments are processes of this machine.")
@click.option(
    "--deadline",
    "silence_s",
    type=click.FloatRange(min=0.1),
    default=SILENCE_S,
    show_default=True,
    metavar="SECONDS",
    help="End the wait when no further node has answered for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--here", is_flag=True, hidden=True)  # the probe on a node: prints what the head's command reads
@click.argument("targets", nargs=-1, metavar="JOB | PID...")
def stack(
    targets: tuple[str, ...],
    all_threads: bool,
    local: bool,
    are_pids: bool,
    silence_s: float,
    as_json: bool,
    here: bool,
) -> int:
    """Show where every rank of a running JOB is right now: equal stacks folded, the odd one out first.

    \b
    allranks stack 1234                          a SLURM job, whoever started it
    allranks stack 1234_5 --all-threads
    allranks stack --local                       what torchrun or allranks run started on this machine
    allranks stack --pid 4711 4712

    It reads from outside, in a step of its own, and stops nothing.
    """
    from allranks.host.stacks import Wanted, look
    from allranks.launch.look.stacks import StackReport, fold, render_stacks, stacks_to_json
    from allranks.report.text import Style, say

    if (len(targets) > 1 and not are_pids) or (not targets and (are_pids or not local)):
        raise UsageError("stack: expected one SLURM job id, --pid with process ids, or --local")
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    if here:
        from allranks.launch.step.parcels import pack

        document = look(Wanted(job=targets[0]), node=node)
        click.echo(pack(node, "stacks", msgspec.json.encode(document)), nl=False)
        sys.stdout.flush()
        os._exit(Exit.OK)  # a thread may still wait for a file system that hangs
    if are_pids:
        pids = tuple(int(text) for text in targets if text.isascii() and text.isdigit())
        if len(pids) < len(targets):
            raise UsageError(f"stack --pid {' '.join(targets)}: expected process ids, for example --pid 4711 4712")
        report = StackReport(job="", documents=[look(Wanted(pids=pids), node=node)])
        gone = sorted(set(pids) - {each.pid for each in report.documents[0].processes})
        if gone:
            say(f"no such process here: {', '.join(map(str, gone))}")
    elif local:
        job = targets[0] if targets else ""
        report = StackReport(job=job, documents=[look(Wanted(job=job), node=node)])
    else:
        from allranks.launch.look.step import probe_job

        report = probe_job(targets[0], silence_s=silence_s, env=os.environ, say=say)
    groups = fold(report.documents, all_threads=all_threads)
    click.echo(stacks_to_json(report, groups) if as_json else render_stacks(report, groups, Style.of(sys.stdout)))
    return Exit.OK if any(group.frames for group in groups) else Exit.UNKNOWN
