"""`allranks status`, `logs`, `cancel`, `list`: for SLURM jobs, and for runs without SLURM."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.context import command_in_lab
from allranks.cli.options import json_option, log_dir_option
from allranks.cli.progress_line import counted
from allranks.model.errors import Exit, SetupError
from allranks.report.machine import to_json
from allranks.report.rundir import LATEST
from allranks.report.text import Style, count_of, one_row, render_findings, render_rows, say

if TYPE_CHECKING:
    from allranks.host.slurm import JobState
    from allranks.launch.batch.follow import JobReport
    from allranks.launch.batch.local_run import LocalRun
    from allranks.model.finding import Verdict
    from allranks.model.ledger import Ledger

MAX_RUNS = 20
"""Number of run directories that are listed: each costs some reads of a shared file system."""
_BOTH_SPELLINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}


@click.command("status", context_settings=_BOTH_SPELLINGS)
@log_dir_option
@json_option
@click.argument("jobs", nargs=-1, metavar="[JOB | RUN]...", shell_complete=complete.jobs)
def status(jobs: tuple[str, ...], log_dir: Path, as_json: bool) -> int:
    """Print the state of jobs: why they wait, where they run, how they ended.

    \b
    allranks status                              the newest job or run in runs/
    allranks status 4711
    allranks status 4711_3                       one task of an array
    allranks status 20261123-031500-977          a run on this machine; allranks list prints the ids
    allranks status --json 4711 4712
    """
    from allranks.launch.batch.follow import find_job, report_job

    meant = [find_job(job, log_dir=log_dir) for job in jobs or (LATEST,)]
    reports = [report for job in meant for report in report_job(job, log_dir=log_dir)]
    exit_code = Exit.UNKNOWN if any(report.is_unknown for report in reports) else Exit.OK
    if as_json:
        click.echo(to_json(reports))
        return exit_code
    show_reports(reports)
    return exit_code


def show_reports(reports: Sequence[JobReport]) -> None:
    """Print the state of jobs, with their verdicts."""
    from allranks.launch.batch.follow import describe
    from allranks.report.history import open_findings

    style = Style.of(sys.stdout)
    for report in reports:
        click.echo("\n".join(map(one_row, describe(report, now=datetime.now(), style=style))))
        verdict = report.verdict
        findings = open_findings(verdict, report.worker_restarts) if verdict is not None else ()
        if verdict is not None and (verdict.exit_code == 0 or not findings):
            click.echo(one_row(f"  verdict   {_conclude(verdict)}, exit code {verdict.exit_code}"))
        if findings:
            click.echo("\n" + render_findings(findings, style) + "\n")


def _conclude(verdict: Verdict) -> str:
    if verdict.ended_by is not None:
        return f"no failure, ended from outside by {verdict.ended_by}"
    return "all ranks succeeded" if verdict.exit_code == 0 else "no finding"


@click.command("logs", context_settings=_BOTH_SPELLINGS)
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Follow the output until the job ends.")
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N", help="Print only this rank; repeatable."
)
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Print only the ranks of this node; repeatable.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines.")
@click.option(
    "--since", metavar="TIME", help="Skip lines before this time: 2026-03-25T10:00, 10:00, or 30m before the last line."
)
@click.option("--timestamps", "has_times", is_flag=True, help="Print the time before each line.")
@log_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.argument("job", default=LATEST, metavar="[JOB | RUN]", shell_complete=complete.jobs)
def logs(job: str, log_dir: Path, **wanted: Any) -> None:
    """Print the output of a job: the lines of all ranks, or of some, in the order of their times.

    \b
    allranks logs                                the newest job or run in runs/
    allranks logs -f 4711
    allranks logs --rank 3 --tail 50             the last 50 lines of rank 3 of the newest attempt
    allranks logs --node node03 --since 10m --timestamps 4711

    The agents record when each file grows, to 0.25 s; after many hours of output, to 10 s. Each node has its own clock.
    """
    from allranks.launch.batch.follow import find_job
    from allranks.launch.batch.logs import WantedLines, show_logs

    show_logs(find_job(job, log_dir=log_dir), log_dir=log_dir, wanted=WantedLines(**wanted))


@click.command("cancel", context_settings=_BOTH_SPELLINGS)
@log_dir_option
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete.jobs)
def cancel(jobs: tuple[str, ...], log_dir: Path) -> None:
    """Cancel jobs.

    \b
    allranks cancel 4711
    allranks cancel 4711_3                       one task of an array
    allranks cancel 20261123-031500-977          a run on this machine: sends SIGTERM to its agent
    """
    from allranks.launch.batch.follow import cancel as cancel_one
    from allranks.launch.batch.follow import find_job

    for job in [find_job(job, log_dir=log_dir) for job in jobs]:
        click.echo(one_row(cancel_one(job, log_dir=log_dir)))


@click.command("list", context_settings=_BOTH_SPELLINGS)
@click.option("--all", "is_all", is_flag=True, help="List all runs, not only the newest 20.")
@log_dir_option
@json_option
def list_own(is_all: bool, log_dir: Path, as_json: bool) -> None:
    """List your pending and running jobs, and the newest runs in runs/.

    \b
    allranks list
    allranks list --all
    allranks list --json
    """
    from allranks.host.slurm import list_jobs
    from allranks.host.slurm_command import NoSlurmError
    from allranks.launch.batch.local_run import look_at_run
    from allranks.report.rundir import as_file_name
    from allranks.report.runs import list_runs, read_ledger, read_run

    paths = list_runs(log_dir)
    jobs: tuple[JobState, ...] = ()
    no_slurm = way = ""
    try:
        jobs = list_jobs(pwd.getpwuid(os.getuid()).pw_name)
    except NoSlurmError as exc:
        no_slurm = f" ({str(exc).partition(';')[0]})"
        command = command_in_lab(["list"])
        way = f"; a lab is up here: {command}" if command else ""
    except SetupError as exc:
        if not paths:
            raise
        say(f"cannot list SLURM jobs: {exc}")
    listed = {job.id for job in jobs}
    shown = [path for path in (paths if is_all else paths[:MAX_RUNS]) if path.name not in listed]
    runs = (read_run(path) for path in counted(shown, "runs read"))
    # A pending job, or one that SLURM has forgotten, may have left only its script.
    seen = [look_at_run(run) for run in runs if run.attempt is not None]
    if seen and no_slurm and (way or "not found" not in no_slurm):  # without SLURM's commands, nobody misses jobs
        say(f"SLURM was not asked{no_slurm}, so its pending and running jobs are missing here{way}")
    if as_json:
        click.echo(to_json([*jobs, *seen]))
        return
    if not jobs and not seen:
        say(f"you have no pending or running job{no_slurm}, and {log_dir} has no run{way}")
        return
    head = ("JOB", "NAME", "STATE", "NODES", "LEFT", "RESTARTS", "GOODPUT", "WHERE OR WHY")
    rows = [head, *(_job_row(job, read_ledger(log_dir / as_file_name(job.id))) for job in jobs), *map(_run_row, seen)]
    click.echo(render_rows(rows))
    if len(paths) > MAX_RUNS and not is_all:
        say(f"{log_dir} has {count_of(len(paths) - MAX_RUNS, 'older run')}; to list them, too: allranks list --all")


def _job_row(job: JobState, ledger: Ledger | None) -> tuple[str, ...]:
    from allranks.launch.batch.follow import time_left

    left = job.time_limit if job.is_pending else time_left(job.end, datetime.now())
    where = job.reason if job.is_pending else job.nodes
    restarts = "-" if ledger is None else str(len(ledger.restarts))
    goodput = _goodput_text(None if ledger is None else ledger.goodput)
    return job.id, job.name, job.state, str(job.num_nodes), left or "-", restarts, goodput, where or "-"


def _run_row(run: LocalRun) -> tuple[str, ...]:
    from allranks.report.history import describe_restarts

    words = [f"exit code {run.exit_code}"] if run.exit_code else []
    words += [run.cause] if run.cause else []
    words += filter(None, [describe_restarts(run.worker_restarts, allowed=run.max_restarts)])
    words += [f"last alive {run.last_alive}"] if run.state in ("LOST", "UNKNOWN") and run.last_alive else []
    words += [f"ended {run.end}"] if run.end else []
    where = ", ".join(words) or run.nodes or "-"
    counts = str(run.num_restarts), _goodput_text(run.goodput)
    return run.id, run.name or "-", run.state, str(run.num_nodes), "-", *counts, where


def _goodput_text(goodput: float | None) -> str:
    from allranks.report.account import share_text

    return "-" if goodput is None else share_text(goodput)
