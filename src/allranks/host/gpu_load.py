"""How busy is each NVIDIA GPU of this machine, how full is its memory, and which processes use it?

    loads = read_gpu_loads(deadline_s=5.0)
    load_of(pids, loads, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))     # by process, as its rank's GPU

Two questions to nvidia-smi. Like `host.gpu`, it ran on recorded answers only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.host.programs import run_command
from allranks.model.beat import GpuSeen

FIELDS = ("uuid", "utilization.gpu", "memory.used", "memory.total")
MAX_MIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """One GPU, or one slice of it."""

    uuid: str
    percent: int | None
    """Of the last second or less, in which a kernel ran; None: not told (MIG)."""
    used_mib: int
    total_mib: int
    pids: tuple[int, ...] = ()
    """That have memory on it. In a container the driver may name none, or pids of another namespace."""


def read_gpu_loads(*, deadline_s: float, env: Mapping[str, str] | None = None) -> tuple[GpuLoad, ...]:
    """Ask nvidia-smi how busy the GPUs are that it shows; empty: there is no answer.

    Args:
        deadline_s: for both questions together.
        env: PATH in it says where nvidia-smi is; the own environment if None.
    """
    end_s, csv = time.monotonic() + deadline_s, "--format=csv,noheader,nounits"
    loads = run_command(("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", csv), deadline_s=deadline_s, env=env)
    if loads.rc is None:
        return ()
    query = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", csv)
    users = run_command(query, deadline_s=max(0.0, end_s - time.monotonic()), env=env)
    return parse_gpu_loads(loads.stdout, users.stdout)


def parse_gpu_loads(loads: str, users: str) -> tuple[GpuLoad, ...]:
    """Read rows like `GPU-..., 97, 71303, 81559` and `GPU-..., 812, python3, 14336`; a name may hold commas."""
    pids: dict[str, list[int]] = {}
    for row in _rows(users):
        if len(row) >= 4 and (pid := _number(row[1])) is not None:
            pids.setdefault(row[0], []).append(pid)
    found = list[GpuLoad]()
    for row in _rows(loads):
        percent, used, total = map(_number, row[1:]) if len(row) == len(FIELDS) else (None, None, None)
        if used is not None and total is not None:
            percent = None if percent is None or percent > 100 else percent
            found.append(GpuLoad(row[0], percent, used, total, tuple(pids.get(row[0], ()))))
    return tuple(found)


def _rows(text: str) -> list[list[str]]:
    return [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.startswith("GPU-")]


def _number(text: str) -> int | None:
    """Return a number; None for `[N/A]` and for what no GPU has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= MAX_MIB else None


def load_of(
    pids: Mapping[int, int], loads: Sequence[GpuLoad], *, visible: str | None = None, root: Path = Path("/")
) -> dict[int, GpuSeen]:
    """Return by rank what the GPUs of its process do.

    Where nvidia-smi names no process of this machine, as in most containers, and there is one GPU for each rank, the
    ranks have them in order: so they were started.

    Args:
        pids: of the ranks of this node, by rank.
        visible: CUDA_VISIBLE_DEVICES, which orders them.
        root: where /proc is.
    """
    by_rank = {rank: [load for load in loads if pid in load.pids] for rank, pid in pids.items()}
    if not any((root / f"proc/{pid}").exists() for load in loads for pid in load.pids):
        chosen = _choose(loads, visible)
        if len(chosen) == len(pids):
            by_rank = {rank: [load] for rank, load in zip(sorted(pids), chosen, strict=True)}
    return {rank: _sum(own) for rank, own in by_rank.items() if own}


def _choose(loads: Sequence[GpuLoad], visible: str | None) -> list[GpuLoad]:
    """Return the GPUs that a process sees, in its order."""
    if visible is None:
        return [*loads]
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    numbers = [_number(entry) for entry in entries]
    return [
        load
        for entry, number in zip(entries, numbers, strict=True)
        for load in (loads[number : number + 1] if number is not None else loads)
        if number is not None or load.uuid.startswith(entry)
    ]


def _sum(loads: Sequence[GpuLoad]) -> GpuSeen:
    """Of several GPUs of one process the use of the idlest, and all of their memory."""
    return GpuSeen(
        percent=min((load.percent for load in loads if load.percent is not None), default=None),
        used_mib=sum(load.used_mib for load in loads),
        total_mib=sum(load.total_mib for load in loads),
    )
