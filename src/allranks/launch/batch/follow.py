"""What is the state of a job? From SLURM's controller, its accounting, and the run directory.

A job is named by SLURM's id, by the id of a run in the log directory, or as `latest`.

Each of the three sources may know nothing: the controller forgets a job after MinJobAge (300 s), accounting may be off,
and the run directory may be elsewhere. A job that SLURM has forgotten is described from its run directory, and the text
says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from allranks.host.slurm import JobState, cancel_job, find_jobs, find_old_jobs
from allranks.host.slurm_command import NoSlurmError
from allranks.launch.batch.local_run import (
    LocalRun,
    cancel_run,
    describe_lost,
    look_at_run,
    note_cancel,
    show_duration,
    show_time,
)
from allranks.launch.batch.submit import describe_unavailable
from allranks.model.errors import Exit, SetupError, UsageError, exit_for_signal
from allranks.model.finding import Verdict
from allranks.model.job_status import FILE as STATUS
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.report.account import describe_goodput
from allranks.report.history import Restart, describe_restarts
from allranks.report.readback import NetworkEvent
from allranks.report.remains import last_alive, last_words
from allranks.report.rundir import as_file_name
from allranks.report.runs import (
    NO_VERDICT_FILE,
    Run,
    find_run,
    is_job_of_slurm,
    read_job_status,
    read_run,
    sort_by_number,
)
from allranks.report.status_line import OVER, short_time, status_line
from allranks.report.text import Style, count_of, say
from allranks.report.traffic import describe_traffic

LOOK_S = 3.0
"""How often to ask the controller."""
NO_ANSWER_S = 600.0
FRESH_S = 10.0
"""A status that is older is not of now: a leader writes one each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job or task: SLURM's state, and what its run directory contains."""

    job: str
    slurm: JobState | None
    """None: SLURM has forgotten it."""
    run_dir: str = ""
    attempt: int | None = None
    verdict: Verdict | None = None
    unavailable: str = ""
    """Nodes that a waiting job cannot get, with SLURM's reason."""
    local: LocalRun | None = None
    """A run that SLURM does not know."""
    worker_restarts: tuple[Restart, ...] = ()
    """Of the newest attempt: all starts of its ranks after the first, each with the fault before it."""
    max_restarts: int | None = None
    last_alive: str = ""
    """When it was last alive, as its files tell, if it has no verdict."""
    num_damaged: int = 0
    """Lines of its events.jsonl that are no events."""
    network: NetworkEvent | None = None
    """What its nodes sent and how long its steps waited for that, as its leader told last."""
    is_verdict_of_events: bool = False
    """Its verdict.json is missing, and its verdict has no more than events.jsonl tells."""
    last_words: tuple[str, ...] = ()
    """If it ended without a verdict: the last lines of its first ranks."""
    status: JobStatus | None = None
    """What it did when its leader wrote that last."""
    ledger: Ledger | None = None
    """Where its time went, over all attempts."""
    no_slurm: str = ""
    """Why SLURM cannot be asked from this machine, where that is so; then only the run directory is known."""

    @property
    def is_unknown(self) -> bool:
        """Whether neither SLURM nor a run directory knows it."""
        return self.slurm is None and not self.run_dir

    @property
    def is_over(self) -> bool:
        """Whether its state can no longer change."""
        job = self.local or self.slurm
        return job is None or job.is_finished

    @property
    def title(self) -> str:
        """`job 4711`, or `run 20261123-031500-4711`."""
        return f"{'run' if self.local else 'job'} {self.job}"


def find_job(text: str, *, log_dir: Path) -> Run | str:
    """Return the run, or the id of the SLURM job; tasks of arrays and parts of jobs have ids, too.

    Raises:
        UsageError: there is no such run, and it is no id of SLURM's.
    """
    if is_job_of_slurm(text):
        return text
    run = find_run(text, log_dir)
    if run is None:
        raise UsageError(
            f"JOB {text!r}: no such run in {log_dir}; expected the id of a run (allranks list prints them), latest, or "
            "the id of a SLURM job, for example 4711, or 4711_3 for a task of an array"
        )
    return run.id if run.is_of_slurm else run


