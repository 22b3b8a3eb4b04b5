"""Which ranks joined the group, and which did not? Pure.

Each waiting rank reports its own wait; the missing rank reports nothing, or that it could not connect.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
LEAST_REPORTERS = 2
FEW_NODES = 16
"""Up to this number, nodes are listed one by one."""


def read_arrivals(reader: FactReader) -> Iterator[Fact]:
    """Return the ranks missing at the store's barrier, and the ranks that were started twice."""
    logs = reader.logs
    reports = [event for event in logs.of(_MISSING) if event.number("wanted")]
    counts = [event for event in reports if event.number("rank") is None]
    of_agents = [event for event in counts if event.line.source.shown in reader.agents_meet]  # those count nodes
    counts = [event for event in counts if event not in of_agents]
    yield from _absent_agents(reader, of_agents[:1])
    yield from _absent(reader, counts[:1])
    yield from _host(reader)
    passed = [event for event in logs.of(_MISSING) if event.states is FactKind.RECOVERED]
    came = {(reader.attempt_of(event.line), event.values.get("key")) for event in (*passed, *logs.of("all-came"))}
    steps = find_last_steps(logs) if reports else {}

    def is_over(event: LogEvent) -> bool:
        attempt, line = reader.attempt_of(event.line), event.line
        is_told = not came.isdisjoint({(attempt, event.values.get("key")), (attempt, None)})
        return is_told or line.number < steps.get(line.source.shown, 0)

    yield from _all_came(reader, reports, passed)
    waiting = [event for event in reports if event.number("rank") is not None and not is_over(event)]
    few = [event for event in waiting if _count(event, "present") < _count(event, "wanted")]
    yield from _barrier(reader, few, counts)
    many = [event for event in waiting if _count(event, "present") > _count(event, "wanted")]
    if many and any("multiprocessing/spawn.py" in frame.values["file"] for frame in logs.of("frame")):
        has_srun = next(logs.of("srun"), None) is not None
        yield from reader.infer(
            FactKind.RAISED,
            "spawn-inside-srun" if has_srun else _WRONG_RANKS,
            [event.line for event in many[:2]],
            f"{many[0].values['present']} processes joined a group of {many[0].values['wanted']}: several tasks each "
            "spawned all ranks",
            ranks=sorted({_count(event, "rank") for event in many}),
            things=("mp.spawn inside srun",) if has_srun else (),
        )
    if next(logs.of("all-came"), None) is None:
        yield from _twice(reader, read_members(logs))


def _all_came(reader: FactReader, reports: Sequence[LogEvent], passed: Sequence[LogEvent]) -> Iterator[Fact]:
    """Return that who waited at a barrier went on: one rank passes it only when all have come."""
    waited: defaultdict[tuple[int, str | None], set[int]] = defaultdict(set)
    for event in reports:
        if (rank := event.number("rank")) is not None:
            waited[reader.attempt_of(event.line), event.values.get("key")].add(rank)
    for event in passed:
        if ranks := waited.pop((reader.attempt_of(event.line), event.values.get("key")), None):
            yield from reader.infer(FactKind.RECOVERED, _MISSING, [event.line], "all ranks came", ranks=sorted(ranks))


def read_members(logs: Logs) -> list[LogEvent]:
    """Return the lines in which a rank reports its start and how many there are to be."""
    return [event for event in logs.of(_WRONG_RANKS) if "rank" in event.values and "wanted" in event.values]


def _barrier(reader: FactReader, waiting: Sequence[LogEvent], counts: Sequence[LogEvent]) -> Iterator[Fact]:
    """Who does not come to the barrier at which these wait.

    The store's host does not come to it before all clients have joined, which it counts.
    """
    if not waiting:
        return
    wanted = max(_count(event, "wanted") for event in waiting)
    keys = {event.values.get("key") for event in waiting}
    added = [event for event in reader.logs.of("added-key") if event.values["key"] in keys]
    came = {_count(event, "rank") for event in (*waiting, *added)}
    came |= {rank for event in counts if (rank := reader.speaker_of(event.line).rank) is not None}
    present = max(_count(event, "present") for event in (*waiting, *counts))
    missing = missing_of(came, wanted)
    if 0 < len(missing) <= max(wanted - present, 1):
        told = f"{fold_ranks(missing)} never called init_process_group; {present} of {wanted} ranks did"
        ask = f"the log of {fold_ranks(missing)}, and their stacks while the job hangs: allranks stack JOB"
        yield from _missing(reader, (waiting[0].line, waiting[-1].line), told, ranks=missing, ask=ask)


