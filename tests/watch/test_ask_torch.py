"""What do torch's worker server and NCCL's dump pipe tell of ranks? Real ranks of Gloo, and servers written here.

NCCL does not run on CPUs: its answers and its pipe are written ones, as torch 2.13 writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from allranks.host.job_processes import WantedStacks
from allranks.model.beat import ProcessState
from allranks.model.node_look import FlightSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen, StackSeen
from allranks.watch.ask_torch import (
    ANSWER_S,
    EVERY_S,
    GLOO,
    MAX_ENTRIES,
    NCCL,
    NOT_ASKED,
    NOTHING_ON,
    SILENT,
    STILL_S,
    TorchRecorders,
    ask_recorders,
)
from allranks.watch.node import NodeWatcher
from allranks.watch.since import LookHistory
from conftest import HANG_S, Allranks, clean_env, free_port

RANK = """\
import ctypes, os, socket, sys, threading, time

def name_thread():
    ctypes.CDLL(None).prctl(15, b"pt_workerserver", 0, 0, 0)

def serve(kind):
    server = socket.create_server(("127.0.0.1", 0))
    kept = []
    named = threading.Event()
    def run():
        name_thread()
        named.set()
        while True:
            connection, _ = server.accept()
            with open("asked", "a") as file:
                file.write("x")
            kept.append(connection)
            if kind == "hangs":
                continue
            threading.Thread(target=answer, args=(connection, kind)).start()
    threading.Thread(target=run).start()
    named.wait()
    time.sleep(0.1)  # until it waits in accept(2)

def answer(connection, kind):
    handler = connection.recv(1 << 16).split()[1].decode().rpartition("/")[2]
    try:
        if kind == "huge":
            connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + b"[" * (40 << 20))
        elif kind == "no http":
            connection.sendall(b"220 mail.example.org ESMTP\\r\\n")
        elif os.path.exists(handler):
            connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + open(handler, "rb").read())
        else:
            connection.sendall(b"HTTP/1.1 404 Not Found\\r\\n\\r\\n" + b"Handler not found")
    except OSError:
        pass
    connection.close()

def read_pipe(kind):
    path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read" else 0
    while fd and not os.read(fd, 128):
        if not told:
            told.append(print("ready", flush=True))
        time.sleep(0.05)
    if fd:
        dump = open("dump", "rb").read()
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "wb") as file:
            file.write(dump[:50])
            file.flush()
            time.sleep(0.2)
            file.write(dump[50:])

told = []
globals()[sys.argv[1]](*sys.argv[2:])
print("ready", flush=True)
time.sleep(600)
"""


@dataclass
class Rank:
    folder: Path
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def num_asked(self) -> int:
        path = self.folder / "asked"
        return len(path.read_text()) if path.exists() else 0


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that serves, or reads a pipe, in a folder with what it answers; all are ended afterwards."""
    started: list[Rank] = []

    def start_one(*words: str, files: dict[str, bytes] | None = None, **env: str) -> Rank:
        folder = tmp_path / f"rank {len(started)}"
        folder.mkdir()
        for name, data in (files or {}).items():
            (folder / name).write_bytes(data)
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, *words],
            cwd=folder,
            env=clean_env(os.environ, **env),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Rank(folder, process))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return started[-1]

    yield start_one
    for rank in started:
        with rank.process:
            os.killpg(rank.pid, signal.SIGKILL)


def entry(seq: int, op: str, *, group: str = "0", **more: Any) -> dict[str, Any]:
    """One call as torch 2.13 writes it in JSON."""
    return {
        "record_id": seq - 1,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": time.time_ns() - 60_000_000_000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
    } | more


def dump_of(*entries: dict[str, Any]) -> bytes:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}).encode()


def test_calls_are_told_by_the_server_that_a_thread_of_torch_s_waits_in(start: Start) -> None:
    many = {"input_sizes": [[4]] * 100, "input_dtypes": ["Float"] * 100}  # of a coalesced call
    rank = start("serve", "answers", files={NCCL: dump_of(entry(7, "nccl:all_reduce", **many))})
    other = start("serve", "answers", files={GLOO: dump_of(entry(3, "gloo:all_reduce", retired=True))})
    both = {NCCL: dump_of(entry(7, "nccl:all_reduce")), GLOO: dump_of(entry(3, "gloo:barrier"))}
    third = start("serve", "answers", files=both)
    told = ask_recorders({rank.pid: 2, other.pid: 1, third.pid: 0}, at_s=100.0)
    seen = [told[process.pid] for process in (rank, other, third)]
    assert [isinstance(flight, FlightSeen) for flight in seen] == [True] * 3, seen
    calls = [[(call.group, call.seq, call.op, call.is_done) for call in flight.calls] for flight in seen]
    assert calls == [
        [("0", 7, "all_reduce", False)],
        [("0", 3, "all_reduce", True)],
        [("0", 7, "all_reduce", False), ("0/gloo", 3, "barrier", False)],
    ]
    assert seen[0].members == {"0": (0, 1, 2)}
    assert seen[0].at_s == 100.0
    assert 30.0 < seen[0].called_s <= 40.0


