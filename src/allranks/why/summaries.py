"""What do torchrun's summaries of failures say? Pure."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs


class SummaryEntry(NamedTuple):
    """One worker of torchrun's summary."""

    event: LogEvent
    """With what all of its lines say."""
    when: Line
    """The line with the time of its end."""
    is_first: bool = False
    """torchrun saw it before the others of its node."""
    script: str | None = None


def read_summaries(logs: Logs) -> list[SummaryEntry]:
    """Return the workers of torchrun's summaries, in their order."""
    ends: list[SummaryEntry] = []
    is_first, script = False, None
    for event in logs.of("failed-script", "failures", "failure-time", "failure-host", "failure-rank", "failure-code"):
        if event.kind == "failures":
            is_first = True
        elif event.kind == "failed-script":
            script = event.values["script"]
        elif event.kind == "failure-time" or not ends or ends[-1].event.line.source != event.line.source:
            ends.append(SummaryEntry(event, event.line, is_first, script))
            is_first = False
        else:
            told = replace(event, values={**ends[-1].event.values, **event.values})
            ends[-1] = ends[-1]._replace(event=told)
    return [end for end in ends if "code" in end.event.values]
