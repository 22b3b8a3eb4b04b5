"""What does a look show of real processes?"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from allranks.host.job_processes import FoundProcess, ProcStat, WantedStacks
from allranks.model.beat import ProcessState
from allranks.model.node_look import EndSeen, NodeLook, ProcessLook, ProcessRole
from allranks.watch.node import NodeWatcher
from allranks.watch.step import add_ranks_below
from conftest import HANG_S, free_port

JOB = f"8{os.getpid():06}"
KEEPS_CODES = tuple(int(number) for number in os.uname().release.split(".")[:2]) >= (6, 15)
SCRIPT = """\
import mmap, os, socket, sys, time

def nap(step=150, token="a secret text"):
    time.sleep(600)

def answer():
    print("ready", flush=True)
    os._exit(int(sys.stdin.readline()))

def listen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        peer, _ = server.accept()
        nap()

def use_nccl():
    with open(f"{os.path.dirname(__file__)}/libnccl.so.2", "w+b") as file:
        file.write(b"x")
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
    nap()

def fork():
    server = socket.create_server(("127.0.0.1", 0))
    server.set_inheritable(True)
    if not (pid := os.fork()):
        os.execve(sys.executable, [sys.executable, __file__, "nap"], {**os.environ, "RANK": "1"})
    print(pid, flush=True)
    nap()

globals()[sys.argv[1]]()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script as a rank; all that came of it is ended afterwards."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []
    numbers = itertools.count()

    def start_one(function: str, *prefix: str) -> subprocess.Popen[str]:
        env = {**os.environ, "SLURM_JOB_ID": JOB, "RANK": str(next(numbers)), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen([*prefix, sys.executable, str(script), function], env=env, **pipes))
        return started[-1]

    yield start_one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


@pytest.fixture
def watcher() -> Iterator[NodeWatcher]:
    watcher = NodeWatcher(WantedStacks(job=JOB), node="here")
    yield watcher
    watcher.close()


def look_until(watcher: NodeWatcher, is_there: Callable[[NodeLook], object], *, step_s: float = 0.0) -> NodeLook:
    """Look until it is so; with a step, each look is told that so much more time has passed: all is due again."""
    deadline_s, now_s = time.monotonic() + HANG_S, time.monotonic()
    while not is_there(look := watcher.look(now_s)):
        assert time.monotonic() < deadline_s, look
        watcher.wait(0.05)
        now_s = now_s + step_s if step_s else time.monotonic()
    return look


def ended(look: NodeLook) -> list[ProcessLook]:
    return [process for process in look.processes if process.end is not None]


def is_there(count: int) -> Callable[[NodeLook], bool]:
    return lambda look: len(look.processes) == count


@pytest.mark.parametrize("is_reaped", [True, False])
@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_an_end_is_noticed_at_once_with_its_code_whether_or_not_the_parent_reaps(
    start: Start, watcher: NodeWatcher, code: int, is_reaped: bool
) -> None:
    if is_reaped and not KEEPS_CODES:
        pytest.skip("needs Linux 6.15")
    process = start("answer")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    look_until(watcher, is_there(1))
    if is_reaped:
        threading.Thread(target=process.wait, daemon=True).start()
    began_s = time.monotonic()
    if code < 0:
        process.send_signal(-code)
    else:
        assert process.stdin is not None
        process.stdin.write(f"{code}\n")
        process.stdin.flush()
    watcher.wait(60.0)
    took_s = time.monotonic() - began_s
    if is_reaped:
        while Path(f"/proc/{process.pid}").exists():
            time.sleep(0.001)
    (seen,) = ended(watcher.look(now_s := time.monotonic()))
    assert took_s < 30.0  # the end, and not the time, has ended the wait
    assert seen.end == EndSeen(at_s=now_s, code=code)
    assert (seen.rank, seen.state) == (0, ProcessState.GONE)
    (again,) = ended(watcher.look(time.monotonic()))  # and goes on being told, with the same time
    assert again.end == seen.end


def test_a_process_whose_end_nobody_can_tell_has_no_code(tmp_path: Path) -> None:
    gone = 2**22 + 1  # more than any pid
    own = tmp_path / f"proc/{gone}"
    own.mkdir(parents=True)
    (own / "stat").write_text(f"{gone} (python) S 1 {' '.join(['0'] * 17)} 4711 {' '.join(['0'] * 30)}\n")
    (own / "environ").write_bytes(b"RANK=1\0WORLD_SIZE=2\0")
    watcher = NodeWatcher(WantedStacks(pids=(gone,)), node="here", root=tmp_path)
    (seen,) = watcher.look(5.0).processes
    watcher.close()
    assert (seen.start_ticks, seen.state, seen.end) == (4711, ProcessState.GONE, EndSeen(at_s=5.0))


def test_a_stopped_rank_is_seen_and_left_alone(start: Start, watcher: NodeWatcher) -> None:
    process = start("nap")
    look_until(watcher, lambda look: look.processes and look.processes[0].stack)
    process.send_signal(signal.SIGSTOP)
    look = look_until(watcher, lambda look: look.processes[0].state is ProcessState.STOPPED)
    assert look.processes[0].end is None
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert "TracerPid:\t0\n" in status
    assert "SigPnd:\t0000000000000000\n" in status


