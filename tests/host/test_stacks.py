"""Stacks of real processes of this machine that claim to be of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.host.job_processes import WantedStacks
from allranks.host.py_spy import explain_refusal
from allranks.host.stacks import Frame, NodeStacks, Process, look
from allranks.model.node_look import ProcessRole
from conftest import HANG_S, wait_until

JOB = f"9{os.getpid():06}"
SCRIPT = """\
import subprocess, sys, threading, time

def nap():
    time.sleep(600)

def wait_for_child():
    subprocess.run(["sleep", "600"])

def parent_of_python():
    subprocess.run([sys.executable, __file__, "nap"])

globals()[sys.argv[1]]()
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script with SLURM's variables; all that came of it is ended afterwards."""
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []

    def start_one(function: str, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), function] if function else ["sleep", "600"]
        started.append(
            subprocess.Popen(command, env={**os.environ, "SLURM_JOB_ID": JOB, **env}, start_new_session=True)
        )
        return started[-1]

    yield start_one
    for each in started:
        os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def look_until(is_there: Callable[[NodeStacks], bool]) -> NodeStacks:
    """The processes need a moment until they are where they stay."""
    deadline_s = time.monotonic() + HANG_S
    while not is_there(found := look(WantedStacks(job=JOB), node="here")):
        assert time.monotonic() < deadline_s, found
    return found


def functions(process: Process) -> list[str]:
    return [frame.function for thread in process.threads if thread.is_main for frame in thread.frames]


def test_every_process_of_the_job_says_where_it_is(start: Start) -> None:
    start("nap", RANK="0", LOCAL_RANK="0", WORLD_SIZE="3")
    start("wait_for_child", RANK="1", LOCAL_RANK="1", WORLD_SIZE="3")
    stopped = start("nap", RANK="2", LOCAL_RANK="2", WORLD_SIZE="3")
    start("", RANK="3")
    look_until(lambda found: [len(functions(each)) > 1 for each in found.processes] == [True] * 3)
    stopped.send_signal(signal.SIGSTOP)
    found = look_until(lambda found: found.processes[2].state == "T" and "run" in functions(found.processes[1]))
    assert [(each.rank, each.local_rank, each.world_size) for each in found.processes] == [
        (0, 0, 3), (1, 1, 3), (2, 2, 3),
    ]  # fmt: skip
    assert functions(found.processes[0]) == ["nap", "<module>"]
    assert functions(found.processes[1])[-2:] == ["wait_for_child", "<module>"]
    assert functions(found.processes[2]) == ["nap", "<module>"]
    assert [each.state for each in found.processes] == ["S", "S", "T"]
    assert (found.node, found.job) == ("here", JOB)
    assert Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T"  # and is left so


def test_the_user_s_source_lines_come_along_from_a_path_with_a_space(start: Start, tmp_path: Path) -> None:
    start("nap", RANK="0")
    found = look_until(lambda found: bool(found.processes) and len(functions(found.processes[0])) == 2)
    frame = next(thread for thread in found.processes[0].threads if thread.is_main).frames[0]
    assert frame == Frame("nap", str(tmp_path / "a script.py"), 4, "time.sleep(600)")


def test_a_python_below_a_rank_is_its_child(start: Start) -> None:
    start("parent_of_python", SLURM_PROCID="4", SLURM_LOCALID="1", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="8")
    found = look_until(lambda found: [bool(functions(each)) for each in found.processes] == [True] * 2)
    assert [(each.role, each.rank, each.local_rank) for each in found.processes] == [
        (ProcessRole.WORKER, 4, 1),
        (ProcessRole.CHILD, 4, 1),
    ]
    assert found.processes[0].world_size == 8


def test_chosen_processes_need_no_job(start: Start) -> None:
    pid = start("nap").pid
    found = wait_until(lambda: look(WantedStacks(pids=(pid, 2**22 + 1)), node="here").processes, "the process")
    assert [each.pid for each in found] == [pid]


def test_a_process_that_is_no_python_says_so(start: Start) -> None:
    found = look(WantedStacks(pids=(start("").pid,)), node="here").processes[0]
    assert found.threads == ()
    assert found.problem.startswith("py-spy: Error: Failed to find python version")


def test_without_py_spy_the_processes_are_named_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("nap", RANK="0")
    look_until(lambda found: len(found.processes) == 1)
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    monkeypatch.setenv("PATH", "/nowhere")
    found = look(WantedStacks(job=JOB), node="here").processes[0]
    assert (found.rank, found.problem) == (0, "py-spy is not installed for /nowhere/python3: pip install py-spy")


@pytest.fixture
def problem_with(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What is said of a rank's process where py-spy is this shell script."""

    def ask(script: str) -> str:
        py_spy = tmp_path / "bin" / "py-spy"
        py_spy.parent.mkdir()
        py_spy.write_text(f"#!/bin/sh\n{script}\n")
        py_spy.chmod(0o755)
        start("nap", RANK="0")
        look_until(lambda found: len(found.processes) == 1)
        monkeypatch.setattr(sys, "executable", str(py_spy.with_name("python3")))
        return look(WantedStacks(job=JOB), node="here").processes[0].problem

    return ask


def test_a_py_spy_that_does_not_come_back_costs_its_deadline(problem_with: Callable[[str], str]) -> None:
    began_s = time.monotonic()
    assert problem_with("exec sleep 60") == "py-spy did not finish within 4 s"
    assert time.monotonic() - began_s < 40


def test_an_answer_of_py_spy_that_is_cut_off_is_said(problem_with: Callable[[str], str]) -> None:
    problem = problem_with("""printf '[{"pid": 1, "thr'""")
    assert problem.startswith("py-spy: its answer is cut off (Input data was truncated")


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("0", "run this as its owner or as root"),
        ("", "run this as its owner or as root"),
        ("1", "as root: sysctl -w kernel.yama.ptrace_scope=0"),
        ("2", "as root: sysctl -w kernel.yama.ptrace_scope=0"),
        ("3", "only a reboot lowers it"),
    ],
)
def test_a_refusal_of_the_kernel_comes_with_its_cure(scope: str, words: str) -> None:
    assert words in explain_refusal(scope)
