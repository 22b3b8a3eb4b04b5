"""A node's standby: a process with torch imported, which forks the workers (see join/standby.py).

    standby = Standby.start(command, env)          before the roll call, so that `import torch` takes no time of its own
    standby.is_importing                           for some seconds
    standby.fork(env, out=..., err=..., fds={"ALLRANKS_CELL_FD": cell.fd})      a worker, or None

One `import torch` serves all workers of a node and of all generations, and the workers share its memory. There is none
with ALLRANKS_HOOK=0, in a container, if the command is not a Python script or module or differs between ranks, or for
one worker that is never restarted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.join import standby as inside
from allranks.launch.workers import spawn

IMPORT_S = 20.0
"""How long workers wait for `import torch` before they start without the standby. With START_S of guard.presence, the
leader waits longer for the first beat."""
FORK_S = 5.0
"""For one fork; it takes 0.02 s."""
END_S = 1.0
"""For a process to be gone after SIGKILL."""
LOCAL_RANK = "${local_rank}"
"""Placeholder of the local rank in a worker's arguments, as in torchrun."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker that a standby forked; a child of this process, as those of subprocess.Popen."""

    pid: int

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


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
        """Start one.

        Args:
            command: the workers'.
            env: the workers', as far as it is known.
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

    def fork(self, env: Mapping[str, str], *, out: int, err: int, fds: Mapping[str, int]) -> Forked | None:
        """Fork a worker; None if that fails, and then no worker is left behind.

        Args:
            env: the worker's, whole.
            out: descriptor for its stdout; `err` for its stderr.
            fds: more descriptors, by the variable that tells the worker their number; the number will be another.
        """
        assert len(fds) + 4 <= inside.MAX_FDS
        entries = b"".join(os.fsencode(f"{name}={value}\0") for name, value in env.items() if name not in fds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.memfd_create(inside.ENVIRONMENT)
        with ours:
            ours.settimeout(FORK_S)
            try:
                os.write(environment, entries)
                with theirs:
                    handed = [theirs.fileno(), environment, out, err, *fds.values()]
                    socket.send_fds(self._control, [" ".join(fds).encode() or b" "], handed)
                pid = int(ours.recv(32))
                ours.send(inside.GO)
            except (OSError, ValueError):  # the worker ends when it sees that this end of the tether is closed
                return None
            finally:
                os.close(environment)
        return Forked(pid)

    def end(self) -> None:
        """Kill it and collect it. Its workers live on."""
        self._control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it (state D)
            self.process.wait(END_S)
