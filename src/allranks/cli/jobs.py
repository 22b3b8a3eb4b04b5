"""`allranks render`, `submit`, `status`, `logs`, `cancel`, `list`: jobs of SLURM, from the login node."""

from __future__ import annotations

import copy
import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from allranks.cli.context import load_cluster
from allranks.cli.options import json_option
from allranks.cli.run import run as run_command
from allranks.config.file import find_cluster_file
from allranks.launch.batch.script import (
    JobEnvironment,
    SbatchOptions,
    parse_env,
    refuse_secret_values,
    render_sbatch,
    submission_env,
)
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.report.rundir import as_file_name
from allranks.report.text import Style, render_findings, say

# Flags of `run` that go into the script as they are.
RUN_FLAGS = (
    "nproc_per_node", "nnodes", "backend", "master_port", "module", "no_python", "redirects", "tee",
    "local_ranks_filter", "log_dir", "cluster_file", "max_restarts", "standby", "capacity_timeout", "hang_timeout",
    "checkpoint_every", "checkpoint_dir",
)  # fmt: skip
MAX_RESTARTS = "3"
"""What a submitted job gets, where torchrun's default is none: nobody watches it."""
_BOTH_SPELLINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}
_SCRIPT = {"allow_interspersed_args": False, **_BOTH_SPELLINGS}


def _run_flags(command: click.Command) -> click.Command:
    """Add the flags of `run`, without its letters: `-t` is the time limit to who knows sbatch."""
    for param in _taken_from_run():
        mine = copy.copy(param)
        mine.opts = [flag for flag in param.opts if flag.startswith("--") or flag == "-m"]
        command.params.append(mine)
    return command


def _taken_from_run() -> list[click.Parameter]:
    """Those of RUN_FLAGS that `run` has; what it only accepts and ignores is none."""
    return [each for each in run_command.params if each.name in RUN_FLAGS and not getattr(each, "hidden", False)]


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add sbatch's options under its own names, and what the script is made of."""
    more = [
        click.option("--sbatch-option", "more", multiple=True, metavar="--NAME=VALUE", help="Any other of sbatch's."),
        click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="The job gets it; secrets by NAME only."),
        click.option("--template", type=click.Path(path_type=Path), metavar="FILE", help="Blocks of your own."),
        click.option("--allranks-command", metavar="COMMAND", help="On the nodes. [default: this Python, -m allranks]"),
    ]
    own = []
    for each in fields(SbatchOptions):
        flag = "--" + each.name.replace("_", "-")
        kind: dict[str, Any] = {"type": int if isinstance(each.default, int) or each.name == "cpus_per_task" else str}
        if each.name == "requeue":
            flag, kind = "--requeue/--no-requeue", {}
        elif each.default is False:
            kind = {"is_flag": True}
        text = each.metadata["help"]
        own.append(
            click.option(flag, each.name, default=each.default, help=text, metavar=each.metadata["metavar"], **kind)
        )
    for option in reversed([*own, *more]):
        function = option(function)
    return function


log_dir_option = click.option(
    "--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="As for run."
)


@_run_flags
@click.command("render", context_settings=_SCRIPT)
@_job_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def render(**flags: Any) -> None:
    """Print the batch script that `submit` would hand to SLURM; it also works with plain sbatch.

    \b
    allranks render --nodes 6 --gpus-per-node 1 train.py --epochs 3 > job.sh
    allranks render --nodes 2 --env NCCL_DEBUG=INFO --backend nccl train.py
    allranks render --nodes 2 --template mine.j2 train.py      {% extends "allranks/job.sh.j2" %}, a block of your own
    """
    click.echo(_render(flags)[0], nl=False)


