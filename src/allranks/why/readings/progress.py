"""How far did each rank get? What came before its last step was survived. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.facts.fact import Fact, FactKind
from allranks.why.attempts import ANEW, RESTART
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.step_lines import NUMBER, form_of, is_of_training

NO_FAILURES = frozenset((None, FactKind.STEP, FactKind.FINISHED, FactKind.RECOVERED))
"""What lines state that tell of none."""


def read_steps(reader: FactReader) -> Iterator[Fact]:
    """Return the last step of each rank in each file."""
    errors = {event.line.at for event in reader.logs.events if event.states not in NO_FAILURES}
    for tail in reader.logs.tails:
        last: dict[object, Line] = {}
        for line in tail.lines:
            who = (line.rank, line.local_rank, line.node)
            if is_of_training(line.text) and line.at not in errors and not _is_told_again(line.text, last.get(who)):
                last[who] = line
        for line in last.values():
            yield reader.state(FactKind.STEP, line)


def _is_told_again(text: str, step: Line | None) -> bool:
    """Whether other words tell the number of the last step: that its checkpoint was saved, or a heartbeat."""
    number = NUMBER.search(text)
    before = NUMBER.search(step.text) if step is not None and number else None
    if step is None or number is None or before is None or number[1] != before[1]:
        return False
    return form_of(text) != form_of(step.text)


def find_last_steps(logs: Logs) -> dict[str, int]:
    """Return the number of the last line with a step of the training, by file: what stands above it was overcome."""
    last: dict[str, Line] = {}
    for line in (line for tail in logs.tails for line in tail.lines):
        if is_of_training(line.text) and not _is_told_again(line.text, last.get(line.source.shown)):
            last[line.source.shown] = line
    return {shown: line.number for shown, line in last.items()}


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
