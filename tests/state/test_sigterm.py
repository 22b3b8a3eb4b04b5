"""Does SIGTERM end a worker when its agent means it, and only then?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from allranks.guard.inside.cell import ENV_FD, Cell

PROGRAM = """\
import os, signal, sys, time
from allranks.guard.inside.cell import Cell
from allranks.state.resumed.telling import leave_to_agent
cell = Cell.inherited()
{before}
print(leave_to_agent(lambda: cell.is_ending), flush=True)
{after}
time.sleep(60)
"""
FORK = """\
pid = os.fork()
if pid:
    time.sleep(0.5)  # Python drops signals of the moment of a fork
    os.kill(pid, signal.SIGTERM)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@contextmanager
def running(cell: Cell, *, before: str = "", after: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        env={**os.environ, ENV_FD: str(cell.fd)},
        pass_fds=(cell.fd,),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def cell() -> Iterator[Cell]:
    cell = Cell.create()
    yield cell
    cell.close()


def test_a_signal_of_slurm_s_is_left_to_the_agent_and_the_agent_s_is_obeyed(cell: Cell) -> None:
    with running(cell) as process:
        assert said(process) == "True"
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        cell.end()
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


def test_a_script_s_own_handler_stays(cell: Cell) -> None:
    with running(cell, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))") as process:
        assert said(process) == "False"
        process.terminate()
        assert process.wait(10) == 7


def test_children_die_of_it_as_ever(cell: Cell) -> None:
    with running(cell, after=FORK) as process:
        assert [said(process), said(process)] == ["True", "15"]