def _absent(reader: FactReader, counts: Sequence[LogEvent]) -> Iterator[Fact]:
    """Who is absent where the store's host only counts who came: who says that it could not connect.

    Without such a line: who gave up with an exit code; else whoever wrote no line at all, if those are as many; else
    whoever is no task of srun.
    """
    for event in counts:
        wanted, absent = _count(event, "wanted"), _count(event, "wanted") - _count(event, "present")
        joined = f"{_count(event, 'present')} of {wanted} ranks joined"
        outside = {reader.speaker_of(other.line): other.line for other in _unreached(reader)}
        outside.pop(reader.speaker_of(event.line), None)
        named = [who for who in outside if who.rank is not None or who.local_rank is not None]
        silent = missing_of(_heard(reader), wanted)
        no_tasks = missing_of(_heard(reader) | _tasks(reader), wanted)
        if 0 < len(named) <= absent:
            told = f"{len(named)} of the others could not connect to the store; {joined}"
            yield from _missing(reader, (event.line, *(outside[who] for who in named[:2])), told, who=named)
        elif (gave_up := _gave_up(reader, absent)) and (len(silent) != absent or {*gave_up} <= {*silent}):
            told = f"{fold_ranks(gave_up)} gave up with an exit code, and not because others had ended; {joined}"
            yield from _missing(reader, (event.line,), told, ranks=gave_up, ask=f"the log of {fold_ranks(gave_up)}")
        elif 0 < len(silent) == absent:
            told = f"{fold_ranks(silent)} wrote nothing; {joined}"
            yield from _missing(reader, (event.line,), told, ranks=silent, ask=f"the log of {fold_ranks(silent)}")
        elif 0 < len(no_tasks) == absent:
            told = f"srun tells of no task {', '.join(map(str, no_tasks))}: perhaps it was never started; {joined}"
            ask = "compare WORLD_SIZE with the number of tasks (--ntasks) in the batch script"
            yield from _missing(reader, (event.line,), told, ranks=no_tasks, ask=ask)


def _absent_agents(reader: FactReader, counts: Sequence[LogEvent]) -> Iterator[Fact]:
    """The nodes, by torchrun's --node-rank, that are absent if only the first one's agent came."""
    for event in counts:
        wanted = _count(event, "wanted")
        if _count(event, "present") == 1 < wanted <= FEW_NODES:
            told = f"1 of {wanted} agents came: node {fold_ranks(range(1, wanted))} did not reach that of node rank 0"
            things = tuple(f"node rank {rank}" for rank in range(1, wanted))
            yield from _missing(reader, (event.line,), told, things=things, ask="the logs of the other agents")


def _host(reader: FactReader) -> Iterator[Fact]:
    """Rank 0, which hosts the store, if it wrote nothing and all others say that they do not reach the store."""
    told = {reader.speaker_of(event.line).rank: event for event in _unreached(reader)}
    ranks = _heard(reader) if told else set()
    if 0 in ranks or len(ranks) < LEAST_REPORTERS or ranks != told.keys() - {None}:
        return
    cause = next(iter(told.values())).kind
    told_by = f"rank 0, which hosts the store, wrote nothing; {fold_ranks(ranks)} did not reach it"
    lines = [event.line for event in told.values()][:3]
    yield from reader.infer(FactKind.MISSING, cause, lines, told_by, ranks=(0,), seq=START, ask="the log of rank 0")


def _gave_up(reader: FactReader, absent: int) -> list[int]:
    """Return those, no more than are absent, whom srun saw end by themselves: before rank 0, or nobody else does."""
    tasks = [] if reader.people.are_tasks_agents else list(reader.logs.of("task-end"))
    ended = [(parse_ranks(event.values["ranks"]), event.values.get("code")) for event in tasks]
    host = next((index for index, (ranks, _) in enumerate(ended) if 0 in ranks), len(ended))
    came = {reader.speaker_of(event.line).rank for event in reader.logs.events if event.is_loss} | {0}  # who lost it
    for part in (ended[:host] if any(code is None for _, code in ended) else ended, ended[:host]):
        found = [rank for ranks, code in part for rank in ranks if code is not None and rank not in came]
        if 0 < len(found) <= absent:
            return found
    return []


def _tasks(reader: FactReader) -> set[int]:
    """Return the ranks that srun started, as far as it saw them end."""
    tasks = () if reader.people.are_tasks_agents else reader.logs.of("task-end")
    return {rank for event in tasks for rank in parse_ranks(event.values["ranks"])}


def _heard(reader: FactReader) -> set[int]:
    """Return the ranks that wrote anything."""
    lines = [event.line for event in reader.logs.events]
    lines += [line for tail in reader.logs.tails for line in tail.lines]
    return {rank for line in lines if (rank := reader.speaker_of(line).rank) is not None}


def _unreached(reader: FactReader) -> list[LogEvent]:
    """Return the lines that say that their writer never reached the store."""
    told = [event for event in reader.logs.of(Trait.AT_THE_MEETING) if Trait.FOLLOWS_A_DEATH not in event.traits]
    sure = (event for event in told if event.sign and event.sign.confidence is not Confidence.UNDECIDED)
    return [event for event in sure if event.states is not None]


def _missing(reader: FactReader, lines: Sequence[Line], told: str, **about: Any) -> Iterator[Fact]:
    return reader.infer(FactKind.MISSING, _MISSING, lines, told, seq=START, **about)


def _twice(reader: FactReader, members: Sequence[LogEvent]) -> Iterator[Fact]:
    """Return ranks that reported their start several times while others did not, or that never did."""
    counts = Counter(_count(event, "rank") for event in members)
    wanted = max((_count(event, "wanted") for event in members), default=0)
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    missing = missing_of(counts.keys(), wanted)
    lines = [event.line for event in members[:2]]
    if missing and twice and len(counts) > 1:
        told = f"{fold_ranks(twice)} started {max(counts.values())} times and {fold_ranks(missing)} not at all: "
        told += "the tasks have wrong ranks"
        yield from reader.infer(FactKind.RAISED, _WRONG_RANKS, lines, told, ranks=(*twice, *missing))
    elif missing and len(counts) > 1:
        told = f"{fold_ranks(missing)} did not report their start; {len(counts)} of {wanted} ranks did"
        ask = "check that they were started: srun with one task per rank; the logs of the other nodes"
        yield from _missing(reader, lines, told, ranks=missing, confidence=Confidence.UNDECIDED, ask=ask)


def _count(event: LogEvent, group: str) -> int:
    return event.number(group) or 0
