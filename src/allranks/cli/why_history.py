"""`allranks why --history`: which node breaks more jobs than chance explains, and the commands against it."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from allranks.config.file import find_cluster_file, read_cluster
from allranks.model.errors import Exit, UsageError
from allranks.report.text import count_of, one_line
from allranks.why.fleet.gather import JobHistory, gather
from allranks.why.fleet.suspects import Fleet, Suspect, describe_suspect, find_suspects

RUNS = Path("runs")
DAY_S = 86400.0


class HistoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as JSON. Fields may be added; none is changed or removed within one `version`."""

    version: int = 1
    fleet: Fleet
    damaged: dict[str, int]
    """Path of a file -> number of its lines that could not be read."""


def show_history(targets: Sequence[str], *, window_s: float, as_json: bool) -> int:
    """Print the answer; returns 1 if a node stands out, else 0."""
    now_s = time.time()
    paths = [Path(target) for target in targets] or find_places(read_history_path())
    history = gather(paths, since_s=now_s - window_s)
    fleet = find_suspects(history.ends, now_s=now_s, window_s=window_s)
    if as_json:
        document = HistoryDocument(fleet=fleet, damaged=history.damaged)
        click.echo(json.dumps(msgspec.to_builtins(document), indent=2))
    else:
        click.echo(render_fleet(fleet, history, days=window_s / DAY_S))
    return Exit.USER_CODE if fleet.suspects else Exit.OK


def read_history_path() -> Path | None:
    """Return `[slurm] history` of cluster.toml; None if there is none."""
    path = find_cluster_file(None, os.environ, Path())
    history = read_cluster(path).cluster.slurm.history if path is not None else None
    return Path(history) if history else None


def find_places(history: Path | None, log_dir: Path = RUNS) -> list[Path]:
    """Return where ends of jobs are: what the epilog fills, and the own runs.

    Raises:
        UsageError: there is neither.
    """
    places = [path for path in (history, log_dir) if path is not None and path.exists()]
    if not places:
        wanted = " and ".join(str(path) for path in (history, log_dir) if path is not None)
        raise UsageError(
            f"no history in {wanted}: expected run directories, or the files of an epilog ([slurm] history in "
            "cluster.toml)"
        )
    return places


def render_fleet(fleet: Fleet, history: JobHistory, *, days: float) -> str:
    """Return the suspects, each with its commands, and what they were found in."""
    blocks = [tell_suspect(suspect, fleet) for suspect in fleet.suspects]
    read = (
        f"{count_of(fleet.jobs, 'job')} of the last {days:g} days on {count_of(fleet.nodes, 'node')}, "
        f"{fleet.failed} with a failure"
    )
    blocks.append(read if blocks else f"no node stands out: {read}")
    if history.damaged:
        files = [f"{one_line(path)} ({count})" for path, count in history.damaged.items()]
        blocks.append(f"lines that could not be read: {', '.join(files)}")
    return "\n\n".join(blocks)


def tell_suspect(suspect: Suspect, fleet: Fleet) -> str:
    """Return one suspect as text."""
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(suspect.last_s))
    causes = ", ".join(f"{cause} ({count})" for cause, count in suspect.causes)
    well = f"; {count_of(suspect.well_since, 'job')} ended well on it since" if suspect.well_since else ""
    rows = {
        "causes": causes,
        "last": f"{last}, job {suspect.last_job}{well}",
        "chance": f"{tell_chance(suspect.chance)} if all {fleet.nodes} nodes were alike: {suspect.jobs} of "
        f"{count_of(fleet.jobs, 'job')} ran on it",
        "drain": shlex.join(drain_command(suspect)),
        "exclude": f"sbatch --exclude={suspect.node}",
    }
    head = f"{suspect.node} is the culprit in {suspect.culprit_in} of {suspect.failed} failures of jobs that ran on it"
    return "\n".join([one_line(head), *(f"  {label:<8}{one_line(text)}" for label, text in rows.items())])


def tell_chance(chance: float) -> str:
    """`1 in 5,000`.

    >>> tell_chance(0.0002), tell_chance(1e-12)
    ('1 in 5,000', 'below 1 in 1,000,000')
    """
    return "below 1 in 1,000,000" if chance < 1e-6 else f"1 in {round(1 / chance):,}"


def drain_command(suspect: Suspect) -> list[str]:
    """Return the command that takes a node out of service, with the reason that sinfo shows."""
    reason = f"allranks: {describe_suspect(suspect)}"
    return ["scontrol", "update", f"nodename={suspect.node}", "state=drain", f"reason={reason}"]
