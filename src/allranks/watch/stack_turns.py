"""What a stack tells a watcher, and whose stack is read next, so that watching stays cheap. Pure.

    choose([track], now_s=10.0)          [track]: quiet for a second, and not read for 2 s

One read costs some 15 ms of processor time, more than everything else in a look. A rank that does something is read
rarely. One that is quiet may hang, or wait for one that hangs: it is read at once and after 2 s, and the more rarely
the longer that lasts. A step that is quiet for a second each time costs at most a read every 2 s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

from allranks.host.py_spy import ToldFrame
from allranks.host.stacks import Frame, is_library
from allranks.launch.look.stack_groups import name_operation, waits_for_others
from allranks.model.node_look import MAX_COUNTERS, StackSeen
from allranks.watch.since import Track

FIRST_S, BUSY_EVERY_S = 1.0, 15.0
"""Between two reads of a rank: when it becomes quiet, doubled after each read, and at most."""
MAX_OFTEN = 8
"""Ranks on a node that are read every BUSY_EVERY_S; of more, as many in the same time, in turn."""
MAX_AT_ONCE = 8

_COUNTS = re.compile(
    r"(?!(?:max|min|num|nb?|total|last|start|end|eval|save|log)_)(?:[a-z]+_)*(?:step|epoch|batch|iter|iteration)"
    r"(?:_(?:idx|index|id|num|no|nr|i))?|it|idx|index|i|j|k",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


def choose(tracks: Collection[Track], *, now_s: float, num_ranks: int = 1, at_most: int = MAX_AT_ONCE) -> list[Track]:
    """Return those to read now, booked as read: quiet ones first, then whoever was not read for longest."""
    busy_s, due = BUSY_EVERY_S * max(1.0, num_ranks / MAX_OFTEN), list[tuple[bool, float, Track]]()
    for track in tracks:
        track.pause_s = track.pause_s if track.is_quiet else FIRST_S
        if now_s - track.read_s >= (track.pause_s if track.is_quiet else busy_s):
            due.append((not track.is_quiet, track.read_s, track))
    chosen = [track for *_, track in sorted(due, key=lambda turn: turn[:2])[:at_most]]
    for track in chosen:
        track.read_s, track.pause_s = now_s, min(2 * track.pause_s, BUSY_EVERY_S)
    return chosen


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
