"""Seven planted losses: does the ledger book each of them, within 5 % or 50 ms, and name the right rank?

    slow-rank     a rank computes 20 ms longer in each step      `wait` for it
    slow-loader   its loader takes 30 ms more for each batch      its `data`
    slow-disk     it saves to a disk that takes 10 ms a write     its `save`
    evaluation    it evaluates every 25 steps                     its `eval`
    late-start    it comes 3 s late to init_process_group         `start`, that the others wait for it
    restart       it dies 50 steps after a checkpoint             `redo` of 50 steps, and `restart`
    requeue       SLURM requeues the job, and starts it later     `queue`

The truth is what the ranks themselves measure (programs/), all by CLOCK_MONOTONIC of one machine. A wait is not what
was planted but what followed from it: from each call of an all-reduce to the call of its last rank, which the ranks
write down. So also what a busy machine adds is in both figures. What was planted is said beside it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.model.ledger import Category, Ledger, LostTime

from .jobs import (
    CLUSTER,
    PROGRAMS,
    Check,
    MeasurementError,
    Part,
    SixNodes,
    close_to,
    read_ledger,
    run_here,
    six_nodes,
    wait_for,
)

RANKS = 3
STEPS = 150
LOCAL = {"slow-rank": 2, "slow-loader": 1, "slow-disk": 0, "evaluation": 0, "late-start": 2}
"""On which rank each loss is planted that train.py plants."""
PLANTS = (*LOCAL, "restart", "requeue")
WITHIN = 0.05
CHECKPOINT_EVERY, LOST_STEPS = 60, 50
HELD_S = 12
"""How long a requeued job stays in the queue, at least."""


def measure(
    plants: Sequence[str],
    directory: Path,
    *,
    lab: str,
    is_together: bool = False,
    steps: int = STEPS,
    within: float = WITHIN,
) -> Part:
    """Plant losses, each in a job of its own.

    Args:
        plants: of PLANTS; `slow-rank=1` plants it on that rank.
        lab: name of the lab for `requeue`.
        is_together: plant those that train.py plants in one job.
        within: what part of the truth those may differ by.
    """
    part = Part()
    words = [plant.partition("=") for plant in plants if plant.partition("=")[0] in LOCAL]
    here = [(plant, int(rank or LOCAL[plant])) for plant, _, rank in words]
    for group in [here] if is_together and here else [[plant] for plant in here]:
        job = directory / "-".join(plant for plant, _ in group)
        for check in measure_here(dict(group), job, steps=steps, within=within):
            part.add(check)
    if "restart" in plants:
        for check in measure_restart(directory / "restart"):
            part.add(check)
    if "requeue" in plants:
        with six_nodes(lab) as nodes:
            part.add(measure_requeue(nodes, directory / "requeue"))
    return part


# In one job


@dataclass(frozen=True)
class Truth:
    """What the ranks have measured."""

    ranks: Sequence[Mapping[str, Any]]

    def seconds(self, rank: int, what: str) -> float:
        """Return how long a rank did something, after its first step."""
        return float(self.ranks[rank]["seconds"].get(what, 0.0))

    def waits(self) -> dict[int, float]:
        """Return how long ranks waited in all-reduces after their first step, by the rank that called it last."""
        found: defaultdict[int, float] = defaultdict(float)
        for calls in zip(*(rank["calls"] for rank in self.ranks), strict=True):
            last = max(range(len(calls)), key=calls.__getitem__)
            found[last] += sum(
                calls[last] - called_s
                for rank, called_s in zip(self.ranks, calls, strict=True)
                if called_s >= rank["first_step_s"]
            )
        return found

    def late_s(self, rank: int) -> float:
        """Return how long the others waited in init_process_group for a rank."""
        return sum(max(0.0, self.ranks[rank]["arrived_s"] - other["arrived_s"]) for other in self.ranks)


def measure_here(plants: Mapping[str, int], directory: Path, *, steps: int, within: float) -> list[Check]:
    """Plant losses in one job of this machine, each on its rank."""
    words = [word for plant, rank in plants.items() for word in ("--plant", f"{plant}={rank}")]
    ledger = run_here(directory, "train.py", "--steps", str(steps), *words, ranks=RANKS)
    truth = Truth([json.loads((directory / f"truth_{rank}.json").read_text()) for rank in range(RANKS)])
    return [CHECKS[plant](rank, truth, ledger, within) for plant, rank in plants.items()]


def check_wait(rank: int, truth: Truth, ledger: Ledger, within: float) -> Check:
    """Compare what others waited for a rank."""
    true_s = truth.waits()[rank]
    told_s = next((row.waited_for_s for row in ledger.waited_for if row.rank == rank), 0.0)
    others = [other for other in range(RANKS) if other != rank]
    planted_s = truth.seconds(rank, "compute") - sum(truth.seconds(other, "compute") for other in others) / len(others)
    note = f"planted {planted_s * len(others):.3f} s for {len(others)} ranks"
    return _check("slow rank: wait", Category.WAIT, rank, true_s, told_s, ledger, within, note=note)


def check_own(what: str, category: Category, key: str) -> Callable[[int, Truth, Ledger, float], Check]:
    """Return what compares a category of the rank itself."""

    def check(rank: int, truth: Truth, ledger: Ledger, within: float) -> Check:
        true_s, told_s = truth.seconds(rank, key), _row(ledger, rank).get(category, 0.0)
        return _check(what, category, rank, true_s, told_s, ledger, within)

    return check


def check_late_start(rank: int, truth: Truth, ledger: Ledger, within: float) -> Check:
    """Compare what others waited for a rank before the first step."""
    loss = _loss(ledger, Category.START)
    told_s = loss.waited_s if loss is not None else 0.0
    return _check("late start: start", Category.START, rank, truth.late_s(rank), told_s, ledger, within)


CHECKS: Mapping[str, Callable[[int, Truth, Ledger, float], Check]] = {
    "slow-rank": check_wait,
    "slow-loader": check_own("slow loader: data", Category.DATA, "data"),
    "slow-disk": check_own("slow disk: save", Category.SAVE, "save"),
    "evaluation": check_own("evaluation: eval", Category.EVAL, "eval"),
    "late-start": check_late_start,
}


def _check(
    what: str,
    category: Category,
    rank: int,
    true_s: float,
    told_s: float,
    ledger: Ledger,
    within: float,
    *,
    note: str = "",
) -> Check:
    """Return the check of one category, and of whom its largest loss names."""
    loss = _loss(ledger, category)
    named = f"rank {loss.ranks[0]}" if loss is not None and loss.ranks else ""
    limit_s = close_to(true_s, within)
    return Check(what, true_s, told_s, limit_s, owed_to=f"rank {rank}", named=named, note=note)


def _loss(ledger: Ledger, category: Category) -> LostTime | None:
    return next((loss for loss in ledger.losses if loss.category is category), None)


def _row(ledger: Ledger, rank: int) -> Mapping[str, float]:
    return next((row.seconds for row in ledger.ranks if row.rank == rank), {})


# A restart


def measure_restart(directory: Path) -> list[Check]:
    """Kill one rank of two, 50 steps after the first checkpoint."""
    steps = CHECKPOINT_EVERY + LOST_STEPS + 20
    words = ["--steps", str(steps), "--checkpoint-every", str(CHECKPOINT_EVERY), "--lose", str(LOST_STEPS)]
    ledger = run_here(directory, "session.py", *words, ranks=2, flags=["--max-restarts", "1"])
    ended = [_read_steps(directory / f"steps_{rank}.txt") for rank in range(2)]
    died_s = float((directory / "died.txt").read_text().split()[2])
    first_new_s = [min(at_s for (generation, _), at_s in rank.items() if generation == 1) for rank in ended]
    first_step = min(step for generation, step in ended[0] if generation == 1)
    if first_step != CHECKPOINT_EVERY + 1:
        raise MeasurementError(f"the job went on with step {first_step}, not behind step {CHECKPOINT_EVERY}")
    lost_s = [died_s - rank[0, CHECKPOINT_EVERY] for rank in ended]
    redo_s, restart_s = sum(lost_s), sum(at_s - died_s for at_s in first_new_s)
    (cost,) = ledger.restarts
    told = ledger.seconds
    redo_loss = _loss(ledger, Category.REDO)
    node = redo_loss.nodes[0] if redo_loss is not None and redo_loss.nodes else ""
    about = {"owed_to": f"{LOST_STEPS} steps by AR407 dead-rank on {node or 'a node'}"}
    about["named"] = f"{cost.redo_steps} steps by {cost.cause} on {cost.node}"
    return [
        Check("restart: redo", redo_s, told.get("redo", 0.0), close_to(redo_s), **about),
        Check("restart: until the first step", restart_s, told.get("restart", 0.0), close_to(restart_s)),
    ]


def _read_steps(path: Path) -> dict[tuple[int, int], float]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return {(int(generation), int(step)): float(at_s) for generation, step, at_s in lines}


# A requeue

BATCH = """\
#!/bin/bash
#SBATCH --requeue --open-mode=append --nodes=2 --ntasks-per-node=1 --time=10 --output={log}
date +%s.%N >> {directory}/began.txt
exec srun --no-kill --kill-on-bad-exit=0 {python} -m allranks run --cluster {cluster} --log-dir {directory}/runs \\
    --nproc-per-node 1 {program} --dir {directory}
