"""Worker processes: start them, notice their end, and leave no process behind.

Every worker has its own session, so Ctrl-C in the terminal reaches only the agent. Its output goes directly into files,
not through a pipe that a dead agent could break or a slow terminal could fill. A pidfd reports the end of each worker.
The agent reaps all processes that its workers leave (PR_SET_CHILD_SUBREAPER), and workers die with the agent
(PR_SET_PDEATHSIG, so they must be forked from the main thread).

A node's standby is a process with torch imported, which forks the workers (see join/standby.py). It is started before
the roll call, so that `import torch` takes no time of its own, and serves all generations. There is none with
ALLRANKS_HOOK=0, in a container, if the command is not a Python script or module or differs between ranks, or for one
worker that is never restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import psutil

from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell
from allranks.guard.node.activity import Output
from allranks.guard.origin import killed_by
from allranks.host.signals import die_with_parent
from allranks.join import standby as inside
from allranks.launch.last_words import read_crash, read_left, read_tail
from allranks.launch.worker_end import Left, explain_end, will_end_with
from allranks.model.safe_text import as_utf8
from allranks.wire.protocol import Ended, WorkerEnd

PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""

WRITER = "allranks.state.saved.writer"
"""A word of the command line of processes that write checkpoints (state.saved.writer)."""
LINGERS_S = 3.0
"""How long a worker may take to exit after an exception that nobody caught: saving a checkpoint does not count."""
HELPERS_S = 1.0
"""How long multiprocessing's helpers (resource tracker, fork server of Python 3.14) may take to end after their
worker."""
IMPORT_S = 20.0
"""How long workers wait for `import torch` before they start without the standby. With START_S of guard.presence, the
leader waits longer for the first beat."""
FORK_S = 5.0
"""For one fork; it takes 0.02 s."""
NOTICE_S = 2.0
"""How long a checkpoint may take to be written before people are told that this process waits for it."""
END_S = 1.0
"""For a process to be gone after SIGKILL."""
MOST_REAPED = 1000
"""Orphans that are collected at once: a worker that leaves them without end must not keep the agent from watching."""
LOCAL_RANK = "${local_rank}"
"""Placeholder of the local rank in a worker's arguments, as in torchrun."""


def become_subreaper() -> None:
    """Adopt the orphans of this process's descendants, so that they can be ended with the rest."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    command: Sequence[str], env: Mapping[str, str], *, out: int, err: int, fds: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; it ends with this agent.

    Args:
        out: descriptor for its stdout; `err` for its stderr.
        fds: further descriptors that it gets, under the same numbers.
    Raises:
        OSError, subprocess.SubprocessError: it could not be started.
    """
    die_with_agent = die_with_parent(signal.SIGKILL)

    def before_exec() -> None:
        # SLURM may send its warning to every process of the step; a script that has a handler sets its own.
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        die_with_agent()

    return subprocess.Popen(
        list(command),
        env=dict(env),
        stdout=out,
        stderr=err,
        start_new_session=True,
        pass_fds=tuple(fds),
        preexec_fn=before_exec,
    )


