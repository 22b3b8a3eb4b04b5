"""Whose is this directory of checkpoints? Decides by its owner file, and by what can be seen of the owner from here.

    DIRECTORY/owner.json      who writes checkpoints there; touched every RENEW_S while that process lives

Two runs in one directory would delete each other's checkpoints, and go on from them. So a second one is refused while
the first lives. It is known to be dead, or not to write any more, where

- it is an earlier incarnation of this run: SLURM, torchrun or the leader of `allranks run` has ended that one;
- it was a process of this machine, and is gone: its process id has ended, or belongs to a process that began later;
- SLURM says that its job has ended, or waits in the queue;
- it was not renewed for SILENT_S, by the clock of the file system.

Standard library only: the process that writes checkpoints looks into the file before it completes one.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from allranks.files.regular import open_regular
from allranks.state.saved.commit import identify_process, started_ticks

OWNER = "owner.json"
RENEW_S = 10.0
SILENT_S = 60.0
"""After so long without a renewal an owner is dead, wherever it was."""
REBOOTED_S = 25.0
"""The same where a machine of its name runs here with another boot: it has restarted, or two machines have one name."""
LARGEST_BYTES = 64 << 10
_LONGEST_TEXT = 512


class Ruling(StrEnum):
    """What an owner file means for a run that wants the directory."""

    OWN = "own"
    """This process wrote it, its agent, or a worker of the same agent."""
    FREE = "free"
    """Its owner writes no more."""
    TAKEN = "taken"
    """Its owner lives."""
    UNSURE = "unsure"
    """Its owner was heard of lately, and cannot be seen from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that writes checkpoints, or whose workers do."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int
    """In the kernel's ticks since boot: another process may get the same id."""
    agent_pid: int = 0
    """Of its agent, on the same machine; 0: it has none, or is one."""
    job: str = ""
    command: str = ""
    run_directory: str = ""
    since_s: float = 0.0
    """Seconds since the epoch, by its own clock; only people read it."""
    slurm_job: str = ""
    slurm_cluster: str = ""
    names: Mapping[str, int] = field(default_factory=dict)
    """What its run is called by those that begin it again, and how often they have: `slurm main 17`, 2. They begin it
    again only when they have ended it."""

    @property
    def process(self) -> tuple[str, int, int]:
        """Tells it from all other processes."""
        return self.boot, self.pid, self.started

    def is_kin(self, other: Owner) -> bool:
        """Whether both are of one agent: the agent itself, or workers of it."""
        if self.agent_pid or other.agent_pid:
            return self.boot == other.boot and (self.agent_pid or self.pid) == (other.agent_pid or other.pid)
        return self.process == other.process

    def is_of_run(self, other: Owner) -> bool:
        """Whether both are of one run, in whatever incarnation."""
        return self.is_kin(other) or not self.names.keys().isdisjoint(other.names)


@dataclass(frozen=True, slots=True)
class OwnerFile:
    """An owner file, as it was read."""

    owner: Owner | None
    """None: it is none of ours."""
    mtime_ns: int


def identify(env: Mapping[str, str], *, job: str = "", attempt_path: str = "", generation: int = 0) -> Owner:
    """Return this process as an owner.

    Args:
        env: its environment.
        job: name of the job that this agent leads, with the directory of its attempt and its generation; a worker has
            them in its environment.
    """
    agent_pid = env.get("ALLRANKS_AGENT_PID", "") if not job else ""
    run_id, restarts = env.get("TORCHELASTIC_RUN_ID", "none"), _number(env.get("TORCHELASTIC_RESTART_COUNT"))
    attempt_path = attempt_path or env.get("ALLRANKS_ATTEMPT_DIR", "")
    names: dict[str, int] = {}
    if attempt_path:
        names[f"allranks {attempt_path}"] = generation if job else restarts
    elif not job and run_id != "none":
        names[f"torchrun {run_id}"] = restarts
    slurm_job, cluster = env.get("SLURM_JOB_ID", ""), env.get("SLURM_CLUSTER_NAME", "")
    if slurm_job:
        names[f"slurm {cluster} {slurm_job}"] = _number(env.get("SLURM_RESTART_COUNT"))
    me: dict[str, Any] = identify_process()
    return Owner(
        **me,
        agent_pid=_number(agent_pid),
        job=job or (run_id if run_id != "none" else ""),
        command="" if job else shlex.join(["python", *sys.argv])[:_LONGEST_TEXT],
        run_directory=str(Path(attempt_path).parent) if attempt_path else "",
        since_s=time.time(),
        slurm_job=slurm_job,
        slurm_cluster=cluster,
        names=names,
    )


