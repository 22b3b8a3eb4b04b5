"""A standby: a process with torch already imported, which becomes a worker at the next restart.

    standby = Standby.start(command, env)                  a process of its own; imports at low priority
    standby.become(env, out=..., err=..., fds={"ALLRANKS_CELL_FD": cell.fd})
    standby.process                                        is the worker from now on, with the same pid

The process has the worker's command line and waits in the hook (see join/standby.py). It can become a worker before its
imports are done; it then simply continues. There are no standbys with ALLRANKS_HOOK=0 or if the command is not a Python
script or module, since nothing would make them wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.join.standby import ENV, MAX_FDS
from allranks.launch.workers import prepare_worker

END_S = 1.0
"""For a process to be gone after SIGKILL."""
ROOM = "." * 2048
"""Where /proc/PID/environ will show what the worker got."""


@dataclass(slots=True)
class Standby:
    """One process that waits to become a worker."""

    process: subprocess.Popen[bytes]
    _control: socket.socket
    _has_told: bool = False

    @classmethod
    def can_serve(cls, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Tell whether a worker with this command line would wait: it is Python's, and the hook enters it."""
        is_python = Path(command[0]).name.startswith(("python", "pypy")) and len(command) > 1
        is_script = is_python and (not command[1].startswith("-") or command[1] == "-m")
        return is_script and env.get("ALLRANKS_HOOK") != "0" and "join/site" in env.get("PYTHONPATH", "")

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str]) -> Standby:
        """Start one.

        Args:
            command: the worker's.
            env: the worker's, as far as it is known: all of it but what `become` brings. What is read when Python or
                torch are loaded (PYTHON*, OMP_*, LD_*, TORCH_*) must be there already, else it starts anew then.
        Raises:
            OSError: it could not be started.
        """
        ours, theirs = socket.socketpair()
        words = [os.memfd_create(f"standby-{name}") for name in ("out", "err")]
        try:
            process = subprocess.Popen(
                list(command),
                env={**env, ENV: f"{theirs.fileno()}:{ROOM}"},
                stdout=words[0],
                stderr=words[1],
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                preexec_fn=prepare_worker(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in words:
                os.close(fd)
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done."""
        if not self._has_told:
            with contextlib.suppress(OSError):
                self._has_told = bool(self._control.recv(1))
        return self._has_told

    @property
    def is_alive(self) -> bool:
        """Whether it can still become a worker."""
        return self.process.poll() is None

    def become(self, env: Mapping[str, str], *, out: int, err: int, fds: Mapping[str, int]) -> None:
        """Make it the worker. Waits for nothing.

        Args:
            env: the worker's, whole.
            out: descriptor for its stdout.
            err: for its stderr.
            fds: more descriptors, by the variable that tells the worker their number; the number will be another.
        Raises:
            OSError: it is gone.
        """
        assert len(fds) + 3 <= MAX_FDS
        orders = os.memfd_create("standby-orders")
        try:
            wanted = {"env": dict(env), "fds": list(fds), "cwd": str(Path.cwd())}
            with os.fdopen(os.dup(orders), "wb") as file:
                file.write(json.dumps(wanted).encode())
            socket.send_fds(self._control, [b"b"], [orders, out, err, *fds.values()])
        finally:
            os.close(orders)
            self._control.close()

    def end(self) -> None:
        """Kill it and collect it; it was not needed."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it (state D)
            self.process.wait(END_S)
