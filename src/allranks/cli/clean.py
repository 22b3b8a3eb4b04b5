"""`allranks clean`: delete old runs, after a look at what would go."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.options import Duration, json_option, log_dir_option
from allranks.cli.progress_line import counted
from allranks.model.errors import Exit, UsageError
from allranks.report.text import count_of, describe_size, render_rows, say

if TYPE_CHECKING:
    from allranks.launch.batch.clean import Candidate, Content


@click.command("clean", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.option("--older", "older_s", type=Duration(), metavar="DURATION", help="Delete runs that ended longer ago: 30d.")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N runs.")
@click.option("--yes", "is_sure", is_flag=True, help="Delete without a question.")
@log_dir_option
@json_option
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete.jobs)
def clean(
    runs: tuple[str, ...], older_s: float | None, keep: int | None, is_sure: bool, log_dir: Path, as_json: bool
) -> int:
    """Delete old runs in runs/, with the checkpoints inside them; first it prints what would go, and asks.

    \b
    allranks clean --older 30d                   prints the runs that ended more than 30 days ago, and asks
    allranks clean --keep 10 --yes               all but the newest 10 runs, without a question
    allranks clean --older 30d --keep 10         of the runs beyond the newest 10, those older than 30 days
    allranks clean 20261123-031500-977

    A run that is running, or may be, is kept, and so is one in which a running one has its checkpoints. Checkpoints
    outside a run's directory are never deleted.
    """
    from allranks.launch.batch.clean import delete, tidy

    if not runs and older_s is None and keep is None:
        raise UsageError("clean: expected --older DURATION, --keep N, or runs, for example: allranks clean --older 30d")
    find = partial(_choose, runs=runs, older_s=older_s, keep=keep, log_dir=log_dir)
    chosen = find()
    contents = {run.id: _content_of(run) for run in counted(chosen, "runs measured")}
    going = [run for run in chosen if not run.kept]
    if not as_json:
        _show(chosen, contents, log_dir)
    is_asked = bool(going) and not is_sure and not as_json and sys.stdin.isatty()
    if is_asked:
        is_sure = click.confirm(f"Delete {count_of(len(going), 'run')}?", err=True)
    deleted, failed = set[str](), dict[str, str]()
    if is_sure:
        still = {run.id for run in find() if not run.kept}  # a run may have begun meanwhile
        for run in counted([run for run in going if run.id in still], "runs deleted"):
            try:
                delete(run)
                deleted.add(run.id)
            except OSError as exc:
                failed[run.id] = f"{exc.filename or run.path}: {exc.strerror}"
        tidy(log_dir)
    if as_json:
        _print_json(chosen, contents, deleted)
    elif is_sure:
        freed = sum(contents[name].size_bytes for name in deleted)
        say(f"{count_of(len(deleted), 'run')} deleted, {describe_size(freed)}")
    elif going:
        say("nothing was deleted" + ("" if is_asked else "; to delete these runs, add --yes"))
    for text in failed.values():
        say(f"not deleted: {text}")
    return Exit.UNKNOWN if failed else Exit.OK


def _choose(*, runs: tuple[str, ...], older_s: float | None, keep: int | None, log_dir: Path) -> list[Candidate]:
    from allranks.launch.batch.clean import Slurm, choose, keep_shared, look_at
    from allranks.report.runs import find_run, list_runs

    now_s, slurm = time.time(), Slurm()
    everything = [look_at(path, slurm, now_s=now_s) for path in counted(list_runs(log_dir), "runs read")]
    if runs:
        named = {name: find_run(name, log_dir) for name in runs}
        if missing := [name for name, run in named.items() if run is None]:
            raise UsageError(f"RUN {missing[0]!r}: no such run in {log_dir}; allranks list --all prints them")
        ids = {run.id for run in named.values() if run is not None}
        chosen = [run for run in everything if run.id in ids]
    else:
        chosen = choose(everything, older_s=older_s, keep=keep, now_s=now_s)
    return keep_shared(chosen, [run for run in everything if run.kept])


def _content_of(run: Candidate) -> Content:
    from allranks.launch.batch.clean import read_content

    return read_content(run)


def _show(chosen: list[Candidate], contents: dict[str, Content], log_dir: Path) -> None:
    if not chosen:
        say(f"nothing to delete in {log_dir}")
        return
    rows = [("RUN", "NAME", "STATE", "ENDED", "SIZE", "CHECKPOINT", "WHAT")]
    for run in chosen:
        content = contents[run.id]
        ended = datetime.fromtimestamp(run.ended_s).isoformat(timespec="minutes")
        checkpoint = "-" if content.checkpoint is None else f"step {content.checkpoint}"
        what = f"kept: {run.kept}" if run.kept else "delete"
        rows.append((run.id, run.name or "-", run.state, ended, describe_size(content.size_bytes), checkpoint, what))
    click.echo(render_rows(rows))
    total = sum(contents[run.id].size_bytes for run in chosen if not run.kept)
    click.echo(f"{count_of(sum(not run.kept for run in chosen), 'run')} to delete, {describe_size(total)}")


def _print_json(chosen: list[Candidate], contents: dict[str, Content], deleted: set[str]) -> None:
    import json

    rows: list[dict[str, Any]] = [
        {
            "id": run.id,
            "name": run.name,
            "state": run.state,
            "ended": datetime.fromtimestamp(run.ended_s).isoformat(timespec="seconds"),
            "size_bytes": contents[run.id].size_bytes,
            "checkpoint": contents[run.id].checkpoint,
            "kept": run.kept,
            "is_deleted": run.id in deleted,
        }
        for run in chosen
    ]
    click.echo(json.dumps(rows, indent=2))
