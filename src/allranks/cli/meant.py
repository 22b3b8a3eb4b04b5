"""Which logs do the arguments of `allranks why` mean? A job, a run, paths, or the newest run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.finding import Verdict
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.why.logs.sources import Source

RUNS = Path("runs")
_SLURM_OUTPUT = re.compile(r"(?:^|/)slurm-(\d+(?:_\d+)?)\.(?:out|err)(?:\.gz|\.zst)?$")


def find_meant(target: str) -> str:
    """Return what an argument means: the id of a SLURM job, a path, or `-`.

    `latest` and a run's id mean the run in runs/; a directory with several runs means the newest of them.

    Raises:
        UsageError: `latest`, and there is no run here.
    """
    from allranks.report.runs import find_run, list_runs
    from allranks.why.logs.job import is_job_id

    if os.path.lexists(target):  # an existing path comes first
        runs = list_runs(Path(target))
        if len(runs) < 2:
            return target
        say(f"{target} has {len(runs)} runs; reading the newest, {runs[0]}; the previous one is {runs[1]}")
        return str(runs[0])
    run = None if target == "-" or is_job_id(target) else find_run(target, RUNS)
    if run is None:
        return target
    say(f"reading {run.path}" + (", the newest run" if target == "latest" else ""))
    return run.id if run.is_of_slurm else str(run.path)


def find_logs(targets: Sequence[str]) -> tuple[Source, ...]:
    """Return the logs to read; none if all arguments are flight recorder dumps.

    Raises:
        UsageError: a path does not exist.
        SetupError: no log of a job is on this machine, and SLURM is missing or does not answer.
    """
    from allranks.report.runs import is_run
    from allranks.why.dumps import is_dump
    from allranks.why.logs.job import find_job_sources, is_job_id
    from allranks.why.logs.sources import find_sources

    targets = [target for target in targets if target == "-" or not is_dump(Path(target))]
    if not targets:
        return ()
    # An existing path comes first, even if its name looks like a job.
    jobs = [target for target in targets if is_job_id(target) and not os.path.lexists(target)]
    if not jobs:
        try:
            found = find_sources(targets)
        except UsageError:
            if find_recordings(targets, ()):  # dumps alone are something to read, too
                return ()
            raise
        if len(targets) == 1 and is_run(Path(targets[0])):  # many words lead to it: the paths lead there from here
            return tuple(replace(each, shown=str(Path(targets[0], each.shown))) for each in found)
        return found
    if len(targets) > 1:
        raise UsageError(
            f"why {' '.join(targets)}: expected one job and nothing else; to combine logs, give only files"
        )
    try:
        return find_job_sources(jobs[0])
    except SetupError as exc:
        raise SetupError(f"job {jobs[0]}: {exc}; or give its log files or directory") from exc


def find_job(targets: Sequence[str], sources: Sequence[Source], verdict: Verdict | None) -> str | None:
    """Return the id of the job or run that is asked about, as other verbs take it; None if it is unknown."""
    from allranks.why.logs.job import is_job_id

    if verdict is not None:
        return verdict.job
    if len(targets) == 1 and is_job_id(targets[0]) and not os.path.lexists(targets[0]):
        return targets[0].partition(".")[0]
    named = {match[1] for each in sources if (match := _SLURM_OUTPUT.search(each.shown))}
    return named.pop() if len(named) == 1 else None


def find_running(targets: Sequence[str]) -> str | None:
    """Return the id of the run or job that is asked about, if it still runs; None if not, or if nobody here knows."""
    from allranks.host.slurm import find_jobs
    from allranks.report.runs import is_run, read_run
    from allranks.why.logs.job import is_job_id

    if len(targets) != 1:
        return None
    path, job = Path(targets[0]), ""
    if os.path.lexists(path):
        if not path.is_dir() or not is_run(path):
            return None
        run = read_run(path.resolve())
        if run.verdict is not None:
            return None
        from allranks.launch.batch.local import look_at_run  # with psutil, which takes a moment

        if look_at_run(run).state == "RUNNING":
            return run.id
        job = run.id if run.is_of_slurm else ""
    elif is_job_id(targets[0]):
        job = targets[0].partition(".")[0]
    with contextlib.suppress(AllranksError):
        if job and any(state.state == "RUNNING" for state in find_jobs(job)):
            return job
    return None


def find_recordings(targets: Sequence[str], sources: Sequence[Source]) -> tuple[Source, ...]:
    """Return the flight recorder dumps among the arguments, below a job's run directory, or beside a pattern's logs.

    A job's output file is often in the directory from which many jobs are submitted: dumps there, and runs below it,
    are those of other jobs.
    """
    from allranks.report.runs import is_run
    from allranks.why.dumps import find_dumps
    from allranks.why.logs.job import is_job_id

    if named := [target for target in targets if os.path.lexists(target)]:
        return find_dumps(named)
    folders = dict.fromkeys(each.path.parent for each in sources if each.path is not None)
    if any(is_job_id(target) for target in targets):
        runs = dict.fromkeys(top for folder in folders for top in (folder, *folder.parents) if is_run(top))
        return find_dumps(sorted(map(str, runs)))
    return find_dumps([str(path) for folder in sorted(folders) for path in sorted(folder.iterdir()) if path.is_file()])
