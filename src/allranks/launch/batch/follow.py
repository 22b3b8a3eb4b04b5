"""What became of a job, and what does it print? From SLURM's controller, its accounting, and the run directory.

Each of the three may know nothing: the controller forgets a job after MinJobAge (300 s), accounting may be off, and the
run directory may be elsewhere. A job that SLURM has forgotten is told from what it left behind, and that is said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from allranks.host.slurm import JobState, cancel_job, find_jobs, find_old_jobs
from allranks.launch.batch.submit import describe_unavailable
from allranks.launch.console import Console
from allranks.launch.plan import count_of
from allranks.model.errors import SetupError, UsageError
from allranks.model.finding import Verdict
from allranks.report.rundir import as_file_name

POLL_S = 0.2
LOOK_S = 3.0
"""How often the controller is asked and new files are looked for while logs are followed."""
LAST_WORDS_S = 2.0
"""A shared file system shows the last lines a little after the job has ended."""
NO_ANSWER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job or task: what SLURM says, and what lies in its run directory."""

    job: str
    slurm: JobState | None
    """None: it has forgotten it."""
    run_dir: str = ""
    attempt: int | None = None
    verdict: Verdict | None = None
    unavailable: str = ""
    """Nodes a waiting job could have had, with SLURM's reason."""

    @property
    def is_unknown(self) -> bool:
        """Whether nobody knows anything of it."""
        return self.slurm is None and not self.run_dir


def check_job_id(text: str) -> str:
    """Return the id of a job, of a task of an array, or of a part of a heterogeneous job.

    Raises:
        UsageError: it is something else.
    """
    if not re.fullmatch(r"\d+([_+]\d+)?", text):
        raise UsageError(f"JOB {text!r}: expected the id of a job, for example 4711, or 4711_3 for a task of an array")
    return text


