"""Which lines tell of another SLURM job than the one that the logs are of? Pure.

    slurmstepd[70113]: error: Detected 1 oom_kill event in StepId=991.0.
    oom-kill:constraint=CONSTRAINT_MEMCG,...,task_memcg=/slurm/uid_1001/job_991/step_0/task_0,task=python3,pid=21044

A kernel's or a daemon's log has all jobs of its node. A job is known by the names of its files (slurm-123.out), by its
variables, and by what SLURM writes into its output. What a program itself says of other jobs is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from allranks.facts.fact import FactKind, Said, When
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.logs.sources import list_jobs
from allranks.why.times import Times

_OF_JOB, _OF_CGROUP, _OWN_JOB = "of-job", "of-cgroup", "own-job"
_OUTSIDE = frozenset((Said.KERNEL, Said.SCHEDULER))
_DAEMON = re.compile(r"(?:\S+ +){0,4}slurm(?:d|stepd|ctld)(?:\[\d+\])?: ")
"""How a line of SLURM's daemons begins, with or without syslog's header."""
_LAUNCHERS = ("task-end", "agent-failed", "failure-code", "launcher-failed")
_KILLED = frozenset(("Killed", "Out Of Memory", "-9", "137"))
MAX_REPORT_LINES = 4000
"""Lines of one report of the kernel's OOM killer: it lists all processes of the machine, or of the job's cgroup."""
NEAR_S = 10.0
"""Within this, a launcher tells of a kill."""


def find_own_jobs(logs: Logs) -> frozenset[str]:
    """Return the ids of the jobs that wrote these logs; empty if nobody says one.

    The number of a file of an array's task is not the id that SLURM's daemons use, so it does not count, and beside
    such a file the names of others do not tell all jobs.
    """
    said = {event.values["job"] for event in logs.of(_OWN_JOB)}
    named = list_jobs(tail.source for tail in logs.tails)
    return frozenset(said.union(named) if said or all(map(str.isdecimal, named)) else ())


def leave_out_other_jobs(logs: Logs) -> Logs:
    """Return the logs without what kernels and SLURM's daemons tell of other jobs, if the own one is known."""
    others = _list_others(logs)
    if not others or not find_own_jobs(logs):
        return logs
    foreign = {event.line.at for event in others} - set(_find_perhaps_own(logs, others))
    foreign |= set(_of_reports(logs, foreign))
    return replace(logs, events=tuple(event for event in logs.events if event.line.at not in foreign))


def find_unowned(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return the lines that name a job by its id, unless somebody says that this is the own one."""
    return frozenset(event.line.at for event in _list_others(logs))


def find_own_kills(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return the kernel's lines about kills in the own job's cgroup."""
    told = [*logs.of(_OF_CGROUP)]
    own = find_own_jobs(logs) if told else ()
    named = {event.line.at for event in told if event.values["job"] in own}
    return frozenset(named.union(_of_reports(logs, named)) if named else ())


def _list_others(logs: Logs) -> list[LogEvent]:
    """Return where kernels and daemons name a job that is not known as the own one; no exception, no rank does."""
    told = [*logs.of(_OF_JOB, _OF_CGROUP)]
    own = find_own_jobs(logs) if told else ()  # looks at the names of all files
    named = [event for event in told if event.values["job"] not in own]
    if not named:
        return []
    outside = {event.line.at for event in logs.events if _is_outside(event)}
    outside -= {event.line.at for event in logs.of("exception")}
    return [event for event in named if event.line.at in outside and (event.line.rank is None or _is_daemons(event))]


def _is_outside(event: LogEvent) -> bool:
    """Whether the kernel or SLURM says it: by its sign, or as the line begins."""
    is_told = event.sign is not None and event.sign.said in _OUTSIDE
    return is_told or event.kind == _OF_CGROUP or _is_daemons(event)


def _is_daemons(event: LogEvent) -> bool:
    return _DAEMON.match(event.line.text) is not None


def _find_perhaps_own(logs: Logs, others: Sequence[LogEvent]) -> Iterator[tuple[str, int]]:
    """Yield those of a kill on a node where a launcher saw one of the job at about that time.

    The parts of a heterogeneous job have ids of their own.
    """
    killed = [event for event in logs.of(*_LAUNCHERS) if not _KILLED.isdisjoint(event.values.values())]
    if not killed:
        return
    times = Times(logs)
    kills = {event.line.at for event in logs.events if event.states is FactKind.ENDED}
    for event in others:
        when = times.of(event.line)
        for own in killed if event.kind == _OF_CGROUP or event.line.at in kills else ():
            is_there = (own.values.get("node") or own.line.node) == event.line.node is not None
            pids = {own.values.get("pid"), event.values.get("pid")} - {None}
            if is_there and len(pids) < 2 and not _are_apart(when, times.of(own.line)):
                yield event.line.at


def _are_apart(first: When, second: When) -> bool:
    waits = [(first, second), (second, first)]
    return any(
        msgspec.structs.replace(before, latest_s=before.latest_s + NEAR_S).is_before(after)
        for before, after in waits
        if before.latest_s is not None
    )


def _of_reports(logs: Logs, named_by: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the kernel's lines about a kill in a job whose id only another line of the report has, one of `named_by`.

    A report begins with who asked for memory. Then one line has the cgroup with the job's id, and on newer kernels the
    killed process, which the last line names; another process is another report's.
    """
    begun: LogEvent | None = None
    named: LogEvent | None = None
    pid: str | None = None
    pids = {event.line.at: event.values["pid"] for event in logs.events if _is_kernels(event) and "pid" in event.values}
    for event in logs.events:
        if event.kind in {_OF_JOB, _OF_CGROUP}:
            named, pid = event, pids.get(event.line.at)
            if begun is not None and event.line.at in named_by and _is_near(begun, event):
                yield begun.line.at
            begun = None
        elif not _is_kernels(event):
            continue
        elif "pid" not in event.values:
            begun, named = event, None
        elif named is not None and named.line.at in named_by and _is_near(named, event):
            pid = pid or event.values["pid"]
            if event.values["pid"] == pid:
                yield event.line.at
            else:
                named = None


def _is_kernels(event: LogEvent) -> bool:
    return event.states is FactKind.ENDED and event.sign is not None and event.sign.said is Said.KERNEL


def _is_near(above: LogEvent, below: LogEvent) -> bool:
    is_one_file = above.line.source.shown == below.line.source.shown
    return is_one_file and 0 <= below.line.number - above.line.number <= MAX_REPORT_LINES
