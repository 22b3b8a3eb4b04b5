"""What do the watchdogs of all ranks show: which rank is behind, silent, or in another collective? Pure.

A watchdog's timeout names its own rank, which waited. The culprit is the rank without one: in NCCL, a rank that never
enqueued the collective has no timeout of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from allranks.causes.cause import Trait
from allranks.facts.fact import Fact
from allranks.recorder.calls import Call, Dump
from allranks.recorder.reach import DEFAULT_GROUP
from allranks.report.text import fold_ranks
from allranks.why.facts_of_lines import FactReader, place_of
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent
from allranks.why.people import own_rank
from allranks.why.stops import read_stops

_BAR = re.compile(r"\d%\|.{0,120}? (?:\d+(?:\.\d+)?[kMG]?/\d+(?:\.\d+)?[kMG]? )?\[(?:(\d+):)?(\d\d):(\d\d)<")
"""tqdm's: `85%|####  | 35595/41999 [29:57<08:39, 12.34it/s]`."""
_LEAST_SHARE, _MOST_SHARE = 0.9, 1.2
"""As a fraction of the timeout."""
_FREE = ("gather", "scatter", "alltoall", "all_to_all")
"""Collectives whose sizes may differ between ranks."""
_INTO_ONE = ("_allgather_base", "_reduce_scatter_base")
"""But not in these."""
_ASK = "allranks stack JOB while it hangs, or TORCH_FR_BUFFER_SIZE=2000 and the flight recorder's dumps of all ranks"


def _sizes(report: LogEvent) -> tuple[tuple[int, ...], ...]:
    """Return the sizes that all ranks of the group must have in common; none if they may differ."""
    op, numel = report.values.get("op", "").lower(), report.number("numel")
    is_free = op not in _INTO_ONE and any(word in op for word in _FREE)
    return () if numel is None or is_free else ((numel,),)


def read_watchdogs(reader: FactReader) -> Iterator[Fact]:
    """Return which rank is behind, silent or in another collective of its group, and which did something else."""
    starts: dict[int, list[tuple[LogEvent, int]]] = {}
    for event in reader.logs.of(Trait.ONLY_WAITS):
        rank = reader.people.speaker(event.line).rank
        rank = own_rank(event) if rank is None else rank
        if rank is not None:
            starts.setdefault(reader.attempt_of(event.line), []).append((event, rank))
    last = max(starts, default=0)
    waited = [rank for reports in starts.values() for rank in {rank for _, rank in reports}]
    if len(waited) == len({*waited}):  # nobody in two of them: not every file tells of each start
        starts = {last: [report for reports in starts.values() for report in reports]}
    for attempt, reports in starts.items():
        yield from _table(reader, reports, attempt)
    yield from _elsewhere(reader, starts[last])


def _table(reader: FactReader, reports: Sequence[tuple[LogEvent, int]], attempt: int) -> Iterator[Fact]:
    """Fill the table of progress with what the watchdogs say: in which call each rank waits, and what it counts.

    A line without its group is of the group that another line of its rank names, for this number or at all; else of
    that of all ranks, unless one of them counts its ranks in another way than the job does. If several ranks have one
    seat in a group, its name is that of several groups, and their numbers cannot be compared.
    """
    reports = [(event, rank) for event, rank in reports if event.values]
    seats = {(event.values.get("group"), event.number("rank"), rank) for event, rank in reports}
    taken = Counter((group, seat) for group, seat, _ in seats)
    shared = {group for (group, seat), ranks in taken.items() if seat is not None and ranks > 1} - {None}
    groups = {group for event, _ in reports if (group := event.values.get("group"))}
    are_smaller = any(
        event.number("rank") not in {None, rank} for event, rank in reports if "group" not in event.values
    )
    usual = groups.pop() if len(groups) == 1 else "" if are_smaller else DEFAULT_GROUP
    group_of: dict[object, str] = {}
    for event, rank in reversed(reports):  # the first one counts
        if group := event.values.get("group"):
            group_of |= {rank: group, (rank, event.number("seq")): group}
    calls: defaultdict[int, dict[str, Call]] = defaultdict(dict)
    enqueued: defaultdict[int, dict[str, int]] = defaultdict(dict)
    completed: defaultdict[int, dict[str, int]] = defaultdict(dict)
    lines: dict[int, Line] = {}
    for event, rank in reports:
        seq, values = event.number("seq"), event.values
        group = values.get("group") or group_of.get((rank, seq)) or group_of.get(rank, usual)
        group += f" of rank {rank}" if group in shared else ""
        if group and (seq is not None or "op" in values):
            if group not in calls[rank]:
                op, sizes = values.get("op", ""), _sizes(event)
                calls[rank][group] = Call(group=group, seq=seq or 0, op=op, sizes=sizes, number=1)
            lines.setdefault(rank, event.line)
        for word, numbers in (("enqueued", enqueued), ("completed", completed)):
            if (number := event.number(word)) is not None and number >= 0:
                numbers[rank][group if "group" in values else DEFAULT_GROUP] = number
                lines.setdefault(rank, event.line)
    dumps = [Dump(rank, tuple(calls[rank].values()), enqueued[rank], completed[rank]) for rank in sorted(lines)]
    if dumps:
        places, when = {rank: place_of(line) for rank, line in lines.items()}, reader.before(lines.values())
        for fact in read_stops(dumps, world=reader.people.size, places=places, when=when, attempt=attempt):
            yield replace(fact, who=reader.people.know(fact.who))


def _elsewhere(reader: FactReader, reports: Sequence[tuple[LogEvent, int]]) -> Iterator[Fact]:
    """Who did something else for longer than the others' timeout, as it says; or as long, by the last progress bar.

    Usually only rank 0 shows one.
    """
    timeouts = [event for event in reader.logs.of(Trait.ONLY_WAITS) if event.number("ms")]
    if not timeouts:
        return
    limit_s, first = min(event.number("ms") or 0 for event in timeouts) / 1000, timeouts[0].line
    waiting = {rank for _, rank in reports}
    took = [event for event in reader.logs.of("took") if float(event.values["seconds"]) > limit_s]
    slow = [event for event in took if event.line.rank is not None and event.line.rank not in waiting]
    if ranks := sorted({event.line.rank or 0 for event in slow}):
        told = f"{fold_ranks(ranks)} took {slow[0].values['seconds']} s, more than the timeout of {limit_s:g} s"
        yield from reader.behind([event.line for event in slow[:3]], told, ranks=ranks, ask=_ASK)
    lines = [line for tail in reader.logs.tails for line in tail.lines if "%|" in line.text]
    bars = [(line, match) for line in lines if (match := _BAR.search(line.text))]
    for line, match in bars[-1:]:
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        took_s = 3600 * hours + 60 * minutes + seconds
        rank = 0 if line.rank is None or line.rank in waiting else line.rank
        if _LEAST_SHARE * limit_s <= took_s <= _MOST_SHARE * limit_s and rank not in waiting:
            told = f"rank {rank} did something else for {took_s} s while {fold_ranks(waiting)} waited for it"
            yield from reader.behind((line, first), told, ranks=(rank,), ask=_ASK)
