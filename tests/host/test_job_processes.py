"""Jobs of every kind of launcher as real processes, and trees of /proc for what cannot be made here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from allranks.host import py_spy
from allranks.host.job_processes import FoundProcess, WantedStacks, find_processes, find_store
from allranks.host.py_spy import PySpyDump, ToldFrame, ToldLocal, ToldRank, ToldThread, find_rank
from conftest import clean_env, free_port

# What starts two ranks; the words after the script's name say how.
STARTER = """\
import os, socket, subprocess, sys, time

how, port, worker = sys.argv[-3:]
if __name__ == "__main__":
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    if how == "store":  # torchrun
        server = socket.create_server(("127.0.0.1", int(port)))
    if how == "own-environment":
        os.environ.update(env)
    if how == "rank-0":  # Lightning: it is a rank itself
        os.environ.update(env, NODE_RANK="0", LOCAL_RANK="0")
        server = socket.create_server(("127.0.0.1", int(port)))
        subprocess.Popen([sys.executable, worker, how, port], env={**os.environ, "LOCAL_RANK": "1"})
        time.sleep(60)
    for rank in ("0", "1"):
        if how == "own-environment":
            os.environ["RANK"] = rank
            subprocess.Popen([sys.executable, worker, how, port])
        elif how == "late":  # Ray: the worker gets its rank after it began
            subprocess.Popen([sys.executable, worker, how, port, rank])
        else:
            subprocess.Popen([sys.executable, worker, how, port], env={**env, "RANK": rank})
    time.sleep(60)
"""
WORKER = """\
import os, socket, subprocess, sys, time

how, port, *late = sys.argv[1:]
if late:
    os.environ.update(RANK=late[0], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
if how in ("store", "late", "rank-0"):
    store = socket.create_connection(("127.0.0.1", int(port)))
if how == "child" and os.environ["RANK"] == "1":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
time.sleep(60)
"""
# Ranks as arguments and nothing in the environment but a port of something else; rank 0 has the store.
SPAWN = """\
import multiprocessing, os, socket, sys, time

def main(rank, world_size, port):
    store = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
    while True:
        try:
            client = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.01)
    time.sleep(60)

def start_all(world_size):
    for rank in range(world_size):  # and is 1 for the rest of its life
        args = rank, world_size, int(sys.argv[-2])
        multiprocessing.get_context("spawn").Process(target=main, args=args).start()
    time.sleep(60)

if __name__ == "__main__":
    os.environ["MASTER_PORT"] = ""
    start_all(2)
