"""Which Python processes of a job run on this machine, and what is each doing now?

    look(WantedStacks(job="123"), node="node01").processes[0].threads[0].frames[0].function

Nothing is stopped, signalled or written to: /proc is read, and py-spy reads the interpreter's memory from outside
(`--nonblocking`; an ordinary dump would pause the process, and fails on a stopped one).

Limits: a process without SLURM's variables and outside of SLURM's cgroups is not found. A rank that a script gives to
its own children (`mp.spawn`) is not in their environment: they show as children of the process that started them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from allranks.host.process import STANDBY, read_environment
from allranks.host.source import read_source_lines
from allranks.model.foreign import Unreadable, decode_json

DUMP_S = 4.0
"""For one process; a dump takes 0.03 s, and longer only where the kernel does not hand the memory out."""
LOOK_S = 12.0
"""For all of them: what has not been read by then stays unread."""
CPU_WINDOW_S = 0.25
MAX_AT_ONCE = 4
ATTEMPTS = 3
"""Of reading a process that is changing its stack at the same time."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are no tasks but batch scripts and shells (slurm/slurm.h)."""


class ProcessRole(StrEnum):
    """What a process is in its job."""

    WORKER = "worker"
    CHILD = "child"  # of a worker: DataLoader workers, compilers
    LAUNCHER = "launcher"  # torchrun and its like


class Frame(msgspec.Struct, frozen=True):
    """One call on a stack."""

    function: str
    file: str
    line: int
    text: str = ""
    """The source line as it is on disk now; empty for libraries and where it cannot be read."""


class Thread(msgspec.Struct, frozen=True):
    """One thread that has a Python stack."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]  # innermost first


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One Python process of the job, as it was seen."""

    pid: int
    role: ProcessRole
    rank: int | None
    local_rank: int | None
    world_size: int | None
    state: str
    """One letter of proc(5): R and S run, T and t are stopped, D waits in the kernel, Z is dead."""
    kernel_wait: str = ""  # the kernel function of a D
    cpu: float = 0.0  # cores
    threads: tuple[Thread, ...] = ()
    problem: str = ""
    """Why there are no threads."""
    job: str = ""
    """The job that its environment names (`name_job`)."""


