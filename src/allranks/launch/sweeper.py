"""A small process beside the agent: if the agent is killed, it ends what that had started, and writes how it ended.

    sweeper = Sweeper.start()                         # forks: before this process has threads
    sweeper.tell(attempt, "node03")                   # where to write; known after the roll call
    sweeper.watch([4711, 4712])                       # workers, each the leader of its session
    sweeper.dismiss()                                 # the agent ends by itself: nothing is ended

The agent holds one end of a pipe, which the kernel closes with the agent. Workers and standby die with the agent by
themselves (launch.workers); this is about what they have started: processes of DataLoader, servers, compilers. They are
found by their session, by ALLRANKS_AGENT_PID in their environment, and by their parents. A process that writes a
checkpoint may complete it (WRITERS_S). Where slurmstepd counts processes by cgroup, it ends all of them itself as soon
as the agent is gone, and this process too.

It is forked, not started: an agent may start from a slow file server. It has a session of its own and ignores all
signals that it can, since SLURM sends its signals to every process of a step.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from allranks.files.folder import Folder
from allranks.host.oom import OomWatch
from allranks.launch.succession import AGENT_ENDED
from allranks.launch.workers import WRITER
from allranks.report.last_files import EVENTS
from allranks.report.rundir import event_line

FAREWELL = b"\n"
"""An empty line: the agent ends by itself."""
GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""
KILL_S = 5.0
"""For processes to be gone after SIGKILL, before they are left to the kernel."""
WRITERS_S = 60.0
"""For checkpoints that are being written; as an agent waits for them at its end (launch.loop)."""
EXIT_S = 1.0
"""From the end of the pipe to the end of the agent: the kernel still frees its memory."""
POLL_S = 0.05
NAME = "allranks-sweep"
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _INFO = 0xC040FF0B, 1 << 3, struct.Struct("<QQ12I")
"""linux/pidfd.h, struct pidfd_info: mask, cgroupid, then pid ... exit_code; Linux 6.15 and later know the exit code."""


@dataclass(slots=True)
class Sweeper:
    """The agent's end of the pipe."""

    pid: int
    """0: there is none."""
    _pipe: int

    @classmethod
    def start(cls) -> Sweeper:
        """Fork it; where that is impossible, the agent goes on without."""
        agent = os.getpid()
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
        except OSError:
            return cls(0, -1)
        if pid == 0:
            _run(reader, agent)
        os.close(reader)
        os.set_blocking(writer, False)  # somebody may have stopped it
        return cls(pid, writer)

    def tell(self, attempt: Folder, node: str) -> None:
        """Say where an abrupt end of this agent is to be written, and under which name of its node."""
        self._write({"attempt": str(attempt.path.absolute()), "identity": attempt.identity, "node": node})

    def watch(self, sessions: Iterable[int]) -> None:
        """Add workers whose sessions end with this agent."""
        self._write({"sessions": list(sessions)})

    def dismiss(self) -> None:
        """Let it end: this agent leaves nothing behind."""
        if self._pipe >= 0:
            with contextlib.suppress(OSError):
                os.write(self._pipe, FAREWELL)
            os.close(self._pipe)
            self._pipe = -1

    def _write(self, told: Mapping[str, Any]) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(OSError):  # somebody has killed it
                os.write(self._pipe, json.dumps(told).encode() + b"\n")


# The process itself


def _run(reader: int, agent: int) -> Never:
    try:
        gc.disable()  # a collection would copy the agent's memory
        os.setsid()
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_IGN)
        _close_others(reader)
        Path("/proc/self/comm").write_text(NAME)
        _wait(reader, agent)
    finally:
        os._exit(0)


def _close_others(reader: int) -> None:
    """Let go of the terminal, and of whatever else the agent had open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) > 2 and int(link.name) != reader:
            with contextlib.suppress(OSError):
                os.close(int(link.name))


def _wait(reader: int, agent: int) -> None:
    began, memory = _read_start(agent), OomWatch()
    end = _AgentEnd(agent)
    told: dict[str, Any] = {"sessions": set()}
    rest = b""
    while data := os.read(reader, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        if FAREWELL.strip() in lines:
            return
        for line in map(json.loads, lines):
            told["sessions"] |= set(line.pop("sessions", ()))
            told |= line
    signum = end.read_signal()
    if "attempt" in told:
        fields = {"node": told["node"], "pid": agent, "signal": signum, "oom_kills": memory.num_kills()}
        fields["is_oom"] = agent in memory.killed_pids()
        write_end(told, event_line(AGENT_ENDED, **fields))
    sweep(agent, sessions=told["sessions"], since=began)


def write_end(told: Mapping[str, Any], line: str) -> None:
    """Append how the agent ended to the events of its attempt, as long as nobody has put another directory there.

    Args:
        told: by the agent: `attempt`, the path, and `identity` of the directory.
        line: of events.jsonl.
    """
    with contextlib.suppress(OSError):
        attempt = Folder.at(Path(told["attempt"]))
        if attempt.identity == tuple(told["identity"]):
            with attempt.append(EVENTS) as file:
                file.write(line.encode())


class _AgentEnd:
    """How a process ends that is not a child of this one: as far as the kernel tells."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)

    def read_signal(self) -> int | None:
        """Return the signal that has ended it, once it has ended; None: none has, or nobody knows."""
        # Linux before 6.15 tells nobody but the parent, once that has collected it: so ask before.
        early = self._read_stat()
        select.select([self._pidfd], [], [], EXIT_S)
        info = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _PIDFD_INFO_EXIT:
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        status = self._read_stat() or early
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None

    def _read_stat(self) -> int:
        with contextlib.suppress(OSError):
            return int(os.pread(self._stat, 4096, 0).split()[-1])  # proc_pid_stat(5), exit_code
        return 0


def sweep(agent: int, *, sessions: Iterable[int], since: int) -> None:
    """End everything that an agent has started; what writes a checkpoint, at last.

    Args:
        agent: its pid.
        sessions: of its workers.
        since: when it began, in the kernel's ticks: a pid may have been another process's before.
    """
    known = set(sessions)

    def end(signum: int, within_s: float, *, writers: bool = False) -> bool:
        until_s = time.monotonic() + within_s
        while left := _find_left(agent, known, since, writers=writers):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
            if time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
        return True

    _ = end(signal.SIGTERM, GRACE_S) or end(signal.SIGKILL, KILL_S)
    until_s = time.monotonic() + WRITERS_S
    while _find_left(agent, known, since, writers=True) and time.monotonic() < until_s:
        time.sleep(1.0)
    end(signal.SIGKILL, KILL_S, writers=True)


def _find_left(agent: int, sessions: set[int], since: int, *, writers: bool) -> list[int]:
    """Return the pids of what an agent has left; adds their sessions to those that are known."""
    mark = f"ALLRANKS_AGENT_PID={agent}".encode()
    found: dict[int, bool] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError, IndexError):
            state, parent, _, session, *more = _read_fields(pid)
            if state in "ZX" or int(more[15]) < since or pid == os.getpid():
                continue
            parents[pid] = int(parent)
            if int(session) in sessions or mark in (folder / "environ").read_bytes().split(b"\0"):
                found[pid] = WRITER.encode() in (folder / "cmdline").read_bytes()
                if not found[pid]:
                    sessions.add(int(session))
    while more_pids := [pid for pid, parent in parents.items() if parent in found and pid not in found]:
        found |= {pid: found[parents[pid]] for pid in more_pids}
    return [pid for pid, is_writer in found.items() if is_writer == writers]


def _read_start(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(_read_fields(pid)[19])
    return 0


def _read_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, group, session ...; the 20th is the start."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
