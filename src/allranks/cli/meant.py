"""Which logs do the arguments of `allranks why` stand for? A job, a run, paths, or the newest run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.finding import Confidence, Finding, Verdict
from allranks.model.fix import Reader, SchedulerKind, find_scheduler
from allranks.report.rundir import as_file_name
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.report.runs import Run
    from allranks.why.logs.sources import Source

RUNS = Path("runs")
SILENT_S = 300.0
"""A run whose files have not been touched for so long, by the clock of this machine, is dead."""


def find_meant(target: str) -> str:
    """Return what an argument means: the id of a SLURM job, a path, or `-`.

    `latest` and a run's id mean the run in runs/; a directory with several runs means the newest of them.

    Raises:
        UsageError: `latest`, and there is no run here.
    """
    from allranks.report.runs import find_run, list_runs
    from allranks.why.logs.sources import is_job_id

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
    from allranks.why.logs.sources import find_sources, is_job_id

    targets = [target for target in targets if target == "-" or not is_dump(Path(target))]
    if not targets:
        return ()
    # An existing path comes first, even if its name looks like a job.
    jobs = [target for target in targets if is_job_id(target) and not os.path.lexists(target)]
    if not jobs:
        try:
            found = find_sources(targets)
        except UsageError:
            if find_recordings(targets, ()) or (len(targets) == 1 and is_run(Path(targets[0]))):
                return ()  # dumps alone are something to read, too; a run may end before its ranks are started
            raise
        if len(targets) == 1 and is_run(Path(targets[0])):  # many words lead to it: the paths lead there from here
            return tuple(msgspec.structs.replace(source, shown=str(Path(targets[0], source.shown))) for source in found)
        return _keep_newest(found) if len(targets) == 1 and Path(targets[0]).is_dir() else found
    if len(targets) > 1:
        raise UsageError(
            f"why {' '.join(targets)}: expected one job and nothing else; to combine logs, give only files"
        )
    from allranks.why.logs.job_files import find_job_sources  # with subprocess, which takes a moment

    try:
        return find_job_sources(jobs[0])
    except SetupError as exc:
        raise SetupError(f"job {jobs[0]}: {exc}; or give its log files or directory") from exc


def _keep_newest(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Return the logs below directories without the output of older jobs of SLURM; tasks of an array are one job."""
    from allranks.why.logs.sources import list_jobs

    begun = [source for source in sources if source.size]  # a job that has just begun tells nothing
    jobs = sorted({int(job.partition("_")[0]) for job in list_jobs(begun)}, reverse=True)
    if len(jobs) < 2:
        return sources
    say(f"the output of {len(jobs)} jobs is here; reading that of the newest, {jobs[0]}; the previous one is {jobs[1]}")
    older = {job for job in list_jobs(sources) if int(job.partition("_")[0]) != jobs[0]}
    return tuple(source for source in sources if older.isdisjoint(list_jobs([source])))


def find_job(targets: Sequence[str], sources: Sequence[Source], verdict: Verdict | None) -> str | None:
    """Return the id of the job or run that is asked about, as other verbs take it; None if it is unknown."""
    from allranks.why.logs.sources import is_job_id, list_jobs

    if verdict is not None:
        return verdict.job
    if len(targets) == 1 and is_job_id(targets[0]) and not os.path.lexists(targets[0]):
        return targets[0].partition(".")[0]
    named = list_jobs(sources)
    return named[0] if len(named) == 1 else None


def find_run_path(targets: Sequence[str]) -> Path | None:
    """Return the directory of the run that is asked about; None: something else is."""
    from allranks.report.runs import is_run

    if len(targets) != 1:
        return None
    path = Path(targets[0]) if os.path.lexists(targets[0]) else RUNS / as_file_name(targets[0].partition(".")[0])
    return path.resolve() if is_run(path) else None


