"""Which nodes break more jobs than chance explains? Pure.

    fleet = find_suspects(ends, now_s=time.time())
    [suspect.node for suspect in fleet.suspects]           # ['node17']

A false accusation takes a healthy node out of service, and silence only costs the next failure. So a node is named
only if all of this holds:

1. It was the culprit in MIN_JOBS jobs or more. All tasks and all restarts of one job are one job: what they share
   (script, data, the same minute) may be the reason.
2. Only faults count that leaving the node out cures (exit code 75 in the book of causes), that are certain or likely,
   and that name this node alone, as a node of the job. An error of the script happens on some node, too. A fault of
   the rendezvous does not count: the node where ranks meet is nearly always the first one of a job.
3. Chance does not explain it. If all nodes were alike, each fault would hit a node with the probability of its share
   of all runs (jobs times nodes). The probability that a node gets its faults, or more, in this way (a binomial tail),
   times the number of nodes, is at most MAX_CHANCE: a cluster of nodes that are alike names one in fewer than 1 of
   100 looks. Two nodes that always run together need eight faults of eight.
4. The faults are at most `window_s` old. A repaired node is not named for what it did before the repair for longer
   than that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from allranks.causes.book import known_cause
from allranks.causes.cause import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence
from allranks.model.hostlist import expand_hosts
from allranks.report.runs import is_job_of_slurm
from allranks.why.fleet.job_end import JobEnd, NodeFault

MIN_JOBS = 3
MAX_CHANCE = 0.01
WINDOW_S = 30 * 86400.0
"""A month: long enough for a node that fails once a week, short enough to forget a repaired one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A node that breaks more jobs than chance explains."""

    node: str
    culprit_in: int
    """Number of jobs in which it was the culprit."""
    failed: int
    """Number of failed jobs that ran on it."""
    jobs: int
    """Number of jobs that ran on it."""
    causes: tuple[tuple[str, int], ...]
    """Label of each cause, and in how many jobs; the most frequent first."""
    last_s: float
    """Unix time of its last fault."""
    last_job: str
    well_since: int
    """Number of jobs that have ended well on it since."""
    chance: float
    """Probability that a node of this cluster gets so many faults if all nodes are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is known of the nodes of a cluster."""

    suspects: tuple[Suspect, ...]
    """The one with the most faults first."""
    jobs: int
    failed: int
    nodes: int
    """Number of nodes on which a job ran."""
    since_s: float


@dataclass(slots=True)
class _Job:
    """One job, with all its tasks and restarts."""

    nodes: set[str] = field(default_factory=set)
    faults: dict[str, tuple[NodeFault, float]] = field(default_factory=dict)
    """Node -> its newest fault that counts, and when."""
    is_failed: bool = False
    time_s: float = 0.0


def accuses_its_node(cause: str) -> bool:
    """Whether a fault of this cause (`AR105 gpu-hardware`) speaks against the node that it names."""
    known = known_cause(cause.partition(" ")[0])
    return known is not None and known.exit_code is Exit.NODE_FAULT and Trait.AT_THE_MEETING not in known.traits


def find_suspects(
    ends: Iterable[JobEnd],
    *,
    now_s: float,
    window_s: float = WINDOW_S,
    accuses: Callable[[str], bool] = accuses_its_node,
) -> Fleet:
    """Return the nodes that break more jobs than chance explains.

    Args:
        ends: of jobs, in any order; several of one job are one.
        now_s: Unix time.
        window_s: how far back ends count.
        accuses: whether a cause speaks against its node.
    """
    since_s = now_s - window_s
    jobs = _join((end for end in ends if since_s <= end.time_s), accuses)
    runs = Counter(node for job in jobs.values() for node in job.nodes)
    faults = {
        (job_id, node): (fault.cause, time_s)
        for job_id, job in jobs.items()
        for node, (fault, time_s) in job.faults.items()
    }
    culprits = Counter(node for _, node in faults)
    suspects = []
    for node, count in culprits.items():
        chance = tail(count, of=culprits.total(), share=runs[node] / runs.total()) * len(runs)
        if count < MIN_JOBS or chance > MAX_CHANCE:
            continue
        own = {job_id: told for (job_id, at), told in faults.items() if at == node}
        last_job = max(own, key=lambda job_id: own[job_id][1])
        last_s = own[last_job][1]
        there = [job for job in jobs.values() if node in job.nodes]
        suspects.append(
            Suspect(
                node=node,
                culprit_in=count,
                failed=sum(job.is_failed for job in there),
                jobs=len(there),
                causes=tuple(Counter(cause for cause, _ in own.values()).most_common()),
                last_s=last_s,
                last_job=last_job,
                well_since=sum(not job.is_failed and job.time_s > last_s for job in there),
                chance=chance,
            )
        )
    return Fleet(
        suspects=tuple(sorted(suspects, key=lambda suspect: (-suspect.culprit_in, suspect.node))),
        jobs=len(jobs),
        failed=sum(job.is_failed for job in jobs.values()),
        nodes=len(runs),
        since_s=since_s,
    )


def _join(ends: Iterable[JobEnd], accuses: Callable[[str], bool]) -> dict[str, _Job]:
    """Return the jobs by the ids under which they were submitted."""
    jobs: dict[str, _Job] = {}
    for end in ends:
        base = end.job.partition("_")[0].partition("+")[0] if is_job_of_slurm(end.job) else end.job
        job = jobs.setdefault(base, _Job())
        nodes = expand_hosts(end.nodes) if end.nodes else []
        job.nodes.update(nodes)
        job.is_failed |= end.is_failed or bool(end.faults)  # a restart may have cured it
        job.time_s = max(job.time_s, end.time_s)
        of_short = {short_name(node): node for node in nodes}  # a log may have the full name
        for fault in end.faults:
            node = of_short.get(short_name(fault.node))
            counts = fault.confidence is not Confidence.UNDECIDED and accuses(fault.cause)
            if node is not None and counts and end.time_s >= job.faults.get(node, (fault, 0.0))[1]:
                job.faults[node] = (fault, end.time_s)
    return jobs


def describe_suspect(suspect: Suspect) -> str:
    """`culprit in 7 of 9 failures, AR105 gpu-hardware in 5`, as a reason of SLURM and a line of `submit` say it."""
    cause, count = suspect.causes[0]
    return f"culprit in {suspect.culprit_in} of {suspect.failed} failures, {cause} in {count}"


def short_name(node: str) -> str:
    """`node17` of `node17.cluster.local`."""
    return node.partition(".")[0]


def tail(count: int, *, of: int, share: float) -> float:
    """Return the probability of `count` hits or more in `of` tries that each hit with the probability `share`.

    >>> round(tail(3, of=3, share=0.5), 3), tail(0, of=9, share=0.1), tail(2, of=2, share=1.0)
    (0.125, 1.0, 1.0)
    """
    if count <= 0 or share >= 1.0:
        return 1.0
    logs = [
        math.lgamma(of + 1) - math.lgamma(hits + 1) - math.lgamma(of - hits + 1)
        + hits * math.log(share) + (of - hits) * math.log1p(-share)
        for hits in range(count, of + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))
