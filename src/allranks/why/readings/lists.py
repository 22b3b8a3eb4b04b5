"""Who differs from most, by lists that already compare ranks? Pure.

NCCL's calls       node1:45006:45006 [0] NCCL INFO AllReduce: opCount 28c sendbuff .. count 9984512 .. [nranks=4]
its RAS            508 ranks have launched up to operation 6650
                   4 ranks have launched up to operation 6649
                   Rank 260 -- GPU 0 managed by process 48307 on node 10.64.17.210
Horovod's stalls   grad_1 [ready ranks: 0, 2]       or [missing ranks: 1], several in one line: Horovod up to 0.17
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from msgspec.structs import replace

from allranks.causes.cause import Trait
from allranks.facts.fact import Fact, FactKind, Who
from allranks.report.text import fold_ranks
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.people import missing_of, named, parse_ranks

_DIFFERENT = "collective-mismatch"
_LEAST = 3
"""Minimum number of processes: if two differ, either may be wrong."""
_READY = re.compile(r"\[ready ranks: ?([0-9]+(?:, ?[0-9]+)*)\]")


def read_opcounts(reader: FactReader) -> Iterator[Fact]:
    """Return the first call in which a minority of the processes differs (NCCL_DEBUG_SUBSYS=COLL).

    A line has its communicator as an address in its process. So if a process has several of one size, or more processes
    than that list one, as those of pipeline stages, nobody knows which calls belong together: nothing follows. How far
    a process came does not follow either: NCCL lists what is enqueued, and lines may be missing at a log's end.
    """
    calls: defaultdict[tuple[str, int], dict[object, tuple[str, Line]]] = defaultdict(dict)
    comms: defaultdict[str, dict[object, str]] = defaultdict(dict)
    unclear: set[str] = set()
    for event in reader.logs.of("collective"):
        line, values, size = event.line, event.values, event.values["size"]
        process = line.node, line.pid, line.local_rank
        called = "{op} of {count} elements of type {datatype}".format_map(values)
        calls[size, int(values["number"], 16)].setdefault(process, (called, line))
        if comms[size].setdefault(process, values["comm"]) != values["comm"] or len(comms[size]) > int(size):
            unclear.add(size)
    for (size, number), told in sorted(calls.items()):
        (usual, most), *others = Counter(called for called, _ in told.values()).most_common()
        if size not in unclear and len(told) >= _LEAST and others and most > others[0][1]:
            odd = [line for called, line in told.values() if called != usual]
            whole = next(line for called, line in told.values() if called == usual)
            yield from reader.infer(
                FactKind.RAISED,
                _DIFFERENT,
                (odd[0], whole),
                f"call {number:x} is {others[0][0]} on {len(odd)} of {len(told)} processes, {usual} on the others",
                who=map(reader.people.speaker, odd),
                things=tuple(f"process {line.pid}" for line in odd if line.pid is not None),
            )
            return


def read_ras(reader: FactReader) -> Iterator[Fact]:
    """Return the named ranks that have launched least, at the last report of such ranks: the others wait for them.

    RAS tells in consecutive lines how many ranks of a communicator have launched how many operations of a kind, and
    names the ranks of a count if they are few (NCCL 2.24 and later, src/ras/client_support.cc). In a running job some
    are always behind: what an earlier report tells may be over.
    """
    found: Iterator[Fact] = iter(())
    events = enumerate(reader.logs.of("launched", "launched-rank"))
    for _, report in groupby(events, lambda pair: (pair[1].line.source.shown, pair[1].line.number - pair[0])):
        lines: dict[int, Line] = {}
        sizes: Counter[int] = Counter()
        whos: defaultdict[int, list[Who]] = defaultdict(list)
        count = 0
        for _, event in report:
            if event.kind == "launched":
                count = event.number("count") or 0
                lines.setdefault(count, event.line)
                sizes[count] += event.number("size") or 1
            whos[count] += named(event)[0]
        least, *more = sorted(lines)[:2] or [0]
        behind, size = whos[least], sizes.total()
        if more and len(behind) == sizes[least]:
            told = fold_ranks(who.rank or 0 for who in behind)
            if reader.people.world not in {None, size}:  # it numbers the ranks of each communicator from 0
                told, behind = f"{told} of a communicator of {size}", [replace(who, rank=None) for who in behind]
            found = reader.behind(
                (lines[least], lines[more[0]]),
                f"{told} launched {least} operations, the others {more[0]} and more",
                who=behind,
                ask="the stack of those ranks while it hangs: allranks stack JOB",
            )
    yield from found


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
