"""How did processes end, according to their parents: torchrun's agent and summary, other launchers, SLURM? Pure.

Who a launcher ended is no culprit: LAUNCHER_KILL. Which worker it saw first is `is_first_observed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGKILL, SIGTERM
from typing import Any

from allranks.causes.cause import Trait
from allranks.facts.fact import Fact, FactKind, Said, Who
from allranks.model.finding import Confidence
from allranks.why.facts_of_lines import FactReader, HowEnded, read_ending
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent
from allranks.why.people import named
from allranks.why.summaries import SummaryEntry, read_summaries

MAX_GAP = 64
"""Largest distance of the pids of one agent's workers: they are started one after the other."""
LOOK_S = 1.0
"""torchrun looks at all workers every 0.1 s, and tells of those that ended meanwhile in the order of their ranks."""
_OWN_WORDS = "the .err file of that rank; torchrun --log-dir DIR -r 3 writes one per rank"


def read_ends(reader: FactReader) -> Iterator[Fact]:
    """Return the ends of processes, and who was ended by a launcher."""
    summaries = read_summaries(reader.logs)
    yield from _of_summaries(reader, summaries)
    of_agents = {end.event.line.source.shown for end in summaries}
    for event in reader.logs.of("agent-failed"):
        source = event.line.source.shown
        who = event.who | Who(event.line.rank, reader.people.node_of(event.line))
        yield _ended(reader, event.line, who, _how(event), is_first_observed=source not in of_agents)
        of_agents.add(source)
    if not of_agents:
        yield from _of_launchers(reader)
        yield from _not_ended(reader)
    has_agents = bool(of_agents) or any(reader.logs.of("closing", "killed-by-agent"))
    yield from _of_tasks(reader, has_agents=has_agents)
    for event in reader.logs.of("killed-by-agent", "closing"):
        how = HowEnded(9) if event.kind == "killed-by-agent" else read_ending(None, event.values)
        who = Who(node=reader.people.node_of(event.line), pid=event.number("pid"))
        yield _ended(reader, event.line, who, how, is_kill=True)
    yield from _store_gone(reader)


def _of_summaries(reader: FactReader, summaries: list[SummaryEntry]) -> Iterator[Fact]:
    """A summary has its first failure last; one summary per node."""
    first: SummaryEntry | None = None
    for end in reversed(summaries):
        first = end if end.is_first or first is None else first
        how, began, ended = read_ending(None, end.event.values), first.when.time, end.when.time
        is_soon = began is None or ended is None or ended - began <= LOOK_S
        is_alike = how == read_ending(None, first.event.values) and how.signal in {None, SIGTERM}
        about: dict[str, Any] = {"is_first_observed": end.is_first or (is_alike and is_soon)}
        yield _ended(reader, end.event.line, end.event.who, how, when=reader.times.of(end.when), **about)


def _ended(
    reader: FactReader,
    line: Line,
    who: Who,
    how: HowEnded,
    *,
    said: Said = Said.LAUNCHER,
    is_kill: bool = False,
    **about: Any,
) -> Fact:
    """Return an end; if its launcher did not bring it about, with what is told if nothing else tells more."""
    about |= {"who": reader.people.know(who), "said": said, "signal": how.signal, "code": how.code}
    if is_kill:
        return reader.state(FactKind.LAUNCHER_KILL, line, **about)
    words = f"exit code {how.code}" if how.signal is None else f"signal {how.signal}"
    return reader.state(
        FactKind.ENDED,
        line,
        cause="user-code-error" if how.signal is None else "dead-rank",
        is_generic=True,
        told=f"a worker ended with {words}, but these logs do not have its own output",
        confidence=Confidence.UNDECIDED,
        ask=_OWN_WORDS,
        **about,
    )


def _how(event: LogEvent) -> HowEnded:
    """Return how a process ended that a launcher says to have failed."""
    how = read_ending(None, event.values)
    return HowEnded(code=1) if how == HowEnded() else how