"""


def measure_requeue(nodes: SixNodes, directory: Path) -> Check:
    """Requeue a job of two nodes, and let it start again some time later."""
    directory.mkdir(parents=True)
    script, log = directory / "batch.sh", directory / "output.txt"
    script.write_text(BATCH.format(log=log, directory=directory, python=sys.executable, cluster=CLUSTER,
                                   program=PROGRAMS / "plain.py"))  # fmt: skip
    controller = nodes.controller
    try:
        submitted_s = time.time()
        said = nodes.on(controller, "sbatch", "--chdir", str(directory), str(script))
        job = re.search(r"\d+", said)
        if job is None:
            raise MeasurementError(f"sbatch: {said}")
        steps = directory / "steps_0.txt"
        wait_for(lambda: steps.exists() and len(steps.read_text().splitlines()) > 40, 90, "40 steps")
        nodes.on(controller, "scontrol", "requeue", job[0])
        wait_for(lambda: _field(nodes, job[0], "JobState") == "PENDING", 60, "the job to wait")
        nodes.on(controller, "scontrol", "update", f"JobId={job[0]}", f"StartTime=now+{HELD_S}")
        began = directory / "began.txt"
        wait_for(lambda: len(began.read_text().splitlines()) == 2, 90, "the second start")
        wait_for(lambda: "1" in {line.split()[0] for line in steps.read_text().splitlines()}, 90, "a step of it")
        (directory / "stop").touch()
        wait_for(lambda: _field(nodes, job[0], "JobState") == "COMPLETED", 60, "its end")
    finally:
        nodes.clear()
    ended_s = max(float(line.split()[2]) for line in steps.read_text().splitlines() if line.startswith("0 "))
    began_s = [float(line) for line in began.read_text().splitlines()]
    true_s, ledger = 2 * (began_s[0] - submitted_s + began_s[1] - ended_s), read_ledger(directory / "runs")
    note = f"{ledger.attempts} attempts, two ranks: from sbatch to the script's start, from the last step to the next"
    return Check("requeue: queue", true_s, ledger.seconds.get("queue", 0.0), close_to(true_s), note=note)


def _field(nodes: SixNodes, job: str, name: str) -> str:
    shown = nodes.on(nodes.controller, "scontrol", "show", "job", "--oneliner", job, must_work=False)
    found = re.search(rf"\b{name}=(\S+)", shown)
    return found[1] if found else ""