def test_who_does_not_answer_or_answers_nonsense_costs_the_others_nothing(start: Start) -> None:
    good = start("serve", "answers", files={GLOO: dump_of(entry(3, "gloo:all_reduce"))})
    kinds = {"hangs": SILENT, "huge": "more than 8 MiB", "no http": "220 mail.example.org ESMTP"}
    ranks = {kind: start("serve", kind) for kind in kinds}
    deep = b'{"entries":' + b"[" * 100_000
    garbage = [
        b"",
        b"\x80\x04",
        b"\x80\x04cposix\nsystem\n.",
        deep,
        b'{"entries": [{"input_sizes": 1}]}',
        b"[1, 2]",
        b'{"entries":[' + b"{}," * MAX_ENTRIES + b"{}]}",
        b"{}{",
    ]
    nonsense = [start("serve", "answers", files={GLOO: data}) for data in garbage]
    older, none, gone = (
        start("serve", "answers"),
        start("read_pipe", "no", TORCH_NCCL_DEBUG_INFO_PIPE_FILE="p"),
        1 << 22,
    )
    began_s = time.monotonic()
    asked = [good, *ranks.values(), *nonsense, older]
    told = ask_recorders({process.pid: number for number, process in enumerate(asked)} | {gone: 99}, at_s=100.0)
    assert time.monotonic() - began_s < ANSWER_S + 5.0
    assert isinstance(told[good.pid], FlightSeen)
    for kind, problem in kinds.items():
        assert problem in str(told[ranks[kind].pid]), kind
    assert {str(told[process.pid]).partition(":")[0] for process in nonsense} == {"torch cannot be asked"}
    assert "no flight recorder that can be asked" in str(told[older.pid])
    assert "No such file" in str(told[gone])
    assert "TORCH_FR_DUMP_TEMP_FILE is not set" in str(ask_recorders({none.pid: 0}, at_s=1.0)[none.pid])
    assert ask_recorders({os.getpid(): 0}, at_s=1.0) == {os.getpid(): NOTHING_ON}


def test_an_answer_of_too_many_entries_is_not_read(start: Start) -> None:
    many = b'{"entries":[' + b"{}," * MAX_ENTRIES + b"{}]}"
    rank = start("serve", "answers", files={GLOO: many})
    assert "more than 20,000 entries" in str(ask_recorders({rank.pid: 0}, at_s=1.0)[rank.pid])


def test_whatever_is_raised_is_a_line_of_what_is_not_seen() -> None:
    asked = Asked()

    def fail() -> dict[int, FlightSeen | str]:
        raise MemoryError("all of it")

    asked.recorders._question.ask(fail)
    assert asked.look(1.0, look_of(1 << 22, 0)) == {}
    assert asked.recorders.limits == ["the calls of rank 0: torch cannot be asked: MemoryError('all of it')"]


def test_a_job_that_never_stands_still_is_told_as_one_that_was_not_asked() -> None:
    asked = Asked()
    for tick in range(40):  # 10 s
        assert asked.recorders.limits == ([] if tick <= 33 else [NOT_ASKED])
        asked.look(0.25 * tick, look_of(1 << 22, 0, nccl_ops=tick))


def test_a_byte_in_nccl_s_pipe_makes_it_write_its_dump(start: Start, tmp_path: Path) -> None:
    """A written reader, which does what DumpPipe and DebugInfoWriter of torch 2.13 do; the dump is a pickle."""
    dump = pickle.dumps(
        {"version": "2.10", "entries": [entry(7, "nccl:all_reduce", process_group=("0", "default_pg"))]}
    )
    env = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": "trace_"}
    rank = start("read_pipe", "read", files={"dump": dump, "trace_0": b"an older one"}, **env)
    told = ask_recorders({rank.pid: 0}, at_s=100.0)[rank.pid]
    assert isinstance(told, FlightSeen), told
    assert [(call.seq, call.op) for call in told.calls] == [(7, "all_reduce")]
    unread = start("read_pipe", "no", **env | {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "other_"})
    assert "No such device" in str(ask_recorders({unread.pid: 0}, at_s=100.0)[unread.pid])  # ENXIO: nobody reads
    (unread.folder / "other_0.pipe").unlink()
    (unread.folder / "other_0.pipe").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("as it was")
    assert "no pipe of the job's user" in str(ask_recorders({unread.pid: 0}, at_s=100.0)[unread.pid])
    assert (tmp_path / "victim").read_text() == "as it was"


