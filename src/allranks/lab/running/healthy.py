"""Is anybody accused of anything in a healthy training? Slow steps, late ranks, evaluations and checkpoints, for long.

    train(Lab("demo"), seed=7, minutes=30, work_dir=Path("drills"))       # -> Calm

The program draws by the seed what it does when (`Mixture` in programs/orders.py), and who is at something for long
writes it down. No verdict may come, and whoever is called slow must have been the one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.lab.faults.fault import Start
from allranks.lab.job import wait_until_gone
from allranks.lab.lab import Lab
from allranks.lab.running.drill import END_S, UP_S
from allranks.lab.running.job import PLAIN, PROGRAM, TIME_MINUTES, Running
from allranks.lab.running.terminal import Terminal
from allranks.model.errors import SetupError

LATE_S = 3.0
"""A line about a slow rank may come so long after the rank is back."""
_SLOW = re.compile(r"\bslow: rank (\d+)\b")


class Busy(msgspec.Struct, frozen=True):
    """One rank was at something for long."""

    rank: int
    from_s: float
    to_s: float
    step: int


class Calm(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a healthy training."""

    minutes: float
    num_steps: int
    num_busy: int
    num_slow: int
    """Lines that called a rank slow."""
    wrong: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        found = f"{self.num_steps} steps in {self.minutes:.1f} min; {self.num_busy} long evaluations"
        return [f"healthy: {found}, {self.num_slow} reports of slow ranks", *(f"    {each}" for each in self.wrong)]


def train(lab: Lab, *, seed: int, minutes: float, work_dir: Path, is_plain: bool) -> Calm:
    """Train so long, and hold what was said against what was done.

    Args:
        lab: which must be up.
        seed: of the mixture.
        minutes: from the first steps of all ranks on.
        work_dir: where run directories and logs go.
        is_plain: train with the script that knows nothing of allranks.
    Raises:
        SetupError: the job does not come up.
    """
    directory = (work_dir / f"running-healthy-{seed}-{int(time.time())}").absolute()
    directory.mkdir(parents=True)
    job = Running(lab, directory, None, Start(), minutes=TIME_MINUTES + round(minutes))
    wrong: list[str] = []
    with Terminal(job.output) as terminal:
        try:
            job.begin(PLAIN if is_plain else PROGRAM, ["--mix", str(seed)])
            job.wait_until_stepping(UP_S)
            began_s = time.monotonic()
            while time.monotonic() < began_s + minutes * 60 and not job.has_ended():
                time.sleep(0.5)
            trained_s = time.monotonic() - began_s
            if job.has_ended():
                wrong.append(f"the job ended after {trained_s:.0f} s with exit code {job.exit_code()}")
            job.target.stop()
            try:
                job.target.wait(job.has_ended, END_S + 60.0, "the training to end")
            except SetupError as exc:
                wrong.append(str(exc))
            if job.exit_code() != 0:
                wrong.append(f"exit code {job.exit_code()}")
        finally:
            job.cut_off()
            wrong += [f"left running: {process}" for process in wait_until_gone(lab)]
    wrong += [f"accused: {each['cause']} {each.get('node')}" for each in job.events() if each["event"] == "verdict"]
    busy = read_busy(directory)
    slow = [(time_s, int(match[1])) for time_s, line in terminal.lines if (match := _SLOW.search(line))]
    wrong += judge_slow(slow, busy)
    steps = job.target.steps()
    return Calm(
        minutes=round(trained_s / 60, 2),
        num_steps=max((each.step for each in steps), default=0),
        num_busy=len(busy),
        num_slow=len(slow),
        wrong=tuple(wrong),
    )


def read_busy(directory: Path) -> list[Busy]:
    """Return who was at something for long."""
    lines = [line for path in directory.glob("busy_*.jsonl") for line in path.read_text().splitlines()]
    return [msgspec.convert(json.loads(line), Busy) for line in lines]


def judge_slow(slow: Sequence[tuple[float, int]], busy: Sequence[Busy]) -> list[str]:
    """Return which lines named a rank that was at nothing then.

    Args:
        slow: (when, rank) of each line.
        busy: who was at something.
    """
    return [
        f"rank {rank} was reported as slow, but was not"
        for time_s, rank in slow
        if not any(each.rank == rank and each.from_s <= time_s <= each.to_s + LATE_S for each in busy)
    ]
