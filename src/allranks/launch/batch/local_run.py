"""What is the state of a run without SLURM? Its files say how it ended, its agent's process whether it still runs.

    look_at_run(read_run(Path("runs/20261123-031500-4711"))).state

An agent on another machine cannot be examined: a run there without a verdict is UNKNOWN.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from allranks.causes.book import find_cause
from allranks.files.folder import Folder
from allranks.host.node import name_of
from allranks.host.process import identify, read_boot_id
from allranks.host.slurm import JobState
from allranks.model.errors import UsageError
from allranks.model.hostlist import fold_hosts
from allranks.model.named_agent import CLOCK_S, why_another, why_no_signal
from allranks.report.history import Restart
from allranks.report.remains import last_alive
from allranks.report.runs import Run, sort_by_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun(JobState):
    """One run. Its state may also be LOST: its agent ended without a verdict; or UNKNOWN: not visible here."""

    cause: str
    """Cause of the first finding, or of a signal from outside; "" if there is none."""
    pid: int | None
    """Pid of the leader's agent, on the first of the nodes."""
    run_dir: str
    worker_restarts: tuple[Restart, ...] = ()
    """All starts of its ranks after the first, each with the fault before it."""
    max_restarts: int | None = None
    last_alive: str = ""
    """When it was last alive, if it has no verdict."""
    leader: str = ""
    """The node whose agent led last."""
    killed: str = ""
    """How that agent was killed, if the process beside it has seen that."""
    goodput: float | None = None
    """Share of the ranks' time that trained, over all attempts; None: it is not known."""
    num_restarts: int = 0
    """Of its ranks, over all attempts as far as they were told."""
    is_host_younger: bool = False
    """Whether this machine has been restarted since the run began."""

    @property
    def is_finished(self) -> bool:
        """Whether it has certainly ended."""
        return self.state not in ("RUNNING", "UNKNOWN")


def look_at_run(run: Run) -> LocalRun:
    """Return the state of a run."""
    verdict, cause = run.verdict, ""
    if verdict is not None and verdict.findings and verdict.exit_code:  # else it went on after these faults
        cause = verdict.findings[0].cause
    elif verdict is not None and verdict.ended_by and not run.is_of_slurm:  # a signal from outside is a person's then
        cause = find_cause("cancelled").label
    return LocalRun(
        id=run.id,
        name=run.name,
        state=_state_of(run),
        num_nodes=len(run.nodes),
        nodes=fold_hosts(run.nodes),
        start=show_time(run.started_s),
        end=show_time(run.ended_s),
        elapsed=show_duration(run.ended_s - run.started_s) if run.ended_s and run.started_s else "",
        exit_code=verdict.exit_code if verdict else None,
        cause=cause,
        pid=run.pid,
        run_dir=str(run.path),
        leader=run.leader,
        killed=run.killed,
        worker_restarts=run.restarts,
        max_restarts=run.max_restarts,
        last_alive="" if verdict or run.attempt is None else show_time(last_alive(run.attempt_path)),
        goodput=run.ledger.goodput if run.ledger else None,
        num_restarts=max(len(run.restarts), len(run.ledger.restarts) if run.ledger else 0),
        is_host_younger=_is_here(run) and _is_host_younger(run),
    )


def describe_lost(run: LocalRun) -> str:
    """Return how a run that is LOST ended, in a clause."""
    process = f"process {run.pid} on " if run.pid is not None else ""
    agent = f"its agent ({process}{run.leader or run.nodes})"
    if run.killed:
        return f"{agent} was killed by {run.killed}, and left no verdict"
    if run.is_host_younger:
        return f"the machine {run.nodes} was restarted while {agent} ran"
    return f"{agent} was killed: it is gone without a verdict, while the machine stayed up"


def show_duration(seconds: float) -> str:
    """Return `1:59:50`, or `2-1:59:50` with days, as SLURM has it."""
    days, rest_s = divmod(int(seconds), 86400)
    return (f"{days}-" if days else "") + str(timedelta(seconds=rest_s))


def cancel_run(run: Run) -> str:
    """Ask the agent of a run to end it, and return what was done.

    Raises:
        UsageError: the agent cannot be reached from here, or what the run names is not its agent.
    """
    local = look_at_run(run)
    ended = f"run {run.id} had already ended"
    if local.is_finished and (local.state != "LOST" or run.killed):
        return f"{ended}: {local.state}"
    if local.state == "UNKNOWN" or run.pid is None:
        where = (
            f"runs on {local.nodes}: cancel it there" if local.nodes else "has not started its ranks yet: use Ctrl-C"
        )
        raise UsageError(f"run {run.id}: its agent {where}")
    try:
        held = os.pidfd_open(run.pid)  # from here on it is the same process, whatever becomes of its number
    except OSError:
        return f"{ended}: LOST"
    try:
        process = identify(run.pid, run_dir=run.path)
        if process is None or process.is_dead:
            return f"{ended}: LOST"
        if why := why_another(run.agent, process):
            return f"{ended}: LOST; process {run.pid} is another one ({why}), and got no signal"
        if why := why_no_signal(run.agent, process):
            raise UsageError(f"run {run.id}: process {run.pid} is not its agent: {why}; it got no signal")
        signal.pidfd_send_signal(held, signal.SIGTERM)
    except ProcessLookupError:
        return ended
    except PermissionError as exc:
        raise UsageError(f"run {run.id}: process {run.pid} belongs to another user") from exc
    finally:
        os.close(held)
    note_cancel(run.path)
    return f"cancelling run {run.id}: sent SIGTERM to its agent, process {run.pid}"


def note_cancel(run_dir: Path) -> None:
    """Leave a line for `allranks why` in the newest attempt of a run, if that can be written."""
    attempts = sort_by_number(run_dir.glob("attempt_*"))
    who = f"{psutil.Process().username()} on {os.uname().nodename}"
    line = f"{show_time(time.time())} allranks cancel: {who} cancelled the job\n"
    with contextlib.suppress(OSError):
        if attempts:
            with Folder.at(attempts[-1]).append("cancel.log") as file:
                file.write(line.encode())


def _state_of(run: Run) -> str:
    if run.verdict is not None:
        return "COMPLETED" if run.verdict.exit_code == 0 else "CANCELLED" if run.verdict.ended_by else "FAILED"
    if run.killed:
        return "LOST"
    if run.pid is None or not _is_here(run):
        return "UNKNOWN"
    process = identify(run.pid, run_dir=run.path)
    is_agent = process is not None and not process.is_dead and why_another(run.agent, process) is None
    return "RUNNING" if is_agent else "LOST"


def _is_here(run: Run) -> bool:
    """Whether the leader's node is this machine."""
    return run.nodes[:1] == (name_of(os.environ),)


def _is_host_younger(run: Run) -> bool:
    """Whether this machine has been restarted since the run began."""
    if run.agent.boot_id:
        return run.agent.boot_id != read_boot_id()
    return run.started_s is not None and psutil.boot_time() > run.started_s + CLOCK_S


def show_time(seconds: float | None) -> str:
    """Return a Unix time as local time, `2026-11-23T03:15:00`; empty for None."""
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds") if seconds else ""
