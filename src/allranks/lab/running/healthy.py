"""Is a rank reported wrongly in a healthy training? Slow steps, late ranks, evaluations and checkpoints, for long.

    train(Lab("demo"), seed=7, minutes=30, work_dir=Path("drills"))       # -> Calm

The seed decides when the program does what (`Mixture` in programs/orders.py); a rank that is busy for long logs it.
There must be no verdict, and a rank that is reported as slow must have been busy.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.lab.faults.fault import JobStart
from allranks.lab.faulty_job import wait_until_gone
from allranks.lab.lab import Lab
from allranks.lab.running.strike_drill import END_S, UP_S
from allranks.lab.running.terminal import Terminal
from allranks.lab.running.training import PLAIN, PROGRAM, TIME_MINUTES, Running
from allranks.model.errors import SetupError

LATE_S = 3.0
"""A line about a slow rank may come this long after the rank has returned."""
_SLOW = re.compile(r"\bslow: rank (\d+)\b")


class Busy(msgspec.Struct, frozen=True):
    """A period in which one rank was busy."""

    rank: int
    from_s: float
    to_s: float
    step: int


class Calm(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a healthy training."""

    minutes: float
    num_steps: int
    num_busy: int
    num_slow: int
    """Number of lines that reported a rank as slow."""
    wrong: tuple[str, ...]

    def lines(self) -> list[str]:
        """One line for the user."""
        found = f"{self.num_steps} steps in {self.minutes:.1f} min; {self.num_busy} long evaluations"
        return [
            f"healthy: {found}, {self.num_slow} reports of slow ranks",
            *(f"    {problem}" for problem in self.wrong),
        ]


def train(lab: Lab, *, seed: int, minutes: float, work_dir: Path, is_plain: bool) -> Calm:
    """Train for some minutes, and compare the reports with the log of busy ranks.

    Args:
        lab: a lab that is up.
        seed: of the mixture.
        minutes: counted from the first steps of all ranks.
        work_dir: for run directories and logs.
        is_plain: train with the script that does not use allranks.
    Raises:
        SetupError: the job does not start.
    """
    directory = (work_dir / f"running-healthy-{seed}-{int(time.time())}").absolute()
    directory.mkdir(parents=True)
    job = Running(lab, directory, None, JobStart(), minutes=TIME_MINUTES + round(minutes))
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
    wrong += [f"accused: {event['cause']} {event.get('node')}" for event in job.events() if event["event"] == "verdict"]
    busy = read_busy(directory)
    slow = [(time_s, int(match[1])) for time_s, line in terminal.lines if (match := _SLOW.search(line))]
    wrong += judge_slow(slow, busy)
    steps = job.target.steps()
    return Calm(
        minutes=round(trained_s / 60, 2),
        num_steps=max((step.step for step in steps), default=0),
        num_busy=len(busy),
        num_slow=len(slow),
        wrong=tuple(wrong),
    )


def read_busy(directory: Path) -> list[Busy]:
    """Return the periods in which ranks were busy."""
    lines = [line for path in directory.glob("busy_*.jsonl") for line in path.read_text().splitlines()]
    return [msgspec.convert(json.loads(line), Busy) for line in lines]


def judge_slow(slow: Sequence[tuple[float, int]], busy: Sequence[Busy]) -> list[str]:
    """Return the lines that reported a rank that was not busy then.

    Args:
        slow: (when, rank) of each line.
        busy: periods in which ranks were busy.
    """
    return [
        f"rank {rank} was reported as slow, but was not"
        for time_s, rank in slow
        if not any(span.rank == rank and span.from_s <= time_s <= span.to_s + LATE_S for span in busy)
    ]
