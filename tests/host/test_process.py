"""Are the kernel's states of a process read as what they mean?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.host.process import is_below, read_environment, read_process, read_usage, read_wait_status
from allranks.model.beat import ProcessState
from conftest import HANG_S


def wait_for(pid: int, state: ProcessState) -> None:
    deadline_s = time.monotonic() + HANG_S
    while read_process(pid).state is not state:
        assert time.monotonic() < deadline_s, f"{pid} is {read_process(pid).state}, expected {state}"
        time.sleep(0.01)


def test_a_process_is_followed_from_running_to_gone():
    text = "import sys\nsys.stdin.readline()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        wait_for(child.pid, ProcessState.SLEEPING)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        wait_for(child.pid, ProcessState.RUNNING)
        deadline_s = time.monotonic() + HANG_S
        while read_process(child.pid).cpu_s < 0.1:
            assert time.monotonic() < deadline_s
        child.send_signal(signal.SIGSTOP)
        wait_for(child.pid, ProcessState.STOPPED)
        child.kill()
        wait_for(child.pid, ProcessState.GONE)  # a zombie, until it is collected
    assert read_process(child.pid).state is ProcessState.GONE


def proc(root: Path, pid: int, letter: str, *, name: str = "python", switches: int = 7) -> Path:
    own = root / f"proc/{pid}"
    own.mkdir(parents=True)
    fields = [letter, "41", *["0"] * 9, "150", "50", *["0"] * 30]
    (own / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (own / "status").write_text(
        f"Name:\t{name}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t3\n"
    )
    return own


@pytest.mark.parametrize(
    ("letter", "state"),
    [
        ("R", ProcessState.RUNNING),
        ("S", ProcessState.SLEEPING),
        ("I", ProcessState.SLEEPING),
        ("D", ProcessState.BLOCKED),
        ("T", ProcessState.STOPPED),
        ("t", ProcessState.TRACED),
        ("Z", ProcessState.GONE),
        ("X", ProcessState.GONE),
    ],
)
def test_each_letter_has_its_state(tmp_path: Path, letter: str, state: ProcessState):
    proc(tmp_path, 42, letter, name="a (nasty) name) R 1")
    seen = read_process(42, root=tmp_path)
    assert (seen.state, seen.parent, seen.num_switches) == (state, 41, 7)
    assert seen.cpu_s == 200 / os.sysconf("SC_CLK_TCK")


def test_a_process_in_a_frozen_cgroup_is_stopped(tmp_path: Path):
    own = proc(tmp_path, 42, "S")
    (own / "cgroup").write_text("0::/job_7/step_0\n")
    group = tmp_path / "sys/fs/cgroup/job_7/step_0"
    group.mkdir(parents=True)
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert read_process(42, root=tmp_path).state is ProcessState.SLEEPING
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert read_process(42, root=tmp_path).state is ProcessState.STOPPED


def test_one_that_is_not_there_is_gone(tmp_path: Path):
    assert read_process(42, root=tmp_path).state is ProcessState.GONE
    (tmp_path / "proc/42").mkdir(parents=True)
    (tmp_path / "proc/42/stat").write_text("42 (py")
    assert read_process(42, root=tmp_path).state is ProcessState.GONE


def test_descendants_are_below_and_others_are_not():
    assert is_below(os.getpid(), os.getppid())
    assert is_below(os.getpid(), 1)  # an agent may be the first process of its container
    assert is_below(os.getpid(), os.getpid())
    assert not is_below(1, os.getpid())


def test_what_children_use_counts():
    text = "import os, sys\nif os.fork() == 0:\n    while True: os.write(1, bytes(1000))\nsys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as parent:
        try:
            deadline_s = time.monotonic() + 60
            while (usage := read_usage(parent.pid)).cpu_s < 0.3 or usage.written_bytes < 100_000:
                assert time.monotonic() < deadline_s, usage
                time.sleep(0.02)
            assert read_process(parent.pid).cpu_s < 0.3
            assert usage.reads_terminal is False  # it reads a pipe
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_who_waits_for_a_line_from_a_terminal_is_seen():
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=theirs, stdout=subprocess.DEVNULL) as child:
        deadline_s = time.monotonic() + 60
        try:
            while not read_usage(child.pid).reads_terminal:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            assert read_usage(os.getpid()).reads_terminal  # a child of this one
        finally:
            os.write(ours, b"go\n")
    os.close(ours)
    os.close(theirs)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ["os.ftruncate(fd, 10**12)", "os.write(fd, b'RANK=3\\0')"])
def test_the_environment_of_a_forked_worker_is_read_up_to_its_possible_size(make: str):
    """It is a memory file of the worker, which can make it 1 TB long."""
    text = f"import os, time; fd = os.memfd_create('allranks-environment'); {make}; print(flush=True); time.sleep(60)"
    env = {"ALLRANKS_STANDBY": "5", "RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert read_environment(child.pid)["RANK"] == ("0" if "truncate" in make else "3")
        child.kill()


@pytest.mark.parametrize(
    ("text", "status"), [("raise SystemExit(3)", 3 << 8), ("import os; os.kill(os.getpid(), 9)", 9)]
)
def test_how_a_process_ended_is_told_by_the_zombie_and_then_by_its_pidfd(text, status):
    with subprocess.Popen([sys.executable, "-c", text]) as child:
        pidfd = os.pidfd_open(child.pid)
        assert read_process(child.pid).wait_status is None or read_process(child.pid).state is ProcessState.GONE
        wait_for(child.pid, ProcessState.GONE)
        assert read_process(child.pid).wait_status == status
        assert read_wait_status(pidfd) is None  # not before it was reaped
    assert read_process(child.pid).wait_status is None
    assert read_wait_status(pidfd) in (status, None)  # None: before Linux 6.15
    os.close(pidfd)


def test_the_status_of_another_users_zombie_is_not_believed(tmp_path, monkeypatch):
    """The kernel tells those who may not know that it ended with 0."""
    proc(tmp_path, 42, "Z").joinpath("stat").write_text(f"42 (python) Z {' '.join(['0'] * 49)}\n")
    assert read_process(42, root=tmp_path).wait_status == 0
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert read_process(42, root=tmp_path).wait_status is None
