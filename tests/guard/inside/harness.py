"""Real workers with cells, without an agent: torch with Gloo over loopback, the hook, and a cell each.

Within `standing_by`, a standby forks them, as one does the workers of `allranks run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

import allranks
from allranks.guard.inside.cell import Cell
from allranks.join.standby import READY, differing
from allranks.launch.workers import PR_SET_CHILD_SUBREAPER, Standby, become_subreaper
from conftest import clean_env, wait_until

SITE = Path(allranks.__file__).parent / "join" / "site"
PREAMBLE = """
import os, sys, time
import torch
import torch.distributed as dist
RANK = int(os.environ["RANK"])
"""


class Forked:
    """A fork of the standby, with the methods of subprocess.Popen that tests need."""

    def __init__(self, process: psutil.Process) -> None:
        self.pid, self._process = process.pid, process

    def wait(self, timeout: float) -> int:
        return int(self._process.wait(timeout))

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except psutil.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@dataclass
class Started:
    """One worker."""

    process: subprocess.Popen[str] | Forked
    cell: Cell
    out: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def told(self) -> bool:
        """Whether it has told anything."""
        return self.cell.read().told is not None


ENV = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(SITE),
    "ALLRANKS_AGENT_PID": str(os.getpid()), "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


@dataclass
class Standing:
    """The standby, and the script that its forks run."""

    standby: Standby
    script: Path

    def fork(self, env: dict[str, str], cell: Cell, out: int) -> Forked:
        become_subreaper()
        forked = self.standby.fork(env, out=out, err=out, fds={"ALLRANKS_CELL_FD": cell.fd})
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert forked is not None
        return Forked(forked)


_standing: list[Standing] = []
"""At most one."""


@contextlib.contextmanager
def standing_by(script: Path) -> Iterator[None]:
    """Fork workers whose environment allows it from one standby, as this script."""
    script.write_text("")
    made = Standby.start([sys.executable, str(script)], clean_env(os.environ, **ENV))
    try:
        wait_until(lambda: not made.is_importing, "import torch")
        assert made.answer == READY
        _standing.append(Standing(made, script))
        yield
    finally:
        _standing.clear()
        made.end()


@contextlib.contextmanager
def workers(tmp_path: Path, text: str, num: int = 2, *, fresh: bool = False, **env: str) -> Iterator[list[Started]]:
    """Start this script as so many ranks, and end them.

    Args:
        fresh: no standby forks them.
    """
    text = PREAMBLE + textwrap.dedent(text)
    script = tmp_path / "train.py"
    script.write_text(text)
    if _standing:
        _standing[0].script.write_text(f"import os; os.chdir({str(Path.cwd())!r}){text}")  # the first line is empty
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    try:
        for rank in range(num):
            cell = Cell.create()
            own = {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            whole = clean_env(os.environ, **ENV, **own) | env
            out = tmp_path / f"out_{rank}"
            with out.open("w") as file:
                process: subprocess.Popen[str] | Forked
                if _standing and not fresh and not differing(_standing[0].standby.env, whole):
                    process = _standing[0].fork(whole, cell, file.fileno())
                else:
                    process = subprocess.Popen(
                        [sys.executable, str(script)],
                        env=whole | {"ALLRANKS_CELL_FD": str(cell.fd)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        text=True,
                        pass_fds=(cell.fd,),
                        start_new_session=True,
                    )
            started.append(Started(process, cell, out))
        yield started
    finally:
        for worker in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.process.wait(60)
            worker.cell.close()
