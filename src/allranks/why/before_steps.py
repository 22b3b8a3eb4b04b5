"""Which lines mean what their words say only at the start of a job, in a call of torch's? Pure.

`RuntimeError: Wait timeout` is of a store in a file, or of anybody's lock.
"""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.step_lines import is_of_training


def leave_out_strangers(logs: Logs) -> Logs:
    """Return the logs without such lines of other calls, and of writers that have made a step."""
    asked = {event.line.at for event in logs.events if event.sign is not None and event.sign.frame}
    if not asked:
        return logs
    steps = [line for tail in logs.tails for line in tail.lines if is_of_training(line.text)]
    frames: dict[object, str] = {}
    strange: set[int] = set()
    for event in logs.events:
        line = event.line
        writer = line.source.shown, line.rank, line.local_rank, line.node
        if event.kind == "traceback":
            frames.pop(writer, None)
        elif event.kind == "frame":
            frames[writer] = event.values["file"]
        elif event.sign is not None and event.sign.frame:
            is_there = re.search(event.sign.frame, frames.get(writer, "")) is not None
            if not is_there or any(_is_before(step, line) for step in steps):
                strange.add(id(event))
    return replace(logs, events=tuple(event for event in logs.events if id(event) not in strange))


def _is_before(step: Line, line: Line) -> bool:
    """Whether a step is of a line's writer, and not below it; in another file a rank wrote it before it ended."""
    if step.source.shown == line.source.shown:
        is_above = step.number < line.number
        return is_above and (step.rank, step.local_rank, step.node) == (line.rank, line.local_rank, line.node)
    return line.rank is not None and (step.rank, step.source.attempt) == (line.rank, line.source.attempt)
