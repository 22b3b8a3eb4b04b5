"""`allranks watch`: what is wrong with a job that runs now, whoever started it; read-only."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli import complete
from allranks.cli.options import log_dir_option, read_pids
from allranks.host.programs import OWN_COMMAND
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.report.text import Style, say

if TYPE_CHECKING:
    from allranks.report.top_rows import TopView
    from allranks.watch.heard_job import HeardJob
    from allranks.watch.step import Watched

ONCE_S, ANSWERS_OF_TORCH_S, MORE_S = 5.0, 7.0, 20.0
"""How long `--once` looks; how much longer for an answer of torch, and at most for slow nodes."""
NOTICE_S = 2.0
"""Before somebody who waits for nodes is told so."""
SCREEN_S, JSON_S = 0.5, 1.0
"""How often the table is drawn, and a document is printed."""


@click.command("watch")
@click.option("--here", "is_here", is_flag=True, help="Watch ranks of this machine only; do not ask SLURM.")
@click.option("--pid", "are_pids", is_flag=True, help="Take the arguments as process ids of this machine.")
@click.option(
    "--once",
    "is_once",
    is_flag=True,
    help="Look for 5 s (with --ask 12 s; on a busy machine up to 20 s longer), print one answer, and exit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line, each second.")
@click.option(
    "--ask", "asks", is_flag=True, help="While ranks wait, also ask torch's debug server, or NCCL's dump pipe."
)
@log_dir_option
@click.option("--probe", "probe_s", type=float, hidden=True)  # on a node: sends what the head's command reads
@click.argument("targets", nargs=-1, metavar="[JOB | PID...]", shell_complete=complete.jobs)
def watch(
    targets: tuple[str, ...],
    is_here: bool,
    are_pids: bool,
    is_once: bool,
    as_json: bool,
    asks: bool,
    log_dir: Path,
    probe_s: float | None,
) -> int:
    """Find out what is wrong with a JOB that runs now, whoever started it, and which rank causes it.

    \b
    allranks watch                     the job on this machine: of torchrun, mp.spawn, Ray ...
    allranks watch --once              one answer after 5 s: the rank that the others wait for, file and line
    allranks watch 127.0.0.1:29777     one of several jobs on this machine; without JOB they are listed
    allranks watch 4711                a SLURM job, on all its nodes
    allranks watch --pid 4711 4712     these processes
    allranks watch --ask               with process groups: who is behind, or in another collective than the others
    allranks watch --json > watch.jsonl

    It prints what is wrong, and below it a row for each rank, with the line of your code that it is at (WHERE):

    \b
    ✗ a verdict   proven: a rank ended or is stopped, a connection is dead, or the launcher's store does not answer
    ⚠ a state     "rank 2 has been at data.py:9 for 41 s; 2 ranks wait": look at that line; it may be as it should

    It only reads: no signal, no stop, no write. Process groups cannot be seen so: with --ask, torch tells the calls of
    each rank, where the job has its debug server (start_debug_server) or NCCL's dump pipe on already. Be the owner of
    the processes, or root. The table on a terminal needs textual (pip install 'allranks[top]'); its keys: s stack, o
    sort, / search, ? help, q quit. Elsewhere a line is printed when something changes. When the job ends, the last
    looks stay in runs/watch-JOB, for `allranks why`.

    Exit codes, of the last look: 0 nothing is wrong, 1 a verdict, 3 only states, or it could not tell; also after q or
    Ctrl-C in the table. 2 usage error, 78 SLURM is not available, 130 Ctrl-C where lines are printed.
    """
    from allranks.watch.heard_job import HeardJob
    from allranks.watch.step import probe

    if probe_s is not None:
        probe("".join(targets), every_s=probe_s, asks=asks)
        os._exit(Exit.OK)  # a thread may still wait for a file system that hangs
    watched = _find(targets, is_here=is_here, are_pids=are_pids, asks=asks, log_dir=log_dir)
    heard = HeardJob(watched.job, watched.nodes)
    with contextlib.closing(watched.looks):
        if is_once or as_json or not _show_screen(heard, watched):
            once_s = ONCE_S + ANSWERS_OF_TORCH_S * asks
            _print_answers(heard, watched, is_once=is_once, as_json=as_json, once_s=once_s)
    if heard.is_over and not is_once:
        try:
            say(f"job {heard.job} has ended; to read this again: allranks why {heard.save(log_dir)}")
        except OSError as exc:
            say(f"job {heard.job} has ended; its last looks are not kept: {log_dir}: {exc.strerror}")
    return heard.opinion.exit_code


def _find(targets: tuple[str, ...], *, is_here: bool, are_pids: bool, asks: bool, log_dir: Path) -> Watched:
    """Return the job that is meant.

    Raises:
        UsageError: there is none, or several.
        SetupError: SLURM is needed, and is not available.
        AllranksError: it is not running.
    """
    from allranks.host.slurm_command import NoSlurmError
    from allranks.report.runs import find_run, is_job_of_slurm
    from allranks.watch.step import add_ranks_below, find_jobs_here, has_name, list_jobs, watch_here, watch_job

    if are_pids:
        pids = add_ranks_below(read_pids("watch", targets), find_jobs_here())
        return watch_here(f"pid-{pids[0]}", pids=pids, asks=asks)
    if len(targets) > 1:
        raise UsageError(f"watch {' '.join(targets)}: expected one job; for process ids: allranks watch --pid PID...")
    target, here = "".join(targets), find_jobs_here()
    known = list_jobs(here)
    none = "no ranks that this user can see run on this machine; for process ids: allranks watch --pid PID..."
    if not target and len(here) != 1:
        nothing = f"{none}; for a job in SLURM: allranks watch JOB (allranks list prints yours)"
        raise UsageError(f"watch: {'several jobs run on this machine:' if here else nothing}", more=known)
    may_be_run = target and target not in here and (is_here or not is_job_of_slurm(target))
    run = find_run(target, log_dir) if may_be_run else None
    job = run.id if run is not None else target or next(iter(here))
    found, no_slurm = here.get(job, []), ""
    if run is not None and run.verdict is not None and not found:
        raise AllranksError(f"run {job} has ended; to see what happened: allranks why {job}")
    is_of_slurm = found[0].env.get("SLURM_JOB_ID") == job if found else is_job_of_slurm(job)
    if not is_here and (run.is_of_slurm if run else is_of_slurm):  # it may have more nodes
        try:
            return watch_job(job, env=os.environ, asks=asks)
        except AllranksError as exc:
            if not found and (run or not isinstance(exc, NoSlurmError)):
                raise
            no_slurm = "no SLURM here, and "
            if found:
                say(f"{exc}; this machine's ranks of job {job} are watched")
    if not found:
        is_pid = target.isdigit() and Path(f"/proc/{target}").exists()
        process = f"; to watch the process {target}: allranks watch --pid {target}" if is_pid else ""
        others = "; jobs here:" if here else f"; {none}"
        raise UsageError(f"JOB {target!r}: {no_slurm}no process of such a job runs here{process}{others}", more=known)
    if not target or has_name(job):  # without a name, all ranks are of the only job, and whoever started them
        return watch_here(job if has_name(job) else "", asks=asks)
    return watch_here("", pids=tuple(process.pid for process in found), asks=asks)


def _print_answers(heard: HeardJob, watched: Watched, *, is_once: bool, as_json: bool, once_s: float) -> None:
    """Print one answer, or documents, or lines whenever what is wrong changes."""
    from allranks.report.top_rows import render_view
    from allranks.watch.judge import describe

    style, began_s, notice_s = Style.of(sys.stdout), time.monotonic(), NOTICE_S
    due_s, told, was_all_heard = 0.0, None, False
    while not heard.is_over:
        heard.hear_for(watched.looks, 0.0)
        now_s = time.monotonic()
        waited_s = now_s - began_s
        if not was_all_heard and (waited_s > notice_s or not heard.unheard):
            notice_s, was_all_heard = 4 * notice_s, not heard.unheard
            say(heard.describe_progress(waited_s))
        has_looked = heard.looked_s >= once_s or waited_s > once_s + MORE_S
        if is_once and has_looked:
            break
        # It takes some looks to know that nothing is wrong.
        is_known = has_looked or (not heard.unheard and (as_json or heard.opinion.is_wrong))
        is_due = heard.news != told or (as_json and now_s >= due_s)
        if not is_once and is_known and is_due:
            click.echo(heard.to_json() if as_json else "\n".join(describe(heard.opinion, style)))
            told, due_s = heard.news, now_s + JSON_S
    if not heard.is_heard:
        raise AllranksError(f"watch {heard.job}: no node answered within {once_s + MORE_S:.0f} s")
    news = [] if heard.news == told else describe(heard.opinion, style)
    click.echo(heard.to_json() if as_json else "\n".join([*news, "", *render_view(heard.view(), style)]))


def _show_screen(heard: HeardJob, watched: Watched) -> bool:
    """Draw the table until the job ends or the user quits, then print it; False: no terminal, or no textual."""
    from allranks.cli.top import has_terminal, run_command
    from allranks.report.top_rows import render_view
    from allranks.watch.judge import describe

    if not has_terminal():
        return False
    try:
        from allranks.cli.top_app import TopApp, TopScreen
    except ImportError as exc:
        say(f"lines instead of a table, which needs textual ({exc}): pip install 'allranks[top]'")
        return False
    lock, problems, style = threading.Lock(), list[AllranksError](), Style.of(sys.stdout)

    def run_verb(words: Sequence[str]) -> str:
        if words[0] != "stack":
            return "the logs are where the job's launcher writes them; allranks logs reads those of allranks run"
        return run_command([*OWN_COMMAND, "stack", *watched.stack])

    def look() -> TopView | None:
        with lock:
            try:
                heard.hear_for(watched.looks, SCREEN_S)
            except AllranksError as exc:
                problems.append(exc)
                heard.is_over = True
            return heard.view(*describe(heard.opinion, replace(style, has_colour=False))) if heard.is_heard else None

    missing, is_done = f"watching {heard.job}: no node has answered yet", lambda: heard.is_over
    TopApp(TopScreen(heard.job, look, run_verb, missing=missing, style=style, every_s=SCREEN_S, is_done=is_done)).run()
    with lock:  # a thread of the screen may still look
        watched.looks.close()
    if problems:
        raise problems[0]
    if heard.is_heard:
        click.echo("\n".join([*describe(heard.opinion, style), "", *render_view(heard.view(), style)]))
    return True