def _of_launchers(reader: FactReader) -> Iterator[Fact]:
    """The worker that failed first according to another launcher; each has its own format."""
    killed = {event.number("pid") for event in reader.logs.of("launcher-kills")}
    only_killed = killed.pop() if len(killed) == 1 else None
    named: LogEvent | None = None
    is_first = True
    for event in reader.logs.of("launcher-names", "launcher-failed"):
        line = event.line
        if event.kind == "launcher-names":
            named = event
        elif event.number("code") != 0:
            rank = event.number("ranks") if line.rank is None else line.rank
            who = (named or event).who | Who(rank, reader.people.node_of(line), pid=event.number("pid") or only_killed)
            yield _ended(reader, line, who, _how(event), is_first_observed=is_first)
            is_first = False


def _of_tasks(reader: FactReader, *, has_agents: bool) -> Iterator[Fact]:
    """The tasks of srun, which are the ranks unless each starts several.

    After a task failed, or the scheduler ended the job, srun kills the others, and says so in the same words: by
    SIGTERM, half a minute later by SIGKILL.
    """
    tasks = list(reader.logs.of("task-end"))
    terminated = {
        _start(reader, event): event.line.number for event in reversed(tasks) if _how(event).signal == SIGTERM
    }
    ended: dict[object, int] = {}
    for event in reader.logs.of(Trait.ENDS_FROM_OUTSIDE, "srun-ends"):
        ended.setdefault(_start(reader, event), event.line.number)
    for event in tasks:
        start, line = _start(reader, event), event.line
        how = signal, _ = read_ending(None, event.values)
        if how == HowEnded():
            continue
        is_after = line.number > ended.get(start, line.number)
        is_agents = has_agents and signal is None  # the task is an agent, which ends with its workers
        is_early = signal == SIGKILL and line.number < terminated.get(start, 0)
        is_ended = signal in {SIGKILL, SIGTERM} and event.values.get("signal") != "Out Of Memory" and is_after
        for who in [Who(node=event.values["node"])] if has_agents else named(event)[0]:
            yield _ended(reader, line, who, how, said=Said.SCHEDULER, is_kill=is_agents or (is_ended and not is_early))


def _start(reader: FactReader, event: LogEvent) -> tuple[str, int]:
    """Return in which file, and which start of the job, a line stands."""
    return event.line.source.shown, reader.attempt_of(event.line)


def _not_ended(reader: FactReader) -> Iterator[Fact]:
    """The agent ends all workers except the one that has already ended; all of them if it was told to end itself."""
    is_told = any(reader.logs.of(Trait.ENDS_FROM_OUTSIDE))
    closing = [event for event in reader.logs.of("closing") if event.values["signal"] == "SIGTERM" and not is_told]
    closed = {int(event.values["pid"]): event.line for event in closing}
    first, last = min(closed, default=0), max(closed, default=0)
    gone = [pid for pid in range(first, last) if pid not in closed] if last - first <= MAX_GAP else []
    if 0 < len(gone) < len(closed):
        line = closed[first]
        told = f"the agent ended all workers except process {', '.join(map(str, gone))}, which had already ended"
        whos = [Who(node=line.node, local_rank=pid - first, pid=pid) for pid in gone]
        ask = "the .err file of that worker, dmesg -T of its node"
        yield from reader.infer(FactKind.ENDED, "dead-rank", (line,), told, who=whos, ask=ask)


def _store_gone(reader: FactReader) -> Iterator[Fact]:
    """An agent with running workers had reached the store before: the store is gone, not unreachable."""
    meeting = reader.logs.of(Trait.AT_THE_MEETING)
    refused = next((event for event in meeting if "RendezvousConnectionError: " in event.line.text), None)
    if refused is not None and any(reader.logs.of("agent-runs")):
        told = "the agent lost the rendezvous store while its workers ran: the store's host or its agent ended"
        ask = "the log of the agent on the host that --rdzv-endpoint names"
        yield from reader.infer(FactKind.STORE_GONE, "store-lost", (refused.line,), told, ask=ask)
