"""What a stack tells a watcher, and whose stack is read next, so that watching stays cheap. Pure.

    turns.choose([track], num_ranks=2, now_s=10.0)          [track]: quiet for a second, and not read for 2 s

One read costs some 15 ms of processor time, more than everything else in a look. A rank that does something is read
rarely. One that is quiet may hang, or wait for one that hangs: it is read every 2 s, as long as the credit lasts that
the node's ranks collect with time. A step that is quiet for a second each time thus costs no more than a hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from allranks.host.py_spy import ToldFrame
from allranks.host.stacks import Frame, is_library
from allranks.launch.look.stack_groups import name_operation, waits_for_others
from allranks.model.node_look import MAX_COUNTERS, StackSeen
from allranks.watch.since import Track

QUIET_EVERY_S, BUSY_EVERY_S = 2.0, 15.0
MAX_OFTEN = 8
"""Ranks on a node that are read every BUSY_EVERY_S; of more, as many in the same time, in turn."""
SHARE = 0.005
"""Of a core for each rank, spent on reading stacks."""
FIRST_COST_S = 0.02
"""Processor time of one read, until it was measured."""
BURST = 4
"""Reads of each rank that can be saved up: a hang has two different looks within 4 s."""
MAX_AT_ONCE = 8

_COUNTS = re.compile(
    r"(?!(?:max|min|num|nb?|total|last|start|end|eval|save|log)_)(?:[a-z]+_)*(?:step|epoch|batch|iter|iteration)"
    r"(?:_(?:idx|index|id|num|no|nr|i))?|it|idx|index|i|j|k",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(slots=True)
class StackTurns:
    """Who is read next."""

    cost_s: float = FIRST_COST_S
    """Processor time of one read, as measured lately."""
    credit_s: float | None = None
    """Processor time that may be spent now; None: all that can be saved up."""
    _last_s: float = 0.0

    def choose(
        self, tracks: Iterable[Track], *, num_ranks: int, now_s: float, at_most: int = MAX_AT_ONCE
    ) -> list[Track]:
        """Return those to read now, booked as read: quiet ones first, then whoever was not read for longest."""
        most_s = BURST * self.cost_s * num_ranks
        saved_s = most_s if self.credit_s is None else self.credit_s + SHARE * num_ranks * (now_s - self._last_s)
        self.credit_s, self._last_s = min(most_s, saved_s), now_s
        every_s = {True: QUIET_EVERY_S, False: BUSY_EVERY_S * max(1.0, num_ranks / MAX_OFTEN)}
        due = [track for track in tracks if now_s - track.read_s >= every_s[track.is_quiet]]
        due.sort(key=lambda track: (not track.is_quiet, track.read_s))
        chosen = due[: min(at_most, int(self.credit_s / self.cost_s))]
        for track in chosen:
            track.read_s = now_s
        self.credit_s -= len(chosen) * self.cost_s
        return chosen

    def hear_cost(self, spent_s: float, num_reads: int) -> None:
        """Take in what some reads have cost."""
        self.cost_s = max(0.001, 0.8 * self.cost_s + 0.2 * spent_s / num_reads)


def summarize(told: Sequence[ToldFrame], *, at_s: float, is_still: bool, text: str = "") -> StackSeen:
    """Return what a watcher keeps of the main thread's stack: where it is, and whole numbers that count.

    Args:
        told: frames, innermost first.
        at_s: when they were read.
        is_still: the process does nothing; else `backward` computes, and does not wait for others.
        text: the innermost line of source; it shows which C function it is in.
    """
    frames = [Frame(frame.name, frame.filename, frame.line, text) for frame in told]
    operation = name_operation(frames)  # `wait` is in no Python function of a library: of an asynchronous collective
    mine = [frame for frame in told if not is_library(frame.filename)]
    place = f"{PurePath(mine[0].filename).name}:{mine[0].line} in {mine[0].name}" if mine else ""
    values = [(local.name, local.repr or "") for frame in mine for local in frame.locals or ()]
    counters = [
        (name[:300], int(value)) for name, value in values if _COUNTS.fullmatch(name) and _WHOLE.fullmatch(value)
    ]
    return StackSeen(
        at_s=at_s,
        operation=operation[:300],
        place=place[:300],
        is_collective=is_still if operation in ("backward", "wait") else waits_for_others(operation),
        counters=tuple(counters[:MAX_COUNTERS]),
    )