def test_a_pipe_gets_one_byte_while_its_rank_stands_still(start: Start, tmp_path: Path) -> None:
    dump = json.dumps({"entries": [entry(7, "nccl:all_reduce")]}).encode()
    env = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": "trace_"}
    rank, asked = start("read_pipe", "read", files={"dump": dump}, **env), Asked()
    told: dict[int, FlightSeen] = {}
    fd = os.open(f"{tmp_path}/pipe_0.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def pass_by(first_s: float, operation: str) -> None:
        for tick in range(60):  # 15 s of the looks' clock
            stack = StackSeen(at_s=first_s + 0.25 * tick, operation=operation)
            told.update(asked.look(first_s + 0.25 * tick, look_of(rank.pid, 0, stack=stack)))

    pass_by(0.0, "all_reduce")
    assert [call.seq for call in told[rank.pid].calls] == [7]
    assert os.read(fd, 10) == b""
    pass_by(15.0, "barrier")
    assert os.read(fd, 10) == b"1"
    os.close(fd)


# --- When -------------------------------------------------------------------------------------------------------------


class Asked:
    """Recorders that are asked at each look, and whose answers are waited for."""

    def __init__(self) -> None:
        self.history, self.recorders = LookHistory(), TorchRecorders()

    def look(self, now_s: float, *processes: ProcessLook) -> dict[int, FlightSeen]:
        look = NodeLook(node="n1", at_s=now_s, processes=processes, store=("127.0.0.1", 29500))
        self.history.hear(look, now_s)
        told = dict(self.recorders.look(self.history, now_s))
        if self.recorders._question.is_open:
            wait([self.recorders._question._open])
        return told


def look_of(pid: int, carried: int, **more: Any) -> ProcessLook:
    return ProcessLook(pid=pid, role=ProcessRole.WORKER, rank=0, sockets=(socket_of(4000, 4001, carried),), **more)


def socket_of(own_port: int, peer_port: int, carried: int) -> SocketSeen:
    ends = {"own_address": "127.0.0.1", "own_port": own_port, "peer_address": "127.0.0.1", "peer_port": peer_port}
    return SocketSeen(**ends, acked_bytes=carried, received_bytes=0)


def peer_of(look: ProcessLook) -> ProcessLook:
    """A rank at the other end of its connection, that is stopped: nobody asks it."""
    (own,) = look.sockets
    socket = socket_of(own.peer_port, own.own_port, own.acked_bytes or 0)
    return ProcessLook(pid=1 << 22, role=ProcessRole.WORKER, rank=1, sockets=(socket,), state=ProcessState.STOPPED)


@pytest.mark.parametrize("asks", [True, False])
def test_torch_is_asked_only_on_demand(start: Start, asks: bool) -> None:
    rank = start("serve", "answers", files={GLOO: dump_of(entry(3, "gloo:barrier"))}, RANK="0", WORLD_SIZE="2")
    watcher = NodeWatcher(WantedStacks(pids=(rank.pid,)), node="here", asks=asks)
    began_s = time.monotonic()
    looks = [watcher.look(began_s + 0.25 * tick) for tick in range(40)]
    while asks and not rank.num_asked and time.monotonic() < began_s + HANG_S:
        time.sleep(0.05)  # the thread that asks may be slow
    assert (rank.num_asked > 0, any(look.limits for look in looks)) == (asks, False)
    watcher.close()


def test_ranks_are_asked_only_while_they_stand_still_and_not_again_if_they_are_silent(start: Start) -> None:
    rank, hangs = (
        start("serve", kind, files={GLOO: dump_of(entry(3, "gloo:barrier"))}) for kind in ("answers", "hangs")
    )
    on, silent = Asked(), Asked()

    def pass_by(asked: Asked, process: Rank, first_s: float, *, moves: bool, **more: Any) -> dict[int, FlightSeen]:
        told: dict[int, FlightSeen] = {}
        for tick in range(100):  # 20 s of the looks' clock
            look = look_of(process.pid, tick if moves else 0, **more)
            told = asked.look(first_s + 0.2 * tick, look, peer_of(look))
        return told

    pass_by(on, rank, 0.0, moves=True)
    pass_by(on, rank, 20.0, moves=False, state=ProcessState.STOPPED)
    assert rank.num_asked == 0
    told = pass_by(on, rank, 40.0, moves=False)
    num_times = 1 + int((20.0 - STILL_S) / EVERY_S)
    assert rank.num_asked <= 2 * (num_times + 1)  # two handlers
    assert [call.op for call in told[rank.pid].calls] == ["barrier"]
    assert pass_by(on, rank, 60.0, moves=True) == {}
    assert pass_by(silent, hangs, 0.0, moves=False) == {}
    assert hangs.num_asked == 1
    assert silent.recorders.limits == [f"the calls of rank 0: {SILENT}"]


def test_connections_to_anybody_but_a_rank_are_no_sign_that_ranks_go_on(start: Start) -> None:
    rank = start("serve", "answers", files={GLOO: dump_of(entry(3, "gloo:barrier"))})
    asked = Asked()
    for tick in range(40):
        look = look_of(rank.pid, 0)
        look = replace(look, sockets=(*look.sockets, socket_of(6000, 443, tick)))  # it tells its metrics to somebody
        told = asked.look(0.25 * tick, look, peer_of(replace(look, sockets=look.sockets[:1])))
    assert [call.op for call in told[rank.pid].calls] == ["barrier"]


# --- Real ranks -------------------------------------------------------------------------------------------------------

GLOO_RANK = """\
import os, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer
from torch.distributed.debug import start_debug_server

dist.init_process_group("gloo")
rank, second = dist.get_rank(), dist.new_group([0, 1, 2])
try:
    start_debug_server(port=int(sys.argv[2]))
except ImportError:  # rank 0's web page needs jinja2, aiohttp and tabulate; the ranks' servers do not
    server = _WorkerServer("::", 0)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=second)
for _ in range(2):  # these count as collectives of the group, too, but not in the numbers of its calls
    if rank != 1:
        (dist.send if rank else dist.recv)(torch.ones(4), 0 if rank else 2)
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
if rank == 1 and sys.argv[1] == "mismatch":
    dist.broadcast(torch.ones(4), 0, group=second)
if rank == 1 and sys.argv[1] == "missing":
    time.sleep(600)
dist.all_reduce(torch.ones(4), group=second)
"""


@contextlib.contextmanager
def gloo_job(folder: Path, kind: str) -> Iterator[list[int]]:
    (folder / "train.py").write_text(GLOO_RANK)
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as left:
        ranks = []
        for rank in range(3):
            ranks.append(
                left.enter_context(
                    subprocess.Popen(
                        [sys.executable, "train.py", kind, str(free_port())],
                        cwd=folder,
                        env=clean_env(os.environ, RANK=str(rank), **env),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        text=True,
                        start_new_session=True,
                    )
                )
            )
            left.callback(os.killpg, ranks[-1].pid, signal.SIGKILL)
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        yield [rank.pid for rank in ranks]


@pytest.mark.torch
def test_watch_names_the_rank_of_gloo_s_that_called_something_else(allranks: Allranks, tmp_path: Path) -> None:
    with gloo_job(tmp_path, "mismatch") as pids:
        silent = allranks("watch", "--once", "--json", "--pid", *map(str, pids))
        asked = allranks("watch", "--once", "--ask", "--json", "--pid", *map(str, pids))
    document = json.loads(asked.stdout)
    assert (asked.returncode, document["culprits"]) == (3, [1]), asked.stdout + asked.stderr
    said = "at collective 4 of group 1 rank 1 called broadcast [4] Float"
    assert any(said in state["text"] and state["is_suspicion"] for state in document["states"]), document["states"]
    unasked = json.loads(silent.stdout)
    assert (unasked["verdicts"], unasked["states"][0]["is_suspicion"]) == ([], True), silent.stdout


@pytest.mark.torch
def test_a_rank_of_gloo_s_that_does_not_come_is_named_with_group_and_number(allranks: Allranks, tmp_path: Path) -> None:
    with gloo_job(tmp_path, "missing") as pids:
        result = allranks("watch", "--once", "--ask", "--json", "--pid", *map(str, pids))
    document = json.loads(result.stdout)
    texts = [state["text"] for state in document["states"]]
    assert (result.returncode, document["culprits"]) == (3, [1]), result.stdout + result.stderr
    assert any("rank 1 did not enter collective 4 (all_reduce) of group 1" in text for text in texts), texts
    assert any("rank 1 has been in sleep at train.py" in text for text in texts), texts
