"""What do the watchdogs of all ranks show: which rank is behind, silent, or in another collective? Pure.

A watchdog's timeout names its own rank, which waited. The culprit is the rank without one: in NCCL, a rank that never
enqueued the collective has no timeout of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allranks.causes.book import find_cause
from allranks.causes.cause import Role, Trait
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import Culprit, People, missing_of

DEFAULT_GROUP = "0"
_BAR = re.compile(r"\d%\|.{0,120}? (?:\d+(?:\.\d+)?[kMG]?/\d+(?:\.\d+)?[kMG]? )?\[(?:(\d+):)?(\d\d):(\d\d)<")
"""tqdm's: `85%|####  | 35595/41999 [29:57<08:39, 12.34it/s]`."""
_LEAST_SHARE, _MOST_SHARE = 0.9, 1.2
"""As a fraction of the timeout."""
_ALONE = re.compile(
    r"(?i)\b(?:saving|writing|uploading|evaluating|running evaluation|validating|tokenizing|running tokenizer"
    r"|preprocessing|converting|consolidating)\b"
)
"""What the first rank does while the others wait for it."""
_FAILED = "raised the following async exception"
"""torch, ProcessGroupNCCL.cpp, checkAndSetException."""
_DAY_S = 86_400.0
_ASK = "allranks stack JOB while it hangs, or TORCH_FR_BUFFER_SIZE=2000 and the flight recorder's dumps of all ranks"


@dataclass(slots=True)
class StuckRank:
    """Progress of one rank in one group when its watchdog reported."""

    rank: int
    line: Line
    seq: int | None = None
    """Number of the collective that timed out."""
    op: str | None = None
    numel: int | None = None


def read_groups(logs: Logs, people: People) -> Mapping[str, Mapping[int, StuckRank]]:
    """Return the reports of the watchdogs by process group and rank; the default group if they name none."""
    groups: defaultdict[str, dict[int, StuckRank]] = defaultdict(dict)
    group_of: dict[int, str] = {}
    named_groups: set[str] = set()
    failed = _failed(logs, people)
    said = [(event, rank) for event, rank in _speakers(logs, people) if rank not in failed]
    for event, rank in said:
        if named := event.values.get("group"):
            group_of.setdefault(rank, named)
            named_groups.add(named)
    usual = named_groups.pop() if len(named_groups) == 1 else DEFAULT_GROUP
    for event, rank in said:
        if event.number("seq") is None and "op" not in event.values:
            continue
        group = groups[event.values.get("group") or group_of.get(rank, usual)]
        stuck = group.setdefault(rank, StuckRank(rank, event.line))
        stuck.seq = stuck.seq if stuck.seq is not None else event.number("seq")
        stuck.op = stuck.op or event.values.get("op")
        stuck.numel = stuck.numel if stuck.numel is not None else event.number("numel")
    return groups


