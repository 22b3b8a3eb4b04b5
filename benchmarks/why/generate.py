"""From a seed to a job: its files and the right answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .faults import FAULTS, Fault, Struck
from .job import Job
from .layout import Written, write_lines
from .noise import start_up, train
from .plan import Plan, draw_plan, half_of, variant_of
from .truth import Truth, tell_truth

SECOND_EVERY = 8
"""One job in so many has a second fault of its own, where its first allows it."""
END_S = 5000.0
"""Seconds after the fault after which nothing more is written."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One job, not yet on disk."""

    seed: int
    variant: str
    half: str
    plan: Plan
    written: tuple[Written, ...]
    truths: tuple[Truth, ...]
    """The first fault first; a second one where there is one."""

    @property
    def name(self) -> str:
        return f"job-{self.seed:06d}"

    def to_json(self) -> dict[str, Any]:
        """The truth, as `truth.json` has it."""
        return {
            "version": 1,
            "job": self.name,
            "seed": self.seed,
            "variant": self.variant,
            "half": self.half,
            "loss": self.plan.loss,
            "faults": [truth.to_json() for truth in self.truths],
        }

    def write(self, folder: Path) -> int:
        """Write the logs below a folder; returns the number of bytes."""
        texts: dict[str, list[str]] = {}
        for entry in self.written:
            texts.setdefault(entry.path, []).append(entry.text)
            if not entry.text.startswith("\r"):  # a progress bar ends with no new line
                texts[entry.path].append("\n")
        total = 0
        for path, parts in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            total += target.write_text("".join(parts), encoding="utf-8", newline="")
        return total


def generate(seed: int, *, is_small: bool = False) -> Generated:
    """Return the job of a seed."""
    rng, fault, plan = _begin(seed, is_small=is_small)
    job = Job(plan, rng)
    if fault.is_ft:
        job.aliases = {"agent-failed": "ft-failed", "agent-starts": "ft-start"}
    start_up(job)
    if not fault.is_before_steps:
        train(job)
    rank = rng.randrange(plan.world)
    struck_s = job.now_s
    struck = {0: (fault.name, fault.strike(job, 0, rank, False))}
    if fault.can_be_second and rng.randrange(SECOND_EVERY) == 0:
        delay = rng.uniform(1, 120)
        job.after(delay, _strike_again, job, rank, struck)
    job.run(until_s=struck_s + END_S)
    culprit = struck[0][1].rank if fault.can_lose else None
    written = tuple(write_lines(plan, job.lines, culprit, struck_s, rng.uniform(0, 40)))
    truths = tuple(tell_truth(plan, name, index, what, written, job.pids) for index, (name, what) in struck.items())
    variant = variant_of(fault.name, plan)
    return Generated(seed, variant, half_of(variant), plan, written, truths)


def _begin(seed: int, *, is_small: bool) -> tuple[random.Random, Fault, Plan]:
    rng = random.Random(f"why {seed}")
    fault = FAULTS[rng.choice(list(FAULTS))]
    return rng, fault, _draw(seed, rng, fault, is_small=is_small)


def _draw(seed: int, rng: random.Random, fault: Fault, *, is_small: bool) -> Plan:
    while True:
        plan = draw_plan(
            seed,
            rng,
            is_small=is_small,
            launchers=fault.launchers,
            layouts=fault.layouts,
            is_flat=fault.is_flat,
            net=fault.net,
            loss=None if fault.can_lose else "nothing",
        )
        if plan.num_nodes >= fault.min_nodes:
            return plan


def _strike_again(job: Job, first: int, struck: dict[int, tuple[str, Struck]]) -> None:
    """Let another rank on another node fail by itself, if one is left."""
    plan, rng = job.plan, job.rng
    ranks = [rank for rank in range(plan.world) if job.is_alive[rank] and plan.node_of(rank) != plan.node_of(first)]
    if ranks:
        fault = FAULTS[rng.choice([name for name, entry in FAULTS.items() if entry.can_be_second])]
        struck[1] = (fault.name, fault.strike(job, 1, rng.choice(ranks), True))


def list_seeds(
    first: int, count: int, *, half: str = "both", is_small: bool = False, only: str | None = None
) -> list[int]:
    """Return the seeds of `count` jobs of a half, from `first` on; `only` those whose first fault has this name."""
    found: list[int] = []
    seed = first
    while len(found) < count:
        _, fault, plan = _begin(seed, is_small=is_small)
        if only in {None, fault.name} and half in {"both", half_of(variant_of(fault.name, plan))}:
            found.append(seed)
        seed += 1
    return found


def generate_many(first: int, count: int, *, half: str = "both", is_small: bool = False) -> Iterator[Generated]:
    """Yield `count` jobs of a half, with seeds from `first` on."""
    for seed in list_seeds(first, count, half=half, is_small=is_small):
        yield generate(seed, is_small=is_small)


def write_job(job: Generated, folder: Path, *, is_merged: bool = False) -> int:
    """Write a job's folder: its logs below `logs`, and `truth.json` beside it.

    Args:
        is_merged: also write `merged.log`, for tools that read one log: all lines in the order in which they were said.
    """
    place = folder / job.name
    total = job.write(place / "logs")
    if is_merged:
        text = "\n".join(entry.text.lstrip("\r") for entry in job.written)
        (place / "merged.log").write_text(text + "\n", encoding="utf-8")
    (place / "truth.json").write_text(json.dumps(job.to_json(), indent=2) + "\n")
    return total
