"""Which lines tell of something else than this job: of another SLURM job, or of another call? Pure.

    slurmstepd[70113]: error: Detected 1 oom_kill event in StepId=991.0.
    oom-kill:constraint=CONSTRAINT_MEMCG,...,task_memcg=/slurm/uid_1001/job_991/step_0/task_0,task=python3,pid=21044

A kernel's or a daemon's log has all jobs of its node. A job is known by the names of its files (slurm-123.out), by its
variables, and by what SLURM writes into its output. What a program itself says of other jobs is left as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace

from allranks.causes.cause import Trait
from allranks.facts.fact import FactKind, Said
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.logs.sources import list_jobs
from allranks.why.step_lines import is_of_training

_OF_JOB, _OF_CGROUP, _OWN_JOB = "of-job", "of-cgroup", "own-job"
_OUTSIDE = frozenset((Said.KERNEL, Said.SCHEDULER))
_DAEMON = re.compile(r"(?:\S+ +){0,4}slurm(?:d|stepd|ctld)(?:\[\d+\])?: ")
"""How a line of SLURM's daemons begins, with or without syslog's header."""
MAX_REPORT_LINES = 4000
"""Lines of one report of the kernel's OOM killer: it lists all processes of the machine, or of the job's cgroup."""


def leave_out_strangers(logs: Logs) -> Logs:
    """Return the logs without what is of another call, or is told of other jobs, if the own one is known."""
    strange = {id(event) for event in _find_other_calls(logs)}
    if (others := find_unowned(logs)) and find_own_jobs(logs):
        others = _with_reports(logs, others)
        strange.update(id(event) for event in logs.events if event.line.at in others)
    return replace(logs, events=tuple(event for event in logs.events if id(event) not in strange)) if strange else logs


def find_own_jobs(logs: Logs) -> frozenset[str]:
    """Return the ids of the jobs that wrote these logs; empty if nobody says one, or none is asked for.

    The number of a file of an array's task is not the id that SLURM's daemons use, so it does not count, and beside
    such a file the names of others do not tell all jobs.
    """
    said = {event.values["job"] for event in logs.of(_OWN_JOB)}
    named = list_jobs(tail.source for tail in logs.tails)
    return frozenset(said.union(named) if said or all(map(str.isdecimal, named)) else ())


def find_unowned(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return where kernels and daemons name a job that is not known as the own one; no exception, no rank does."""
    told = list(logs.of(_OF_JOB, _OF_CGROUP))
    own = find_own_jobs(logs) if told else ()  # looks at the names of all files
    told = [event for event in told if event.values["job"] not in own]
    outside = {event.line.at for event in logs.events if told and event.sign and event.sign.said in _OUTSIDE}
    raised = {event.line.at for event in logs.of("exception") if told}
    return frozenset(
        event.line.at
        for event in told
        if event.line.at not in raised
        if _DAEMON.match(event.line.text)
        or (event.line.rank is None and (event.kind == _OF_CGROUP or event.line.at in outside))
    )


def find_own_words(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return the lines that name the own job: SLURM's by its number, the kernel's about kills by their cgroup."""
    told = list(logs.of(_OF_JOB, _OF_CGROUP, _OWN_JOB))
    own = find_own_jobs(logs) if told else ()  # looks at the names of all files
    return _with_reports(logs, frozenset(event.line.at for event in told if event.values["job"] in own))


def _with_reports(logs: Logs, named: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Return these lines, and of those that name a job by a cgroup all others of the kernel's report.

    A report begins with who asked for memory. Then one line has the cgroup with the job's id, and on newer kernels the
    killed process, which the last line names; another process is another report's.
    """
    found = set(named)
    asked: LogEvent | None = None
    owner: LogEvent | None = None
    pid: str | None = None
    for event in logs.events if named else ():
        if event.kind == _OF_CGROUP:
            if asked is not None and event.line.at in named and _is_near(asked, event):
                found.add(asked.line.at)
            asked, owner, pid = None, event, None
        elif event.states is FactKind.ENDED and event.sign is not None and event.sign.said is Said.KERNEL:
            killed = event.values.get("pid")
            if killed is None:
                asked, owner = event, None
            elif owner is not None and pid in {None, killed} and _is_near(owner, event):
                pid = killed
                if owner.line.at in named:
                    found.add(event.line.at)
    return frozenset(found)


def _is_near(above: LogEvent, below: LogEvent) -> bool:
    is_one_file = above.line.source.shown == below.line.source.shown
    return is_one_file and 0 <= below.line.number - above.line.number <= MAX_REPORT_LINES


def _find_other_calls(logs: Logs) -> Iterator[LogEvent]:
    """Yield what counts only in a call whose file its sign names (at a start: before any step) and is of another."""
    if not any(event.sign and event.sign.frame for event in logs.events):
        return
    frames: dict[object, str] = {}
    steps = (line for tail in logs.tails for line in reversed(tail.lines) if is_of_training(line.text))
    trained = {line.writer: line.number for line in steps}  # of each the first
    for event in logs.events:
        writer = event.line.writer
        if event.kind == "traceback":
            frames.pop(writer, None)
        elif event.kind == "frame":
            frames[writer] = event.values["file"]
        elif event.sign and event.sign.frame:
            is_there = re.search(event.sign.frame, frames.get(writer, "")) is not None
            is_late = Trait.ALL_MEET in event.traits and trained.get(writer, sys.maxsize) < event.line.number
            if not is_there or is_late:
                yield event
