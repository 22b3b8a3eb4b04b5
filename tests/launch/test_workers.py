"""How a worker ended, as its agent sees it, and who is taken for a left-over of the workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell
from allranks.launch import workers as workers_module
from allranks.launch.workers import WRITER, Worker, age, end_left_behind, wait_for_writers
from allranks.wire.protocol import WorkerEnd


def test_a_tool_of_the_agent_itself_is_no_left_over():
    own = subprocess.Popen(["sleep", "60"])
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)  # as workers are, and so all that they start
    try:
        named = end_left_behind(0.5)
        assert f"sleep (pid {left.pid})" in named
        assert f"sleep (pid {own.pid})" not in named
        assert own.poll() is None
    finally:
        own.kill()
        left.kill()
        own.wait()
        left.wait()


def test_an_end_is_told_with_its_age_for_a_leader_that_does_not_know_the_clock_yet():
    told = age(WorkerEnd(rank=1, node="n1", exit_code=1, time_s=time.time() - 5), generation=2)
    assert 5 <= told.age_s < 60
    assert age(WorkerEnd(rank=1, node="n1", exit_code=1, time_s=time.time() + 5), generation=2).age_s == 0


def test_a_left_over_gets_sigterm_first_and_may_clean_up(tmp_path: Path):
    said = tmp_path / "said"
    script = f"trap 'echo bye > {said}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    left = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert left.stdout is not None
        assert left.stdout.readline() == b"ready\n"
        assert f"sh (pid {left.pid})" in end_left_behind(30.0)
        assert said.read_text() == "bye\n"
    finally:
        left.kill()
        left.communicate()


@pytest.mark.parametrize(("lives_s", "is_named"), [(0.2, False), (60, True)])
def test_a_helper_of_multiprocessing_may_end_by_itself(lives_s: float, is_named: bool):
    """Python 3.14's fork server and the resource tracker end a moment after the worker."""
    script = f"import time; print(flush=True); time.sleep({lives_s})  # from multiprocessing.forkserver import main"
    command = [sys.executable, "-I", "-S", "-c", script]
    left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert left.stdout is not None
        left.stdout.readline()
        assert any(f"(pid {left.pid})" in name for name in end_left_behind(0.5)) == is_named
        assert psutil.pid_exists(left.pid) is False
    finally:
        left.kill()
        left.communicate()


def test_what_is_spared_keeps_its_children():
    """As srun, which is two processes."""
    spared = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
    try:
        child = psutil.Process(int(spared.stdout.readline()))
        assert f"sh (pid {spared.pid})" not in end_left_behind(0.1, spared=[spared.pid])
        assert psutil.Process(spared.pid).children() == [child]
    finally:
        os.killpg(spared.pid, signal.SIGKILL)
        spared.communicate()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with contextlib.closing(Cell.create()) as cell:
        yield Worker(rank=3, node="node02", folder=Folder.at(tmp_path), cell=cell)


@pytest.mark.parametrize("has_time", [True, False])
def test_a_worker_failed_when_it_raised_and_not_when_its_process_had_ended(worker: Worker, has_time: bool):
    """Its `finally` blocks and its interpreter's exit may take longer than the whole life of a victim."""
    raised_s = time.time() - 100
    extra = {"py_callstack": "Traceback ...", **({"time_s": raised_s} if has_time else {})}
    record = json.dumps({"message": {"message": "ValueError: batch 17", "extraInfo": extra}})
    worker.start(
        ["/bin/sh", "-c", 'printf %s "$1" > "$2"; exit 1', "sh", record, str(worker.path("error.json"))],
        os.environ,
        fds={},
    )
    started_s = time.time()
    end = worker.reap()
    assert (end.rank, end.exit_code, end.message, end.traceback) == (3, 1, "ValueError: batch 17", "Traceback ...")
    if has_time:
        assert end.time_s == raised_s
    else:
        assert end.time_s >= started_s - 1


def test_a_worker_that_was_killed_after_it_lost_a_connection_ended_when_it_was_killed(worker: Worker):
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    record = json.dumps({"message": {"message": lost, "extraInfo": {"time_s": time.time() - 100}}})
    script = 'printf %s "$1" > "$2"; kill -9 $$'
    started_s = time.time()
    worker.start(["/bin/sh", "-c", script, "sh", record, str(worker.path("error.json"))], os.environ, fds={})
    end = worker.reap()
    assert (end.exit_code, end.message) == (-9, lost)
    assert end.time_s >= started_s


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_worker_that_made_all_its_steps_is_known_by_its_cell(worker: Worker, is_finished: bool):
    assert worker.cell.claim()
    if is_finished:
        worker.cell.finish()
    worker.start(["/bin/true"], os.environ, fds={})
    end = worker.reap()
    assert (end.exit_code, end.is_finished) == (0, is_finished)


def raise_in(worker: Worker, **told: object) -> int:
    """What the hook writes; the time."""
    assert worker.cell.claim()
    record = {"message": "ValueError: bad", "py_callstack": "Traceback ...", "time_s": 1e9, "threads": [], **told}
    assert worker.cell.raised(json.dumps(record).encode())
    return worker.cell.read().raised.written_ns


