"""Runs scripts by scripts/fork_ranks.py, with one import of torch for all ranks of all tests that a process runs.

done = fork_ranks(tmp_path, "3,2", "train.py")      three ranks, then two; done.stdout, done.stderr
done = fork_script(tmp_path, "train.py")            as `python train.py`
process = ForkedScript(tmp_path, "train.py")        as subprocess.Popen(["python", "train.py"])

Not for a script whose start is what a test is about: its /proc/PID/cmdline and environ are those of fork_ranks.py, and
torch has one thread.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from conftest import clean_env

FORK_RANKS = Path(__file__).parent / "scripts/fork_ranks.py"
READ_AT_IMPORT = re.compile("TORCH(?!_FR_|ELASTIC_)|OMP_(?!NUM_THREADS)|MKL_|PYTHON(?!IOENCODING)")
"""Variables that torch or Python read when they are loaded: a script with one of them has an import of its own."""


def fork_ranks(
    folder: Path, sizes: str, script: str | Path, *arguments: str | Path, within_s: float = 200, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script in the folder, by as many ranks as `sizes` says.

    Raises:
        subprocess.TimeoutExpired: it took longer than `within_s`, and is killed.
    """
    command = [sizes, str(script), *map(str, arguments)]
    whole = clean_env(os.environ, PYTHONIOENCODING="utf-8", **env)
    if any(map(READ_AT_IMPORT.match, env)):
        return subprocess.run(
            [sys.executable, FORK_RANKS, *command],
            cwd=folder,
            env=whole,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    process = ForkedScript(folder, *command[1:], sizes=sizes, env=whole)
    try:
        told = process.communicate(timeout=within_s)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.wait(), *told)


def fork_script(
    folder: Path, script: str | Path, *arguments: str | Path, within_s: float = 200, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script in the folder, as `python SCRIPT` would.

    Raises:
        subprocess.TimeoutExpired: it took longer than `within_s`, and is killed.
    """
    return fork_ranks(folder, "alone", script, *arguments, within_s=within_s, **env)


class ForkedScript:
    """A process that runs a script, with the methods of subprocess.Popen that tests need.

    Args:
        sizes: see fork_ranks.py.
        has_pipe: `stdout` is read while it runs, and stderr by nobody. Otherwise communicate() returns both.
    """

    def __init__(
        self,
        folder: Path,
        *command: str | Path,
        env: dict[str, str],
        sizes: str = "alone",
        has_pipe: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self._forker = forker()
        self.args = command
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self._files: list[IO[bytes]] = []
        self._said: list[str] = []
        if has_pipe:
            end, out = os.pipe()
            self.stdout, fds = os.fdopen(end), [out, os.open(os.devnull, os.O_WRONLY)]
        else:
            fds = [os.memfd_create(name) for name in ("stdout", "stderr")]
            for fd in fds:
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # of a memfd, ranks would write over each other's lines
            self._files = [os.fdopen(os.dup(fd), "rb") for fd in fds]
        words = {"folder": str(folder), "env": env, "command": [sizes, *map(str, command)], "leads": start_new_session}
        self.pid = self._forker.start(words, fds)
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> ForkedScript:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        self._look(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.args), timeout or 0)
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit code; None: it has not ended."""
        self._look(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it wrote until its end."""
        self.wait(timeout)
        return self._said[0], self._said[1]

    def _look(self, timeout_s: float | None) -> None:
        """Wait for its end, and read then what it wrote."""
        if self.returncode is None:
            self.returncode = self._forker.wait(self.pid, timeout_s)
            if self.returncode is not None:
                for file in self._files:
                    with file:
                        file.seek(0)
                        self._said.append(file.read().decode())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """A process that has torch imported, and forks what it is told to run; it ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, FORK_RANKS, "serve", str(theirs.fileno())],
                env=clean_env(os.environ, PYTHONIOENCODING="utf-8"),
                pass_fds=[theirs.fileno()],
            )
        self._ended: dict[int, int] = {}
        atexit.register(self.end)

    def start(self, order: dict[str, Any], fds: Sequence[int]) -> int:
        """Return the pid of a new process with these files as stdout and stderr."""
        socket.send_fds(self._control, [json.dumps(order).encode()], fds)
        self._control.settimeout(None)
        while len(told := self._read()) > 1:
            self._ended[told[0]] = told[1]
        return told[0]

    def wait(self, pid: int, timeout_s: float | None) -> int | None:
        """Return the exit code of a process; None: it has not ended."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ended:
            self._control.settimeout(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            try:
                ended, code = self._read()
            except (TimeoutError, BlockingIOError):
                return None
            self._ended[ended] = code
        return self._ended.pop(pid)

    def _read(self) -> list[int]:
        told = self._control.recv(1000)
        assert told, "fork_ranks.py has ended"
        return list(json.loads(told))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._control.close()
        self._process.wait()


_forkers: list[Forker] = []


def forker() -> Forker:
    """Return the one of this process; another one if a test has ended it."""
    if not _forkers or _forkers[-1].has_ended:
        _forkers.append(Forker())
    return _forkers[-1]
