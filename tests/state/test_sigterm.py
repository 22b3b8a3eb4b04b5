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
here, there = os.pipe()
pid = os.fork()
if pid:
    os.read(here, 1)  # Python drops signals of the moment of a fork
    os.kill(pid, signal.SIGTERM)
    print(os.waitpid(pid, 0)[1], flush=True)
os.write(there, b"x")
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
        assert process.wait(60) == -signal.SIGTERM


ALONE = """\
import signal, sys, time
from allranks.state.resumed.telling import leave_by_itself
asked = []
undo = leave_by_itself(lambda: asked.append(1) or {runs})
{after}
print(asked, flush=True)
while not asked:
    time.sleep(0.01)
print(asked, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("runs", "after", "said_s", "exit_codes"),
    [
        pytest.param(True, "", ["[]", "[1]"], [None, -15], id="the first asks for a checkpoint, the second ends it"),
        pytest.param(False, "", ["[]"], [-15], id="no training runs"),
        pytest.param(True, "undo()", ["[]"], [-15], id="the session is over"),
        pytest.param(
            True, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); undo()", ["[]"], [7], id="a later handler"
        ),
    ],
)
def test_without_an_agent_the_training_is_asked(
    runs: bool, after: str, said_s: list[str], exit_codes: list[int | None]
) -> None:
    words = [sys.executable, "-c", ALONE.format(runs=runs, after=after)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            for words, exit_code in zip(said_s, exit_codes, strict=True):
                assert said(process) == words
                process.terminate()
                if exit_code is not None:
                    assert process.wait(60) == exit_code
        finally:
            process.kill()


def saving(cell: Cell | None, text: str) -> subprocess.Popen[str]:
    env = {**os.environ} | ({ENV_FD: str(cell.fd)} if cell else {})
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, sys, time\nimport allranks\n{text}"],
        env=env, pass_fds=(cell.fd,) if cell else (), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


SAVING = """\
with allranks.saving():
    with allranks.saving():
        pass
    os.write(1, b"in\\n")
    sys.stdin.readline()
    os.write(1, b"written\\n")
os.write(1, b"out\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_rank_that_saves_is_ended_when_it_has_saved(cell: Cell, has_agent: bool) -> None:
    with saving(cell if has_agent else None, SAVING) as process:
        try:
            assert said(process) == "in"
            assert cell.is_saving == has_agent
            process.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
            assert said(process) == "written"
            assert process.wait(60) == -signal.SIGTERM
            assert not cell.is_saving
        finally:
            process.kill()


def test_a_script_that_handles_sigterm_gets_it_while_it_saves() -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n" + SAVING
    with saving(None, text) as process:
        assert said(process) == "in"
        process.terminate()
        assert process.wait(60) == 7


def test_the_session_s_handler_is_no_handler_of_the_script(cell: Cell) -> None:
    before = "from allranks.guard.inside import handlers\nhandlers.begin(cell.fd)"
    with running(cell, before=before) as process:
        assert said(process) == "True"
        told = cell.handlers()
        assert (told.pid, told.handled, told.own) == (process.pid, 0, 1 << signal.SIGTERM)


def test_a_script_s_own_handler_stays(cell: Cell) -> None:
    with running(cell, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))") as process:
        assert said(process) == "False"
        process.terminate()
        assert process.wait(60) == 7


def test_children_die_of_it_as_ever(cell: Cell) -> None:
    with running(cell, after=FORK) as process:
        assert [said(process), said(process)] == ["True", "15"]
