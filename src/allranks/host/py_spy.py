"""Asks py-spy for the Python stacks of a process, from outside and without stopping it, and for the rank in them.

    ask_py_spy(4711, deadline_s=time.monotonic() + 4).threads[0].frames[0].name
    ask_for_ranks([4711])[4711].rank            # of ranks that are arguments, as with `mp.spawn`

`--nonblocking`: an ordinary dump would pause the process, and fails on a stopped one. Of variables only `rank`,
`world_size` and torch.multiprocessing's `i` tell a rank.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allranks.host.process import read_file, read_start_ticks
from allranks.model.foreign import Unreadable, decode_json

DUMP_S = 4.0
"""For one process; a dump takes 0.03 s, and longer only where the kernel does not hand the memory out."""
ATTEMPTS = 3
"""Of reading a process that is changing its stack at the same time."""
ASK_S = 4.0
"""For the variables of all processes whose environment tells no rank."""
AGAIN_S = 10.0
"""Between two questions to a process that tells nothing."""


class ToldLocal(msgspec.Struct):
    """A variable, as Python prints it."""

    name: str
    repr: str | None = None


class ToldFrame(msgspec.Struct):
    """A call on a stack as py-spy writes it."""

    name: str
    filename: str
    line: int
    locals: list[ToldLocal] | None = None


class ToldThread(msgspec.Struct):
    """A thread as py-spy writes it, innermost frame first."""

    frames: list[ToldFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None

    def is_main(self, pid: int) -> bool:
        """Whether it is the main thread of this process."""
        return self.thread_name == "MainThread" or self.os_thread_id == pid


class PySpyDump(msgspec.Struct, frozen=True):
    """What py-spy said of a process."""

    threads: tuple[ToldThread, ...] = ()
    problem: str = ""
    """Why there are none."""


def ask_py_spy(pid: int, *, deadline_s: float, with_locals: bool = False, root: Path = Path("/")) -> PySpyDump:
    """Return the threads of one process, or why there are none.

    Args:
        deadline_s: of the monotonic clock; no dump may take longer than DUMP_S.
        with_locals: the variables of each frame come along.
    """
    py_spy = _find_py_spy()
    if py_spy is None:
        return PySpyDump(problem=f"py-spy is not installed for {sys.executable}: pip install py-spy")
    command = [py_spy, "dump", "--json", "--nonblocking", *["--locals"] * with_locals, "--pid", str(pid)]
    words = ""
    for _ in range(ATTEMPTS):
        limit_s = min(DUMP_S, deadline_s - time.monotonic())
        if limit_s <= 0:
            return PySpyDump(problem="not read: the time for all processes of this node was used up")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                return PySpyDump(problem=f"py-spy did not finish within {limit_s:.0f} s")
        words = err.decode(errors="replace")
        if child.returncode == 0:
            try:
                return PySpyDump(tuple(decode_json(out, list[ToldThread])))
            except Unreadable as exc:  # what it looked at, or itself, was killed meanwhile
                words = f"its answer is cut off ({exc})"
        if not (root / f"proc/{pid}").exists():
            return PySpyDump(problem="has ended in the meantime")
        if "ermission" in words or "not permitted" in words:
            return PySpyDump(problem=explain_refusal(read_file(root / "proc/sys/kernel/yama/ptrace_scope").strip()))
    lines = [line.strip() for line in words.partition("Stack backtrace")[0].splitlines() if line.strip()]
    said = "; ".join(line for line in lines if line != "Caused by:")[:200] or "it failed without a message"
    return PySpyDump(problem=f"py-spy: {said}")


def explain_refusal(ptrace_scope: str) -> str:
    """Say why the kernel does not let this user read a process, and what cures it; empty scope: no Yama here."""
    if ptrace_scope in ("", "0"):
        return "cannot be read: it belongs to another user, or changed its user; run this as its owner or as root"
    cure = "only a reboot lowers it" if ptrace_scope == "3" else "as root: sysctl -w kernel.yama.ptrace_scope=0"
    return f"cannot be read: kernel.yama.ptrace_scope is {ptrace_scope} on this node; {cure}"


def _find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


@dataclass(frozen=True, slots=True)
class ToldRank:
    """What a stack says of its process."""

    rank: int
    local_rank: int | None
    world_size: int | None


_Process = tuple[int, int | None]
"""Its pid, and when it started."""
_TOLD: dict[_Process, ToldRank] = {}
"""A rank keeps its number."""
_SILENT: dict[_Process, float] = {}
"""Who told nothing, and when it was asked."""


def ask_for_ranks(
    pids: Iterable[int], *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
) -> dict[int, ToldRank]:
    """Return what the stacks of these processes tell, by pid.

    Who has told nothing is asked again after AGAIN_S; whom the time did not suffice for comes first.
    """
    if root != Path("/"):  # py-spy reads this machine, and no tree
        return {}
    keys, now_s = {pid: (pid, read_start_ticks(pid)) for pid in pids}, clock()
    for gone in _SILENT.keys() - keys.values():
        del _SILENT[gone]
    asked_s = {key: _SILENT.get(key, -math.inf) for key in keys.values() if key not in _TOLD}
    asked = sorted((key for key, at_s in asked_s.items() if now_s - at_s >= AGAIN_S), key=asked_s.__getitem__)
    for key in asked:
        if clock() >= now_s + ASK_S:
            break
        threads = ask_py_spy(key[0], deadline_s=now_s + ASK_S, with_locals=True).threads
        if (told := find_rank(threads)) is not None:
            _TOLD[key] = told
        else:
            _SILENT[key] = now_s
    return {pid: _TOLD[key] for pid, key in keys.items() if key in _TOLD}


def find_rank(threads: Iterable[ToldThread]) -> ToldRank | None:
    """Return the rank among the variables of a stack, the outermost `rank` first: a group's numbers are further in.

    A `rank` without any `world_size` counts only below torch.multiprocessing, whose `i` is the process's number there.
    """
    found: dict[str, int] = {}
    for frame in (
        frame for thread in threads if thread.thread_name == "MainThread" for frame in reversed(thread.frames)
    ):
        is_spawn = frame.name == "_wrap" and frame.filename.endswith("/torch/multiprocessing/spawn.py")
        for variable in frame.locals or ():
            text = variable.repr or ""
            if variable.name in ("rank", "world_size", *["i"] * is_spawn) and text.isascii() and text.isdigit():
                found.setdefault(variable.name, int(text))
    rank, world_size = found.get("rank", found.get("i")), found.get("world_size")
    if rank is None or (world_size is None and "i" not in found):
        return None
    return ToldRank(rank, found.get("i"), world_size) if world_size is None or rank < world_size else None
