"""Real processes of this machine that claim to be of a job, and trees of /proc for what cannot be made here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from allranks.host.stacks import (
    Frame,
    NodeStacks,
    Process,
    ProcessRole,
    WantedStacks,
    explain_refusal,
    find_processes,
    look,
)
from conftest import wait_until

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
    deadline_s = time.monotonic() + 20
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
    assert found.others == ("sleep",)
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


def test_the_rank_of_a_dead_process_s_parent_is_known(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(10, {"SLURM_JOB_ID": "7", "RANK": "1"})
    tree.add(11, {}, parent=10, state="Z")
    found, _ = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(each.pid, each.role, each.rank) for each in found] == [(10, "worker", 1), (11, "child", 1)]


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


class Tree:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, env: Mapping[str, str], *, parent: int = 1, command: str = "python x.py", state: str = "S"
    ) -> None:
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} (python3.11) {state} {parent} " + "0 " * 20)
        (directory / "environ").write_text("".join(f"{name}={value}\0" for name, value in env.items()))
        (directory / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (directory / "exe").symlink_to("/usr/bin/python3.11")


JOB_7 = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("env", "job", "rank"),
    [
        ({"SLURM_JOB_ID": "7", "RANK": "5"}, "7", 5),
        (JOB_7, "7", 2),
        ({**JOB_7, "RANK": "5"}, "7", 5),
        ({**JOB_7, "OMPI_COMM_WORLD_RANK": "3"}, "7", 3),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "7", None),  # a batch script's own
        ({**JOB_7, "SLURM_STEP_ID": "4294967291"}, "7", None),
        ({**JOB_7, "SLURM_STEP_ID": "-5"}, "7", None),  # a batch script of 26.05
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1", "RANK": "0"}, "3_1", 0),
        ({"SLURM_JOB_ID": "4", "SLURM_JOB_ID_HET_GROUP_1": "5", "RANK": "0"}, "5", 0),
        ({"SLURM_JOB_ID": "7", "RANK": "five"}, "7", None),
    ],
)
def test_the_environment_says_job_and_rank(tmp_path: Path, env: dict[str, str], job: str, rank: int | None) -> None:
    Tree(tmp_path).add(10, env)
    found, _ = find_processes(WantedStacks(job=job), root=tmp_path)
    assert [each.rank for each in found] == [rank]
    assert find_processes(WantedStacks(job="77"), root=tmp_path) == ([], [])


@pytest.mark.parametrize(
    "command", ["/venv/bin/python /venv/bin/torchrun x.py", "python -m torch.distributed.run x.py"]
)
def test_torchrun_is_a_launcher_before_and_after_it_has_started_workers(tmp_path: Path, command: str) -> None:
    tree = Tree(tmp_path)
    tree.add(10, JOB_7, command=command)
    before, _ = find_processes(WantedStacks(job="7"), root=tmp_path)
    tree.add(11, {**JOB_7, "RANK": "4"}, parent=10)
    tree.add(12, {**JOB_7, "RANK": "4"}, parent=11)
    after, _ = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(each.role, each.rank) for each in before] == [("launcher", None)]
    assert [(each.role, each.rank) for each in after] == [("worker", 4), ("child", 4), ("launcher", None)]


@pytest.mark.parametrize(
    "command",
    [
        "/venv/bin/python /venv/bin/allranks run train.py",
        "/venv/bin/python -m allranks stack --here 7",
        "/venv/bin/python -c from\xa0multiprocessing.resource_tracker\xa0import\xa0main;main(5)",
        "/venv/bin/python -B -c import\xa0sys;\xa0from\xa0multiprocessing.forkserver\xa0import\xa0main;\xa0main(3,",
    ],
)
def test_our_own_processes_and_python_s_helpers_are_left_out(tmp_path: Path, command: str) -> None:
    Tree(tmp_path).add(10, JOB_7, command=command)
    assert find_processes(WantedStacks(job="7"), root=tmp_path) == ([], [])


def test_what_a_fork_server_starts_is_a_child_of_the_rank_and_the_server_is_left_out(tmp_path: Path) -> None:
    """Python 3.14 starts processes by it: they are forked, so that they have the server's command line."""
    tree, server = Tree(tmp_path), "python -c from\xa0multiprocessing.forkserver\xa0import\xa0main;\xa0main(3,"
    tree.add(10, {**JOB_7, "RANK": "4"})
    tree.add(11, {**JOB_7, "RANK": "4"}, parent=10, command=server)
    tree.add(12, {**JOB_7, "RANK": "4"}, parent=11, command=server)
    found, _ = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(each.pid, each.role, each.rank) for each in found] == [(10, "worker", 4), (12, "child", 4)]


def test_a_process_whose_environment_is_closed_is_found_by_its_cgroup(tmp_path: Path) -> None:
    Tree(tmp_path).add(10, {})
    (tmp_path / "proc/10/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    found, _ = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [each.pid for each in found] == [10]


def test_every_process_with_a_rank_is_found_without_a_job(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(10, {"RANK": "0", "WORLD_SIZE": "2"})
    tree.add(11, {"HOME": "/root"})
    assert [each.pid for each in find_processes(WantedStacks(), root=tmp_path)[0]] == [10]


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("0", "run this as its owner or as root"),
        ("", "run this as its owner or as root"),
        ("1", "as root: sysctl -w kernel.yama.ptrace_scope=0"),
        ("2", "as root: sysctl -w kernel.yama.ptrace_scope=0"),
        ("3", "only with a reboot"),
    ],
)
def test_a_refusal_of_the_kernel_comes_with_its_cure(scope: str, words: str) -> None:
    assert words in explain_refusal(scope)
