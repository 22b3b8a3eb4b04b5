"""Which ranks joined the group, and which did not? Pure.

Each waiting rank reports its own wait; the missing rank reports nothing, or that it could not connect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from allranks.causes.cause import Trait
from allranks.facts.fact import START, Fact, FactKind
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import missing_of, parse_ranks
from allranks.why.readings.progress import find_last_steps

_MISSING = "missing-rank"
_WRONG_RANKS = "slurm-env"


def read_arrivals(reader: FactReader) -> Iterator[Fact]:
    """Return the ranks missing where all meet, and the ranks that were started twice."""
    logs = reader.logs
    told = list(logs.of(_MISSING))
    passed = {_barrier_of(reader, event): event.line for event in told if event.states is FactKind.RECOVERED}
    reports = [event for event in told if event.number("wanted") and event.states is not FactKind.RECOVERED]
    waiting = [event for event in reports if event.number("rank") is not None]
    counts = [event for event in reports if event not in waiting and event.line.source.shown not in reader.agents_meet]
    yield from _absent(reader, counts[:1])
    for event in waiting:
        if (line := passed.get(_barrier_of(reader, event))) is not None:
            ranks = [_count(event, "rank")]
            yield from reader.infer(FactKind.RECOVERED, _MISSING, [line], "all ranks came", ranks=ranks)
    if any(logs.of("all-came")):
        return
    steps = find_last_steps(logs) if waiting else {}
    waiting = [event for event in waiting if event.line.number > steps.get(event.line.source.shown, 0)]
    yield from _barrier(reader, [event for event in waiting if _barrier_of(reader, event) not in passed], counts)
    yield from _twice(reader, read_members(logs))


def _barrier_of(reader: FactReader, event: LogEvent) -> tuple[int, str | None]:
    """Return which barrier of the store it is, in which start of the job: one rank passes it only if all have come."""
    return reader.attempt_of(event.line), event.values.get("key")


def read_members(logs: Logs) -> list[LogEvent]:
    """Return the lines in which a rank reports its start and how many there are to be."""
    return [event for event in logs.of(_WRONG_RANKS) if event.values.keys() >= {"rank", "wanted"}]


def _barrier(reader: FactReader, waiting: Sequence[LogEvent], counts: Sequence[LogEvent]) -> Iterator[Fact]:
    """Who does not come to the barrier at which these wait.

    The store's host does not come to it before all clients have joined, which it counts. More than all come if several
    tasks each spawned all ranks: then nobody is missing.
    """
    wanted = max((_count(event, "wanted") for event in waiting), default=0)
    present = max((_count(event, "present") for event in (*waiting, *counts)), default=0)
    keys = {event.values.get("key") for event in waiting}
    added = [event for event in reader.logs.of("added-key") if event.values["key"] in keys]
    came = {_count(event, "rank") for event in (*waiting, *added)}
    came |= {rank for event in counts if (rank := reader.speaker_of(event.line).rank) is not None}
    missing = missing_of(came, wanted)
    if waiting and present <= wanted and 0 < len(missing) <= max(wanted - present, 1):
        told = f"{fold_ranks(missing)} never called init_process_group; {present} of {wanted} ranks did"
        ask = f"the log of {fold_ranks(missing)}, and their stacks while the job hangs: allranks stack JOB"
        yield from _missing(reader, (waiting[0].line, waiting[-1].line), told, ranks=missing, ask=ask)


def _absent(reader: FactReader, counts: Sequence[LogEvent]) -> Iterator[Fact]:
    """Who is absent where the store's host only counts who came: who says that it could not connect.

    Without such a line: whoever wrote no line at all, if those are as many; else who gave up with an exit code.
    """
    for event in counts:
        wanted, absent = _count(event, "wanted"), _count(event, "wanted") - _count(event, "present")
        joined = f"{_count(event, 'present')} of {wanted} ranks joined"
        outside = {reader.speaker_of(other.line): other.line for other in _unreached(reader)}
        outside.pop(reader.speaker_of(event.line), None)
        named = [who for who in outside if who.is_process]
        silent = missing_of(_heard(reader), wanted)
        if 0 < len(named) <= absent:
            told = f"{len(named)} of the others could not connect to the store; {joined}"
            yield from _missing(reader, (event.line, *(outside[who] for who in named[:2])), told, who=named)
        elif 0 < len(silent) == absent:
            told = f"{fold_ranks(silent)} wrote nothing; {joined}"
            yield from _missing(reader, (event.line,), told, ranks=silent, ask=f"the log of {fold_ranks(silent)}")
        elif gave_up := _gave_up(reader, absent):
            told = f"{fold_ranks(gave_up)} gave up with an exit code, and not because others had ended; {joined}"
            yield from _missing(reader, (event.line,), told, ranks=gave_up, ask=f"the log of {fold_ranks(gave_up)}")


def _gave_up(reader: FactReader, absent: int) -> list[int]:
    """Return those, no more than are absent, whom srun saw end by themselves: at all, or else before rank 0."""
    tasks = [] if reader.people.are_tasks_agents else list(reader.logs.of("task-end"))
    ended = [(parse_ranks(event.values["ranks"]), event.values.get("code")) for event in tasks]
    host = next((index for index, (ranks, _) in enumerate(ended) if 0 in ranks), len(ended))
    came = {reader.speaker_of(event.line).rank for event in reader.logs.events if event.is_loss} | {0}  # who lost it
    for part in (ended, ended[:host]):
        found = [rank for ranks, code in part for rank in ranks if code is not None and rank not in came]
        if 0 < len(found) <= absent:
            return found
    return []


def _heard(reader: FactReader) -> set[int]:
    """Return the ranks that wrote anything."""
    lines = [event.line for event in reader.logs.events]
    lines += [line for tail in reader.logs.tails for line in tail.lines]
    return {rank for line in lines if (rank := reader.speaker_of(line).rank) is not None}


def _unreached(reader: FactReader) -> list[LogEvent]:
    """Return the lines that say that their writer never reached the store."""
    return [event for event in reader.logs.of(Trait.AT_THE_MEETING) if Trait.FOLLOWS_A_DEATH not in event.traits]


def _missing(reader: FactReader, lines: Sequence[Line], told: str, **about: Any) -> Iterator[Fact]:
    return reader.infer(FactKind.MISSING, _MISSING, lines, told, seq=START, **about)


def _twice(reader: FactReader, members: Sequence[LogEvent]) -> Iterator[Fact]:
    """Return ranks that reported their start several times while others did not, or that never did."""
    counts = Counter(_count(event, "rank") for event in members)
    wanted = max((_count(event, "wanted") for event in members), default=0)
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    missing = missing_of(counts.keys(), wanted)
    lines = [event.line for event in members[:2]]
    if not missing or len(counts) < 2:
        return
    if twice:
        told = f"{fold_ranks(twice)} started {max(counts.values())} times and {fold_ranks(missing)} not at all: "
        told += "the tasks have wrong ranks"
        yield from reader.infer(FactKind.RAISED, _WRONG_RANKS, lines, told, ranks=(*twice, *missing))
    else:
        told = f"{fold_ranks(missing)} did not report their start; {len(counts)} of {wanted} ranks did"
        ask = "check that they were started: srun with one task per rank; the logs of the other nodes"
        yield from _missing(reader, lines, told, ranks=missing, confidence=Confidence.UNDECIDED, ask=ask)


def _count(event: LogEvent, group: str) -> int:
    return event.number(group) or 0
