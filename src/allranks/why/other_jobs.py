"""Which lines tell of another SLURM job than the one that the logs are of? Pure.

    slurmstepd: error: Detected 1 oom_kill event in StepId=991.0.
    oom-kill:constraint=CONSTRAINT_MEMCG,...,task_memcg=/slurm/uid_1001/job_991/step_0/task_0,task=python3,pid=21044

A kernel's or a daemon's log has all jobs of its node. A job is known by the names of its files (slurm-123.out), by its
variables, and by what SLURM writes into its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from allranks.facts.fact import FactKind, Said
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.logs.sources import list_jobs

_OF_JOB, _OWN_JOB = "of-job", "own-job"
MAX_REPORT_LINES = 4000
"""Lines of one report of the kernel's OOM killer: it lists all processes of the machine, or of the job's cgroup."""


def find_own_jobs(logs: Logs) -> frozenset[str]:
    """Return the ids of the jobs that wrote these logs; empty if nobody says one.

    The number of a file of an array's task is not the id that SLURM's daemons use, so it does not count.
    """
    named = {job for job in list_jobs(tail.source for tail in logs.tails) if job.isdecimal()}
    return frozenset(named | {event.values["job"] for event in logs.of(_OWN_JOB)})


def leave_out_other_jobs(logs: Logs) -> Logs:
    """Return the logs without what tells of other jobs, if the own one is known."""
    own = find_own_jobs(logs)
    foreign = {event.line.at for event in logs.of(_OF_JOB) if event.values["job"] not in own} if own else set()
    if not foreign:
        return logs
    foreign |= set(_of_reports(logs, foreign))
    return replace(logs, events=tuple(event for event in logs.events if event.line.at not in foreign))


def find_unowned(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return the lines that name a job by its id, if nobody says which is the own one."""
    return frozenset() if find_own_jobs(logs) else frozenset(event.line.at for event in logs.of(_OF_JOB))


def _of_reports(logs: Logs, foreign: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the kernel's lines about a kill of another job whose id only another line of the report has.

    A report begins with who asked for memory. Then one line has the cgroup with the job's id, and on newer kernels the
    killed process, which the last line names.
    """
    pids = {event.line.at: event.values["pid"] for event in logs.events if _is_kernels(event) and "pid" in event.values}
    begun: LogEvent | None = None
    named: LogEvent | None = None
    for event in logs.events:
        if not (is_kernels := _is_kernels(event)) and event.kind != _OF_JOB:
            continue
        if event.kind == _OF_JOB:
            named = event
            if begun is not None and event.line.at in foreign and _is_near(begun, event):
                yield begun.line.at
            begun = None
        elif is_kernels and "pid" not in event.values:
            begun, named = event, None
        elif named is not None and named.line.at in foreign and _is_near(named, event):
            is_its = event.values["pid"] == pids.get(named.line.at, event.values["pid"])
            yield from (event.line.at,) if is_its else ()


def _is_kernels(event: LogEvent) -> bool:
    return event.states is FactKind.ENDED and event.sign is not None and event.sign.said is Said.KERNEL


def _is_near(above: LogEvent, below: LogEvent) -> bool:
    is_one_file = above.line.source.shown == below.line.source.shown
    return is_one_file and 0 <= below.line.number - above.line.number <= MAX_REPORT_LINES
