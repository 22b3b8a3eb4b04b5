"""Does an agent know which signals a script handles, and which it has got, and does the script notice nothing?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.guard.inside import cell as cell_module
from allranks.guard.inside.cell import Cell
from allranks.host.signals import handled, read_caught

PREAMBLE = f"""
import importlib, os, sys, types
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = [{str(Path(cell_module.__file__).parent)!r}]
importlib.import_module("inside.handlers").begin(int(os.environ["ALLRANKS_CELL_FD"]))
import signal
"""
WAITS = "\nos.write(1, b'ready\\n')\nos.read(0, 1)\n"


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell.create()
    yield made
    made.close()


def start(cell: Cell, text: str, **env: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", PREAMBLE + textwrap.dedent(text) + WAITS],
        env={**os.environ, "ALLRANKS_CELL_FD": str(cell.fd)} | env,
        pass_fds=(cell.fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def handled_by(cell: Cell, pid: int) -> set[str]:
    told = cell.handlers()
    assert told.pid == pid
    return {signal.Signals(each).name for each in handled(read_caught(pid), script=told.handled, own=told.own)}


OURS = """
def handle(signum, frame): pass
handle.is_allranks_handler = True
signal.signal(signal.SIGTERM, handle)
"""
ASYNCIO = """
import asyncio
runner = asyncio.Runner() if hasattr(asyncio, "Runner") else None
if runner:
    async def wait():
        os.write(1, b"ready\\n")
        os.read(0, 1)
    runner.run(wait())
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("signal.signal(signal.SIGTERM, print)", {"SIGTERM"}),
        ("signal.signal(signal.SIGTERM, print); signal.signal(signal.SIGTERM, signal.SIG_DFL)", set()),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", set()),
        ("signal.signal(signal.SIGINT, print); signal.signal(signal.SIGUSR2, print)", {"SIGINT", "SIGUSR2"}),
        ("signal.signal(signal.SIGINT, signal.default_int_handler)", set()),
        ("signal.signal(signal.SIGALRM, print)", set()),
        (OURS, set()),
        ("import faulthandler; faulthandler.register(signal.SIGUSR1)", {"SIGUSR1"}),
        (ASYNCIO, set()),
        ("if os.fork() == 0: signal.signal(signal.SIGTERM, print); os._exit(0)\nos.wait()", set()),
    ],
    ids=["nothing", "SIGTERM", "put back", "ignored", "two", "Python's own", "SIGALRM is the script's", "the session's",
         "in C", "asyncio.run", "in a child"],
)  # fmt: skip
def test_what_a_script_handles_is_known(cell: Cell, text: str, expected: set[str]):
    child = start(cell, text)
    try:
        assert handled_by(cell, child.pid) == expected
    finally:
        child.kill()
        child.communicate()


def test_a_handler_that_has_begun_is_known_and_the_script_sees_its_own(cell: Cell):
    child = start(
        cell,
        """
        def save(signum, frame):
            print(signum, frame.f_code.co_name, flush=True)
            raise SystemExit("left by the handler")
        def earlier(signum, frame): pass
        signal.signal(signal.SIGTERM, earlier)
        assert signal.signal(signal.SIGTERM, save) is earlier
        assert signal.getsignal(signal.SIGTERM) is save
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """,
    )
    assert cell.handlers().begun_s == {}
    before_s = time.monotonic()
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (1, "15 <module>\n", "left by the handler\n")
    (begun_s,) = cell.handlers().begun_s.values()
    assert before_s <= begun_s <= time.monotonic()


@pytest.mark.parametrize(
    ("env", "handles", "printed"),
    [
        pytest.param({"SLURM_JOB_ID": "1"}, True, "15\n", id="under SLURM as SIGTERM"),
        pytest.param({"SLURM_JOB_ID": "1"}, False, "", id="under SLURM, no handler"),
        pytest.param({}, True, "", id="elsewhere: nobody but the agent sends it"),
    ],
)
def test_ctrl_c_that_slurm_sends_to_all(cell: Cell, env: dict[str, str], handles: bool, printed: str):
    text = "signal.signal(signal.SIGTERM, lambda signum, _: print(signum, flush=True))" if handles else ""
    child = start(cell, text, **env)
    child.send_signal(signal.SIGINT)
    time.sleep(0.2)
    out, err = child.communicate("\n", timeout=30)
    assert out == printed
    assert ("KeyboardInterrupt" in err) == (not printed)
    assert "handlers.py" not in err


@pytest.mark.parametrize(("job", "times"), [("SLURM_JOB_ID", 1), ("PBS_JOBID", 2)])
def test_a_signal_that_slurm_sends_twice_enters_a_handler_once(cell: Cell, job: str, times: int):
    text = "def save(signum, _):\n    os.write(1, b'saving\\n')\n    import time; time.sleep(1)\n"
    child = start(cell, text + "signal.signal(signal.SIGTERM, save)", **{job: "1"})
    assert child.stdout is not None
    child.send_signal(signal.SIGTERM)
    first = child.stdout.readline()  # signals that wait at the same time are one
    child.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    out, _ = child.communicate("\n", timeout=30)
    assert first + out == "saving\n" * times


def test_a_program_that_the_worker_starts_does_not_speak_for_it(cell: Cell):
    child = start(cell, "signal.signal(signal.SIGTERM, print)")
    try:
        other = start(cell, "signal.signal(signal.SIGUSR1, print)")
        other.communicate("\n")
        assert handled_by(cell, child.pid) == {"SIGTERM"}
    finally:
        child.kill()
        child.communicate()
