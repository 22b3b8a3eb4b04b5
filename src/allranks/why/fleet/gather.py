"""Reads how jobs ended: from run directories, and from files that `allranks why --epilog --to` fills.

past = gather([Path("runs"), Path("/var/log/allranks")], since_s=0.0)
past.ends, past.damaged         # what was read, and the number of damaged lines by file
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.files.regular import open_regular
from allranks.model.errors import UsageError
from allranks.model.hostlist import fold_hosts, is_host_name
from allranks.report.last_files import VERDICT
from allranks.report.runs import is_run, list_runs, read_nodes, read_verdict, sort_by_number
from allranks.why.fleet.job_end import VERSION, JobEnd, find_faults, read_ends

SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class JobHistory:
    """How jobs ended, as far as these files tell."""

    ends: tuple[JobEnd, ...]
    damaged: dict[str, int]
    """Path of a file -> number of its lines that could not be read."""


def gather(paths: Sequence[Path], *, since_s: float) -> JobHistory:
    """Return what run directories and files tell.

    Args:
        paths: run directories, their parents, files of the epilog, or directories of such files.
        since_s: run directories whose last verdict is older are not read.
    Raises:
        UsageError: a path does not exist, cannot be read, or has neither.
    """
    ends: list[JobEnd] = []
    damaged: dict[str, int] = {}
    for path in paths:
        runs = _runs_of(path)
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() and not is_run(path) else [path][: not runs]
        if not runs and not files:
            raise UsageError(f"{path}: expected run directories, or {SUFFIX} files of `allranks why --epilog --to`")
        for run in runs:
            ends += _ends_of_run(run, since_s=since_s)
        for file in files:
            try:
                with open_regular(file, follows_links=True) as opened:
                    told = read_ends(opened)
            except OSError as exc:
                raise UsageError(f"{file}: {(exc.strerror or str(exc)).lower()}") from exc
            if told.num_damaged and not told.ends and file == path:
                raise UsageError(f"{file}: no line of it is one that `allranks why --epilog --to` writes")
            ends += told.ends
            if told.num_damaged:
                damaged[str(file)] = told.num_damaged
    return JobHistory(tuple(ends), damaged)


def _runs_of(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    return list_runs(path) if path.is_dir() else []


def _ends_of_run(path: Path, *, since_s: float) -> Iterator[JobEnd]:
    """Yield an end for each attempt of a run that has a verdict."""
    for attempt in sort_by_number(path.glob("attempt_*")):
        file = attempt / VERDICT
        with contextlib.suppress(OSError):  # no verdict: it runs, or its agents were killed
            time_s = file.lstat().st_mtime
            verdict = read_verdict(file)
            if verdict is None or time_s < since_s:
                continue
            yield JobEnd(
                version=VERSION,
                time_s=time_s,
                job=path.name,
                nodes=fold_hosts([*filter(is_host_name, read_nodes(attempt))]),
                is_failed=verdict.exit_code != 0 and verdict.ended_by is None,
                faults=find_faults(verdict.findings),
            )
