"""How did processes end, according to their parents: torchrun's summary, its agent's SIGTERMs, SLURM? Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from allranks.causes.book import find_cause
from allranks.causes.cause import Role, Trait
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import Culprit, People

MAX_SIGNAL = 64
"""Linux's highest signal; a larger code is the program's own: exit(-1) is 255."""
MAX_GAP = 64
"""Largest distance of the pids of one agent's workers: they are started one after the other."""
PATIENCE_S = 20.0
"""A SIGKILL this long after the first failure is the agent's own: it waits 30 s for workers that ignore its SIGTERM."""


@dataclass(slots=True)
class SummaryEntry:
    """One worker of torchrun's summary."""

    line: Line
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    code: int | None = None
    pid: int | None = None
    is_first: bool = False
    """torchrun saw it before the others of its node."""
    when: str = ""
    """In torchrun's format: 2024-09-09_09:36:56."""

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it, in the notation of torchrun (-9) or of shells (137)."""
        return self.code is not None and (self.code < 0 or 128 < self.code <= 128 + MAX_SIGNAL)

    def culprit(self) -> Culprit:
        """Return the rank, as a culprit."""
        things = [] if self.pid is None else [f"process {self.pid}"]
        if self.rank is None and self.local_rank is not None:
            things.insert(0, f"local rank {self.local_rank}")
        return Culprit(
            (self.node,) if self.node else (), () if self.rank is None else (self.rank,), None, tuple(things)
        )


def read_ends(logs: Logs) -> list[SummaryEntry]:
    """Return the workers of torchrun's summaries, in their order."""
    ends: list[SummaryEntry] = []
    current: SummaryEntry | None = None
    is_first = False
    for event in logs.of("failures", "failure-time", "failure-host", "failure-rank", "failure-code"):
        if event.kind == "failures":
            is_first = True
            continue
        if event.kind == "failure-time" or current is None or current.line.source != event.line.source:
            current = SummaryEntry(event.line, is_first=is_first, when=event.values.get("when", ""))
            is_first = False
            ends.append(current)
        if event.kind == "failure-host":
            current.node = event.values["node"]
        elif event.kind == "failure-rank":
            current.rank, current.local_rank = event.number("rank"), event.number("local_rank")
        elif event.kind == "failure-code":
            current.code, current.pid = event.number("code"), event.number("pid")
            current.line = event.line
    return [end for end in ends if end.code is not None]


def find_ended(logs: Logs) -> frozenset[int]:
    """Return the processes that torchrun's agent killed after another one had failed: they are not culprits."""
    pids = {pid for event in logs.of("killed-by-agent") if (pid := event.number("pid")) is not None}
    node: list[SummaryEntry] = []
    for end in read_ends(logs):  # one summary per node, with its first failure last
        node.append(end)
        if not end.is_first:
            continue
        if not end.is_killed:
            pids |= {other.pid for other in node if other.pid is not None and _lag_s(end, other) >= PATIENCE_S}
        node = []
    return frozenset(pids)


def _lag_s(first: SummaryEntry, other: SummaryEntry) -> float:
    try:
        ended, began = (datetime.strptime(end.when, "%Y-%m-%d_%H:%M:%S") for end in (other, first))
    except ValueError:
        return 0.0
    return (ended - began).total_seconds()


def find_first(logs: Logs) -> SummaryEntry | None:
    """Return the worker that ended first, according to torchrun's summary or its agent."""
    ends = read_ends(logs)
    if ends:
        return next((end for end in ends if end.is_first), ends[0])
    for event in logs.of("agent-failed"):
        line = event.line
        local_rank, code, pid = event.number("local_rank"), event.number("code"), event.number("pid")
        rank = line.rank if "rank" not in event.values else event.number("rank")
        return SummaryEntry(
            line, rank, local_rank, event.values.get("node") or line.node, 1 if code is None else code, pid
        )
    return _told_by_launcher(logs)


def _told_by_launcher(logs: Logs) -> SummaryEntry | None:
    """Return the worker that failed first according to another launcher; each has its own format."""
    killed = {event.number("pid") for event in logs.of("launcher-kills")}
    named: LogEvent | None = None
    for event in logs.of("launcher-names", "launcher-failed"):
        if event.kind == "launcher-names":
            named = event
            continue
        line, code = event.line, event.number("code")
        if code == 0:
            continue
        who = named if named is not None and named.line.source == line.source else event
        rank = who.number("rank") if "rank" in who.values else event.number("ranks")
        pid = event.number("pid") if "pid" in event.values or len(killed) != 1 else killed.pop()
        return SummaryEntry(
            line,
            line.rank if rank is None else rank,
            who.number("local_rank"),
            who.values.get("node") or line.node,
            1 if code is None else code,
            pid,
        )
    return None


def conclude_ends(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return conclusions from the ends of processes, if nothing says why they ended."""
    first = find_first(logs)
    if first is not None and first.code is not None and not first.is_killed:
        yield Conclusion(
            cause=find_cause("user-code-error"),
            role=Role.VICTIM,
            confidence=Confidence.UNDECIDED,
            culprit=first.culprit(),
            message=f"a worker ended with exit code {first.code}, but these logs do not have its own output",
            evidence=(first.line,),
            ask="the .err file of that rank; torchrun --log-dir DIR -r 3 writes one per rank",
            weight=1,
        )
    if first is None:
        yield from _not_ended(logs)
    yield from _store_gone(logs)


def _store_gone(logs: Logs) -> Iterator[Conclusion]:
    """An agent with running workers had reached the store before: the store is gone, not unreachable."""
    refused = [event for event in logs.of(Trait.AT_THE_MEETING) if "RendezvousConnectionError: " in event.line.text]
    if not refused or next(logs.of("agent-runs"), None) is None:
        return
    yield Conclusion(
        cause=find_cause("store-lost"),
        role=Role.LIKELY,
        confidence=Confidence.LIKELY,
        culprit=Culprit(),
        message="the agent lost the rendezvous store while its workers ran: the store's host or its agent ended",
        evidence=(refused[0].line,),
        ask="the log of the agent on the host that --rdzv-endpoint names",
        weight=1,
    )


def _not_ended(logs: Logs) -> Iterator[Conclusion]:
    """The agent ends all workers except the one that has already ended."""
    closed = [event for event in logs.of("closing") if event.values["signal"] == "SIGTERM"]
    pids = sorted({int(event.values["pid"]) for event in closed})
    if len(pids) < 2 or pids[-1] - pids[0] > MAX_GAP:
        return
    gone = [pid for pid in range(pids[0], pids[-1]) if pid not in pids]
    if not gone or len(gone) >= len(pids):
        return
    things = [word for pid in gone for word in (f"local rank {pid - pids[0]}", f"process {pid}")]
    yield Conclusion(
        cause=find_cause("dead-rank"),
        role=Role.VICTIM,
        confidence=Confidence.LIKELY,
        culprit=Culprit(things=tuple(things)),
        message=f"the agent ended all workers except process {', '.join(map(str, gone))}, which had already ended",
        evidence=(closed[0].line,),
        ask="the .err file of that worker, dmesg -T of its node",
        weight=2,
    )
