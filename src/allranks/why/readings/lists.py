"""Who differs from most, by lists that already compare ranks? Pure.

NCCL's calls       node1:45006:45006 [0] NCCL INFO AllReduce: opCount 28c sendbuff .. count 9984512 .. [nranks=4]
its RAS            508 ranks have launched up to operation 6650
                   4 ranks have launched up to operation 6649
                   Rank 260 -- GPU 0 managed by process 48307 on node 10.64.17.210
Horovod's stalls   grad_1 [ready ranks: 0, 2]       or [missing ranks: 1], several in one line: Horovod up to 0.17
times of ranks     Rank 4: 409.17ms                 or rows of numbers below `rank   data_time   step_time`
saved stacks       of py-spy: which ranks wait in a collective, and which are elsewhere
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter

from allranks.causes.cause import Trait
from allranks.facts.fact import Fact, FactKind, Who
from allranks.model.finding import Confidence
from allranks.recorder.calls import Call, Dump
from allranks.recorder.wait_graph import StandstillKind, find_stops
from allranks.report.text import fold_ranks
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent
from allranks.why.logs.log_path import MAX_RANK
from allranks.why.people import missing_of, named, parse_ranks

_DIFFERENT = "collective-mismatch"
_LEAST = 3
"""Minimum number of processes: if two differ, either may be wrong."""
_RAS = "of the communicator"
"""Name of the group of its ranks."""
_READY = re.compile(r"\[ready ranks: ?([0-9]+(?:, ?[0-9]+)*)\]")


def read_opcounts(reader: FactReader) -> Iterator[Fact]:
    """Return the first call in which a minority of the processes differs (NCCL_DEBUG_SUBSYS=COLL).

    The table of progress compares them, a process for a rank. If a process has several communicators of one size, a
    line does not tell which one it means: nothing follows. How far a process came does not follow either: NCCL lists
    what is enqueued, and lines may be missing at the end of a log.
    """
    listed: defaultdict[str, defaultdict[object, list[LogEvent]]] = defaultdict(lambda: defaultdict(list))
    for event in reader.logs.of("collective"):
        listed[event.values["size"]][event.line.node, event.line.pid, event.line.local_rank].append(event)
    for size, by_process in listed.items():
        own = [*by_process.values()]
        if len(own) < _LEAST or any(len({event.values["comm"] for event in events}) > 1 for events in own):
            continue
        dumps = [Dump(index, tuple(_call(event, size) for event in events)) for index, events in enumerate(own)]
        stop = next((stop for stop in find_stops(dumps) if stop.kind is StandstillKind.MISMATCH), None)
        if stop is None or not stop.is_decided:
            continue
        (_, odd), (other, usual) = stop.calls
        at = {index: event.line for index, events in enumerate(own) for event in events
              if _call(event, size).seq == stop.seq}  # fmt: skip
        lines = [at[index] for index in stop.ranks]
        yield from reader.infer(
            FactKind.RAISED,
            _DIFFERENT,
            (lines[0], at[other]),
            f"call {stop.seq:x} is {odd.op} of {odd.sizes[0][0]} elements on {len(lines)} of {len(at)} processes, "
            f"{usual.op} of {usual.sizes[0][0]} on the others",
            who=map(reader.people.speaker, lines),
            things=tuple(f"process {line.pid}" for line in lines if line.pid is not None),
        )
        return


def _call(event: LogEvent, size: str) -> Call:
    values = event.values
    sizes, dtypes = ((int(values["count"]),),), (values["datatype"],)
    return Call(group=size, seq=int(values["number"], 16), op=values["op"], sizes=sizes, dtypes=dtypes)


def read_ras(reader: FactReader) -> Iterator[Fact]:
    """Return the named ranks that have not come to what all others wait in, at the first report of such ranks.

    RAS tells how many ranks of a communicator have launched how many operations, and names the ranks of a count if they
    are few (NCCL 2.24 and later, src/ras/client_support.cc). The table of progress compares them: what all have
    launched can end, and what some have not launched cannot.
    """
    for report in _consecutive(reader.logs.of("launched", "launched-rank")):
        groups: list[tuple[int, LogEvent, list[Who]]] = []
        for event in report:
            if event.kind == "launched":
                groups.append((event.number("count") or 0, event, []))
            if groups:
                groups[-1][2].extend(named(event)[0])
        groups.sort(key=itemgetter(0))
        size = min(sum(event.number("size") or 1 for _, event, _ in groups), MAX_RANK)
        reached = dict.fromkeys(range(size), next((count for count, _, whos in groups if not whos), 0))
        told = {who.rank: who for _, _, whos in groups for who in whos if who.rank is not None}
        reached |= {who.rank: count for count, _, whos in groups for who in whos if who.rank is not None}
        dumps = [Dump(rank, enqueued={_RAS: count}, completed={_RAS: groups[0][0]}) for rank, count in reached.items()]
        stop = next(iter(find_stops(dumps)), None)
        if stop is not None and stop.is_decided and told.keys() >= {*stop.ranks}:
            least, line = groups[0][0], groups[0][1].line
            most, next_line = next((count, event.line) for count, event, _ in groups if count > least)
            yield from reader.behind(
                (line, next_line),
                f"{fold_ranks(stop.ranks)} launched {least} operations, the others {most} and more",
                who=[told[rank] for rank in stop.ranks],
                ask="the stack of those ranks while it hangs: allranks stack JOB",
            )
            return


def _consecutive(events: Iterable[LogEvent]) -> Iterator[list[LogEvent]]:
    """Yield the events of consecutive lines together: a communicator, and a kind of operation."""
    found: list[LogEvent] = []
    for event in events:
        if found and (event.line.source, event.line.number - 1) != (found[-1].line.source, found[-1].line.number):
            yield found
            found = []
        found.append(event)
    yield found


def read_stalls(reader: FactReader) -> Iterator[Fact]:
    """Return the ranks that are ready for nothing in Horovod, or for other operations than most."""
    lines = [event.line for event in reader.logs.of(Trait.OTHERS_WAIT_FOR_IT) if "ready ranks:" in event.line.text]
    ready = {frozenset(parse_ranks(ranks)) for line in lines for ranks in _READY.findall(line.text)}
    anybody = frozenset[int]().union(*ready)
    if missing := missing_of(anybody, reader.people.world):
        told = f"{fold_ranks(missing)} did not enter a collective for which {fold_ranks(anybody)} were ready"
        yield from reader.behind(lines[:2], told, ranks=missing)
    elif ready:
        fewest = min(ready, key=lambda ranks: (len(ranks), sorted(ranks)))
        most = max((ranks for ranks in ready if not ranks & fewest), key=len, default=fewest)
        if len(fewest) < len(most):
            told = f"{fold_ranks(fewest)} wait in a different collective than {fold_ranks(most)}"
            yield from reader.infer(FactKind.RAISED, _DIFFERENT, lines[:2], told, ranks=sorted(fewest))


# --- Times: what the numbers mean is unknown, so the conclusion is a guess --------------------------------------------

_LEAST_TIMES = 4
"""Minimum number of ranks in a list."""
_MUCH = 3.0
"""Minimum factor to the longest of the others."""
_TOOK = re.compile(r"\brank\W{1,3}(\d{1,6})\W{1,4}(\d+(?:\.\d+)?) ?(ms|s|sec|seconds)\b", re.IGNORECASE)
_HEAD = re.compile(r"^\s*rank\s+\w*time\b", re.IGNORECASE)
_ROW = re.compile(r"^\s*(\d{1,6})\s+(\d+\.\d+)\b")


def read_paces(reader: FactReader) -> Iterator[Fact]:
    """Return the ranks that took much longer than the others, in the first such list; the others wait for them."""
    for paces in (paces for tail in reader.logs.tails for paces in _lists(tail.lines)):
        longest = max((took for _, took, _ in paces), default=0.0)
        slow = {rank: line for rank, took, line in paces if took > longest / 2}
        others = [took for rank, took, _ in paces if rank not in slow]
        is_one_step = len({rank for rank, _, _ in paces}) == len(paces) >= _LEAST_TIMES
        if is_one_step and others and max(others) * _MUCH <= min(took for rank, took, _ in paces if rank in slow):
            yield from reader.behind(
                [*slow.values()][:3],
                f"{fold_ranks(slow)} took at least {_MUCH:g} times as long as others",
                kind=FactKind.SETTING,
                ranks=sorted(slow),
                confidence=Confidence.UNDECIDED,
                ask="the GPU's clocks and the data loader of those ranks: nvidia-smi -q -d CLOCK,PERFORMANCE",
            )
            return


def _lists(lines: Iterable[Line]) -> Iterator[list[tuple[int, float, Line]]]:
    """Yield consecutive lines that name a rank and its time, or that are rows below a heading of such a table."""
    paces: list[tuple[int, float, Line]] = []
    is_table = False
    for line in lines:
        match = _ROW.match(line.text) if is_table else None
        if match is None and "rank" in line.text.lower():  # most lines: this is the faster test
            match = _TOOK.search(line.text)
        if match is not None:
            paces.append((int(match[1]), float(match[2]), line))
            continue
        if paces:
            yield paces
        paces, is_table = [], _HEAD.match(line.text) is not None
    yield paces


# --- Stacks -----------------------------------------------------------------------------------------------------------

_WAITS = re.compile(
    r"^(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|reduce|gather|scatter|send|recv|wait"
    r"|monitored_barrier)\w*$"
)
_DISTRIBUTED = re.compile(r"torch/distributed/|torch/nn/parallel/distributed|deepspeed/comm|horovod/")
_FRAMES_LOOKED_AT = 4


def read_saved_stacks(reader: FactReader) -> Iterator[Fact]:
    """Return the ranks whose main threads are elsewhere while those of most wait in a collective."""
    stacks: list[tuple[list[LogEvent], list[LogEvent]]] = []  # main threads, and the frames that they share
    is_main = False
    for event in reader.logs.of("thread", "stack"):
        if event.kind == "stack" and is_main:
            stacks[-1][1].append(event)
        elif event.kind == "thread":
            was_main, is_main = is_main, event.values.get("name", "MainThread") == "MainThread"
            if is_main and was_main and not stacks[-1][1]:  # headings that follow each other share the stack below
                stacks[-1][0].append(event)
            elif is_main:
                stacks.append(([event], []))
    waiting = [stack for stack in stacks if any(map(_is_waiting, stack[1][:_FRAMES_LOOKED_AT]))]
    others = [stack for stack in stacks if stack[1] and stack not in waiting]
    num_waiting = sum(len(threads) for threads, _ in waiting)
    if not waiting or not others or sum(len(threads) for threads, _ in others) > num_waiting:
        return
    where = others[0][1][0]
    told = f"it is in {where.values['function']} ({where.values['file']}:{where.values['line']}) while {num_waiting} "
    for thread in (thread for threads, _ in others for thread in threads):
        yield from reader.behind(
            (thread.line, where.line, waiting[0][1][0].line),
            f"{told}others wait in a collective",
            who=[reader.people.speaker(thread.line)],
            confidence=Confidence.CERTAIN,
            things=(f"process {thread.values['thread']}",),
        )


def _is_waiting(frame: LogEvent) -> bool:
    return bool(_WAITS.match(frame.values["function"]) and _DISTRIBUTED.search(frame.values["file"]))
