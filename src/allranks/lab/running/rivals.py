"""Did two groups of workers of one job train at the same time? Pure: from records to a list of signs.

A start of the workers is over when a later one has done its first step: from then on it may neither step nor complete a
checkpoint. Within one start, a rank is one process. All nodes of the lab share one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allranks.lab.faults.running.target import Saved, StepDone

MOST_SIGNS = 3
"""Shown; of two groups that train at the same time, every step is a sign."""
Start = tuple[int, int]
"""Attempt and generation."""


def find_rivals(steps: Sequence[StepDone], saved: Sequence[Saved] = ()) -> list[str]:
    """Return the signs of rivals; empty if there never were any.

    Args:
        steps: of all ranks.
        saved: whole checkpoints.
    """
    first_s: dict[Start, float] = {}
    for done in sorted(steps, key=lambda step: step.time_s):
        first_s.setdefault(done.start, done.time_s)
    signs = [*_doubled_ranks(steps), *_late_steps(steps, first_s), *_late_saves(saved, first_s)]
    return signs[:MOST_SIGNS] + ([f"{len(signs) - MOST_SIGNS} more like this"] if len(signs) > MOST_SIGNS else [])


def _late_steps(steps: Sequence[StepDone], first_s: Mapping[Start, float]) -> list[str]:
    over_s = {start: _over_s(start, first_s) for start in first_s}
    return [
        f"{step.node} did step {step.step} {step.time_s - over_s[step.start]:.2f} s after the first of later workers"
        for step in steps
        if step.time_s > over_s[step.start]
    ]


def _doubled_ranks(steps: Sequence[StepDone]) -> list[str]:
    places: dict[tuple[int, int, int], set[tuple[str, int]]] = {}
    for step in steps:
        places.setdefault((*step.start, step.rank), set()).add((step.node, step.pid))
    return [
        f"rank {rank} of generation {generation} trained on {' and '.join(sorted(node for node, _ in found))}"
        for (_, generation, rank), found in places.items()
        if len(found) > 1
    ]


def _late_saves(saved: Sequence[Saved], first_s: Mapping[Start, float]) -> list[str]:
    """Who wrote a checkpoint is told by its run, which belongs to the start that was the newest at its first save."""
    signs, start_of = [], dict[str, Start]()
    for written in sorted(saved, key=lambda save: save.time_s):
        begun = [start for start, time_s in first_s.items() if time_s <= written.time_s]
        start = start_of.setdefault(written.run, max(begun, default=(0, 0)))
        if written.time_s > (over_s := _over_s(start, first_s)):
            late_s = written.time_s - over_s
            signs.append(
                f"checkpoint {written.step} was completed {late_s:.2f} s after the first step of later workers"
            )
    return signs


def _over_s(start: Start, first_s: Mapping[Start, float]) -> float:
    """When the workers of a start were over."""
    return min((time_s for other, time_s in first_s.items() if other > start), default=float("inf"))
