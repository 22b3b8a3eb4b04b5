"""What does `py-spy dump` show for the same faults? Each rank is dumped, as its owner would, a moment after the fault.

    python -m benchmarks.watch beside

The other tools of docs/comparison.md read what NCCL and GPUs tell; there is neither here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .faults import FAULTS, Fault, Named
from .jobs import NUM_RANKS, LocalJob
from .stage import RANK, answer, run_apart, tell_truth

AFTER_S, DUMP_S = 4.0, 10.0
_USER = re.compile(r"^\s+(?P<function>\w+) \((?:[^:)]*/)?(?P<file>(?:train|data)\.py):(?P<line>\d+)\)")
_TOP = re.compile(r"^\s+(?P<function>[\w<>]+) \((?P<file>[^:)]+)")


def compare(scratch: Path) -> dict[str, Any]:
    """Dump the ranks of one torchrun job for each fault."""
    rows = []
    for name in FAULTS:
        directory = scratch / f"beside-{name}"
        row = run_apart(["benchmarks.watch.beside", name, str(directory)], directory, timeout_s=200)
        print(f"{row['fault']:16} {row['told']:4} {row['shown']}", flush=True)
        rows.append(row)
    version = subprocess.run([_py_spy(), "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return {"version": version, "after_s": AFTER_S, "rows": rows}


def _py_spy() -> str:
    return str(Path(sys.executable).with_name("py-spy"))


def dump(pid: int) -> str:
    """Return what a dump shows in short, or why there is none."""
    try:
        done = subprocess.run(
            [_py_spy(), "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {DUMP_S:.0f} s"
    if "process executable name" in done.stderr:
        return "no such process any more"
    if done.returncode:
        return f"error: {' '.join(done.stderr.split())[:110]}"
    return shorten(done.stdout)


def shorten(text: str) -> str:
    """Shorten a dump to the main thread's innermost call and the user's innermost line.

    >>> shorten('Thread 7 (idle): "MainThread"\\n    all_reduce (torch/c10d.py:9)\\n    average (train.py:38)\\n')
    'all_reduce at train.py:38 in average'
    """
    main = text.partition('"MainThread"')[2].partition("\nThread ")[0].splitlines()
    calls = [found["function"] for line in main if (found := _TOP.match(line))]
    user = next((found for line in main if (found := _USER.match(line))), None)
    if user is None:
        return calls[0] if calls else "no Python frames"
    at = f"{user['file']}:{user['line']} in {user['function']}"
    return at if not calls or calls[0] == user["function"] else f"{_known(calls)} at {at}"


def _known(calls: list[str]) -> str:
    return next((call for call in calls if call in ("all_reduce", "broadcast", "new_group")), calls[0])


def is_told(shown: Mapping[int, str], fault: Fault) -> bool:
    """Whether the dumps single the right rank out: it alone shows something else than the others."""
    counted = Counter(shown.values())
    odd = {rank for rank, text in shown.items() if counted[text] == 1}
    return fault.named is Named.RANK and len(counted) == 2 and odd == {RANK}


def _show(name: str, directory: Path) -> dict[str, Any]:
    fault, job = FAULTS[name], LocalJob("torchrun", directory / "job")
    try:
        job.start()
        job.wait_until_stepping()
        tell_truth(job, fault)
        pids = {rank: job.pid_of(rank) for rank in range(NUM_RANKS)}
        fault.strike(job, RANK)
        time.sleep(AFTER_S)
        shown = {rank: dump(pid) for rank, pid in pids.items()}
    finally:
        job.end()
    groups: dict[str, list[int]] = {}
    for rank, text in shown.items():
        groups.setdefault(re.sub(r"\b\d{2,}\b(?!:)", "N", text) if text.startswith("error") else text, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items())
    return {"fault": name, "shown": told, "told": "yes" if is_told(shown, fault) else "no"}


if __name__ == "__main__":
    where = Path(sys.argv[2])
    sys.exit(answer(where, lambda: _show(sys.argv[1], where)))
