"""Completions that a shell offers: causes, faults, jobs and runs, paths.

Each function is a `shell_complete` of click: it gets the beginning of the word. All imports are inside, since the verbs
import this file whenever they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MAX_RUNS = 20
SQUEUE_S = 2.0
"""A user who has to wait longer types the id instead."""


def causes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of causes; names and aliases where the word begins like one."""
    from click.shell_completion import CompletionItem

    from allranks.causes.book import all_causes

    found = [(cause.id, cause) for cause in all_causes() if cause.id.startswith(incomplete.upper())]
    if not found:
        named = [(name, cause) for cause in all_causes() for name in (cause.name, *cause.aliases)]
        found = [(name, cause) for name, cause in named if name.lower().startswith(incomplete.lower())]
    return [CompletionItem(word, help=cause.title) for word, cause in found]


def faults(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the faults that a lab can have."""
    from click.shell_completion import CompletionItem

    from allranks.lab.faults.catalogue import FAULTS

    return [CompletionItem(name, help=fault.title()) for name, fault in FAULTS.items() if name.startswith(incomplete)]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of the user's jobs in SLURM and of runs in the log directory, and `latest`."""
    import os
    import pwd
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from allranks.host.slurm import list_jobs
    from allranks.model.errors import AllranksError
    from allranks.report.runs import list_runs, read_run
    from allranks.report.text import cell

    log_dir = Path(ctx.params.get("log_dir") or "runs")
    found = []
    try:
        listed = list_jobs(pwd.getpwuid(os.getuid()).pw_name, deadline_s=SQUEUE_S)
        found += [CompletionItem(job.id, help=cell(f"{job.name} {job.state}")) for job in listed]
    except (AllranksError, KeyError):  # no SLURM here: the runs are offered
        pass
    runs = [read_run(path) for path in list_runs(log_dir)[:MAX_RUNS]]
    if ctx.info_name in ("cancel", "stack", "watch"):
        runs = [run for run in runs if run.verdict is None]
    known = {item.value for item in found}
    found += [CompletionItem(run.id, help=cell(run.script)) for run in runs if run.id not in known]
    if runs:
        found.append(CompletionItem("latest", help="the newest run"))
    return [item for item in found if item.value.startswith(incomplete)]


def jobs_or_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """As `jobs`; where none fits, the shell's own files."""
    return jobs(ctx, param, incomplete) or paths(ctx, param, incomplete)


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
