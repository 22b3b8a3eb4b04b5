"""NCCL's own list of collectives (NCCL_DEBUG_SUBSYS=COLL): do all ranks make the same call at the same number? Pure.

    node1:45006:45006 [0] NCCL INFO AllReduce: opCount 28c sendbuff .. count 9984512 datatype 7 .. comm .. [nranks=4]

If a process has several communicators of one size, a line does not tell which one it means: there is no conclusion.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import Culprit, People, speaker

_Call = tuple[str, str, str]
"""Name, count and type."""
_LEAST = 3
"""Minimum number of processes: if two differ, either may be wrong."""


def conclude_opcounts(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the first call in which a minority of the processes differs."""
    comms: defaultdict[tuple[object, str], set[str]] = defaultdict(set)
    calls: dict[tuple[str, str], dict[object, LogEvent]] = {}
    for event in logs.of("collective"):
        who = (event.line.node, event.line.pid, event.line.local_rank)
        size = event.values["size"]
        comms[who, size].add(event.values["comm"])
        calls.setdefault((size, event.values["number"]), {}).setdefault(who, event)
    for (size, number), by_process in calls.items():
        if len(by_process) < _LEAST or any(len(comms[who, size]) > 1 for who in by_process):
            continue
        ways = Counter(_call(event) for event in by_process.values())
        (usual, count), *others = ways.most_common()
        if not others or 2 * count <= len(by_process):
            continue
        odd = [event for event in by_process.values() if _call(event) != usual]
        culprit = Culprit()
        for event in odd:
            line = people.know(event.line)
            culprit |= speaker(line) | Culprit(things=(f"process {line.pid}",) if line.pid is not None else ())
        same = next(event for event in by_process.values() if _call(event) == usual)
        yield Conclusion(
            cause=find_cause("collective-mismatch"),
            role=Role.LIKELY,
            confidence=Confidence.LIKELY,
            culprit=culprit,
            message=f"call {number} is {_call(odd[0])[0]} of {_call(odd[0])[1]} elements on {len(odd)} of "
            f"{len(by_process)} processes, {usual[0]} of {usual[1]} on the others",
            evidence=(odd[0].line, same.line),
            weight=1,
        )
        return


def _call(event: LogEvent) -> _Call:
    return event.values["op"], event.values["count"], event.values["datatype"]