def find_restarts(targets: Sequence[str]) -> str:
    """Return how often the ranks of the run that is asked about were started again, in words; empty for never."""
    from allranks.report.history import describe_restarts
    from allranks.report.runs import read_run

    path = find_run_path(targets)
    run = read_run(path) if path is not None else None
    return describe_restarts(run.restarts, allowed=run.max_restarts) if run is not None else ""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run or job without a verdict."""

    running: str | None = None
    """Its id, if it still runs."""
    lost: Finding | None = None
    """What is known of its end, if its agent is gone."""


def find_unfinished(targets: Sequence[str]) -> Unfinished:
    """Return whether the run or job that is asked about still runs, or has lost its agent, if anybody here knows."""
    from allranks.report.runs import is_run, read_run
    from allranks.why.logs.sources import is_job_id

    if len(targets) != 1:
        return Unfinished()
    path, job, run = Path(targets[0]), "", None
    if os.path.lexists(path):
        if not path.is_dir() or not is_run(path):
            return Unfinished()
        run = read_run(path.resolve())
        if run.verdict is not None:
            return Unfinished()
        if not run.is_of_slurm:
            return _look_at(run)
        job = run.id
    elif is_job_id(targets[0]):
        job = targets[0].partition(".")[0]
        run = read_run(RUNS / as_file_name(job)) if is_run(RUNS / as_file_name(job)) else None
        if run is not None and run.verdict is not None:
            return Unfinished()
    from allranks.host.slurm import find_jobs  # with subprocess, which takes a moment

    with contextlib.suppress(AllranksError):
        states = find_jobs(job) if job else ()
        if any(state.state == "RUNNING" for state in states):
            return Unfinished(running=job)
        failed = next((state.state for state in states if state.is_finished and state.state != "COMPLETED"), None)
        if failed and run is not None and run.attempt is not None:
            how = f"the job is {failed} in SLURM, and its agents ended without a verdict"
            how += f"; that on {run.leader} was killed by {run.killed}" if run.killed else ""
            return Unfinished(lost=_judge(run, how, Confidence.CERTAIN if run.killed else Confidence.UNDECIDED))
    return Unfinished()


def _look_at(run: Run) -> Unfinished:
    """Look for the agent of a run without SLURM."""
    from allranks.launch.batch.local_run import describe_lost, look_at_run  # with psutil, which takes a moment
    from allranks.report.remains import ALIVE_S, last_alive

    local = look_at_run(run)
    if local.state == "RUNNING":
        return Unfinished(running=run.id)
    if local.state == "LOST":
        return Unfinished(lost=_judge(run, describe_lost(local), Confidence.CERTAIN))
    alive_s = last_alive(run.attempt_path) if run.attempt is not None and run.max_restarts is not None else None
    if alive_s is not None and time.time() - alive_s > SILENT_S:
        how = f"its agent on {local.nodes} or that host was killed: a sign of life is due every {ALIVE_S:.0f} s"
        return Unfinished(lost=_judge(run, how, Confidence.LIKELY))
    return Unfinished()


def read_here() -> Reader:
    """Return for whom an answer is, as this machine shows it: people of a SLURM cluster if it shows nothing."""
    scheduler = find_scheduler(os.environ)
    return Reader(scheduler=SchedulerKind.SLURM if scheduler is SchedulerKind.NONE else scheduler)


def _judge(run: Run, how: str, confidence: Confidence) -> Finding:
    from allranks.launch.batch.local_run import show_time
    from allranks.report.remains import last_alive, last_words
    from allranks.why.findings import reader_of_job
    from allranks.why.verdicts import judge_lost

    how += f"; last alive {show_time(last_alive(run.attempt_path))}"
    here = Path.cwd()
    words = [
        replace(word, path=word.path.relative_to(here)) if word.path.is_relative_to(here) else word
        for word in last_words(run.attempt_path)
    ]
    return judge_lost(run, how=how, confidence=confidence, words=words, reader=reader_of_job(run.id, here=read_here()))


def find_recordings(targets: Sequence[str], sources: Sequence[Source]) -> tuple[Source, ...]:
    """Return the flight recorder dumps among the arguments, below a job's run directory, or beside a pattern's logs.

    A job's output file is often in the directory from which many jobs are submitted: dumps there, and runs below it,
    are those of other jobs.
    """
    from allranks.report.runs import is_run
    from allranks.why.dumps import find_dumps
    from allranks.why.logs.sources import is_job_id

    if named := [target for target in targets if os.path.lexists(target)]:
        return find_dumps(named)
    folders = dict.fromkeys(Path(source.path).parent for source in sources if source.path is not None)
    if any(is_job_id(target) for target in targets):
        runs = dict.fromkeys(top for folder in folders for top in (folder, *folder.parents) if is_run(top))
        return find_dumps(sorted(map(str, runs)))
    return find_dumps([str(path) for folder in sorted(folders) for path in sorted(folder.iterdir()) if path.is_file()])
