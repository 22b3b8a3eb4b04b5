"""Which Python processes of a job run on this machine, and what is each doing now?

    look(WantedStacks(job="123"), node="node01").processes[0].threads[0].frames[0].function

Nothing is stopped, signalled or written to: /proc is read, and py-spy reads the interpreter's memory from outside.

Limits: those of host.job_processes, which finds them, and of host.py_spy, which reads them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from allranks.host.job_processes import FoundProcess, WantedStacks, find_processes, read_stat
from allranks.host.process import read_file
from allranks.host.py_spy import PySpyDump, ToldThread, ask_py_spy
from allranks.host.source import read_source_lines
from allranks.model.node_look import ProcessRole

LOOK_S = 12.0
"""For all stacks of this machine: what has not been read by then stays unread."""
CPU_WINDOW_S = 0.25
MAX_AT_ONCE = 4


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
    store: str = ""
    """Address and port of the job's store, if the process owns that port."""


class NodeStacks(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says."""

    node: str
    job: str
    processes: tuple[Process, ...]


def look(wanted: WantedStacks, *, node: str, root: Path = Path("/")) -> NodeStacks:
    """Return the stacks of all wanted Python processes of this machine; what could not be read says why.

    Args:
        wanted: which processes.
        node: this machine's name in the answer.
        root: where /proc is; tests feed a tree.
    """
    deadline_s = time.monotonic() + LOOK_S
    found = find_processes(wanted, root=root)
    began_s, before_s = time.monotonic(), {process.pid: _cpu_s(process, root) for process in found}
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        answers = pool.map(lambda process: _dump(process, deadline_s, root), found)
        dumps = {process.pid: dump for process, dump in zip(found, answers, strict=True)}
    time.sleep(max(0.0, began_s + CPU_WINDOW_S - time.monotonic()))
    window_s = time.monotonic() - began_s
    frames = {pid: [frame for thread in dump.threads for frame in thread.frames] for pid, dump in dumps.items()}
    lines = {
        pid: {(frame.filename, frame.line) for frame in own if not is_library(frame.filename)}
        for pid, own in frames.items()
    }
    texts = read_source_lines(lines, root=root)
    processes = []
    for process in found:
        pid, state = process.pid, (read_stat(process.pid, root=root) or process.stat).state
        processes.append(
            Process(
                pid=pid,
                role=process.role,
                rank=process.rank,
                local_rank=process.local_rank,
                world_size=process.world_size,
                state=state,
                kernel_wait=read_file(root / f"proc/{pid}/wchan") if state == "D" else "",
                cpu=round(max(0.0, _cpu_s(process, root) - before_s[pid]) / window_s, 2),
                threads=tuple(_thread(told, pid, texts.get(pid, {})) for told in dumps[pid].threads),
                problem=dumps[pid].problem,
                job=process.job,
                store=process.serves,
            )
        )
    return NodeStacks(node=node, job=wanted.job, processes=tuple(processes))


def is_library(file: str) -> bool:
    """Tell whether a source file is the standard library's, an installed package's or generated, and not the user's.

    >>> is_library("/opt/venv/lib/python3.11/site-packages/torch/optim/sgd.py"), is_library("/home/me/train.py")
    (True, False)
    """
    return _LIBRARY.search(file) is not None


_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/(python|pypy)3[.\d]*t?/|^<|/allranks/(join|guard/inside)/|/torch/(distributed|nn|utils|autograd)/"
)


def _dump(process: FoundProcess, deadline_s: float, root: Path) -> PySpyDump:
    if process.stat.state == "Z":
        return PySpyDump(problem="has ended (zombie)")
    return ask_py_spy(process.pid, deadline_s=deadline_s, root=root)


def _thread(told: ToldThread, pid: int, texts: Mapping[tuple[str, int], str]) -> Thread:
    frames = (Frame(f.name, f.filename, f.line, texts.get((f.filename, f.line), "")) for f in told.frames)
    return Thread(told.thread_name or "", told.is_main(pid), tuple(frames))


def _cpu_s(process: FoundProcess, root: Path) -> float:
    stat = read_stat(process.pid, root=root)
    return stat.cpu_s if stat else 0.0