def conclude_collectives(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return which rank is behind in each group, or that this is undecided."""
    failed = _failed(logs, people)
    for group in read_groups(logs, people).values():
        stuck = sorted(group.values(), key=lambda report: report.rank)
        yield from _behind(stuck)
        yield from _different(stuck)
        yield from _silent(stuck, people, failed=failed)
    yield from _slow(logs)
    timeouts = [(event, rank) for event, rank in _speakers(logs, people) if event.number("ms")]
    if timeouts:
        waiting = frozenset(rank for _, rank in timeouts)
        limit_s = min(event.number("ms") or 0 for event, _ in timeouts) / 1000
        yield from _busy(logs, timeouts[0][0].line, waiting, limit_s)
        yield from _alone(logs, timeouts[0][0].line, waiting, limit_s)


def _slow(logs: Logs) -> Iterator[Conclusion]:
    """Ranks that themselves report that something took longer than the others' timeout."""
    timeouts = [ms for event in logs.of(Trait.ONLY_WAITS) if (ms := event.number("ms"))]
    if not timeouts:
        return
    limit_s = min(timeouts) / 1000
    slow = [
        event for event in logs.of("took") if event.line.rank is not None and float(event.values["seconds"]) > limit_s
    ]
    if slow:
        ranks = {event.line.rank for event in slow if event.line.rank is not None}
        yield Conclusion(
            cause=find_cause("straggler-rank"),
            role=Role.LIKELY,
            confidence=Confidence.CERTAIN,
            culprit=Culprit(ranks=tuple(sorted(ranks))),
            message=f"{fold_ranks(ranks)} took {slow[0].values['seconds']} s, more than the timeout of {limit_s:g} s",
            evidence=tuple(event.line for event in slow[:3]),
            ask=_ASK,
            weight=1,
        )


def _behind(stuck: list[StuckRank]) -> Iterator[Conclusion]:
    """Ranks whose collective has a lower number than the others', or the few in another operation."""
    numbered = [report for report in stuck if report.seq is not None]
    seqs = Counter(report.seq for report in numbered)
    if len(seqs) < 2:
        return
    lowest = min(seq for seq in seqs if seq is not None)
    late = [report for report in numbered if report.seq == lowest]
    others = [report for report in numbered if report.seq != lowest]
    is_mixed = late[0].op != others[0].op and None not in {late[0].op, others[0].op}
    if len(late) > len(others):
        if not is_mixed:
            return
        late, others = others, late
    ahead = Counter(report.seq for report in others).most_common(1)[0][0]
    yield Conclusion(
        cause=find_cause("collective-mismatch" if is_mixed else "straggler-rank"),
        role=Role.LIKELY,
        confidence=Confidence.LIKELY,
        culprit=Culprit(ranks=tuple(report.rank for report in late)),
        message=f"{fold_ranks(report.rank for report in late)} waited in collective {late[0].seq}"
        f"{_op(late[0])}, the others waited in {ahead}{_op(others[0])}",
        evidence=tuple(report.line for report in (*late[:2], *others[:1])),
        victims=frozenset(report.rank for report in others),
        ask=_ASK,
    )


def _different(stuck: list[StuckRank]) -> Iterator[Conclusion]:
    """Ranks with the same number in another operation, or with another size."""
    by_seq: defaultdict[int, list[StuckRank]] = defaultdict(list)
    for report in stuck:
        if report.seq is not None and report.op is not None:
            by_seq[report.seq].append(report)
    for seq, members in by_seq.items():
        ops = Counter((report.op, None if "GATHER" in (report.op or "") else report.numel) for report in members)
        if len(ops) < 2:
            continue
        (usual, count), *rest = ops.most_common()
        odd = [
            report
            for report in members
            if (report.op, None if "GATHER" in (report.op or "") else report.numel) != usual
        ]
        is_tie = bool(rest) and rest[0][1] == count
        culprits = members if is_tie else odd
        yield Conclusion(
            cause=find_cause("collective-mismatch"),
            role=Role.PRIMARY,
            confidence=Confidence.UNDECIDED if is_tie else Confidence.CERTAIN,
            culprit=Culprit(ranks=tuple(report.rank for report in culprits)),
            message=f"at collective {seq} {fold_ranks(report.rank for report in odd)} called {_call(odd[0])}, "
            f"the others {usual[0]} of {usual[1]} elements",
            evidence=tuple(report.line for report in (*odd[:2], *[m for m in members if m not in odd][:1])),
            victims=frozenset(report.rank for report in members if report not in culprits),
        )


def _silent(stuck: list[StuckRank], people: People, *, failed: set[int]) -> Iterator[Conclusion]:
    """Ranks that report no timeout although most others do."""
    if len(stuck) < 2 or (stuck[0].seq is None and len({report.op for report in stuck}) > 1):  # no number before 1.10
        return
    reporting = {report.rank for report in stuck}
    missing = missing_of(reporting | failed, people.world)
    if not missing or len(missing) >= len(reporting):
        return
    yield Conclusion(
        cause=find_cause("straggler-rank"),
        role=Role.LIKELY,
        confidence=Confidence.LIKELY if _are_together(stuck) else Confidence.UNDECIDED,
        culprit=Culprit(ranks=missing),
        message=f"{fold_ranks(missing)} did not enter {_name(stuck[0])}; "
        f"{fold_ranks(reporting)} waited there until the timeout",
        evidence=tuple(report.line for report in stuck[:2]),
        victims=frozenset(reporting),
        ask=_ASK,
    )


def _are_together(stuck: list[StuckRank]) -> bool:
    """Whether all wait in the same collective."""
    return len({(report.seq, report.op) for report in stuck}) == 1


def _busy(logs: Logs, first: Line, waiting: frozenset[int], limit_s: float) -> Iterator[Conclusion]:
    """A progress bar that ran for as long as the others' timeout: only one rank shows it, and is busy elsewhere."""
    bars = [(line, match) for tail in logs.tails for line in tail.lines if (match := _BAR.search(line.text))]
    for line, match in bars[-1:]:
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        took_s = hours * 3600 + minutes * 60 + seconds
        rank = 0 if line.rank is None or line.rank in waiting else line.rank  # usually, only the first rank shows one
        if _LEAST_SHARE * limit_s <= took_s <= _MOST_SHARE * limit_s and rank not in waiting:
            yield Conclusion(
                cause=find_cause("straggler-rank"),
                role=Role.LIKELY,
                confidence=Confidence.LIKELY,
                culprit=Culprit(ranks=(rank,)),
                message=f"rank {rank} did something else for {took_s} s while {fold_ranks(waiting)} waited for it",
                evidence=(line, first),
                victims=waiting,
                ask=_ASK,
            )


def _alone(logs: Logs, first: Line, waiting: frozenset[int], limit_s: float) -> Iterator[Conclusion]:
    """Last messages before the timeouts, as old as the timeout is long: the first rank printed what it began."""
    if 0 in waiting or first.time is None:
        return
    before = [
        line
        for tail in logs.tails
        for line in tail.lines
        if line.source == first.source and line.number < first.number and line.time is not None
    ]
    if not before or before[-1].rank not in {None, 0} or not _ALONE.search(before[-1].text):
        return
    # By the time of day: glog's times have no year.
    took_s = ((first.time or 0.0) - (before[-1].time or 0.0)) % _DAY_S
    if _LEAST_SHARE * limit_s <= took_s <= _MOST_SHARE * limit_s:
        yield Conclusion(
            cause=find_cause("straggler-rank"),
            role=Role.LIKELY,
            confidence=Confidence.LIKELY,
            culprit=Culprit(ranks=(0,)),
            message=f"rank 0 began something else {took_s:.0f} s before {fold_ranks(waiting)} gave up waiting",
            evidence=(before[-1], first),
            victims=waiting,
            ask=_ASK,
        )


def _name(stuck: StuckRank) -> str:
    return f"the {stuck.op}" if stuck.seq is None else f"collective {stuck.seq}{_op(stuck)}"


def _speakers(logs: Logs, people: People) -> Iterator[tuple[LogEvent, int]]:
    """Return the reports of watchdogs with their ranks; reports without a rank are dropped."""
    for event in logs.of(Trait.ONLY_WAITS):
        rank = people.know(event.line).rank
        if rank is None:
            rank = event.number("rank")
        if rank is not None:
            yield event, rank


def _failed(logs: Logs, people: People) -> set[int]:
    """Ranks whose watchdog reports an error of NCCL: they did not wait, and the number is of what had not completed."""
    return {rank for event, rank in _speakers(logs, people) if _FAILED in event.line.text}


def _op(stuck: StuckRank) -> str:
    return f" ({stuck.op})" if stuck.op else ""


def _call(stuck: StuckRank) -> str:
    return f"{stuck.op} of {stuck.numel} elements" if stuck.numel is not None else str(stuck.op)