"""
KINDS = {
    "torchrun": ("torchrun", "store"),
    "torch.distributed.run": ("-m", "torch.distributed.run", "plain"),
    "deepspeed": ("-m", "deepspeed.launcher.launch", "child"),
    "accelerate": ("accelerate", "launch", "plain"),
    "ray": ("driver.py", "late"),
    "own-environment": ("driver.py", "own-environment"),
    "lightning": ("driver.py", "rank-0"),
    "mp.spawn": ("spawn.py", "spawn"),
}
SERVED = {"torchrun": ("launcher", None), "mp.spawn": ("worker", 0), "lightning": ("worker", 0), "ray": ("store", None)}
"""Who has the store, in jobs that have one."""


class Started(NamedTuple):
    """Launchers of all kinds that run now."""

    pid: dict[str, int]
    port: dict[str, int]
    store_pid: int
    """Of a program that only listens, for `ray`."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("launchers")
    for name in ("torchrun", "accelerate", "driver.py", "torch/distributed/run.py", "deepspeed/launcher/launch.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(STARTER)
    (folder / "torch/__init__.py").touch()  # else the installed one counts
    (folder / "worker.py").write_text(WORKER)
    (folder / "spawn.py").write_text(SPAWN)
    env, processes = clean_env(os.environ, PYTHONPATH=str(folder)), {}
    port = {kind: free_port() for kind in KINDS}
    listen = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True)"
    command = [sys.executable, "-c", f"{listen}; time.sleep(60)", str(port["ray"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, start_new_session=True) as store:
        assert store.stdout is not None
        store.stdout.readline()
        for kind, words in KINDS.items():
            command = [sys.executable, *words, str(port[kind]), str(folder / "worker.py")]
            processes[kind] = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
        yield Started({kind: process.pid for kind, process in processes.items()}, port, store.pid)
        for process in (store, *processes.values()):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def found(started: Started) -> dict[str, list[FoundProcess]]:
    """What one look without a job finds of each kind, other jobs of this machine left out."""

    sizes = dict.fromkeys(KINDS, 3) | {"deepspeed": 4, "ray": 4, "lightning": 2}  # a child, and who owns the store

    def look() -> dict[str, list[FoundProcess]]:
        processes = find_processes(WantedStacks())
        kinds = {pid: kind for kind, pid in started.pid.items()} | {started.store_pid: "ray"}
        sessions = [(kinds.get(session_of(process.pid)), process) for process in processes]
        return {kind: [process for session, process in sessions if session == kind] for kind in KINDS}

    def is_whole(kind: str, own: list[FoundProcess]) -> bool:
        """Whether all of a kind are up: one that still starts has no rank, and has not asked the store yet."""
        ranks = [process.rank for process in own if process.role == "worker"]
        is_served = kind not in SERVED or any(process.serves for process in own)
        return len(own) == sizes[kind] and ranks == [0, 1] and is_served

    deadline_s, of_kinds = time.monotonic() + 30, look()
    while not all(is_whole(*item) for item in of_kinds.items()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
        of_kinds = look()
    return of_kinds


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # of another test's, gone meanwhile
        return 0


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_launcher_are_found_whoever_started_them(
    found: dict[str, list[FoundProcess]], started: Started, kind: str
) -> None:
    ranks = [(process.rank, process.world_size) for process in found[kind] if process.role == "worker"]
    assert ranks == [(0, 2), (1, 2)]
    launchers = [(process.pid, process.rank) for process in found[kind] if process.role == "launcher"]
    assert launchers == ([(started.pid[kind], None)] if kind != "lightning" else [])
    assert len({process.job for process in found[kind]}) == 1


def test_a_python_below_a_rank_is_its_child_whatever_its_environment(found: dict[str, list[FoundProcess]]) -> None:
    assert [(process.role, process.rank) for process in found["deepspeed"]][2:] == [("child", 1), ("launcher", None)]


@pytest.mark.parametrize(("kind", "role", "rank"), [(kind, *owner) for kind, owner in SERVED.items()])
def test_the_owner_of_the_store_s_port_is_known(
    found: dict[str, list[FoundProcess]], started: Started, kind: str, role: str, rank: int | None
) -> None:
    """Of mp.spawn only the connections tell the port."""
    owners = [(process.role, process.rank, process.serves) for process in found[kind] if process.serves]
    assert owners == [(role, rank, f"127.0.0.1:{started.port[kind]}")]
    assert find_store(found[kind]) == ("127.0.0.1", started.port[kind])


def test_a_store_on_another_node_is_not_taken_for_a_port_of_this_one(tmp_path: Path) -> None:
    """Rank 0 listens on that port for another purpose; the connection goes to node 10.0.0.9."""
    tree = Tree(tmp_path)
    tree.add(10, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"})
    (tmp_path / "proc/10/net").mkdir()
    (tmp_path / "proc/10/fd").mkdir()
    for number, inode in enumerate((77, 78)):
        (tmp_path / f"proc/10/fd/{number}").symlink_to(f"socket:[{inode}]")
    here, there, zero = "0100000A:8000", "0900000A:733C", "00000000:0000"  # 29500 is 733C
    rest = "00000000:00000000 00:00000000 00000000 0 0"
    lines = ["sl", f"0: {here} {there} 01 {rest} 77 1", f"1: 00000000:733C {zero} 0A {rest} 78 1"]
    (tmp_path / "proc/10/net/tcp").write_text("\n".join(lines))
    assert find_processes(WantedStacks(), root=tmp_path)[0].serves == ""
    (tmp_path / "proc/10/net/tcp").write_text("\n".join([*lines, f"2: {there} {here} 01 {rest} 79 1"]))
    assert find_processes(WantedStacks(), root=tmp_path)[0].serves == "10.0.0.9:29500"


def stack(*frames: tuple[str, str, dict[str, str]]) -> list[ToldThread]:
    main = [ToldFrame(name, file, 1, [ToldLocal(*pair) for pair in own.items()]) for name, file, own in frames]
    other = [ToldFrame("poll", "x.py", 1, [ToldLocal("rank", "9"), ToldLocal("world_size", "10")])]
    return [ToldThread(other, "Thread-1"), ToldThread(main, "MainThread")]


SPAWN_PY = "/site-packages/torch/multiprocessing/spawn.py"


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([("join", "c10d.py", {"rank": "0", "world_size": "2"}), ("main", "a.py", {"rank": "5", "world_size": "8"})],
         (5, None, 8)),
        ([("main", "a.py", {"rank": "5"})], None),
        ([("main", "a.py", {"world_size": "5"})], None),
        ([("main", "a.py", {"rank": "8", "world_size": "8"})], None),
        ([("main", "a.py", {"rank": "-1", "world_size": "8"})], None),
        ([("main", "a.py", {"rank": "'5'", "world_size": "8"})], None),
        ([("main", "a.py", {"gpu": "1"}), ("_wrap", SPAWN_PY, {"i": "1"})], (1, 1, None)),
        ([("main", "a.py", {"rank": "5"}), ("_wrap", SPAWN_PY, {"i": "1"})], (5, 1, None)),
        ([("main", "a.py", {"i": "1"}), ("_wrap", "/home/me/spawn.py", {"i": "1"})], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_outermost_numbers_of_a_stack_are_the_rank_s(
    frames: list[tuple[str, str, dict[str, str]]], told: tuple[int, int | None, int | None] | None
) -> None:
    assert find_rank(stack(*frames)) == (told and ToldRank(*told))


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m torch.distributed.launch x.py", "launcher"),
        ("python /opt/torch/distributed/run.py x.py", "launcher"),
        ("python -u -X importtime -m deepspeed.launcher.runner x.py", "launcher"),
        ("python /venv/bin/deepspeed x.py", "launcher"),
        ("python -m accelerate.commands.launch x.py", "launcher"),
        ("python -X torchrun x.py", "worker"),
        ("python train_deepspeed.py --launcher slurm", "worker"),
        ("python train.py --launcher torchrun", "worker"),
        ("python", "worker"),
    ],
)
def test_a_launcher_is_known_by_what_it_runs_and_a_task_of_slurm_that_names_one_keeps_its_rank(
    tmp_path: Path, command: str, role: str
) -> None:
    Tree(tmp_path).add(10, JOB_7, command=command)
    found = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(process.role, process.rank) for process in found] == [(role, 2 if role == "worker" else None)]


def test_a_long_command_line_is_read_in_no_time(tmp_path: Path) -> None:
    Tree(tmp_path).add(10, JOB_7, command="python" + 40 * " -X a" + 40 * " -X" + " x.py")
    began_s = time.monotonic()
    [found] = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert (found.role, time.monotonic() - began_s < 5.0) == ("worker", True)


def test_a_launcher_of_allranks_hides_what_is_above_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(9, {}, command="python notebook.py")
    tree.add(10, {}, parent=9, command="python /venv/bin/allranks run x.py")
    tree.add(11, {"RANK": "0", "WORLD_SIZE": "1"}, parent=10)
    assert [process.pid for process in find_processes(WantedStacks(), root=tmp_path)] == [11]


def test_ranks_of_another_job_below_the_same_launcher_are_left_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(9, {}, command="python driver.py")
    tree.add(10, {"RANK": "0", "TORCHELASTIC_RUN_ID": "one"}, parent=9)
    tree.add(11, {"RANK": "0", "TORCHELASTIC_RUN_ID": "two"}, parent=9)
    tree.add(12, {}, parent=9)
    found = find_processes(WantedStacks(job="one"), root=tmp_path)
    assert [(process.pid, process.role) for process in found] == [(10, "worker"), (9, "launcher")]


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
    found = find_processes(WantedStacks(job=job), root=tmp_path)
    assert [process.rank for process in found] == [rank]
    assert find_processes(WantedStacks(job="77"), root=tmp_path) == []


def test_a_step_of_slurm_beside_ranks_that_say_rank_is_no_rank(tmp_path: Path) -> None:
    """Each step counts its tasks from 0: one that serves the store has the number of rank 0."""
    tree = Tree(tmp_path)
    tree.add(1, {})  # a container's first process
    (tmp_path / "proc/9").mkdir()
    (tmp_path / "proc/9/stat").write_text("9 (slurmstepd) S 1 " + "0 " * 20)
    tree.add(10, {**JOB_7, "SLURM_PROCID": "0"}, parent=9)
    tree.add(11, {**JOB_7, "SLURM_PROCID": "0", "RANK": "0"}, parent=9)
    found = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(process.pid, process.role, process.rank) for process in found] == [(11, "worker", 0), (10, "worker", None)]


@pytest.mark.parametrize(
    "command", ["/venv/bin/python /venv/bin/torchrun x.py", "python -m torch.distributed.run x.py"]
)
def test_torchrun_is_a_launcher_before_and_after_it_has_started_workers(tmp_path: Path, command: str) -> None:
    tree = Tree(tmp_path)
    tree.add(10, JOB_7, command=command)
    before = find_processes(WantedStacks(job="7"), root=tmp_path)
    tree.add(11, {**JOB_7, "RANK": "4"}, parent=10)
    tree.add(12, {**JOB_7, "RANK": "4"}, parent=11)
    after = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(process.role, process.rank) for process in before] == [("launcher", None)]
    assert [(process.role, process.rank) for process in after] == [("worker", 4), ("child", 4), ("launcher", None)]


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
    assert find_processes(WantedStacks(job="7"), root=tmp_path) == []


