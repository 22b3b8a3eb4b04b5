"""Which lines tell of another SLURM job? Pure.

    slurmstepd[70113]: error: Detected 1 oom_kill event in StepId=991.0.
    oom-kill:constraint=CONSTRAINT_MEMCG,...,task_memcg=/slurm/uid_1001/job_991/step_0/task_0,task=python3,pid=21044

A kernel's or a daemon's log has all jobs of its node. A job is known by the names of its files (slurm-123.out), by its
variables, and by what SLURM writes into its output. What a program itself says of other jobs is left as it is.
"""

from __future__ import annotations

from dataclasses import replace

from allranks.facts.fact import FactKind, Said
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.logs.sources import list_jobs

_OF_JOB, _OF_CGROUP, _OF_STEP, _OWN_JOB = "of-job", "of-cgroup", "of-step", "own-job"
_OUTSIDE = frozenset((Said.KERNEL, Said.SCHEDULER))


def leave_out_strangers(logs: Logs) -> Logs:
    """Return the logs without what is told of other jobs, if the own one is known."""
    others = find_unowned(logs)
    if not (others and find_own_jobs(logs)):
        return logs
    others = _with_reports(logs, others)
    return replace(logs, events=tuple(event for event in logs.events if event.line.at not in others))


def find_own_jobs(logs: Logs) -> frozenset[str]:
    """Return the ids of the jobs that wrote these logs; empty if nobody says one, or none is asked for.

    The number of a file of an array's task is not the id that SLURM's daemons use, so it does not count, and beside
    such a file the names of others do not tell all jobs.
    """
    said = {event.values["job"] for event in logs.of(_OWN_JOB)}
    named = list_jobs(tail.source for tail in logs.tails)
    return frozenset(said.union(named) if said or all(map(str.isdecimal, named)) else ())


def find_unowned(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return where kernels and daemons name a job that is not known as the own one; no rank does."""
    told = list(logs.of(_OF_JOB, _OF_CGROUP, _OF_STEP))
    own = find_own_jobs(logs) if told else ()  # looks at the names of all files
    told = [event for event in told if event.values["job"] not in own and event.line.rank is None]
    outside = {event.line.at for event in logs.events if told and event.sign and event.sign.said in _OUTSIDE}
    whose = (event for event in told if event.kind in {_OF_CGROUP, _OF_STEP} or event.line.at in outside)
    return frozenset(event.line.at for event in whose)


def find_own_words(logs: Logs) -> frozenset[tuple[str, int]]:
    """Return the lines that name the own job: SLURM's by its number, the kernel's about kills by their cgroup."""
    told = list(logs.of(_OF_JOB, _OF_CGROUP, _OF_STEP, _OWN_JOB))
    own = find_own_jobs(logs) if told else ()  # looks at the names of all files
    return _with_reports(logs, frozenset(event.line.at for event in told if event.values["job"] in own))


def _with_reports(logs: Logs, named: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Return these lines, and of those that name a job by a cgroup all others of the kernel's report.

    A report begins with who asked for memory. Then one line has the cgroup with the job's id, and on newer kernels the
    killed process, which the last line names; another process is another report's.
    """
    reports: list[list[LogEvent]] = []
    for event in logs.events if named else ():
        is_cgroup = event.kind == _OF_CGROUP
        is_end = event.states is FactKind.ENDED and event.sign is not None and event.sign.said is Said.KERNEL
        if is_cgroup or is_end:
            own = reports[-1] if reports and reports[-1][0].line.source == event.line.source else []
            has_cgroup = any(above.kind == _OF_CGROUP for above in own)
            pids = {above.values.get("pid") for above in (*own, event)} - {None}
            if not own or (is_cgroup and has_cgroup) or (is_end and "pid" not in event.values) or len(pids) > 1:
                reports.append(own := [])
            own.append(event)
    whole = (report for report in reports if any(event.line.at in named for event in report))
    return named.union(event.line.at for report in whole for event in report)