def test_a_stack_has_its_place_and_counters_and_no_text(start: Start, watcher: NodeWatcher) -> None:
    start("nap")
    has_slept = lambda look: any(seen.stack and seen.stack.operation == "sleep" for seen in look.processes)  # noqa: E731
    look = look_until(watcher, has_slept, step_s=20.0)
    (seen,) = look.processes
    assert seen.stack is not None
    assert seen.stack.place == "train.py:4 in nap"
    assert seen.stack.counters == (("step", 150),)
    assert (seen.rank, seen.world_size, seen.role, look.store) == (0, 2, ProcessRole.WORKER, ("node01", 29500))
    assert b"secret" not in msgspec.json.encode(look)


def test_bytes_that_a_process_does_not_read_and_connections_it_does_not_accept_are_seen(
    start: Start, watcher: NodeWatcher
) -> None:
    process = start("listen")
    assert process.stdout is not None
    port = int(process.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as first, socket.create_connection(("127.0.0.1", port)):
        first.send(b"x" * 1000)
        look = look_until(watcher, lambda look: look.processes and len(look.processes[0].sockets) == 2)
        own = {bool(seen.peer_address): seen for seen in look.processes[0].sockets}
        assert (own[False].own_port, own[False].unread_bytes, own[False].unacked_bytes) == (port, 1, 0)
        assert (own[True].peer_port, own[True].unread_bytes) == (first.getsockname()[1], 1000)
        assert (own[True].received_bytes, own[True].unacked_bytes) == (1000, 0)
        first.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:  # until the other's buffer is full
                first.send(b"x" * (1 << 20))
        look_until(watcher, lambda look: max(seen.unread_bytes for seen in look.processes[0].sockets) > 10_000)


def test_a_socket_that_a_fork_inherited_is_its_parents(start: Start, watcher: NodeWatcher) -> None:
    process = start("fork")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    look = look_until(watcher, is_there(2))
    assert {seen.pid: (seen.role, len(seen.sockets)) for seen in look.processes} == {
        process.pid: (ProcessRole.LAUNCHER, 1),
        child: (ProcessRole.WORKER, 0),
    }


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_sockets_of_another_network_namespace_are_seen_without_the_bytes(start: Start, watcher: NodeWatcher) -> None:
    port = start("listen", "unshare", "--net").stdout.readline().strip()  # type: ignore[union-attr]
    look = look_until(watcher, lambda look: look.processes and look.processes[0].sockets)
    (listening,) = look.processes[0].sockets
    assert (str(listening.own_port), listening.peer_address, listening.acked_bytes) == (port, "", None)
    assert look.limits == ("bytes that TCP connections have carried are not known in another network namespace",)


def test_a_process_that_comes_later_belongs_to_the_job_with_the_sockets_that_it_had_before(
    start: Start, watcher: NodeWatcher
) -> None:
    start("nap")
    look = look_until(watcher, is_there(1))
    port = int(start("listen").stdout.readline())  # type: ignore[union-attr]
    look = watcher.look(look.at_s + 2.0)  # its socket is seen before it is found itself
    assert len(look.processes) == 1
    look = look_until(watcher, is_there(2), step_s=20.0)
    assert [process.rank for process in look.processes] == [0, 1]
    look = watcher.look(look.at_s + 2.0)
    assert [seen.own_port for seen in look.processes[1].sockets] == [port]


def test_operations_of_nccl_are_told_or_why_they_are_not(
    start: Start, watcher: NodeWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address := f"127.0.0.1:{free_port()}")
    process = start("use_nccl")
    look = look_until(watcher, lambda look: look.limits, step_s=20.0)
    assert look.limits[0].startswith("NCCL's RAS does not tell which operations its ranks have started: [Errno 111]")
    rank = {"host": "127.0.0.1", "pid": process.pid, "collective_counts": {"AllReduce": 40, "AllGather": 3}}
    answer = msgspec.json.encode({"communicators": [{"ranks": [rank]}]})

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb") as lines:
            while lines.readline() != b"VERBOSE STATUS\n":
                lines.write(b"OK\n")
                lines.flush()
            lines.write(answer)

    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as listening:
        threading.Thread(target=serve, daemon=True).start()
        look = look_until(watcher, lambda look: look.processes[0].nccl_ops is not None, step_s=20.0)
    assert (look.processes[0].nccl_ops, look.limits) == (43, ())


def test_a_launchers_pid_means_the_ranks_that_it_started() -> None:
    launcher = _found(100, {}, None)
    other = _found(200, {}, None)
    ranks = [_found(101 + rank, {"RANK": str(rank), "WORLD_SIZE": "2"}, launcher) for rank in range(2)]
    lone = _found(201, {"RANK": "0", "WORLD_SIZE": "1"}, other)
    jobs = {"node01:29500": ranks, "node01:29501": [lone]}
    assert add_ranks_below([100], jobs) == (100, 101, 102)
    assert add_ranks_below([102], jobs) == (102,)


def _found(pid: int, env: Mapping[str, str], above: FoundProcess | None) -> FoundProcess:
    stat = ProcStat("python", "S", 1, 0.0, 0)
    return FoundProcess(pid, stat, env, ["python", "train.py"], above)