@_run_flags
@click.command("submit", context_settings=_SCRIPT)
@_job_options
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, checked by SLURM where it is there.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Render the batch script, check it, submit it, and say how to follow the job.

    \b
    allranks submit --nodes 6 --gpus-per-node 1 train.py --epochs 3
    allranks submit --nodes 2 --nproc-per-node 4 --cpus-per-task 32 --time 30 train.py
    allranks submit --nodes 2 --env HF_TOKEN train.py          the token goes in by name, its value is written nowhere
    allranks submit --array 0-2 --dry-run train.py
    """
    from allranks.launch.batch.submit import SBATCH_ARGUMENTS, check_script, lines_to_follow
    from allranks.launch.batch.submit import submit as submit_job

    text, options, asked = _render(flags)
    _check_there(flags, options)
    said = [each.name for each in fields(SbatchOptions) if _is_said(each.name)]
    env, withheld = submission_env(os.environ, asked.names, said=said)
    if dry_run:
        check_script(text)
        click.echo(text, nl=False)
        say(f"would run: sbatch --parsable {' '.join(SBATCH_ARGUMENTS)} < this script")
        say(f"the job's environment: {' '.join(sorted(env))}")
        _note_withheld(withheld)
        _try(text, env)
        _note_limits(options, env)
        return
    submission = submit_job(text, options, env=env, log_dir=flags["log_dir"])
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(submission))
        return
    when = f", expected to start {submission.trial.start} on {submission.trial.nodes}" if submission.trial.start else ""
    click.echo(f"job {submission.job} submitted{when}")
    for line in lines_to_follow(submission):
        click.echo(f"  {line}")
    _note_withheld(withheld)
    if submission.waits_for:
        say(f"job {submission.job} waits: {submission.waits_for}")
    if submission.problem:
        say(submission.problem)
    _note_limits(options, env)


@click.command("status", context_settings=_BOTH_SPELLINGS)
@log_dir_option
@json_option
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def status(jobs: tuple[str, ...], log_dir: Path, as_json: bool) -> int:
    """Say what became of jobs: why they wait, where they run, what they came to.

    \b
    allranks status 4711
    allranks status 4711_3                       one task of an array
    allranks status --json 4711 4712
    """
    from allranks.launch.batch.follow import check_job_id, describe, report_job

    reports = [report for job in jobs for report in report_job(check_job_id(job), log_dir=log_dir)]
    exit_code = Exit.UNKNOWN if any(report.is_unknown for report in reports) else Exit.OK
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(reports), indent=2))
        return exit_code
    style = Style.of(sys.stdout)
    for report in reports:
        click.echo("\n".join(describe(report, now=datetime.now())))
        if report.verdict is not None and report.verdict.findings:
            click.echo("\n" + render_findings(report.verdict.findings, style) + "\n")
        elif report.verdict is not None:
            click.echo(f"  verdict   no finding, exit code {report.verdict.exit_code}")
    return exit_code


@click.command("logs", context_settings=_BOTH_SPELLINGS)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N", help="This rank's own files.")
@log_dir_option
@click.argument("job")
def logs(job: str, follow: bool, ranks: tuple[int, ...], log_dir: Path) -> None:
    """Show what a job has printed: its own output, which has all ranks, or the files of some ranks.

    \b
    allranks logs -f 4711
    allranks logs --rank 3 4711                  the newest attempt's rank 3, as it wrote it
    """
    from allranks.launch.batch.follow import check_job_id, show_logs

    show_logs(check_job_id(job), log_dir=log_dir, ranks=ranks, is_followed=follow, say=say)


@click.command("cancel")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def cancel(jobs: tuple[str, ...]) -> None:
    """End jobs, or take them out of the queue.

    \b
    allranks cancel 4711
    allranks cancel 4711_3                       one task of an array
    """
    from allranks.launch.batch.follow import cancel as cancel_one
    from allranks.launch.batch.follow import check_job_id

    for job in map(check_job_id, jobs):
        click.echo(cancel_one(job))


@click.command("list")
@json_option
def list_own(as_json: bool) -> None:
    """List your jobs that wait or run.

    \b
    allranks list
    allranks list --json
    """
    from allranks.host.slurm import list_jobs
    from allranks.launch.batch.follow import time_left

    jobs = list_jobs(pwd.getpwuid(os.getuid()).pw_name)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(jobs), indent=2))
        return
    if not jobs:
        say("no job of yours waits or runs")
        return
    rows = [("JOB", "NAME", "STATE", "NODES", "LEFT", "WHERE OR WHY")]
    for job in jobs:
        left = job.time_limit if job.is_pending else time_left(job.end, datetime.now())
        where = job.reason if job.is_pending else job.nodes
        rows.append((job.id, job.name, job.state, str(job.num_nodes), left or "-", where or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _render(flags: dict[str, Any]) -> tuple[str, SbatchOptions, JobEnvironment]:
    """The script's text and what it was made from."""
    slurm = load_cluster(flags["cluster_file"]).cluster.slurm
    options = SbatchOptions(**{each.name: flags[each.name] for each in fields(SbatchOptions)})
    options = replace(
        options,
        job_name=options.job_name or as_file_name(Path(flags["script"]).stem),
        partition=options.partition or slurm.partition,
        time=options.time or slurm.time,
    )
    asked = parse_env(flags["env"], os.environ)
    try:
        agent = shlex.split(flags["allranks_command"] or "") or [sys.executable, "-m", "allranks"]
    except ValueError as exc:
        raise UsageError(f"--allranks-command: {str(exc).lower()}") from exc
    command = [*agent, "run", *_flags_for_run(flags), flags["script"], *flags["arguments"]]
    of_sbatch = [str(getattr(options, each.name)) for each in fields(options)]
    refuse_secret_values([*command, *asked.values.values(), *flags["more"], *of_sbatch], os.environ)
    text = render_sbatch(options, command, more=flags["more"], env=asked.values, template=flags["template"])
    return text, options, asked


