"""How far did each rank get? What came before its last step was survived; others wait for who made fewer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from allranks.causes.cause import Trait
from allranks.facts.fact import NEVER_SAID, Fact, FactKind
from allranks.report.text import fold_ranks
from allranks.why.attempts import ANEW, RESTART
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import People
from allranks.why.step_lines import NUMBER, SLURM, is_of_training, is_step

_DEVICE = re.compile(r"\b(cuda:\d{1,3})\b")
NO_FAILURES = frozenset((None, FactKind.STEP, FactKind.FINISHED, FactKind.RECOVERED))
"""What lines state that tell of none."""
_LEAST = 3
"""Minimum number of ranks with steps: of two, one is always behind."""


def read_steps(reader: FactReader) -> Iterator[Fact]:
    """Return the last step of each rank in each file."""
    errors = {
        event.line.at for event in reader.logs.events if event.kind == "exception" or event.states not in NO_FAILURES
    }
    for tail in reader.logs.tails:
        last: dict[object, Line] = {}
        for line in reversed(tail.lines):
            who = (line.rank, line.local_rank, line.node)
            if who not in last and is_step(line.text) and line.at not in errors and not SLURM.search(line.text):
                last[who] = line
        for line in last.values():
            yield reader.state(FactKind.STEP, line)


def find_last_steps(logs: Logs) -> dict[str, int]:
    """Return the number of the last line with a step of the training, by file: what stands above it was overcome."""
    lines = (line for tail in logs.tails for line in tail.lines)
    return {line.source.shown: line.number for line in lines if is_of_training(line.text)}


def find_laggard(logs: Logs, people: People) -> tuple[int | str, Line] | None:
    """Return the one rank, or device, whose last step is lower than that of all others, and its line; or None.

    The others wait for it, so their last steps are one. If they differ, output was lost that was still in buffers.
    """
    ranks: dict[int | str, tuple[int, Line]] = {}
    devices: dict[int | str, tuple[int, Line]] = {}
    for line in (line for tail in reversed(logs.tails) for line in reversed(tail.lines)):
        rank = people.speaker(line).rank
        if (rank in ranks and "cuda:" not in line.text) or not is_step(line.text):  # the last step of each counts
            continue
        for match in [*NUMBER.finditer(line.text)][-1:]:
            if rank is not None:
                ranks.setdefault(rank, (int(match[1]), line))
            if device := _DEVICE.search(line.text):
                devices.setdefault(device[1], (int(match[1]), line))
    for steps in (ranks, devices):
        if len(steps) >= _LEAST:
            first, second, *_, last = sorted(steps, key=lambda who: steps[who][0])
            is_one = steps[first][0] < steps[second][0] == steps[last][0]
            return (first, steps[first][1]) if is_one else None
    return None


def read_laggard(reader: FactReader) -> Iterator[Fact]:
    """Return who made fewer steps than all others, if those timed out: who is gone had buffered some."""
    laggard = find_laggard(reader.logs, reader.people) if any(reader.logs.of(Trait.ONLY_WAITS)) else None
    if laggard is not None:
        who, line = laggard
        about: dict[str, Any] = {"ranks": (who,)} if isinstance(who, int) else {"things": (who,)}
        name = fold_ranks([who]) if isinstance(who, int) else who
        about |= {"when": NEVER_SAID, "ask": f"the stack of {name} while it hangs: allranks stack JOB"}  # other clocks
        yield from reader.behind((line,), f"{name} made fewer steps than all others", **about)


def read_restarts(reader: FactReader) -> Iterator[Fact]:
    """Return that the workers started from the beginning after a restart, if a log has both lines in this order.

    Neither line alone proves it: torchrun also restarts workers that resume, and the first start finds no checkpoint.
    """
    restarts: dict[str, Line] = {}
    for event in reader.logs.of(ANEW):
        source = event.line.source.shown
        if RESTART.search(event.line.text):
            restarts.setdefault(source, event.line)
        elif event.states is None and source in restarts:
            yield from reader.infer(
                FactKind.RAISED,
                ANEW,
                (event.line, restarts[source]),
                "the workers were restarted, but found no checkpoint to resume from",
                ask="which checkpoint the script loads at its start, and from where",
            )
            return