def test_what_a_fork_server_starts_is_a_child_of_the_rank_and_the_server_is_left_out(tmp_path: Path) -> None:
    """Python 3.14 starts processes by it: they are forked, so that they have the server's command line."""
    tree, server = Tree(tmp_path), "python -c from\xa0multiprocessing.forkserver\xa0import\xa0main;\xa0main(3,"
    tree.add(10, {**JOB_7, "RANK": "4"})
    tree.add(11, {**JOB_7, "RANK": "4"}, parent=10, command=server)
    tree.add(12, {**JOB_7, "RANK": "4"}, parent=11, command=server)
    found = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(process.pid, process.role, process.rank) for process in found] == [(10, "worker", 4), (12, "child", 4)]


def test_a_process_whose_environment_is_closed_is_found_by_its_cgroup(tmp_path: Path) -> None:
    Tree(tmp_path).add(10, {})
    (tmp_path / "proc/10/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    found = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [process.pid for process in found] == [10]


def test_every_process_with_a_rank_is_found_without_a_job(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(10, {"RANK": "0", "WORLD_SIZE": "2"})
    tree.add(11, {"HOME": "/root"})
    assert [process.pid for process in find_processes(WantedStacks(), root=tmp_path)] == [10]


def test_the_rank_of_a_dead_process_s_parent_is_known(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(10, {"SLURM_JOB_ID": "7", "RANK": "1"})
    tree.add(11, {}, parent=10, state="Z")
    found = find_processes(WantedStacks(job="7"), root=tmp_path)
    assert [(process.pid, process.role, process.rank) for process in found] == [(10, "worker", 1), (11, "child", 1)]


def test_a_process_without_a_rank_is_asked_again_after_a_pause_and_each_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = [0.0], list[tuple[float, int]]()

    def ask(pid: int, **_: object) -> PySpyDump:
        asked.append((clock[0], pid))
        clock[0] += 2.0
        return PySpyDump()

    def search(now_s: float, *pids: int) -> None:
        clock[0] = now_s
        assert py_spy.ask_for_ranks(pids, clock=lambda: clock[0]) == {}

    monkeypatch.setattr(py_spy, "ask_py_spy", ask)
    monkeypatch.setattr(py_spy, "read_start_ticks", lambda pid: 1)
    search(0.0, 7, 8, 9)
    search(10.0, 7, 8, 9)
    assert asked == [(0.0, 7), (2.0, 8), (10.0, 9), (12.0, 7)]  # the time is up after two of them
    asked.clear()
    for now_s in range(20, 140):
        search(now_s, 9)
    assert [at_s for at_s, _ in asked] == [20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130]
