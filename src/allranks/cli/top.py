"""`allranks top`: a screen that shows what the ranks of a running job do; read-only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from allranks.cli import complete
from allranks.cli.options import json_option, log_dir_option
from allranks.host.programs import OWN_COMMAND
from allranks.model.errors import AllranksError, UsageError
from allranks.model.job_status import FILE
from allranks.report.machine import to_json
from allranks.report.remains import last_line_of
from allranks.report.rundir import LATEST, as_file_name
from allranks.report.runs import Run, find_run, read_job_status, read_verdict
from allranks.report.text import Style
from allranks.report.top_rows import OLD_S, TopView, make_view, render_view

MAX_LOGS = 24
"""Rows whose last line is read: each costs some requests to a file server."""
VERB_S = 60.0
"""How long `s` and `l` wait for `allranks stack` and `allranks logs`."""


@click.command("top")
@click.option("--once", "is_once", is_flag=True, help="Print the state of now as text, and exit.")
@json_option
@log_dir_option
@click.argument("job", default=LATEST, metavar="[JOB | RUN]", shell_complete=complete.jobs)
def top(job: str, is_once: bool, as_json: bool, log_dir: Path) -> None:
    """Watch a running JOB: what every rank and node does, the worst first. Equal ranks are one row.

    \b
    allranks top                                 the newest job or run in runs/
    allranks top 4711
    allranks top --once 4711                     the same as text, once
    allranks top --json 4711

    It reads the files of the run directory and changes nothing. Keys: s stack, l log, o sort, / search, ? help, q quit.
    The screen needs textual: pip install 'allranks[top]'. Without a terminal, the state is printed once.
    """
    run = find_run(job, log_dir)
    if run is None:
        raise UsageError(
            f"JOB {job!r}: no such run in {log_dir}; expected the id of a job or run (allranks list prints them), or "
            "latest"
        )
    if not (is_once or as_json) and has_terminal():
        _watch(run, log_dir)
        return
    view = look(run)
    if view is None:
        raise AllranksError(describe_missing(run))
    style = Style.of(sys.stdout)
    click.echo(to_json(view) if as_json else "\n".join(render_view(view, style)))


def has_terminal() -> bool:
    """Whether a screen can be drawn: textual reads stdin and draws on stderr."""
    is_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return is_terminal and os.environ.get("TERM") != "dumb"


def _watch(run: Run, log_dir: Path) -> None:
    try:
        from allranks.cli.top_app import TopApp, TopScreen
    except ImportError as exc:
        raise UsageError(
            f"top: the screen needs textual ({exc}): pip install 'allranks[top]'; without it: allranks top --once"
        ) from exc

    def run_verb(words: Sequence[str]) -> str:
        """Return what a verb of allranks prints about this job."""
        verb, *flags = words
        command = [*OWN_COMMAND, verb, "--log-dir", str(log_dir), *flags, run.id]
        return run_command(command)

    style = Style.of(sys.stdout)
    TopApp(TopScreen(run.id, lambda: look(run), run_verb, missing=describe_missing(run), style=style)).run()


def run_command(command: Sequence[str]) -> str:
    """Return what a command prints, both streams; after VERB_S it is ended."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERB_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[3:])}: no answer in {VERB_S:.0f} s"
    return done.stdout.decode(errors="replace")


def look(run: Run) -> TopView | None:
    """Return the screen of a run, as its files are now; None if it has no status."""
    status = read_job_status(run.path)
    if status is None:
        return None
    now_s, attempt = time.time(), run.path / f"attempt_{status.attempt}"
    is_old = now_s - status.written_s > OLD_S
    verdict = read_verdict(attempt / "verdict.json") if is_old else None
    last_lines = {
        row.ranks[0]: last_line_of(attempt / as_file_name(row.nodes[0]), row.ranks[0])
        for row in status.rows[:MAX_LOGS]
        if row.ranks and row.nodes
    }
    exit_code = None if verdict is None else verdict.exit_code
    return make_view(status, now_s=now_s, last_lines=last_lines, exit_code=exit_code)


def describe_missing(run: Run) -> str:
    """Return why a run has no status."""
    if run.verdict is not None:
        return f"run {run.id} has ended and left no readable {FILE}; to see what happened: allranks why {run.id}"
    return f"run {run.id} has no {FILE} yet; its leader writes it once the ranks are started"