@pytest.mark.parametrize(
    ("threads", "main_at", "lingers"),
    [
        (["Thread-1 (upload)"], "train.py:3 in f", "thread Thread-1 (upload)"),
        (["a", "b\x1b[2J"], "", r"threads a, b\x1b[2J"),
        ([], "train.py:3 in slow", "train.py:3 in slow"),
        ("nonsense", "", ""),
    ],
)
def test_a_worker_that_does_not_exit_after_an_exception_has_ended(worker: Worker, threads, main_at: str, lingers: str):
    worker.start(["/bin/true"], os.environ, fds={})
    assert worker.find_lingering(time.monotonic_ns() + 10**12, main_at="") is None  # it has raised nothing
    raised_ns = raise_in(worker, threads=threads)
    assert worker.find_lingering(raised_ns + 2_900_000_000, main_at=main_at) is None
    worker.cell.phase("saving")
    assert worker.find_lingering(raised_ns + 60_000_000_000, main_at=main_at) is None
    worker.cell.phase("leaving")
    end = worker.find_lingering(raised_ns + 3_000_000_000, main_at=main_at)
    assert (end.exit_code, end.message, end.traceback, end.time_s, end.lingers) == (
        1, "ValueError: bad", "Traceback ...", 1e9, lingers,
    )  # fmt: skip
    assert worker.find_lingering(raised_ns + 4_000_000_000, main_at=main_at) is None  # told once
    assert worker.reap().lingers is None


def test_an_exception_is_known_although_its_file_could_not_be_written(worker: Worker):
    raise_in(worker)
    worker.start(["/bin/false"], os.environ, fds={})
    end = worker.reap()
    assert (end.exit_code, end.message, end.traceback, end.time_s) == (1, "ValueError: bad", "Traceback ...", 1e9)


CRASHED = """Fatal Python error: Aborted

Thread 0x00007fb8d97fa640 (most recent call first):
  File "/opt/allranks/guard/inside/beat.py", line 88 in _run

Current thread 0x00007fb8e1ffb640 (most recent call first):
  <no Python frame>

Thread 0x00007fb8f2ba83b0 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630 in backward
  File "train.py", line 12 in step

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
STACK = """Fatal Python error: Aborted
Thread 0x00007fb8f2ba83b0 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630 in backward
  File "train.py", line 12 in step"""


@pytest.mark.parametrize(("signum", "before"), [(signal.SIGABRT, "what():  no memory\n"), (signal.SIGSEGV, "")])
def test_of_a_crash_the_stack_that_counts_is_kept_apart_from_the_last_words(worker: Worker, signum: int, before: str):
    script = f"cat >&2 <<'E'\nwhat():  no memory\n{CRASHED}E\nkill -{signum} $$"
    worker.start(["/bin/sh", "-c", script], os.environ, fds={})
    end = worker.reap()
    assert (end.exit_code, end.stderr_tail, end.traceback) == (-signum, "what():  no memory", before + STACK)


def test_a_checkpoint_that_is_being_written_is_waited_for():
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(2.5)", WRITER]) as writer:
        wait_for_writers(30.0, said.append)
        assert not psutil.pid_exists(writer.pid)
    assert said == [f"waiting at most 30 s for a checkpoint to be written (pid {writer.pid})"]


def test_a_checkpoint_is_not_waited_for_without_end():
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", WRITER]) as writer:
        began_s = time.monotonic()
        wait_for_writers(2.5, lambda _: None)
        assert 2.4 < time.monotonic() - began_s < 10
        writer.kill()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "directory"])
def test_what_a_worker_put_in_place_of_its_files_delays_no_other_start(worker: Worker, tmp_path: Path, kind: str):
    make = {"fifo": os.mkfifo, "directory": Path.mkdir}.get(kind, lambda path: path.symlink_to(kind))
    for name in ("rank_3.out", "rank_3.err", "rank_3.error.json", "rank_3.exit.json"):
        make(tmp_path / name)
    worker.start(["/bin/sh", "-c", "echo said >&2; exit 3"], os.environ, fds={})
    end = worker.reap()
    assert (end.exit_code, end.stderr_tail, end.could_not_start) == (3, "said", False)
    assert (tmp_path / "rank_3.out").is_file()
    assert len([*tmp_path.glob("rank_3.out.*")]) == 1  # what was there


def test_orphans_without_end_are_collected_in_parts(monkeypatch: pytest.MonkeyPatch):
    workers_module.reap_orphans([])  # those of other tests
    monkeypatch.setattr(workers_module, "MOST_REAPED", 3)
    children = [subprocess.Popen(["/bin/true"]) for _ in range(5)]
    for child in children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    workers_module.reap_orphans([])
    assert len([child for child in children if psutil.Process().children() and psutil.pid_exists(child.pid)]) == 2
    workers_module.reap_orphans([])
    assert not [child for child in children if psutil.pid_exists(child.pid)]
    for child in children:
        child.returncode = 0  # they were collected here
