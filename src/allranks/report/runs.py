"""List the runs below a directory, and read each from its files alone.

    find_run("latest", Path("runs")).id          # 20261123-031500-4711

A run is the directory of one job (rundir.py), with or without SLURM.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.files.regular import find_regular, open_regular
from allranks.model.errors import Exit, UsageError
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.model.job_status import FILE as STATUS
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.model.named_agent import NamedAgent
from allranks.report.history import Restart, list_restarts
from allranks.report.readback import (
    MAX_BYTES,
    MAX_ROLL_CALL_BYTES,
    MAX_STATUS_BYTES,
    NetworkEvent,
    RunEvents,
    parse_hosts,
    parse_job_status,
    parse_ledger,
    parse_verdict,
    read_events,
)
from allranks.report.rundir import LATEST, as_file_name
from allranks.report.status_files import GOODPUT
from allranks.report.text import count_of

NO_VERDICT_FILE = "no readable verdict.json (not written, damaged, or removed): the verdict is what events.jsonl tells"
_MARKS = ("submission.sh", "leader.json")
_MARKS_OF_ATTEMPT = ("events.jsonl", "roll_call.json", "verdict.json", "*/env.json")
"""Files that only allranks writes; torchrun's log directory has `attempt_0`, too."""
BEING_DELETED = ".deleting."
"""How the name of a directory begins that `allranks clean` deletes."""
_JOB_NAME = re.compile(r"^#SBATCH --job-name=(.{1,512})$", re.MULTILINE)  # shlex takes forever for megabytes
_JOB_OF_SLURM = re.compile(r"[0-9]+([_+][0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The newest attempt of one run, from its files."""

    id: str
    path: Path
    attempt: int | None = None
    """None: no agent has started."""
    job_name: str = ""
    """Name that `allranks submit` gave the job; squeue shows the same."""
    command: tuple[str, ...] = ()
    cwd: str = ""
    """Directory in which it was started, on the leader's node."""
    nodes: tuple[str, ...] = ()
    """In the order of the ranks; the first node has the leader."""
    pid: int | None = None
    """Process id of the leader's agent, on the first node; None if another agent leads since."""
    leader: str = ""
    """The node whose agent leads, or led last."""
    killed: str = ""
    """How the leader's agent was killed, if the process beside it has seen that: `SIGKILL, out of memory`."""
    restarts: tuple[Restart, ...] = ()
    max_restarts: int | None = None
    interrupted_by: int | None = None
    """The first signal from outside that an agent got."""
    started_s: float | None = None
    """Unix time; None if the ranks have not been started."""
    ended_s: float | None = None
    verdict: Verdict | None = None
    """None: the run has not ended, or no agent was left to write a verdict."""
    is_verdict_of_events: bool = False
    """There is no verdict.json, but events.jsonl says how the run ended: the verdict has no more than that."""
    agent: NamedAgent = field(default_factory=NamedAgent)
    """Who the leader's agent of the first generation was, as the run's files say."""
    num_damaged: int = 0
    """Lines of events.jsonl that are no events."""
    network: NetworkEvent | None = None
    """What its nodes sent and how long its steps waited for that, as its leader told last."""
    ledger: Ledger | None = None
    """Where its time went, over all attempts; None: it was not told."""

    @property
    def attempt_path(self) -> Path:
        """Directory of its newest attempt."""
        return self.path / f"attempt_{self.attempt}"

    @property
    def is_of_slurm(self) -> bool:
        """Whether its id is that of a SLURM job."""
        return is_job_of_slurm(self.id)

    @property
    def name(self) -> str:
        """The job's name in SLURM, else the script's."""
        return self.job_name or self.script

    @property
    def script(self) -> str:
        """What it runs, in a word."""
        return name_script(self.command, self.cwd)


def name_script(command: Sequence[str], cwd: str = "") -> str:
    """Return what a worker's command runs, in a word: a script, a module, a directory, or a program.

    >>> name_script(["/usr/bin/python3", "-u", "dir/train.py", "--lr", "1"]), name_script(["./serve", "dir/a.cfg"])
    ('train.py', 'serve')
    >>> name_script(["python", "."], "/home/ada/gpt"), name_script(["python", "-c", "import torch; print(1)"])
    ('gpt', 'python -c')
    """
    program, *rest = [*command] or [""]
    name = Path(program).name
    if not re.fullmatch(r"(?:python|pypy)[\d.]*", name):
        return name
    words = iter(rest)
    for word in words:
        if word in ("-m", "-c"):
            return next(words, "") if word == "-m" else f"{name} -c"
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(os.path.normpath(os.path.join(cwd, word)))  # noqa: PTH118, PTH119
    return name


def is_job_of_slurm(text: str) -> bool:
    """Whether a word is the id of a SLURM job: 123, 123_4 (a task of an array), 123+1 (a part)."""
    return bool(_JOB_OF_SLURM.fullmatch(text))


def find_run(text: str, log_dir: Path) -> Run | None:
    """Return the run of this name; None if there is none.

    Args:
        text: a run's id, `latest`, or the path of a run directory.
        log_dir: parent of the run directories.
    Raises:
        UsageError: `latest`, and there is no run yet; or it is one of somebody else, which cannot be read.
    """
    name = text.strip("/")
    if name == LATEST:
        path = log_dir / (log_dir / LATEST).resolve().name
        if path.name == LATEST or not path.is_dir():
            raise UsageError(f"latest: there is no run in {log_dir} yet")
        _refuse_unreadable(path)
        return read_run(path)
    path = Path(text) if "/" in name else log_dir / name
    if "/" in name and path.name == LATEST:
        return find_run(LATEST, path.parent)
    if not name or as_file_name(path.name) != path.name:
        return None
    _refuse_unreadable(path)
    return read_run(path) if is_run(path) else None


def _refuse_unreadable(path: Path) -> None:
    """Raise UsageError if this user may not list a directory, or may not know whether it is there."""
    try:
        os.scandir(path).close()
    except PermissionError as exc:
        raise UsageError(f"{path}: permission denied") from exc
    except OSError:
        return


def list_runs(log_dir: Path) -> list[Path]:
    """Return the directories of all runs below a directory, the newest first."""
    try:
        there = (path for path in log_dir.iterdir() if not path.name.startswith(BEING_DELETED))
        # No job makes other names, and no verb takes them.
        found = [
            path for path in there if as_file_name(path.name) == path.name and not path.is_symlink() and is_run(path)
        ]
        return sorted(found, key=lambda path: (_begin_of(path), path.name), reverse=True)
    except OSError:
        return []


def is_run(path: Path) -> bool:
    """Whether a directory is the run directory of a job, as far as this user may read it."""
    with contextlib.suppress(PermissionError):
        return path.is_dir() and (
            any((path / mark).exists() for mark in _MARKS)
            or any(next(attempt.glob(mark), None) for attempt in path.glob("attempt_*") for mark in _MARKS_OF_ATTEMPT)
        )
    return False


def read_run(path: Path) -> Run:
    """Return a run, as read from its files; unreadable values are None."""
    attempts = sort_by_number(path.glob("attempt_*"))
    job_name = _read_job_name(path / "submission.sh")
    if not attempts:
        return Run(id=path.name, path=path, job_name=job_name)
    told = _read_events(attempts[-1] / "events.jsonl")
    events = told.lines
    started: Mapping[str, Any] = next((event for event in events if event["event"] == "started"), {})
    leader, killed = _find_leader(events)
    attempt, ended_s = int(attempts[-1].name.rpartition("_")[2]), None
    verdict = written = read_verdict(attempts[-1] / "verdict.json")
    if written is not None:
        ended_s = _changed_s(attempts[-1] / "verdict.json")
    elif events and events[-1]["event"] == "ended" and not events[-1].get("is_cut_off"):
        verdict, ended_s = _conclude(events, job=path.name, attempt=attempt), events[-1].get("time_s")
    return Run(
        id=path.name,
        path=path,
        attempt=attempt,
        job_name=job_name,
        command=tuple(started.get("command", ())),
        cwd=started.get("cwd", ""),
        nodes=tuple(started.get("members", ())) or _read_nodes(attempts[-1]),
        pid=started.get("pid") if leader == next(iter(started.get("members", ())), "") else None,
        leader=leader,
        killed=killed,
        restarts=list_restarts(events),
        max_restarts=started.get("max_restarts"),
        interrupted_by=next((event.get("signum") for event in events if event["event"] == "interrupted"), None),
        started_s=started.get("time_s"),
        ended_s=ended_s,
        verdict=verdict,
        is_verdict_of_events=written is None and verdict is not None,
        agent=_find_agent(started, attempts[-1] / "events.jsonl"),
        num_damaged=told.num_damaged,
        network=told.network,
        ledger=read_ledger(path),
    )


def read_nodes(attempt: Path) -> tuple[str, ...]:
    """Return the nodes with which an attempt began, in the order of the ranks."""
    events = _read_events(attempt / "events.jsonl", until="started").lines
    started = events[-1] if events and events[-1]["event"] == "started" else {}
    return tuple(started.get("members", ())) or _read_nodes(attempt)


def read_ledger(path: Path) -> Ledger | None:
    """Return where the time of a run went; None if its directory does not tell.

    The ledger of a leader that works, or was killed, is up to a minute old; its status has a newer one, without ranks.
    """
    data, status = find_regular(path / GOODPUT, at_most=MAX_STATUS_BYTES), read_job_status(path)
    ledger = None if data is None else parse_ledger(data)
    newer = None if status is None else status.ledger
    return newer if ledger is None or (newer is not None and newer.until_s > ledger.until_s) else ledger


def read_job_status(path: Path) -> JobStatus | None:
    """Return what a run did when its leader wrote that last; None if its directory does not tell."""
    data = find_regular(path / STATUS, at_most=MAX_STATUS_BYTES)
    return None if data is None else parse_job_status(data)


def read_verdict(path: Path) -> Verdict | None:
    """Return a verdict; None if it is missing or unreadable."""
    data = find_regular(path, at_most=MAX_BYTES)
    return None if data is None else parse_verdict(data)


def sort_by_number(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that end with `_` and a number, `attempt_2` before `attempt_10`."""
    numbered = [path for path in paths if re.search(r"_[0-9]{1,18}$", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))


def _conclude(events: Sequence[Mapping[str, Any]], *, job: str, attempt: int) -> Verdict:
    """Return the verdict that events tell, of a run whose last event says that it has ended."""
    exit_code, told = events[-1]["exit_code"], list[Mapping[str, Any]]()
    for event in events:
        if event["event"] == "restarting":  # what the ranks were started again after did not end the run
            told.clear()
        elif event["event"] == "verdict" and event.get("cause"):
            told.append(event)
    findings = tuple(map(_as_finding, told)) if exit_code != Exit.OK else ()
    return Verdict(job=job, attempt=attempt, exit_code=exit_code, findings=findings)


def _as_finding(told: Mapping[str, Any]) -> Finding:
    """Return what an event has of a finding; that it is a failure goes without saying there."""
    sure = told.get("confidence")
    return Finding(
        cause=told["cause"],
        severity=Severity.FAIL,
        confidence=Confidence(sure) if sure in set(Confidence) else Confidence.UNDECIDED,
        node=told.get("node"),
        ranks=tuple(told.get("ranks", ())),
        message=told.get("message") or "events.jsonl does not tell what happened",
    )


def _begin_of(path: Path) -> float:
    """Return the start of the newest attempt, else the time at which the directory was created."""
    attempts = sort_by_number(path.glob("attempt_*"))
    events = _read_events(attempts[-1] / "events.jsonl", until="started").lines if attempts else ()
    started: float | None = events[-1].get("time_s") if events and events[-1]["event"] == "started" else None
    return started or _changed_s(attempts[-1] if attempts else path) or 0.0


def _changed_s(path: Path) -> float | None:
    """Return when a file was changed last, Unix time; None if it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return None


def _find_agent(started: Mapping[str, Any], events: Path) -> NamedAgent:
    """Return who the leader's agent was, as the run says it, and whose word that is."""
    owner = None
    with contextlib.suppress(OSError):
        owner = events.lstat().st_uid
    named = {name: started[name] for name in ("pid", "start_ticks", "boot_id") if name in started}
    return NamedAgent(**named, began_by_s=started.get("time_s"), owner=owner)


def _read_job_name(submission: Path) -> str:
    """Return the name in a script that `allranks submit` wrote; empty if there is none."""
    try:
        text = (find_regular(submission, at_most=MAX_BYTES) or b"").decode(errors="replace")
        found = _JOB_NAME.search(text)
        return shlex.split(found[1])[0] if found else ""
    except (ValueError, IndexError):
        return ""


def _find_leader(events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return which node's agent led last, and how it was killed; empty if it was not, or nobody has seen that."""
    leader = killed = ""
    for event in events:
        match event:
            case {"event": "started", "members": [first, *_]}:
                leader, killed = first, ""
            case {"event": "took_over", "leader": successor}:
                leader, killed = successor, ""
            case {"event": "agent_ended", "node": node} if node == leader:
                killed = describe_kill(event)
    return leader, killed


def describe_kill(event: Mapping[str, Any]) -> str:
    """Return what killed an agent, from the event `agent_ended` of the process beside it (launch.sweeper).

    >>> describe_kill({"signal": 9, "oom_kills": 1, "is_oom": True})
    'SIGKILL, out of memory'
    >>> describe_kill({"signal": 9, "oom_kills": 2})
    'SIGKILL (2 out-of-memory kills there since it began)'
    """
    number = event.get("signal")
    name = signal.Signals(number).name if number in set(signal.Signals) else "a signal"
    if event.get("is_oom"):
        return f"{name}, out of memory"
    kills = event.get("oom_kills")
    return f"{name} ({count_of(kills, 'out-of-memory kill')} there since it began)" if kills else name


def _read_nodes(attempt: Path) -> tuple[str, ...]:
    """Return the nodes of an attempt that ended before its ranks were started, in the order of the roll call."""
    data = find_regular(attempt / "roll_call.json", at_most=MAX_ROLL_CALL_BYTES)
    hosts = None if data is None else parse_hosts(data)
    return tuple(sorted(path.name for path in attempt.glob("*/") if path.is_dir())) if hosts is None else hosts


def _read_events(events: Path, *, until: str = "") -> RunEvents:
    """Return what events.jsonl says, all or up to the first event of that name."""
    with contextlib.suppress(OSError), open_regular(events) as file:
        return read_events(file, until=until)
    return RunEvents()