def report_job(job: Run | str, *, log_dir: Path) -> list[JobReport]:
    """Return what is known about a job, one report for each task of an array.

    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    if isinstance(job, Run):
        run = read_run(job.path)  # its current state
        local = look_at_run(run)
        return [_fill(JobReport(job=run.id, slurm=None, local=local), run, is_lost=local.state == "LOST")]
    no_slurm: NoSlurmError | None = None
    try:
        if jobs := find_jobs(job) or find_old_jobs(job):
            return [_report(one, log_dir) for one in jobs]
    except NoSlurmError as exc:
        no_slurm = exc
    ids = [job, *(path.name for path in sort_by_number(log_dir.glob(f"{job}_*")))]
    forgotten = [_report(JobState(id=job_id, state=""), log_dir, no_slurm=str(no_slurm or "")) for job_id in ids]
    known = [report for report in forgotten if report.attempt is not None]
    if no_slurm is not None and not known:
        raise no_slurm
    return known or forgotten[:1]


def _report(job: JobState, log_dir: Path, *, no_slurm: str = "") -> JobReport:
    """Return what is known of a job; of one that SLURM has forgotten, `job` has nothing but the id."""
    run_dir = _find_run_dir(job, log_dir)
    run = read_run(run_dir) if run_dir else None
    is_short_of_nodes = job.is_pending and "node" in job.reason.lower()
    report = JobReport(
        job=job.id,
        slurm=job if job.state else None,
        unavailable=describe_unavailable(job) if is_short_of_nodes else "",
        no_slurm=no_slurm,
    )
    if run is None:
        return report
    # A requeued job has the verdict of its last attempt, not of the coming one.
    is_of_this_attempt = not job.is_pending and run.attempt is not None and run.attempt >= job.restarts
    if not is_of_this_attempt:
        return replace(report, run_dir=str(run.path), attempt=run.attempt)
    return _fill(report, run, is_lost=job.is_finished and job.state != "COMPLETED")


def _fill(report: JobReport, run: Run, *, is_lost: bool) -> JobReport:
    """Return the report with what the run directory has; of a run that is lost, with its ranks' last lines."""
    is_silent = run.verdict is None and run.attempt is not None
    words = last_words(run.attempt_path) if is_lost and is_silent else []
    return replace(
        report,
        run_dir=str(run.path),
        attempt=run.attempt,
        verdict=run.verdict,
        is_verdict_of_events=run.is_verdict_of_events,
        worker_restarts=run.restarts,
        max_restarts=run.max_restarts,
        num_damaged=run.num_damaged,
        network=run.network,
        status=read_job_status(run.path) if run.attempt is not None else None,
        ledger=run.ledger,
        last_alive=show_time(last_alive(run.attempt_path)) if is_silent else "",
        last_words=tuple(f"rank {word.rank}: {word.text}" for word in words),
    )


def _find_run_dir(job: JobState, log_dir: Path) -> Path | None:
    # A script may change its directory first. Without SLURM's answer, only this directory is known.
    places = (Path(job.work_dir), Path(job.script).parent, Path())
    found = (place / log_dir / as_file_name(job.id) for place in places)
    return next((path for path in found if path.is_dir()), None)


def describe(report: JobReport, *, now: datetime, style: Style) -> list[str]:
    """Return the lines that describe a job; its verdict is shown separately."""
    job = report.local or report.slurm
    if report.is_unknown:
        return [
            f"{report.title}: SLURM does not know it, or not any more (it keeps finished jobs for some minutes, and "
            "accounting is off or empty), and it has no run directory here; run this where it was submitted, or give "
            "--log-dir"
        ]
    if job is None:
        not_asked = f"SLURM was not asked ({report.no_slurm.partition(';')[0]})"
        why = not_asked if report.no_slurm else "SLURM no longer knows it"
        first = f"{report.title}: {why}; its output is in its run directory"
    else:
        first = "   ".join(filter(None, [report.title, job.name, _describe_state(job, now)]))
    files = dict.fromkeys(filter(None, [job.out, job.err])) if job is not None and not job.is_pending else {}
    attempt = f"attempt {report.attempt}" if report.attempt is not None else "no agent has started yet"
    run = f"{report.run_dir} ({attempt})" if report.run_dir else ""
    alive = f"last at {report.last_alive}" if report.last_alive and (job is None or job.state != "RUNNING") else ""
    restarts = describe_restarts(report.worker_restarts, allowed=report.max_restarts)
    rows = [("now", _describe_now(report, now, style)), ("time", _describe_time(report))]
    rows += [("nodes", report.unavailable), ("output", " ".join(files)), ("run", run), ("alive", alive)]
    skipped = f"{count_of(report.num_damaged, 'line')} of events.jsonl skipped: no event of allranks"
    rows += [("damaged", skipped if report.num_damaged else "")]
    rows += [("missing", NO_VERDICT_FILE if report.is_verdict_of_events else "")]
    rows += [("restarts", restarts), *(("said" if at == 0 else "", word) for at, word in enumerate(report.last_words))]
    if report.network is not None:
        lines = describe_traffic(report.network, at=show_time(report.network.time_s))
        rows += [("" if number else "network", line) for number, line in enumerate(lines)]
    return [first, *(f"  {name:<9} {text}" for name, text in rows if text)]


def _describe_now(report: JobReport, now: datetime, style: Style) -> str:
    """Return what a job does now, as `allranks run` shows it; empty if it is over, or its files do not tell."""
    status, job = report.status, report.local or report.slurm
    if status is None or report.verdict is not None or (job is not None and job.is_finished):
        return ""
    age_s = now.timestamp() - status.written_s
    if age_s > FRESH_S:
        since = f"not told for {short_time(age_s)}: {STATUS} is of {show_time(status.written_s)}"
        return "" if job is None or status.phase == OVER else since
    return status_line(status, replace(style, has_colour=False), job=report.job)


