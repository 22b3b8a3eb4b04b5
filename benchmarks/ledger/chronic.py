"""Six ranks on six lab nodes, one of them 10 % slow in steps of 100 ms: when is it named, and when does `top` show it?

In the job with a late rank, `allranks top --json` is asked again and again; the step is that of the late rank's own
count at the time of the answer. The event `straggler` names a rank as chronic, once. In the healthy job, of as many
steps or of some minutes, nobody may be named, and at the end `top` may show nobody as costly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.report.top_rows import COSTLY

from .jobs import (
    CLUSTER,
    PROGRAMS,
    Check,
    MeasurementError,
    Part,
    SixNodes,
    clean_env,
    read_json_lines,
    read_ledger,
    six_nodes,
    wait_for,
)

RANKS, STEPS = 6, 320
LATE_RANK, LATE_MS, STEP_MS = 3, 10.0, 100.0
NAMED_BY, SHOWN_BY = 300, 50
LOOK_EVERY_S = 0.5


def measure(directory: Path, *, lab: str, minutes: float, kinds: Sequence[str]) -> Part:
    """Run the job with a late rank, and the healthy one.

    Args:
        minutes: of the healthy one; 0: as many steps as the other.
        kinds: of `late`, `healthy`.
    """
    part = Part()
    with six_nodes(lab) as nodes:
        if "late" in kinds:
            seen = run_job(nodes, directory / "late", late=LATE_RANK, num_steps=STEPS)
            for check in check_late(seen):
                part.add(check)
        if "healthy" in kinds:
            num_steps = round(minutes * 60e3 / STEP_MS) if minutes else STEPS
            seen = run_job(nodes, directory / "healthy", late=-1, num_steps=num_steps)
            for check in check_healthy(seen):
                part.add(check)
    return part


@dataclass(frozen=True)
class Seen:
    """One job."""

    steps_s: Sequence[float]
    """When the late rank (of a healthy job, the same one) ended each step, since the epoch."""
    looks: Sequence[tuple[float, Mapping[str, Any]]]
    """When `top --json` had answered, and its status."""
    named: Sequence[tuple[float, int, str]]
    """Events `straggler`: when, rank, message."""
    share: float
    """Of the others' time that was spent waiting for the late rank, by the account."""

    def step_at(self, time_s: float) -> int:
        """Return how many steps the late rank had made."""
        return bisect_right(self.steps_s, time_s)


def run_job(nodes: SixNodes, directory: Path, *, late: int, num_steps: int) -> Seen:
    """Run one job, and look at it with `top` all the time."""
    directory.mkdir(parents=True)
    log, runs = directory / "output.txt", directory / "runs"
    job = [
        *("srun", f"--nodes={RANKS}", "--ntasks-per-node=1", sys.executable, "-m", "allranks", "run"),
        *("--cluster", str(CLUSTER), "--nproc-per-node", "1", "--log-dir", str(runs), str(PROGRAMS / "plain.py")),
        *("--dir", str(directory), "--steps", str(num_steps), "--step-ms", str(STEP_MS)),
        *("--late", str(late), "--late-ms", str(LATE_MS)),
    ]
    process = nodes.start(log, *job)
    looks: list[tuple[float, Mapping[str, Any]]] = []
    path = directory / f"steps_{LATE_RANK}.txt"
    try:
        wait_for(lambda: path.exists() or process.poll() is not None, 90, f"the first step; see {log}")
        until_s = time.monotonic() + 2 * num_steps * STEP_MS / 1e3 + 60
        while process.poll() is None:
            if time.monotonic() > until_s:
                raise MeasurementError(f"the job did not end; see {log}")
            if (status := ask_top(runs)) is not None:
                looks.append((time.time(), status))
            time.sleep(LOOK_EVERY_S if num_steps <= STEPS else 10 * LOOK_EVERY_S)
    finally:
        nodes.clear(process)
    if process.returncode:
        raise MeasurementError(f"exit code {process.returncode}\n{log.read_text()[-4000:]}")
    ledger = read_ledger(runs)
    waited_s = next((row.waited_for_s for row in ledger.waited_for if row.rank == LATE_RANK), 0.0)
    events = read_json_lines(next(runs.glob("[0-9]*/attempt_0/events.jsonl")))
    return Seen(
        steps_s=[float(line.split()[2]) for line in path.read_text().splitlines()],
        looks=looks,
        named=[(seen["time_s"], seen["rank"], seen["message"]) for seen in events if seen["event"] == "straggler"],
        share=waited_s / (ledger.rank_s - ledger.seconds.get("start", 0.0)) * RANKS / (RANKS - 1),
    )


def ask_top(runs: Path) -> Mapping[str, Any] | None:
    """Return what `allranks top --json` says; None: nothing yet."""
    command = [sys.executable, "-m", "allranks", "top", "--json", "--log-dir", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=clean_env(), check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def costly(status: Mapping[str, Any]) -> list[int]:
    """Return the ranks that `top` marks as costly, the worst first."""
    rows = [row["of"] for row in status.get("rows", ())]
    return [rank for row in rows if row.get("cost_share", 0.0) >= COSTLY for rank in row["ranks"]]


def check_late(seen: Seen) -> list[Check]:
    """Was the late rank named in time, and shown in time, and nobody else?"""
    whom = f"rank {LATE_RANK}"
    named = ", ".join(f"rank {rank}" for _, rank, _ in seen.named)
    named_at = seen.step_at(seen.named[0][0]) if seen.named else len(seen.steps_s) + 1
    shown = [(seen.step_at(at_s), ranks[0]) for at_s, status in seen.looks if (ranks := costly(status))]
    first = next((step for step, rank in shown if rank == LATE_RANK), len(seen.steps_s) + 1)
    others = sum(rank != LATE_RANK for _, rank in shown)
    said = f"{seen.named[0][2]}" if seen.named else ""
    step_ms = 1e3 * (seen.steps_s[-1] - seen.steps_s[0]) / (len(seen.steps_s) - 1)
    truth = LATE_MS / step_ms
    return [
        Check("late: named at step", 0, named_at, NAMED_BY, unit="steps", owed_to=whom, named=named, at_most=True,
              note=said),
        Check("late: shown in top at step", 0, first, SHOWN_BY, unit="steps", owed_to=whom,
              named=whom if any(rank == LATE_RANK for _, rank in shown) else "", at_most=True,
              note=f"{len(seen.looks)} looks, in {others} another rank is the worst; steps of {step_ms:.0f} ms"),
        Check("late: share waited for it", 100 * truth, 100 * seen.share, 2.0, unit="%",
              note="10 ms of a step; what the other ranks waited for it, of their time"),
    ]  # fmt: skip


def check_healthy(seen: Seen) -> list[Check]:
    """Is nobody named?"""
    step_ms = 1e3 * (seen.steps_s[-1] - seen.steps_s[0]) / (len(seen.steps_s) - 1)
    note = f"{len(seen.steps_s)} steps of {step_ms:.0f} ms, load {os.getloadavg()[0]:.1f}"
    said = "; ".join(f"rank {rank} at step {seen.step_at(at_s)}: {text}" for at_s, rank, text in seen.named)
    shown = sum(bool(costly(status)) for _, status in seen.looks)
    return [
        Check("healthy: ranks named", 0, len(seen.named), 0, unit="ranks", at_most=True, note=said or note),
        Check("healthy: looks at top that show one", 0, shown, 0.1 * len(seen.looks), unit="looks", at_most=True,
              note=f"of {len(seen.looks)}"),
    ]  # fmt: skip
