"""How far did each rank get? What came before its last step was survived. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from allranks.facts.fact import Fact, FactKind
from allranks.why.attempts import ANEW, RESTART
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.step_lines import EPOCH, MIN_STEPS, NUMBER, SLURM, form_of, is_of_training

NO_FAILURES = frozenset((None, FactKind.STEP, FactKind.FINISHED, FactKind.RECOVERED))
"""What lines state that tell of none."""


def read_steps(reader: FactReader) -> Iterator[Fact]:
    """Return the last step of each rank in each file; of a further run without steps, that it began."""
    for line in reader.attempts.list_quiet():
        yield reader.state(FactKind.STEP, line)
    errors = {event.line.at for event in reader.logs.events if event.states not in NO_FAILURES}
    for tail in reader.logs.tails:
        own: defaultdict[object, list[Line]] = defaultdict(list)
        for line in tail.lines:
            own[line.rank, line.local_rank, line.node].append(line)
        for lines in own.values():
            if step := _find_last([line for line in lines if line.at not in errors]):
                yield reader.state(FactKind.STEP, step)


def _find_last(lines: Sequence[Line]) -> Line | None:
    """Return the last step; where no line tells steps, the last of several epochs that the same words tell."""
    if step := _find_last_step(reversed(lines)):
        return step
    told: defaultdict[str, list[Line]] = defaultdict(list)
    numbers: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        if (epoch := EPOCH.search(line.text)) and not SLURM.search(line.text):
            told[form_of(line.text)].append(line)
            numbers[form_of(line.text)].add(epoch[1])
    last = [same[-1] for form, same in told.items() if len(numbers[form]) >= MIN_STEPS]
    return max(last, key=lambda line: line.number, default=None)


def _find_last_step(backward: Iterable[Line]) -> Line | None:
    """Return the last step; other words that tell its number again below are none: its checkpoint, a heartbeat."""
    same: list[Line] = []
    told = None
    for line in filter(lambda line: is_of_training(line.text), backward):
        number = NUMBER.search(line.text)
        if same and (number is None or number[1] != told):
            break
        same.append(line)
        if number is None:
            break
        told = number[1]
    return next((line for line in same if form_of(line.text) == form_of(same[-1].text)), None)


def find_last_steps(logs: Logs) -> dict[str, int]:
    """Return the number of the last line with a step of the training, by file: what stands above it was overcome."""
    last = {tail.source.shown: _find_last(tail.lines) for tail in logs.tails}
    return {shown: line.number for shown, line in last.items() if line}


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