@dataclass(slots=True)
class Worker:
    """One training process, one rank."""

    rank: int
    node: str
    folder: Folder
    """For its files."""
    cell: Cell
    """What it tells its agent through."""
    process: subprocess.Popen[bytes] | psutil.Process | None = None
    """A psutil.Process where a standby forked it."""
    pidfd: int = -1
    end: WorkerEnd | None = None
    """Set once it has ended."""
    told_s: dict[int, float] = field(default_factory=dict)
    """Signals that it got to end it, and when first (seconds since the epoch); 0: one that SLURM had sent."""
    handles_end: bool = False
    """It has a handler for one of them: it may then crash on its way out."""
    is_lingering: bool = False
    """It has been told that an exception ended it, though its process is still there."""
    starts: dict[str, int] = field(default_factory=dict)
    """By stream (`out`, `err`): where its output begins in a file that an earlier start already wrote."""

    def file_name(self, kind: str) -> str:
        """Return the name of one of its files: `out`, `err`, `error.json`."""
        return f"rank_{self.rank}.{kind}"

    def path(self, kind: str) -> Path:
        """Return the path of one of its files, for people and for itself."""
        return self.folder.path / self.file_name(kind)

    @property
    def pid(self) -> int:
        """Process id of one that could be started."""
        assert self.process is not None
        return self.process.pid

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Where its output is."""
        return self._output("out"), self._output("err")

    def _output(self, stream: str) -> Output:
        return Output(self.folder, self.file_name(stream), self.starts.get(stream, 0))

    def start(
        self, command: Sequence[str], env: Mapping[str, str], *, fds: Mapping[str, int], standby: Standby | None = None
    ) -> None:
        """Start it with this whole environment; where that fails, `end` says why.

        Args:
            fds: descriptors that it gets, by the variable that tells it their number.
            standby: forks it; if that fails, it is started as a program.
        """
        try:
            for kind in ("error.json", "exit.json"):
                with contextlib.suppress(IsADirectoryError):  # a worker made one of it: its files are not read, either
                    self.folder.unlink(self.file_name(kind))
            self._start(command, env, fds=fds, standby=standby)
        except OSError as exc:  # its output files: a full disk, or one without inodes
            path = self.folder.path / str(exc.filename or "")
            self.end = self._end_as(127, message=as_utf8(f"{exc.args[1]}: '{path}'"), could_not_start=True)

    def _start(
        self, command: Sequence[str], env: Mapping[str, str], *, fds: Mapping[str, int], standby: Standby | None
    ) -> None:
        with self._open_output("out") as out, self._open_output("err") as err:
            self.starts = {"err": err.tell(), "out": out.tell()}
            streams = {"out": out.fileno(), "err": err.fileno()}
            try:
                if standby is not None:
                    self.process = standby.fork(env, fds=fds, **streams)
                self.process = self.process or spawn(command, env, fds=fds.values(), **streams)
            except (OSError, subprocess.SubprocessError) as exc:
                reason = f"{command[0]}: {exc.strerror if isinstance(exc, OSError) else exc}"
                if isinstance(exc, FileNotFoundError) and Path(command[0]).exists():
                    reason = f"{command[0]}: the interpreter in its #! line is not there"
                self.end = self._end_as(127, message=as_utf8(reason), could_not_start=True)
            else:
                self.pidfd = os.pidfd_open(self.process.pid)

    def _open_output(self, stream: str) -> BinaryIO:
        """Open an output file; what an earlier start has put in its place, as a fifo or a link, makes room for it.

        Raises:
            OSError: it cannot be opened.
        """
        name = self.file_name(stream)
        try:
            return self.folder.append(name)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            aside = f"{name}.{secrets.token_hex(8)}"
            os.rename(name, aside, src_dir_fd=self.folder.fd, dst_dir_fd=self.folder.fd)
            return self.folder.open_new(name)

    def reap(self) -> WorkerEnd:
        """Collect a worker whose pidfd became readable: how it ended, and what it left about why."""
        assert self.process is not None
        exit_code = int(self.process.wait())  # psutil has an enum for signals
        os.close(self.pidfd)
        found, left = {}, self._left()
        if exit_code:
            found = explain_end(exit_code, left, told_s=self.told_s, handles_end=self.handles_end, now_s=time.time())
        with contextlib.suppress(OSError):
            self.folder.unlink(self.file_name("exit.json"))  # of no use to people
        self.end = self._end_as(exit_code, lost_lines=left.lost_lines, lost_why=left.lost_why, **found)
        if self.end.exit_code < 0 and self.end.traceback is None:
            self.end = msgspec.structs.replace(self.end, **read_crash(self._output("err"), exit_code))
        return self.end

    def failed_already(self) -> WorkerEnd | None:
        """Return how a worker will end that has not been told to: it has raised, or called sys.exit, and leaves."""
        left, now_s = self._left(), time.time()
        if self.told_s or (status := will_end_with(left, now_s=now_s)) is None:
            return None
        return self._end_as(status, **explain_end(status, left, told_s={}, handles_end=False, now_s=now_s))

    def find_lingering(self, now_ns: int, *, main_at: str) -> WorkerEnd | None:
        """Return the end, once, of a worker that an exception has ended LINGERS_S ago and whose process is still there.

        Args:
            now_ns: by CLOCK_MONOTONIC.
            main_at: where its main thread is in the user's code, where that is known.
        """
        if not self.cell.has_raised or self.is_lingering or self.told_s or self.cell.is_saving:
            return None
        raised = self.cell.read().raised
        if raised is None or now_ns - raised.written_ns < LINGERS_S * 1e9:
            return None
        self.is_lingering = True
        left = self._left()
        what = f"thread{'s' * (len(left.threads) > 1)} {', '.join(left.threads)}" if left.threads else main_at
        return self._end_as(1, lingers=as_utf8(what), **left.error)

    def _left(self) -> Left:
        return read_left(self.folder, self.file_name("error.json"), self.file_name("exit.json"), self.cell)

    def _end_as(self, status: int, **found: Any) -> WorkerEnd:
        """Return how it ended; `found` has further fields."""
        now_s, status = time.time(), found.pop("exit_code", status)
        has_file = self.folder.is_in_place and self.folder.has(self.file_name("err"))
        end = WorkerEnd(
            rank=self.rank,
            node=self.node,
            is_finished=status == 0 and self.cell.is_finished,
            stderr_tail=read_tail(self._output("err")) if status else None,
            stderr_path=as_utf8(str(self.path("err"))) if has_file else None,
            **{"time_s": now_s, "exit_code": status} | found,
        )
        # A signal came after what it had recorded.
        return msgspec.structs.replace(end, time_s=now_s) if killed_by(end) else end


@dataclass(slots=True)
class Standby:
    """One process that forks workers."""

    process: subprocess.Popen[bytes]
    env: Mapping[str, str]
    _control: socket.socket
    _started_s: float = field(default_factory=time.monotonic)
    _answer: str | None = None

    @classmethod
    def can_serve(cls, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Tell whether it could fork workers with this command line: it is Python's, and the hook enters it."""
        is_python = Path(command[0]).name.startswith(("python", "pypy")) and len(command) > 1
        is_script = is_python and (not command[1].startswith("-") or command[1] == "-m")
        is_one = not any(LOCAL_RANK in word for word in command)
        return is_script and is_one and env.get("ALLRANKS_HOOK") != "0" and "join/site" in env.get("PYTHONPATH", "")

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str]) -> Standby:
        """Start one, with the workers' command, and their environment as far as it is known.

        Raises:
            OSError: it could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, os.fdopen(os.memfd_create("standby-out")) as out, os.fdopen(os.memfd_create("standby-err")) as err:
            own_env, fds = {**env, inside.ENV: str(theirs.fileno())}, [theirs.fileno()]
            try:
                process = spawn(command, own_env, out=out.fileno(), err=err.fileno(), fds=fds)
            except BaseException:
                ours.close()
                raise
        return cls(process, env, ours)

    @property
    def is_importing(self) -> bool:
        """Whether it imports torch, and workers should wait for it."""
        return self.answer is None and time.monotonic() < self._started_s + IMPORT_S

    @property
    def answer(self) -> str | None:
        """READY if it can fork, else why it cannot; None while it imports torch."""
        if self._answer is None:
            try:
                heard = self._control.recv(inside.MAX_BYTES)
            except BlockingIOError:
                return None
            except ConnectionError:
                heard = b""
            self._answer = heard.decode(errors="replace") or "it ended while it imported torch"
        return self._answer

    def fork(self, env: Mapping[str, str], *, out: int, err: int, fds: Mapping[str, int]) -> psutil.Process | None:
        """Fork a worker, a child of this process; None if that fails, and then no worker is left behind.

        Args:
            env: the worker's, whole.
            out: descriptor for its stdout; `err` for its stderr.
            fds: more descriptors, by the variable that tells the worker their number; the number will be another.
        """
        assert len(fds) + 4 <= inside.MAX_FDS
        entries = b"".join(os.fsencode(f"{name}={value}\0") for name, value in env.items() if name not in fds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, os.fdopen(os.memfd_create(inside.ENVIRONMENT), "wb", buffering=0) as environment:
            ours.settimeout(FORK_S)
            try:
                environment.write(entries)
                with theirs:
                    handed = [theirs.fileno(), environment.fileno(), out, err, *fds.values()]
                    socket.send_fds(self._control, [" ".join(fds).encode() or b" "], handed)
                pid = int(ours.recv(32))
                ours.send(inside.GO)
            except (OSError, ValueError):  # the worker ends when it sees that this end of the tether is closed
                return None
        return psutil.Process(pid)

    def end(self) -> None:
        """Kill it and collect it. Its workers live on."""
        self._control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it (state D)
            self.process.wait(END_S)


def age(end: WorkerEnd, generation: int) -> Ended:
    """Return the end of a worker as it is told: clocks of nodes differ, so it has an age instead of a time."""
    return Ended(end=end, age_s=max(0.0, time.time() - end.time_s), generation=generation)


def reap_orphans(workers: Sequence[Worker]) -> None:
    """Collect adopted processes that have ended, and leave the workers to their pidfds."""
    own = {worker.pid for worker in workers if worker.process is not None}
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT only looks; a worker at the head of the queue is collected first, in its own way.
        for _ in range(MOST_REAPED):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in own:
                break
            os.waitpid(ended.si_pid, 0)


def kill_descendants() -> None:
    """Kill all processes below this one at once, also those in sessions of their own. Called from a signal handler."""
    for _ in range(2):  # again for what was started meanwhile
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_for_writers(patience_s: float, say: Callable[[str], None]) -> None:
    """Wait until checkpoints are written: when this process ends, SLURM ends all other processes of the step."""
    writers = [child for child in psutil.Process().children(recursive=True) if WRITER in _words_of(child)]
    if writers := psutil.wait_procs(writers, timeout=NOTICE_S)[1]:
        say(f"waiting at most {patience_s:.0f} s for a checkpoint to be written (pid {writers[0].pid})")
        psutil.wait_procs(writers, timeout=patience_s - NOTICE_S)


def end_left_behind(grace_s: float, *, spared: Collection[int] = ()) -> list[str]:
    """End descendants that outlived their worker: SIGTERM, and SIGKILL after the grace.

    Writers of checkpoints stay, and so do tools that this process asks something just now, as py-spy.

    Args:
        grace_s: between the two.
        spared: leaders of sessions that are meant to live.
    Returns:
        Their names and pids, `wandb-service (pid 812)`, empty when there were none.
    """
    kept = {os.getsid(0), *spared}  # workers, and so all that they start, are in sessions of their own
    left = [child for child in psutil.Process().children(recursive=True) if _session_of(child) not in kept]
    orphans = [process for process in left if WRITER not in _words_of(process)]
    helpers = [orphan for orphan in orphans if any("from multiprocessing." in word for word in _words_of(orphan))]
    psutil.wait_procs(helpers, timeout=HELPERS_S)
    names = []
    for process in orphans:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(f"{process.name()} (pid {process.pid})")
                process.terminate()
    for process in psutil.wait_procs(orphans, timeout=grace_s)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(orphans, timeout=END_S)
    return names


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def _words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty for one that has ended, also if nobody has collected it yet."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []
