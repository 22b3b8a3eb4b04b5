"""What a report shows, from the files of one run directory. Frozen data; `--json` prints the same.

    page = read_page(Path("runs/4711"))
    page.outcome, page.findings[0].message

Every part is optional: a run may have ended before it wrote a file, its disk may have been full, and anybody may have
forged one. What cannot be read is left out, and `missing` says so. Texts of logs have no secrets; page.py makes them
harmless. `allranks why --html` fills in what logs alone tell.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from allranks.files.regular import find_regular, open_regular
from allranks.model.curve import FILE as CURVES
from allranks.model.curve import CurvePoint, read_curves
from allranks.model.errors import Exit
from allranks.model.finding import Finding, Severity, Verdict
from allranks.model.job_status import JobStatus, NodeRow
from allranks.model.ledger import Ledger
from allranks.report.books import Lanes, lanes, read_books
from allranks.report.history import Restart
from allranks.report.mask import mask_command, mask_finding, mask_secrets, mask_setting
from allranks.report.page_cards import Links, NodeCard, OddValue, parse_roll_call
from allranks.report.page_curves import PageCurve, draw_all
from allranks.report.page_fault import LastLines, ListedPlace, find_nodes, list_files, read_last_lines, read_places
from allranks.report.readback import MAX_BYTES, MAX_ROLL_CALL_BYTES, parse_settings, read_events
from allranks.report.rundir import as_file_name
from allranks.report.runs import NO_VERDICT_FILE, Run, read_job_status, read_ledger, read_run, sort_by_number
from allranks.report.text import one_line

MAX_EVENTS = 200
MAX_ATTEMPTS = 16
"""The newest ones, whose books are read."""
MAX_DAMAGED = 8
MAX_SETTINGS = 400
MAX_CURVES_BYTES = 64 << 20
"""64 names with 10,000 points each take 30 MB."""
MAX_CHECKPOINTS = 12
"""The newest ones."""
FRESH_S = 30.0
"""A status that is older than this is not of a running job."""


class RunOutcome(StrEnum):
    """How a run went."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """By a signal from outside."""
    RUNNING = "running"
    UNKNOWN = "unknown"
    """It has no verdict, and nobody has written its status lately."""


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job, or of the timeline of its logs."""

    time: str
    """As it is shown; empty: not known."""
    who: str = ""
    text: str
    is_culprit: bool = False


class CheckpointSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a session that is complete."""

    step: int
    time_s: float | None = None
    """Unix time."""
    write_s: float | None = None
    """Seconds from the copy of the state to the complete checkpoint."""


class SaveSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a script without a session has saved; nobody has looked at it."""

    optimizer_steps: int
    """Of rank 0 in its generation, about."""
    save_s: float
    """Seconds in which rank 0 saved."""
    time_s: float | None = None
    """Unix time."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report shows. Fields may be added; none is changed or removed within one `version`."""

    version: int = 1
    title: str
    job: str = ""
    outcome: RunOutcome
    exit_code: int | None = None
    written_s: float
    """When the report was made, Unix time."""
    started_s: float | None = None
    """Of the newest attempt, Unix time."""
    ended_s: float | None = None
    attempts: int = 1
    nodes: tuple[str, ...] = ()
    num_ranks: int = 0
    command: tuple[str, ...] = ()
    cwd: str = ""
    findings: tuple[Finding, ...] = ()
    """The culprit's first."""
    restarts: tuple[Restart, ...] = ()
    max_restarts: int | None = None
    ledger: Ledger | None = None
    status: JobStatus | None = None
    """As the leader wrote it last."""
    lanes: Lanes | None = None
    curves: tuple[PageCurve, ...] = ()
    cards: tuple[NodeCard, ...] = ()
    odd_values: tuple[OddValue, ...] = ()
    links: Links | None = None
    checkpoints: tuple[CheckpointSeen, ...] = ()
    """The newest ones, oldest first."""
    saves: tuple[SaveSeen, ...] = ()
    """The same, of a script without a session."""
    places: tuple[ListedPlace, ...] = ()
    last_lines: tuple[LastLines, ...] = ()
    settings_of: str = ""
    """Node whose environment is shown."""
    settings: tuple[dict[str, str], ...] = ()
    """Name, value, reason and source of each variable, without secrets."""
    events: tuple[Happened, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    """What to do next, and the command for it."""
    missing: tuple[str, ...] = ()
    """What this report lacks, and why."""
    sources: tuple[str, ...] = ()
    """Logs that were read, where there is no run directory."""
    last_words: tuple[str, ...] = ()
    """Of logs without a known cause."""

    @property
    def took_s(self) -> float | None:
        """Wall time of the job, from its first attempt where the ledger knows it."""
        if self.ledger is not None:
            return max(0.0, self.ledger.until_s - self.ledger.begun_s)
        end_s = self.ended_s or (self.status.written_s if self.status else None)
        return None if end_s is None or self.started_s is None else max(0.0, end_s - self.started_s)

    @property
    def node_rows(self) -> tuple[NodeRow, ...]:
        """Nodes as the leader saw them last; empty where it saw nothing of them."""
        rows = self.status.nodes if self.status else ()
        return rows if any(row.num_ranks or row.is_lost or row.segments or row.interfaces for row in rows) else ()

    @property
    def is_failure(self) -> bool:
        """Whether somebody is to blame."""
        return any(finding.severity is Severity.FAIL for finding in self.findings)


def judge_outcome(verdict: Verdict | None, status: JobStatus | None, *, now_s: float) -> RunOutcome:
    """Return how a run went, from its verdict, else from its last status."""
    if verdict is not None:
        if verdict.ended_by is not None:
            return RunOutcome.STOPPED
        return RunOutcome.SUCCEEDED if verdict.exit_code == Exit.OK else RunOutcome.FAILED
    is_fresh = status is not None and status.phase != "over" and now_s - status.written_s < FRESH_S
    return RunOutcome.RUNNING if is_fresh else RunOutcome.UNKNOWN


def read_page(path: Path, *, now_s: float | None = None) -> Page:
    """Return what the files of a run directory tell; nothing is raised for any of them.

    Args:
        path: the directory of the run.
        now_s: Unix time; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    run = read_run(path)
    attempts = sort_by_number(path.glob("attempt_*"))
    files = list_files(run.attempt_path) if attempts else {}
    node_of = find_nodes(files)
    status = read_job_status(path)
    ledger = read_ledger(path)
    roll_call = parse_roll_call(find_regular(run.attempt_path / "roll_call.json", at_most=MAX_ROLL_CALL_BYTES) or b"")
    verdict = run.verdict
    findings = tuple(map(mask_finding, verdict.findings)) if verdict else ()
    nodes = run.nodes or tuple(sorted(files))
    culprit = next((finding for finding in findings if finding.ranks and finding.severity is Severity.FAIL), None)
    events = _read_events(run.attempt_path / "events.jsonl")
    about = as_file_name((culprit and culprit.node) or "")
    about = about if about in files else as_file_name(next(iter(nodes), ""))  # a name in a file may be a path
    settings = parse_settings(find_regular(run.attempt_path / about / "env.json", at_most=MAX_BYTES) or b"")
    found = [read_books(attempt) for attempt in attempts[-MAX_ATTEMPTS:]]
    books = [book for of_attempt in found for book in of_attempt.books]
    over_time = lanes(books)
    outcome = judge_outcome(verdict, status, now_s=now_s)
    is_over = outcome in (RunOutcome.FAILED, RunOutcome.STOPPED, RunOutcome.UNKNOWN)
    return Page(
        title=one_line(run.name or run.id),
        job=run.id,
        outcome=outcome,
        exit_code=verdict.exit_code if verdict else None,
        written_s=now_s,
        started_s=run.started_s,
        ended_s=run.ended_s,
        attempts=len(attempts),
        nodes=nodes,
        num_ranks=max(len(node_of), status.num_ranks if status else 0),
        command=tuple(mask_command(run.command)),
        cwd=run.cwd,
        findings=findings,
        restarts=run.restarts,
        max_restarts=run.max_restarts,
        ledger=ledger,
        status=status,
        lanes=over_time if over_time.lanes else None,
        curves=tuple(draw_all(books, status, [_read_values(attempt) for attempt in attempts[-MAX_ATTEMPTS:]])),
        cards=roll_call.cards,
        odd_values=roll_call.odd_values,
        links=roll_call.links,
        places=read_places(run.attempt_path, files, culprit) if is_over else (),
        last_lines=tuple(read_last_lines(run.attempt_path, files, culprit)) if is_over else (),
        settings_of=about if settings else "",
        settings=tuple(
            {"name": shown.name, "value": shown.value, "reason": shown.reason, "source": shown.source}
            for shown in map(mask_setting, settings[:MAX_SETTINGS])
        ),
        checkpoints=tuple(_find_checkpoints(events)),
        saves=tuple(_find_saves(events)),
        events=tuple(_describe_event(event) for event in _choose(events)),
        commands=tuple(_list_commands(run, num_nodes=len(nodes), num_ranks=len(node_of), outcome=outcome)),
        missing=(
            *_list_missing(run, ledger=ledger, has_books=bool(books)),
            *(line for of_attempt in found for line in of_attempt.damaged[:MAX_DAMAGED]),
        ),
    )


def _read_values(attempt: Path) -> list[CurvePoint]:
    """Return the values of `step.log`, as rank 0 has written them."""
    return read_curves(find_regular(attempt / CURVES, at_most=MAX_CURVES_BYTES) or b"")


def _read_events(path: Path) -> tuple[dict[str, Any], ...]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return read_events(file).lines
    return ()


def _find_checkpoints(events: Iterable[Mapping[str, Any]]) -> list[CheckpointSeen]:
    found = [event for event in events if event["event"] == "checkpoint" and "step" in event][-MAX_CHECKPOINTS:]
    return [
        CheckpointSeen(step=event["step"], time_s=event.get("time_s"), write_s=event.get("write_s")) for event in found
    ]


def _find_saves(events: Iterable[Mapping[str, Any]]) -> list[SaveSeen]:
    found = [
        event for event in events if event["event"] == "checkpoint" and {"optimizer_steps", "save_s"} <= event.keys()
    ]
    return [
        SaveSeen(optimizer_steps=event["optimizer_steps"], save_s=event["save_s"], time_s=event.get("time_s"))
        for event in found[-MAX_CHECKPOINTS:]
    ]


def _choose(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest events; checkpoints have a table of their own."""
    return [event for event in events if event["event"] != "checkpoint"][-MAX_EVENTS:]


def _describe_event(event: Mapping[str, Any]) -> Happened:
    node = event.get("node") or event.get("leader") or ""
    left_out = (
        "event",
        "time_s",
        "node",
        "leader",
        "command",
        "cwd",
        "members",
        "boot_id",
        "start_ticks",
        "pid",
        "job",
    )
    fields = [
        f"{name.replace('_', ' ')} {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"
        for name, value in event.items()
        if name not in left_out and value not in (None, "", ()) and value is not False
    ]
    time_s = event.get("time_s")
    shown = "" if time_s is None else time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))
    text = one_line(mask_secrets(", ".join([str(event["event"]).replace("_", " "), *fields])[:2000]))
    return Happened(time=shown, who=one_line(node), text=text, is_culprit=event["event"] == "verdict")


def _list_commands(run: Run, *, num_nodes: int, num_ranks: int, outcome: RunOutcome) -> Iterable[tuple[str, str]]:
    job = shlex.quote(run.id)
    if outcome is RunOutcome.RUNNING:
        yield "See what it does now", f"allranks status {job}"
        yield "See where its ranks are", f"allranks stack {job}"
        return
    if run.verdict is None or run.verdict.exit_code != Exit.OK:
        yield "See all findings, in order", f"allranks why --all --timeline {job}"
    if not run.command:
        return
    submission = run.path / "submission.sh"
    checkpoints = run.path / "checkpoints"
    is_python = Path(run.command[0]).name.startswith("python")
    words = [*(() if is_python else ("--no-python",)), *mask_command(run.command[1 if is_python else 0 :])]
    per_node = [] if not num_nodes else ["--nproc-per-node", str(max(1, num_ranks // num_nodes))]
    go = f"cd {shlex.quote(run.cwd)} && " if run.cwd else ""
    if submission.exists():
        yield "Run it again", f"sbatch {shlex.quote(str(submission))}"
    else:
        where = ["--nnodes", str(num_nodes)] if num_nodes > 1 else []
        yield "Run it again", f"{go}{shlex.join(['allranks', 'run', *where, *per_node, *words])}"
    if outcome is not RunOutcome.SUCCEEDED and checkpoints.is_dir():
        flags = ["--checkpoint-dir", str(checkpoints.absolute())]
        how = ["submit", "--nodes", str(num_nodes)] if submission.exists() else ["run"]
        command = shlex.join(["allranks", *how, *flags, *per_node, *words])
        yield "Resume it from its newest complete checkpoint", f"{go}{command}"


def _list_missing(run: Run, *, ledger: Ledger | None, has_books: bool) -> Iterable[str]:
    if run.attempt is None:
        yield "no attempt: no agent has started"
    if run.verdict is None:
        yield "no verdict.json: the run has not ended, or no agent was left to write one"
    elif run.is_verdict_of_events:
        yield NO_VERDICT_FILE
    if ledger is None:
        yield "no goodput.json: where the time went is not known"
    elif not ledger.is_steps_seen:
        yield "no optimizer step was seen, so there is no goodput and no rate"
    if not has_books:
        yield "no book.bin: what each rank did over time is not known"
    if run.num_damaged:
        yield f"{run.num_damaged} lines of events.jsonl are damaged"
