"""Errors that the job recovered from, or that follow a success: they are no cause. Pure.

Retries at the start before a training that works, a store that ends with the job, and what came before a run that
succeeded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from allranks.causes.cause import Trait
from allranks.why.logs.log_events import LogEvent, Logs

_TRAINS = re.compile(r"(?i)\bloss\b['\":=\s]{1,4}-?\d")


def leave_out_overcome(logs: Logs) -> Logs:
    """Return the logs without the events of each source before allranks' line that its run succeeded.

    The run recovered from them. Lines after that one, and other logs, may be of another run.
    """
    ends = {source: number for source, (number, is_good) in find_ends(logs).items() if is_good}
    if not ends:
        return logs
    return replace(
        logs, events=tuple(event for event in logs.events if event.line.number >= ends.get(event.line.source.shown, 0))
    )


def find_ends(logs: Logs) -> dict[str, tuple[int, bool]]:
    """Return, for each source with lines of `allranks run`, the last of them that begins or ends a run.

    True: with it, a run succeeded.
    """
    ends: dict[str, tuple[int, bool]] = {}
    for event in logs.of("begun", Trait.SUCCESS):
        if event.kind == "begun" or event.line.text.startswith("allranks: "):
            ends[event.line.source.shown] = (event.line.number, event.kind != "begun")
    return ends


def tell_overcome(logs: Logs) -> Callable[[LogEvent], bool]:
    """Return a function that tells whether a line is such an error."""
    steps: dict[str, int] = {}
    if next(logs.of(Trait.BEFORE_THE_FIRST_STEP), None) is not None:
        for tail in logs.tails:
            for line in tail.lines:
                if _TRAINS.search(line.text):
                    steps[tail.source.shown] = line.number
    done = {event.line.source.shown for event in logs.of(Trait.SUCCESS) if "exit barrier" in event.line.text}

    def is_overcome(event: LogEvent) -> bool:
        source = event.line.source.shown
        if Trait.AFTER_THE_END in event.traits and source in done:
            return True
        return Trait.BEFORE_THE_FIRST_STEP in event.traits and event.line.number < steps.get(source, 0)

    return is_overcome