def _flags_for_run(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    if flags["chdir"]:  # the agents would look for it there
        found = find_cluster_file(flags["cluster_file"], os.environ, Path())
        words += ["--cluster", str(found.resolve())] if found else []
    has_cluster = bool(words)
    for param in _taken_from_run():
        if param.name == "max_restarts" and not _is_said(param.name):
            words += ["--max-restarts", MAX_RESTARTS]
        if param.name is None or not _is_said(param.name) or (has_cluster and param.name == "cluster_file"):
            continue
        flag = next(flag for flag in param.opts if flag.startswith("--"))
        words += [flag] if flags[param.name] is True else [flag, str(flags[param.name])]
    return words


def _is_said(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def _check_there(flags: dict[str, Any], options: SbatchOptions) -> None:
    path = Path(options.chdir or ".", flags["script"])
    if not flags["module"] and not flags["no_python"] and not path.exists():
        raise UsageError(f"{path}: no such script; expected a Python file (a module takes -m, a program --no-python)")


def _note_withheld(names: list[str]) -> None:
    if names:
        say(f"not handed to the job: {', '.join(names)}; --env NAME hands one in")


def _note_limits(options: SbatchOptions, env: dict[str, str]) -> None:
    """Say what this site does not let a job do that wants to come back; a site that does not answer says nothing."""
    from allranks.host.slurm_site import read_partition, read_site
    from allranks.launch.batch.site import limits

    try:
        rules = read_partition(options.partition.partition(",")[0], env=env) if options.partition else None
        lines = limits(read_site(env=env), rules, options)
    except AllranksError:
        return
    for line in lines:
        say(f"note: {line}")


def _try(text: str, env: dict[str, str]) -> None:
    from allranks.host.slurm import try_script
    from allranks.launch.batch.submit import SBATCH_ARGUMENTS

    if shutil.which("sbatch") is None:
        say("not checked by SLURM: there is no sbatch here")
        return
    trial = try_script(text, SBATCH_ARGUMENTS, env=env)
    when = (
        f"would start it {trial.start} on {trial.nodes}" if trial.start else f"would not start it now: {trial.not_now}"
    )
    say(f"SLURM {when}")
