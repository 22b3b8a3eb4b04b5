"""Which rank is a process, by the variables of its Python stack? For ranks that are arguments, as with `mp.spawn`.

ask_for_ranks([4711])[4711].rank

py-spy shows the variables, and nothing is stopped. Only `rank`, `world_size` and torch.multiprocessing's `i` are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allranks.host.process import read_start_ticks
from allranks.host.py_spy import ToldThread, ask_py_spy

ASK_S = 4.0
"""For the variables of all processes whose environment tells no rank."""
MAX_AT_ONCE = 4
AGAIN_S, MOST_S = 3.0, 30.0
"""Between two questions to a process that tells nothing: at first, and at most."""


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
_SILENT: dict[_Process, tuple[float, float]] = {}
"""Who told nothing: when it is asked again, and after which pause."""


def ask_for_ranks(
    pids: Iterable[int], *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
) -> dict[int, ToldRank]:
    """Return what the stacks of these processes tell, by pid.

    Who has told nothing is asked again, the more rarely the more often; whom the time did not suffice for comes first.
    """
    if root != Path("/"):  # py-spy reads this machine, and no tree
        return {}
    keys, now_s = {pid: (pid, read_start_ticks(pid)) for pid in pids}, clock()
    for gone in _SILENT.keys() - keys.values():
        del _SILENT[gone]
    due = {key: _SILENT.get(key, (-math.inf, 0.0))[0] for key in keys.values() if key not in _TOLD}
    asked = sorted((key for key, due_s in due.items() if due_s <= now_s), key=due.__getitem__)
    deadline_s = now_s + ASK_S

    def ask(key: _Process) -> None:
        if clock() >= deadline_s:
            return
        threads = ask_py_spy(key[0], deadline_s=deadline_s, with_locals=True).threads
        if (told := find_rank(threads)) is not None:
            _TOLD[key] = told
        else:
            pause_s = min(MOST_S, max(AGAIN_S, 2 * _SILENT.get(key, (0.0, 0.0))[1]))
            _SILENT[key] = now_s + pause_s, pause_s

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        list(pool.map(ask, asked))
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