def judge(
    found: Owner, me: Owner, *, lives: bool | None, is_running: Callable[[], bool | None], unrenewed_s: float | None
) -> Ruling:
    """Decide whether a run can have the directory that this owner had.

    Args:
        lives: whether its process lives; None: that cannot be seen from here.
        is_running: whether SLURM runs its job; None: nobody knows. It may take seconds, and is asked only if need be.
        unrenewed_s: how long its file was not touched, by the clock of the file system; None: that clock is not known.
    """
    if found.is_kin(me):
        return Ruling.OWN
    if any(me.names.get(name, -1) > begun for name, begun in found.names.items()):
        return Ruling.FREE
    if lives is not None:
        return Ruling.TAKEN if lives else Ruling.FREE
    if unrenewed_s is not None and unrenewed_s >= patience_s(found, me):
        return Ruling.FREE
    if not found.slurm_job or found.slurm_cluster != me.slurm_cluster:
        return Ruling.UNSURE
    running = is_running()
    if running is False:
        return Ruling.FREE
    # Of this run's own job SLURM only knows that it runs, whatever became of that process.
    return Ruling.TAKEN if running and found.slurm_job != me.slurm_job else Ruling.UNSURE


def patience_s(found: Owner, me: Owner) -> float:
    """How long an owner of which nothing else is known may be silent before it is dead."""
    return REBOOTED_S if found.host == me.host and found.boot != me.boot else SILENT_S


def sees(found: Owner, me: Owner) -> bool | None:
    """Whether a process lives; None: it is of another machine, in another container, or hidden."""
    if found.boot != me.boot or found.pid_namespace != me.pid_namespace:
        return None
    started = started_ticks(found.pid)
    if started is None:
        try:
            os.kill(found.pid, 0)
        except PermissionError:
            return None  # /proc may hide other users' processes (hidepid)
        except (OSError, OverflowError):
            return False
    return started == found.started


def describe(found: Owner) -> str:
    """Return who it is: `job 17 (pid 4711 on node03, since 2026-11-28 09:41:02, run directory /scratch/runs/17)`."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(found.since_s, 0.0), 2**40)))
    where = f", run directory {found.run_directory}" if found.run_directory else ""
    who = f"job {found.job}" if found.job else found.command or "a process"
    return f"{who} (pid {found.pid} on {found.host}, since {since}{where})"


def refuse(directory: Path, other: Owner) -> tuple[str, str]:
    """Return why a run cannot have a directory, and what its user can do."""
    end = f"scancel {other.slurm_job}" if other.slurm_job else f"kill {other.agent_pid or other.pid} on {other.host}"
    return (
        f"{directory}: {describe(other)} writes its checkpoints there",
        f"name another directory (--checkpoint-dir, ALLRANKS_CHECKPOINT_DIR), or end that run first ({end}); "
        "to only read, use allranks.load_weights",
    )


# The file


def to_bytes(owner: Owner) -> bytes:
    """The file: one object of JSON."""
    return json.dumps(asdict(owner)).encode() + b"\n"


def parse(data: bytes) -> Owner | None:
    """Return what `to_bytes` wrote; None: it is something else. What is in it may be forged: it is only compared."""
    try:
        told = json.loads(data)
        known = {key.name: told[key.name] for key in fields(Owner)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = [value for name, value in known.items() if name not in ("pid", "started", "agent_pid", "since_s", "names")]
    numbers = [known["pid"], known["started"], known["agent_pid"]]
    if not all(type(value) is str and len(value) <= _LONGEST_TEXT * 8 for value in texts):
        return None
    if not all(type(value) is int and 0 <= value < 2**63 for value in numbers) or known["pid"] < 1:
        return None
    since_s, names = known["since_s"], known["names"]
    if type(since_s) not in (int, float) or not 0 <= since_s < 2**40 or type(names) is not dict:
        return None
    if not all(type(begun) is int for begun in names.values()):
        return None
    shown = ("host", "job", "command", "run_directory", "slurm_job")
    return Owner(**known | {name: "".join(c if c.isprintable() else "?" for c in known[name]) for name in shown})


def read(directory: Path, name: str = OWNER) -> OwnerFile | None:
    """Return the owner file of a directory; None where there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        # Opening asks a file server for the time of now.
        with open_regular(directory / name, follows_links=True) as file:
            mtime_ns = os.fstat(file.fileno()).st_mtime_ns
            return OwnerFile(parse(file.read(LARGEST_BYTES)), mtime_ns)
    except FileNotFoundError:
        return None


def find_other(directory: Path, me: Owner, *, fresh: Path) -> Owner | None:
    """Return the living owner of another run, as far as one look tells; None: nobody keeps this run from writing.

    Args:
        fresh: something in the same file system, which is touched for its time.
    """
    try:
        found = read(directory)
        if found is None or found.owner is None or found.owner.is_of_run(me) or sees(found.owner, me) is False:
            return None
        os.utime(fresh)
        unrenewed_s = (fresh.stat().st_mtime_ns - found.mtime_ns) / 1e9
    except OSError:
        return None
    return found.owner if unrenewed_s < SILENT_S or sees(found.owner, me) else None


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