def _describe_time(report: JobReport) -> str:
    """Return where the time of a job went; empty if its files do not tell."""
    return describe_goodput(report.ledger) if report.ledger is not None else ""


def _describe_state(job: JobState, now: datetime) -> str:
    nodes = f" ({job.nodes})" if job.nodes else ""
    where = f" on {count_of(job.num_nodes, 'node')}{nodes}" if job.num_nodes else ""
    restarts = f", requeued {count_of(job.restarts, 'time')}" if job.restarts else ""
    match job:
        case LocalRun(state="RUNNING"):
            return f"RUNNING{where}, since {job.start}; its agent is process {job.pid}"
        case LocalRun(state="LOST"):
            return f"LOST: {describe_lost(job)}; to see more: allranks why {job.id}"
        case LocalRun(state="UNKNOWN"):
            return f"UNKNOWN: it has no verdict yet, and its agent{where} is not visible from this machine"
    if job.is_pending:
        size = f" for {count_of(job.num_nodes, 'node')}" if job.num_nodes else ""
        why = f": {job.reason}" if job.reason else ""
        when = f"expected to start {job.start}" if job.start else "SLURM has not estimated its start yet"
        return f"{job.state}{size}{why}; {when}"
    if job.is_finished:
        code = f", exit code {job.exit_code}" if job.exit_code or job.state in ("COMPLETED", "FAILED") else ""
        by = f", signal {job.signal}" if job.signal else ""
        why = f", {job.reason}" if job.reason not in ("", "NonZeroExitCode") else ""
        after = f" after {job.elapsed}" if job.elapsed else ""
        return f"{job.state}{code}{by}{why}{where}, ended {job.end}{after}{restarts}"
    left = time_left(job.end, now)
    return f"{job.state}{where}, since {job.start}" + (f", {left} left" if left else "") + restarts


def time_left(end: str, now: datetime) -> str:
    """Return the time left, `1:59:50`, until an end in SLURM's format; empty if there is none.

    >>> time_left("2026-11-21T05:16:18", datetime(2026, 11, 21, 3, 16, 28))
    '1:59:50'
    """
    try:
        left = datetime.fromisoformat(end) - now
    except (ValueError, TypeError):
        return ""
    return show_duration(max(left.total_seconds(), 0))


def cancel(job: Run | str, *, log_dir: Path) -> str:
    """End a job, note that in its run directory, and return what was done.

    Raises:
        UsageError: SLURM knows no such job, or the run is on another machine.
        SetupError: SLURM is not there, or refuses.
    """
    if isinstance(job, Run):
        return cancel_run(read_run(job.path))
    states = find_jobs(job)
    if not states:
        raise UsageError(f"job {job}: SLURM knows no such job; allranks list prints your jobs")
    active = [state for state in states if not state.is_finished]
    if not active:
        return f"job {job} had already ended: {states[0].state}"
    cancel_job(job)
    for live in active:
        if run_dir := _find_run_dir(live, log_dir):
            note_cancel(run_dir)
    tasks = f" ({count_of(len(active), 'task')})" if len(states) > 1 else ""
    return f"cancelling job {job}{tasks}; its state was {', '.join(dict.fromkeys(live.state for live in active))}"


def wait_for_end(job_id: str, *, log_dir: Path) -> tuple[list[JobReport], int]:
    """Wait until a job, with all tasks of an array, has ended; return its reports and its exit code.

    Raises:
        SetupError: SLURM has not answered for NO_ANSWER_S.
    """
    answered_s, told, known = time.monotonic(), "", list[JobReport]()
    while True:
        try:
            reports, answered_s = report_job(job_id, log_dir=log_dir), time.monotonic()
        except SetupError:
            if time.monotonic() - answered_s > NO_ANSWER_S:
                raise
        else:
            states = [report.slurm for report in reports if report.slurm is not None]
            if all(state.is_finished for state in states):
                # SLURM forgot it between two looks: the previous report at least has its name and nodes.
                return (reports if states else known or reports), max(map(_exit_code, reports))
            known = reports
            news = next((describe_progress(state) for state in states if not state.is_finished), "")
            if news not in ("", told):
                told = news
                say(news)
        time.sleep(LOOK_S)


def describe_progress(job: JobState) -> str:
    """Return what a job waits for, or that it runs; empty if SLURM gives no reason."""
    if job.is_pending:
        return f"job {job.id} waits: {job.reason}" if job.reason else ""
    return f"job {job.id} is {job.state}" + (f" on {job.nodes}" if job.nodes else "")


def _exit_code(report: JobReport) -> int:
    """Exit code of the job, as a shell has it; if SLURM has forgotten it, of its verdict; else Exit.UNKNOWN."""
    job = report.slurm
    if job is None:
        return report.verdict.exit_code if report.verdict is not None else Exit.UNKNOWN
    if job.exit_code:
        return job.exit_code
    if job.signal:
        return exit_for_signal(job.signal)
    return Exit.OK if job.state == "COMPLETED" else Exit.USER_CODE
