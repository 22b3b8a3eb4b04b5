"""Real workers with cells, without an agent: torch with Gloo over loopback, the hook, and a cell each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import allranks
from allranks.guard.inside.cell import Cell
from conftest import clean_env

SITE = Path(allranks.__file__).parent / "join" / "site"
PREAMBLE = """
import os, sys, time
import torch
import torch.distributed as dist
RANK = int(os.environ["RANK"])
"""


@dataclass
class Started:
    """One worker."""

    process: subprocess.Popen[str]
    cell: Cell
    out: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def told(self) -> bool:
        """Whether it has told anything."""
        return self.cell.read().told is not None


@contextlib.contextmanager
def workers(tmp_path: Path, text: str, num: int = 2, **env: str) -> Iterator[list[Started]]:
    """Start this script as so many ranks, and end them."""
    script = tmp_path / "train.py"
    script.write_text(PREAMBLE + textwrap.dedent(text))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    try:
        for rank in range(num):
            cell = Cell.create()
            own = {
                "RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": str(SITE), "ALLRANKS_AGENT_PID": str(os.getpid()), "ALLRANKS_CELL_FD": str(cell.fd),
            }  # fmt: skip
            out = tmp_path / f"out_{rank}"
            with out.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, str(script)],
                    env=clean_env(os.environ, **own) | env,
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