def report_job(job_id: str, *, log_dir: Path) -> list[JobReport]:
    """Return what is known of a job, one report for each task of an array.

    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    jobs = find_jobs(job_id) or find_old_jobs(job_id)
    if not jobs:
        ids = [job_id, *(path.name for path in _sorted_by_number(log_dir.glob(f"{job_id}_*")))]
        reports = [_report(each, None, log_dir) for each in ids]
        known = [report for report in reports if report.attempt is not None]
        return known or reports[:1]
    return [_report(job.id, job, log_dir) for job in jobs]


def describe(report: JobReport, *, now: datetime) -> list[str]:
    """Return the lines that people read of a job; its verdict is shown apart."""
    job, head = report.slurm, f"job {report.job}"
    if job is None and report.is_unknown:
        return [
            f"{head}: SLURM does not know it, or no longer (finished jobs are kept some minutes, accounting is off or "
            "empty), and no run directory of it is here; look in the directory it was submitted from, or give --log-dir"
        ]
    if job is None:
        lines = [f"{head}: SLURM no longer knows it; what it left behind is in its run directory"]
    else:
        lines = ["   ".join(filter(None, [head, job.name, _describe_state(job, now)]))]
        if report.unavailable:
            lines.append(f"  nodes     {report.unavailable}")
        files = dict.fromkeys(file for file in (job.out, job.err) if file)
        if files and not job.is_pending:
            lines.append(f"  output    {' '.join(files)}")
    if report.run_dir:
        attempt = f" (attempt {report.attempt})" if report.attempt is not None else " (no agent has come up there)"
        lines.append(f"  run       {report.run_dir}{attempt}")
    return lines


def _describe_state(job: JobState, now: datetime) -> str:
    where = f" on {count_of(job.num_nodes, 'node')}" + (f" ({job.nodes})" if job.nodes else "")
    restarts = f", requeued {count_of(job.restarts, 'time')}" if job.restarts else ""
    if job.is_pending:
        size = f" for {count_of(job.num_nodes, 'node')}" if job.num_nodes else ""
        why = f": {job.reason}" if job.reason else ""
        return f"{job.state}{size}{why}; " + (
            f"expected to start {job.start}" if job.start else "SLURM does not say yet when it starts"
        )
    if job.is_finished:
        code = f", exit code {job.exit_code}" if job.exit_code or job.state in ("COMPLETED", "FAILED") else ""
        by = f", signal {job.signal}" if job.signal else ""
        why = f", {job.reason}" if job.reason not in ("", "NonZeroExitCode") else ""
        return f"{job.state}{code}{by}{why}{where}, ended {job.end} after {job.elapsed}{restarts}"
    left = time_left(job.end, now)
    return f"{job.state}{where}, since {job.start}" + (f", {left} left" if left else "") + restarts


def time_left(end: str, now: datetime) -> str:
    """Return `1:59:50` until an end as SLURM writes it, empty where there is none.

    >>> time_left("2026-11-21T05:16:18", datetime(2026, 11, 21, 3, 16, 28))
    '1:59:50'
    """
    try:
        seconds = int((datetime.fromisoformat(end) - now).total_seconds())
    except (ValueError, TypeError):
        return ""
    days, seconds = divmod(max(seconds, 0), 86400)
    clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{days}-{clock}" if days else clock


def cancel(job_id: str) -> str:
    """End a job and return what was done.

    Raises:
        UsageError: SLURM knows no such job.
        SetupError: SLURM is not there, or refuses.
    """
    jobs = find_jobs(job_id)
    if not jobs:
        raise UsageError(f"job {job_id}: SLURM knows no such job; allranks list shows yours")
    active = [job for job in jobs if not job.is_finished]
    if not active:
        return f"job {job_id} had ended before: {jobs[0].state}"
    cancel_job(job_id)
    states = ", ".join(dict.fromkeys(job.state for job in active))
    tasks = f" ({count_of(len(active), 'task')})" if len(jobs) > 1 else ""
    return f"job {job_id}{tasks} is being ended; it was {states}"


# --- Logs -------------------------------------------------------------------------------------------------------------


def show_logs(
    job_id: str, *, log_dir: Path, ranks: Sequence[int], is_followed: bool, say: Callable[[str], None]
) -> None:
    """Show what a job has printed, and with `is_followed` what it prints until it ends.

    Without `ranks` that is the job's own output: the verdict and all ranks, each line with node and rank. Its files
    may be out of reach; the ranks' own files in the run directory are shown then.

    Raises:
        SetupError: SLURM is not there, or has not answered for NO_ANSWER_S.
        UsageError: nobody knows of such a job, or it has printed nothing.
    """
    console, shown, told = Console(), set[Path](), ""
    looked_s, answered_s, ended_s = float("-inf"), time.monotonic(), None
    while True:
        now_s = time.monotonic()
        if now_s - looked_s >= LOOK_S or ended_s is not None:
            looked_s = now_s
            try:
                reports, answered_s = report_job(job_id, log_dir=log_dir), now_s
            except SetupError:
                if not shown or now_s - answered_s > NO_ANSWER_S:
                    raise
            for file, stream, prefix in _files(reports, ranks):
                if file not in shown:
                    shown.add(file)
                    console.follow(file, start=0, stream=stream, prefix=prefix)
            waiting = next((r.slurm for r in reports if r.slurm is not None and r.slurm.is_pending), None)
            if is_followed and waiting is not None and waiting.reason != told:
                told = waiting.reason
                say(f"job {waiting.id} waits" + (f": {told}" if told else ""))
            if all(report.slurm is None or report.slurm.is_finished for report in reports) and ended_s is None:
                ended_s = now_s
        if console.pump():
            continue
        if not is_followed or (ended_s is not None and now_s - ended_s >= LAST_WORDS_S):
            break
        time.sleep(POLL_S)
    console.close()
    if not shown:
        raise UsageError(_nothing_to_show(reports[0], ranks))


def _nothing_to_show(report: JobReport, ranks: Sequence[int]) -> str:
    head = f"job {report.job}"
    if report.is_unknown:
        return f"{head}: SLURM does not know it, and no run directory of it is here; give --log-dir"
    if report.slurm is not None and report.slurm.is_pending:
        return f"{head}: it has not begun ({report.slurm.reason or report.slurm.state}); -f waits for it"
    if ranks:
        return f"{head}: no rank {ranks[0]} in {report.run_dir or 'its run directory'}"
    return f"{head}: it has printed nothing, or its files are out of reach from here"


def _files(reports: Iterable[JobReport], ranks: Sequence[int]) -> list[tuple[Path, str, str]]:
    """Files with the stream they go to and what stands before each line."""
    found: list[tuple[Path, str, str]] = []
    reports = list(reports)
    for report in reports:
        task = f"{report.job} " if len(reports) > 1 else ""
        own = [] if ranks else _own_files(report)
        found += [(path, stream, f"[{task.strip()}] " if task else "") for path, stream in own]
        if own or report.attempt is None:
            continue
        for path in Path(report.run_dir, f"attempt_{report.attempt}").glob("*/rank_*.*"):
            name = re.fullmatch(r"rank_(\d+)\.(out|err)", path.name)
            if name and (not ranks or int(name[1]) in ranks):
                prefix = "" if len(ranks) == 1 and not task else f"[{task}{path.parent.name} r{name[1]}] "
                found.append((path, name[2], prefix))
    return sorted(found)


def _own_files(report: JobReport) -> list[tuple[Path, str]]:
    job = report.slurm
    if job is not None and job.out:
        files = [(Path(job.out), "out")]
        files += [(Path(job.err), "err")] if job.err not in ("", job.out) else []
    else:  # forgotten, or from accounting, which has no file names: the usual ones, where the job was
        places = dict.fromkeys(
            [Path(job.work_dir)] if job and job.work_dir else [Path(report.run_dir, "../.."), Path()]
        )
        files = [
            (path, path.suffix[1:])
            for place in places
            for path in sorted(place.glob(f"*[-_]{report.job}.*"))
            if path.suffix in (".out", ".err")
        ]
        files = list({path.resolve(): (path, stream) for path, stream in files}.values())
    return [(path, stream) for path, stream in files if path.is_file()]


def _report(job_id: str, job: JobState | None, log_dir: Path) -> JobReport:
    run_dir = _find_run_dir(job_id, job, log_dir)
    attempts = _sorted_by_number(run_dir.glob("attempt_*")) if run_dir else []
    attempt = int(attempts[-1].name.rpartition("_")[2]) if attempts else None
    # A job that was requeued has the verdict of its last attempt, not of the one that is to come.
    is_of_this_attempt = job is None or (not job.is_pending and attempt is not None and attempt >= job.restarts)
    is_short_of_nodes = job is not None and job.is_pending and re.search("node", job.reason, re.IGNORECASE)
    return JobReport(
        job=job_id,
        slurm=job,
        run_dir=str(run_dir or ""),
        attempt=attempt,
        verdict=_read_verdict(attempts[-1] / "verdict.json") if attempts and is_of_this_attempt else None,
        unavailable=describe_unavailable(job) if job is not None and is_short_of_nodes else "",
    )


def _find_run_dir(job_id: str, job: JobState | None, log_dir: Path) -> Path | None:
    places = [Path(job.work_dir) / log_dir] if job is not None and job.work_dir else []
    if job is not None and job.script:  # a script may go to its own directory first
        places.append(Path(job.script).parent / log_dir)
    name = as_file_name(job_id)
    return next((place / name for place in (*places, log_dir) if (place / name).is_dir()), None)


def _sorted_by_number(paths: Iterable[Path]) -> list[Path]:
    numbered = [path for path in paths if re.search(r"_\d+$", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))


def _read_verdict(path: Path) -> Verdict | None:
    try:
        return Verdict.from_json(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