class NodeStacks(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says."""

    node: str
    job: str
    processes: tuple[Process, ...]
    others: tuple[str, ...] = ()
    """Names of the job's processes that are no Python."""


@dataclass(frozen=True, slots=True)
class WantedStacks:
    """Whose stacks: a job's (SLURM's id, or as `name_job` says), these processes', or every process with a RANK."""

    job: str = ""
    pids: tuple[int, ...] = ()


def look(wanted: WantedStacks, *, node: str, root: Path = Path("/")) -> NodeStacks:
    """Return the stacks of all wanted Python processes of this machine; what could not be read says why.

    Args:
        wanted: which processes.
        node: this machine's name in the answer.
        root: where /proc is; tests feed a tree.
    """
    deadline_s = time.monotonic() + LOOK_S
    found, others = find_processes(wanted, root=root)
    began_s, before = time.monotonic(), {process.pid: _cpu_seconds(root, process.pid) for process in found}
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        dumps = list(pool.map(lambda process: _dump(process, deadline_s, root), found))
    time.sleep(max(0.0, began_s + CPU_WINDOW_S - time.monotonic()))
    window_s = time.monotonic() - began_s
    wanted_lines = {process.pid: _user_lines(threads) for process, (threads, _) in zip(found, dumps, strict=True)}
    texts = read_source_lines(wanted_lines, root=root)
    processes = []
    for process, (threads, problem) in zip(found, dumps, strict=True):
        state = (_stat(root, process.pid) or process.stat).state
        processes.append(
            Process(
                pid=process.pid,
                role=process.role,
                rank=process.rank,
                local_rank=process.local_rank,
                world_size=_count(process.env, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
                if process.rank is not None
                else None,
                state=state,
                kernel_wait=_read(root / f"proc/{process.pid}/wchan").decode(errors="replace") if state == "D" else "",
                cpu=round(max(0.0, _cpu_seconds(root, process.pid) - before[process.pid]) / window_s, 2),
                threads=tuple(_with_text(thread, texts.get(process.pid, {})) for thread in threads),
                problem=problem,
                job=process.job,
            )
        )
    return NodeStacks(node=node, job=wanted.job, processes=tuple(processes), others=tuple(others))


def is_library(file: str) -> bool:
    """Tell whether a source file is the standard library's, an installed package's or generated, and not the user's.

    >>> is_library("/opt/venv/lib/python3.11/site-packages/torch/optim/sgd.py"), is_library("/home/me/train.py")
    (True, False)
    """
    return _LIBRARY.search(file) is not None


_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/(python|pypy)3[.\d]*t?/|^<|/allranks/(join|guard/inside)/|/torch/(distributed|nn|utils|autograd)/"
)


@dataclass(slots=True)
class _Stat:
    name: str
    state: str
    parent: int
    cpu_s: float


@dataclass(slots=True)
class FoundProcess:
    """A Python process before it was read."""

    pid: int
    stat: _Stat
    env: Mapping[str, str]
    command: Sequence[str]
    role: ProcessRole = ProcessRole.WORKER
    rank: int | None = field(init=False)
    local_rank: int | None = field(init=False)
    job: str = field(init=False)

    def __post_init__(self) -> None:
        self.job = name_job(self.env)
        step_id = self.env.get("SLURM_STEP_ID", "-")  # from 26.05 -5 in a batch script
        is_task = not step_id.startswith("-") and (_count(self.env, "SLURM_STEP_ID") or 0) < FIRST_SPECIAL_STEP
        slurm = "SLURM_PROCID", "SLURM_LOCALID"
        rank, local = slurm if is_task else ("", "")
        # Order matters: the innermost launcher first.
        self.rank = _count(self.env, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", rank)
        self.local_rank = _count(self.env, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", local)


def name_job(env: Mapping[str, str]) -> str:
    """Return what tells a process's job from others on this machine: the id of its run, else SLURM's, else its store.

    >>> name_job({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"})
    'node01:29500'
    """
    run = env.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's default
    store = ":".join(env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name))
    return run if run not in ("", "none") else env.get("SLURM_JOB_ID") or store


def find_processes(wanted: WantedStacks, *, root: Path = Path("/")) -> tuple[list[FoundProcess], list[str]]:
    """Return the wanted Python processes, workers first, and the names of the job's other processes.

    allranks' own agents, probes and standbys are left out, as are Python's helpers without a stack of interest.
    """
    stats = {pid: stat for pid in _pids(root) if (stat := _stat(root, pid))}
    mine: dict[int, FoundProcess] = {}
    others: list[str] = []
    for pid, stat in sorted(stats.items()):
        env = read_environment(pid, root=root)
        if not _is_wanted(wanted, pid, env, root) or STANDBY in env:
            continue
        command = _read(root / f"proc/{pid}/cmdline").decode(errors="replace").rstrip("\0").split("\0")
        if not (_is_python(root, pid, stat.name) or pid in wanted.pids):
            others.append(stat.name)
        elif pid != os.getpid() and not _is_helper(command, _read(root / f"proc/{stat.parent}/cmdline")):
            mine[pid] = FoundProcess(pid, stat, env, command)
    # The dead have no environment any more: their parent says whose they were.
    for pid, stat in stats.items():
        if stat.state == "Z" and stat.parent in mine and pid not in mine and _PYTHON.match(stat.name):
            mine[pid] = FoundProcess(pid, stat, {}, ())
            mine[pid].job = mine[stat.parent].job
    _assign_roles(mine, stats)
    order = list(ProcessRole)
    ranked = sorted(
        mine.values(), key=lambda process: (order.index(process.role), process.rank is None, process.rank, process.pid)
    )
    return ranked, sorted(set(others) - {"slurm_script"})


def _assign_roles(mine: Mapping[int, FoundProcess], stats: Mapping[int, _Stat]) -> None:
    """Who is whose child; a process without RANK above one that has it started it."""
    for process in mine.values():
        above = process.stat.parent
        while above in stats and above not in mine:
            above = stats[above].parent
        parent = mine.get(above)
        if "RANK" not in process.env and _LAUNCHER.search(" ".join(process.command[:4])):
            process.role = ProcessRole.LAUNCHER
        if parent is None:
            continue
        if "RANK" in process.env and "RANK" not in parent.env:
            parent.role = ProcessRole.LAUNCHER
        elif process.rank == parent.rank or process.rank is None:
            process.role = ProcessRole.CHILD
            process.rank, process.local_rank = parent.rank, parent.local_rank
    for process in mine.values():
        if process.role is ProcessRole.LAUNCHER:  # SLURM's number of it is a node's, not a rank
            process.rank = process.local_rank = None


_PYTHON = re.compile(r"(python|pypy)[\d.]*[td]?(-dbg)?$")
_LAUNCHER = re.compile(r"\btorchrun\b|torch[./]distributed[./](run|launch)\b|accelerate\S* launch|deepspeed\b.*launch")


def _is_python(root: Path, pid: int, name: str) -> bool:
    try:
        exe = (root / f"proc/{pid}/exe").readlink().name.removesuffix(" (deleted)")
    except OSError:
        exe = name
    return bool(_PYTHON.match(exe)) or b"/libpython3" in _read(root / f"proc/{pid}/maps")


def _is_helper(command: Sequence[str], above: bytes) -> bool:
    """Whether it is of allranks or multiprocessing; what a fork server starts has the server's command line, too."""
    is_server = "multiprocessing.forkserver" in str(command) and b"multiprocessing.forkserver" not in above
    is_ours = "allranks" in [Path(word).name for word in command[:2]] or "-m allranks " in " ".join(command[1:5]) + " "
    return is_server or is_ours or "multiprocessing.resource_tracker" in str(command)


def _is_wanted(wanted: WantedStacks, pid: int, env: Mapping[str, str], root: Path) -> bool:
    if wanted.pids:
        return pid in wanted.pids
    if not wanted.job:
        return "RANK" in env and "WORLD_SIZE" in env
    names = {value for name, value in env.items() if re.fullmatch(r"SLURM_JOB_ID(_HET_GROUP_\d+)?", name)}
    names |= {f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}", name_job(env)}
    if not env:  # another user's, or one that forbids to be read: SLURM's cgroup still says whose it is
        names |= set(re.findall(r"/job_(\d+)/", _read(root / f"proc/{pid}/cgroup").decode(errors="replace")))
    return wanted.job in names


def _dump(process: FoundProcess, deadline_s: float, root: Path) -> tuple[tuple[Thread, ...], str]:
    """Threads of one process, or why there are none."""
    if process.stat.state == "Z":
        return (), "has ended (zombie)"
    py_spy = _find_py_spy()
    if py_spy is None:
        return (), f"py-spy is not installed for {sys.executable}: pip install py-spy"
    words = ""
    for _ in range(ATTEMPTS):
        limit_s = min(DUMP_S, deadline_s - time.monotonic())
        if limit_s <= 0:
            return (), f"not read: the {LOOK_S:.0f} s for all processes of this node were used up"
        command = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(process.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                return (), f"py-spy did not finish within {limit_s:.0f} s"
        words = err.decode(errors="replace")
        if child.returncode == 0:
            try:
                return tuple(_thread(told, process.pid) for told in decode_json(out, list[_Told])), ""
            except Unreadable as exc:  # what it looked at, or itself, was killed meanwhile
                words = f"its answer is cut off ({exc})"
        if not (root / f"proc/{process.pid}").exists():
            return (), "has ended in the meantime"
        if "ermission" in words or "not permitted" in words:
            return (), explain_refusal(_read(root / "proc/sys/kernel/yama/ptrace_scope").decode().strip())
    if _namespace(root, process.pid) != _namespace(root, os.getpid()):
        return (), f"runs in a container that py-spy cannot read: {_shorten(words)}"
    return (), f"py-spy: {_shorten(words)}"


def explain_refusal(ptrace_scope: str) -> str:
    """Say why the kernel does not let this user read a process, and what cures it; empty scope: no Yama here."""
    if ptrace_scope in ("", "0"):
        return "cannot be read: it belongs to another user, or changed its user; run this as its owner or as root"
    if ptrace_scope == "3":
        return "cannot be read: kernel.yama.ptrace_scope is 3 on this node; the admin can lower it only with a reboot"
    return (
        f"cannot be read: kernel.yama.ptrace_scope is {ptrace_scope} on this node; "
        "as root: sysctl -w kernel.yama.ptrace_scope=0"
    )


class _ToldFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Told(msgspec.Struct):
    """A thread as py-spy writes it."""

    frames: list[_ToldFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None


def _thread(told: _Told, pid: int) -> Thread:
    name = told.thread_name or ""
    return Thread(
        name=name,
        is_main=name == "MainThread" or told.os_thread_id == pid,
        frames=tuple(Frame(frame.name, frame.filename, frame.line) for frame in told.frames),
    )


def _find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _user_lines(threads: Iterable[Thread]) -> set[tuple[str, int]]:
    return {(f.file, f.line) for thread in threads for f in thread.frames if not is_library(f.file)}


def _with_text(thread: Thread, texts: Mapping[tuple[str, int], str]) -> Thread:
    frames = (msgspec.structs.replace(f, text=texts.get((f.file, f.line), "")) for f in thread.frames)
    return msgspec.structs.replace(thread, frames=tuple(frames))


def _pids(root: Path) -> list[int]:
    return [int(name) for name in os.listdir(root / "proc") if name.isdigit()]  # noqa: PTH208


def _stat(root: Path, pid: int) -> _Stat | None:
    head, _, rest = _read(root / f"proc/{pid}/stat").decode(errors="replace").rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), cpu_s)


def _cpu_seconds(root: Path, pid: int) -> float:
    stat = _stat(root, pid)
    return stat.cpu_s if stat else 0.0


def _namespace(root: Path, pid: int) -> str:
    try:
        return str((root / f"proc/{pid}/ns/mnt").readlink())
    except OSError:
        return ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _count(env: Mapping[str, str], *names: str) -> int | None:
    value = next((env[name] for name in names if env.get(name)), "")
    return int(value) if value.isascii() and value.isdigit() else None


def _shorten(words: str) -> str:
    """What py-spy said, without its own back trace."""
    lines = [line.strip() for line in words.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return "; ".join(line for line in lines if line != "Caused by:")[:200] or "it failed without a message"
