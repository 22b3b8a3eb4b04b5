"""Which ranks joined the group, and which did not? Pure.

Each waiting rank reports its own wait; the missing rank reports nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import MAX_RANKS, Culprit, People, missing_of

FEW_RANKS = 16
"""Up to this number, ranks are listed one by one."""


def conclude_arrivals(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the ranks missing at the store's barrier, and the ranks that were started twice."""
    reports = logs.of("missing-rank")
    waiting = [event for event in reports if event.number("rank") is not None and event.number("wanted")]
    yield from _alone(logs)
    barrier = [event for event in waiting if (event.number("present") or 0) < (event.number("wanted") or 0)]
    if barrier:
        wanted = max(event.number("wanted") or 0 for event in barrier)
        keys = {event.values.get("key") for event in barrier}
        came = [*waiting, *(event for event in logs.of("added-key") if event.values["key"] in keys)]
        here = {rank for event in came if (rank := event.number("rank")) is not None}
        present = max(event.number("present") or 0 for event in barrier)
        missing = missing_of(here, wanted) if wanted <= MAX_RANKS else ()
        if missing and len(missing) <= max(wanted - present, 1):
            yield Conclusion(
                cause=find_cause("missing-rank"),
                role=Role.LIKELY,
                confidence=Confidence.LIKELY,
                culprit=Culprit(ranks=missing),
                message=f"{fold_ranks(missing)} never called init_process_group; {present} of {wanted} ranks did",
                evidence=(barrier[0].line, barrier[-1].line),
                victims=frozenset(here),
                ask=f"the log of {fold_ranks(missing)}, and their stacks while the job hangs: allranks stack JOB",
                weight=1,
            )
    many = [event for event in waiting if (event.number("present") or 0) > (event.number("wanted") or 0)]
    if many and any("multiprocessing/spawn.py" in frame.values["file"] for frame in logs.of("frame")):
        has_srun = next(logs.of("srun"), None) is not None
        yield Conclusion(
            cause=find_cause("spawn-inside-srun" if has_srun else "slurm-env"),
            role=Role.PRIMARY,
            confidence=Confidence.LIKELY,
            culprit=Culprit(
                ranks=tuple(sorted({event.number("rank") or 0 for event in many})),
                things=("mp.spawn inside srun",) if has_srun else (),
            ),
            message=f"{many[0].values['present']} processes joined a group of {many[0].values['wanted']}: "
            "several tasks each spawned all ranks",
            evidence=tuple(event.line for event in many[:2]),
            weight=2,
        )
    if next(logs.of("all-came"), None) is None:
        yield from _twice(read_members(logs))


def read_members(logs: Logs) -> list[LogEvent]:
    """Return the lines in which a rank reports its start and how many there are to be."""
    return [event for event in logs.of("slurm-env") if "rank" in event.values and "wanted" in event.values]


def _alone(logs: Logs) -> Iterator[Conclusion]:
    """Conclude that all ranks but 0 are missing, if only the store's host, rank 0, has joined."""
    for event in logs.of("missing-rank"):
        wanted = event.number("wanted") or 0
        if event.number("present") == 1 and "clients joined" in event.line.text and 1 < wanted <= FEW_RANKS:
            others = tuple(range(1, wanted))
            yield Conclusion(
                cause=find_cause("missing-rank"),
                role=Role.LIKELY,
                confidence=Confidence.LIKELY,
                culprit=Culprit(ranks=others),
                message=f"{fold_ranks(others)} did not reach the store of rank 0",
                evidence=(event.line,),
                ask=f"the log of {fold_ranks(others)}",
                weight=1,
            )
            return


def _twice(members: Sequence[LogEvent]) -> Iterator[Conclusion]:
    """Return ranks that reported their start several times while others did not, or that never did."""
    counts = Counter(event.number("rank") for event in members)
    wanted = max((event.number("wanted") or 0 for event in members), default=0)
    twice = sorted(rank for rank, count in counts.items() if rank is not None and count > 1)
    missing = missing_of({rank for rank in counts if rank is not None}, min(wanted, MAX_RANKS))
    if not missing or len(counts) < 2:
        return
    if not twice:
        yield Conclusion(
            cause=find_cause("missing-rank"),
            role=Role.LIKELY,
            confidence=Confidence.UNDECIDED,
            culprit=Culprit(ranks=missing),
            message=f"{fold_ranks(missing)} did not report their start; {len(counts)} of {wanted} ranks did",
            evidence=tuple(event.line for event in members[:2]),
            ask="check that they were started: srun with one task per rank; the logs of the other nodes",
        )
        return
    yield Conclusion(
        cause=find_cause("slurm-env"),
        role=Role.LIKELY,
        confidence=Confidence.LIKELY,
        culprit=Culprit(ranks=tuple(twice) + missing),
        message=f"{fold_ranks(twice)} started {max(counts.values())} times and {fold_ranks(missing)} not at all: "
        "the tasks have wrong ranks",
        evidence=tuple(event.line for event in members[:2]),
        weight=1,
    )
