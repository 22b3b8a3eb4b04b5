"""Who failed first: from the ends of all workers to one verdict, as far as ends alone can tell. Pure.

A group fails all at once: one rank breaks, and the others die of the lost connection, sometimes sooner than the one
that broke (its `finally` closes the group, and its interpreter takes its time to leave). So the ends are divided in
those of ranks that broke by themselves and those of ranks that lost another one (guard.origin). Several may break at
the same time, all of one reason or each of its own: ranks that failed alike make one finding, the earliest comes first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.guard.disk import SHM_FULL, Shortage, find_full, find_shortage, say_full
from allranks.guard.failure import (
    describe,
    exit_code_of,
    find_evidence,
    is_killed,
    is_own_doing,
    loader_death,
)
from allranks.guard.faults import COLLECTIVE_TIMEOUT, DATALOADER_SHM, DEAD_RANK, HOST_OOM_KILL, MISSING_RANK
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.named import NamedRanks, read_named
from allranks.guard.origin import FailureOrigin, is_abort_for_size, is_crash, killed_by, origin_of, parse_ranks
from allranks.guard.scene import Scene
from allranks.model.errors import Exit, name_signal
from allranks.model.finding import Confidence, Evidence, Finding
from allranks.report.text import fold_ranks
from allranks.wire.protocol import WorkerEnd

COMPANY_S = 0.25
"""How long the first signal to the others waits after the first one that broke by itself: who is about to break, too,
does so by itself."""
TELL_S = 1.0
"""How long the verdict then waits for the ends of all others, some of which may have broken before the signal came."""
MOST_TOLD = 8
"""Findings of one verdict: of more ways to break at once, the notes of the first one tell."""
CLOSES_S = 2.0
"""How long before its end is seen a process may have closed its connections."""
OOM_S = 10.0
"""A kill that the kernel counted so shortly before a SIGKILL is that SIGKILL."""
SETTLE_S = 1.5
"""How long the last victim's failure waits for the culprit's: 0.02 to 0.46 s were seen between them with Gloo."""
MAX_SETTLE_S = 4.0
"""How long the first one's does: victims end one after the other where cores are few."""

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Ends:
    """The workers that failed, by where that came from, each the earliest first."""

    own: tuple[WorkerEnd, ...]
    lost: tuple[WorkerEnd, ...]
    open: tuple[WorkerEnd, ...]
    first: WorkerEnd | None
    """The earliest of all."""


def sort_ends(scene: Scene) -> Ends:
    """Return who broke by itself, and who only lost another one; of thousands, each is looked at once."""
    num, known = scene.sorted_ends
    if num == len(scene.ends) and isinstance(known, Ends):
        return known
    by_origin: dict[FailureOrigin, list[WorkerEnd]] = {origin: [] for origin in FailureOrigin}
    ends = sorted((end for end, _ in scene.ends.values()), key=lambda end: (end.time_s, end.rank))
    for end in ends:
        by_origin[origin_of(end, was_in_collective=_was_in_collective(scene, end.rank))].append(end)
    own, lost, unclear = (
        tuple(by_origin[origin]) for origin in (FailureOrigin.OWN, FailureOrigin.LOST, FailureOrigin.OPEN)
    )
    found = Ends(own, lost, unclear, next(iter(ends), None))
    scene.sorted_ends = len(scene.ends), found
    return found


def _was_in_collective(scene: Scene, rank: int) -> bool:
    """Whether a rank's last word, of when its script was through, has a collective that was not."""
    view = scene.ranks.get(rank)
    return (
        view is not None
        and view.is_leaving
        and any(group.enqueued > group.completed >= 0 for group in view.beat.groups)
    )


def should_stop(scene: Scene, now_s: float) -> bool:
    """Whether the rest is to be ended now. One failed worker ends the job; a worker that ends with 0 does not."""
    if len(scene.ended) == scene.num_ranks:
        return True
    if not scene.ends:
        return False
    if own := sort_ends(scene).own:
        return now_s - min(scene.ends[end.rank][1] for end in own) >= COMPANY_S
    heard_s = [each_s for _, each_s in scene.ends.values()]
    return now_s - max(heard_s) >= SETTLE_S or now_s - min(heard_s) >= MAX_SETTLE_S


def find_aborted(scene: Scene) -> WorkerEnd | None:
    """Return the end of the first worker that Gloo aborted for the size of what came."""
    aborted = (end for end, _ in scene.ends.values() if is_abort_for_size(end))
    return min(aborted, key=lambda end: end.time_s, default=None)


def judge_ends(scene: Scene) -> GuardVerdict:
    """Return what the ends come to: who broke by itself, in groups that failed alike; all others are victims."""
    ends = sort_ends(scene)
    if ends.own:
        return _judge_own(scene, ends)
    if ends.first is None:
        return GuardVerdict(findings=(), exit_code=Exit.UNKNOWN, is_final=False)
    if absent := [rank for rank in _ranks_waited_for(ends.first) if rank < scene.membership.world_size]:
        finding = _name_absent(scene, ends.first, absent)
    elif ends.open and (not ends.lost or len(ends.open) <= len(ends.lost)):
        judged = _judge_own(scene, replace(ends, own=ends.open, open=()))
        findings = tuple(msgspec.structs.replace(likely, confidence=Confidence.LIKELY) for likely in judged.findings)
        return replace(judged, findings=findings, is_final=False, told_within_s=None)
    else:
        finding = _name_whom_victims_lost(scene, ends.first)
    return GuardVerdict(findings=(finding,), exit_code=Exit.USER_CODE, ranks=finding.ranks, is_final=False)


# --- Ranks that broke by themselves -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failure:
    """What one worker that broke by itself comes to."""

    end: WorkerEnd
    cause_id: str
    message: str
    fix: str | None
    evidence: tuple[Evidence, ...]
    confidence: Confidence = Confidence.CERTAIN
    shortage: Shortage | None = None
    """Why, where a full disk is the reason."""

    @property
    def is_own_doing(self) -> bool:
        """Whether another start would meet it again: it is no machine that lacks something for a while."""
        return is_own_doing(self.end) and self.shortage is None

    @property
    def named(self) -> NamedRanks | None:
        """Whom its words name, where all ranks raise them."""
        return read_named(self.cause_id, self.end.message or "")

    @property
    def likeness(self) -> tuple[str, str]:
        """What failures have in common that are one: an error of the script may name a rank, a file, an address."""
        if self.shortage is not None:
            return self.cause_id, ""  # who dies of a full disk may write anything to it
        is_error = self.end.message and not killed_by(self.end)
        return self.cause_id, _NUMBER.sub("#", self.message) if is_error else self.message

    @property
    def short(self) -> str:
        """`SIGSEGV`, `exit code 3`, `ValueError`, `AR008 out-of-memory`."""
        cause = find_cause(self.cause_id)
        if Trait.ENDS_BY_ITSELF not in cause.traits:
            return cause.label
        if signum := (loader_death(self.end) or ("", killed_by(self.end)))[1]:
            return name_signal(signum)
        kind = re.match(r"[\w.]+", self.end.message or "")
        return kind[0].rpartition(".")[2] if kind else f"exit code {self.end.exit_code}"


def _judge_own(scene: Scene, ends: Ends) -> GuardVerdict:
    """Return the verdict on all ranks that broke by themselves, the earliest first."""
    crashed = tuple(end for end in ends.open if is_crash(end))
    groups = [_alike(scene, ends.own), _alike(scene, crashed)]
    named = [rank for failures in (*groups[0], *groups[1]) for rank in _culprits(failures)]
    first = groups[0][0][0]
    notes, parts = [*_say_alike(scene, groups[0][0]), *_say_full(scene, first)], []
    for is_sure, found in zip((True, False), groups, strict=True):
        for failures in found:
            if failures[0] is not first:
                notes.append(_say_also(scene, first, failures, is_sure=is_sure))
            parts.append(_judge_group(scene, failures, is_sure=is_sure))
    head, *others = parts
    finding = msgspec.structs.replace(head.findings[0], notes=tuple(notes), victims=scene.others(*named))
    told = [other.findings[0] for other in others]
    sure = tuple(others[: len(groups[0]) - 1])
    is_final = len(scene.ended) == scene.num_ranks
    return replace(
        head,
        findings=(finding, *told[: MOST_TOLD - 1]),
        others=sure,
        is_final=is_final,
        told_within_s=None if is_final else TELL_S,
    )


def _alike(scene: Scene, ends: Sequence[WorkerEnd]) -> list[list[_Failure]]:
    """Return failures in groups of those that are one, the earliest first."""
    groups: dict[tuple[str, str], list[_Failure]] = {}
    for end in ends:
        failure = _describe_in(scene, end)
        groups.setdefault(failure.likeness, []).append(failure)
    # Of ranks that failed alike, one that says why stands for those that do not.
    return [
        sorted(group, key=lambda failure: failure.confidence is not Confidence.CERTAIN) for group in groups.values()
    ]


def _culprits(failures: Sequence[_Failure]) -> Sequence[int]:
    """The ranks at fault: those that failed, unless what they say names others."""
    said = failures[0].named
    return said.ranks if said is not None else [failure.end.rank for failure in failures]


def _judge_named(scene: Scene, first: _Failure, said: NamedRanks) -> GuardVerdict:
    """Return the verdict on ranks that others name; where that is sure, their nodes are better left out."""
    is_sure = said.confidence is Confidence.CERTAIN
    ranks = [rank for rank in said.ranks if rank in scene.everybody]
    about: dict[str, Any] = {"confidence": said.confidence, "victims": ()}
    return GuardVerdict(
        (scene.fault(first.cause_id, first.message, *ranks, **about),),
        Exit.NODE_FAULT if said.is_retryable else Exit.SETUP,
        ranks=tuple(ranks),
        nodes=tuple(sorted({scene.node_of(rank).index for rank in ranks})) if is_sure else (),
        cures=is_sure,
        may_stay=is_sure,
        is_retryable=said.is_retryable,
        comes_back_as=said.comes_back_as,
    )


def _judge_group(scene: Scene, failures: Sequence[_Failure], *, is_sure: bool) -> GuardVerdict:
    if (said := failures[0].named) is not None:
        return _judge_named(scene, failures[0], said)
    first, ranks = failures[0], sorted(failure.end.rank for failure in failures)
    about: dict[str, Any] = {
        "evidence": first.evidence,
        "fix": first.fix or "",
        "victims": (),
        "confidence": first.confidence if is_sure else Confidence.UNDECIDED,
    }
    finding = scene.fault(first.cause_id, first.message, *ranks, **about)
    exit_code: int = exit_code_of(first.end)
    nodes: tuple[int, ...] = ()
    if first.shortage is not None and not killed_by(first.end):
        exit_code = Exit.NODE_FAULT if first.shortage.is_local else Exit.SETUP
        nodes = (scene.node_of(first.end.rank).index,) if first.shortage.is_local else ()
    return GuardVerdict(
        (finding,),
        exit_code,
        ranks=finding.ranks,
        nodes=nodes,
        is_retryable=not any(failure.is_own_doing for failure in failures),
        needs_room=first.shortage is not None,
    )


def _say_full(scene: Scene, first: _Failure) -> Iterator[str]:
    """A note on a disk that was full when a rank failed for another reason."""
    places = find_full(scene.node_of(first.end.rank), first.end)
    if places and first.shortage is None:
        yield say_full(places)


def _say_alike(scene: Scene, failures: Sequence[_Failure]) -> Iterator[str]:
    if len(failures) > 1 and failures[0].named is None:
        yield f"{'all ' if len(failures) == scene.num_ranks else ''}{len(failures)} ranks failed alike"


def _say_also(scene: Scene, first: _Failure, failures: Sequence[_Failure], *, is_sure: bool) -> str:
    """`also by itself: rank 3, SIGSEGV, 0.1 s later`."""
    then, ranks = failures[0].end, [failure.end.rank for failure in failures]
    later_s = then.time_s - first.end.time_s
    error_s = scene.time_error_s(first.end, then)
    when = f"{later_s:.1f} s later" if later_s >= 0.095 else f"{later_s * 1000:.0f} ms later"
    if later_s <= error_s:
        when = f"at the same time within {max(error_s, 0.001) * 1000:.0f} ms"
    who = f"{'itself' if len(ranks) == 1 else 'themselves'}: {fold_ranks(ranks)}, {failures[0].short}, {when}"
    return f"also by {who}" if is_sure else f"perhaps also by {who}, after a lost connection"


def _describe_in(scene: Scene, end: WorkerEnd) -> _Failure:
    """Return what a worker's failure comes to, with what its node tells of its memory and its disks."""
    node, (_, heard_s) = scene.node_of(end.rank), scene.ends[end.rank]
    pids, signum = loader_death(end) or ("", killed_by(end))
    who = f"its DataLoader worker (pid {pids})" if pids else "it"
    cause_id, what, seen = "", "", ""
    if pids and signum == signal.SIGBUS and node.beat is not None and node.beat.shm_used >= SHM_FULL:
        cause_id, what = DATALOADER_SHM, f"{who} got SIGBUS: /dev/shm was full"
        seen = f"{100 * node.beat.shm_used:.0f} % of /dev/shm were in use"
    elif is_killed(end) and node.oom_s is not None and node.oom_s >= heard_s - OOM_S:
        cause_id, what = HOST_OOM_KILL, f"{who} was killed: the node, or the job's share of it, ran out of memory"
        seen = f"the kernel counted {node.oom_kills} out-of-memory kills"
    elif not pids and (full := find_shortage(end, node)) is not None:
        fix = full.fix or _fix_of(scene, full.cause_id, end.rank)
        return _Failure(end, full.cause_id, full.message, fix, full.evidence, full.confidence, full)
    if not cause_id:
        return _Failure(end, *describe(end, reader=scene.reader), find_evidence(end))
    died = (end.message if pids else None) or "killed by SIGKILL (signal 9)"
    fix = _fix_of(scene, cause_id, end.rank)
    return _Failure(end, cause_id, what, fix, (Evidence(seen=died), Evidence(seen=seen)))


def _fix_of(scene: Scene, cause_id: str, rank: int) -> str | None:
    return find_cause(cause_id).fix.tell(scene.reader, scene.values(rank) | {"node": scene.node_of(rank).name})


# --- Ranks that only lost others --------------------------------------------------------------------------------------


def _name_absent(scene: Scene, first: WorkerEnd, absent: Sequence[int]) -> Finding:
    words = (first.message or "").partition("init_process_group waited ")[2].partition("; look at")[0]
    what = "it never reached init_process_group, although its process ran"
    if absent[0] in scene.left:
        what = "it exited with code 0 before it reached init_process_group"
    seen = [Evidence(seen=f"rank {first.rank} waited {words}", source=first.stderr_path)]
    fix = "find out what it does before that call: read its .out and .err in the run directory"
    return scene.fault(MISSING_RANK, what, *absent, node=scene.node_of(absent[0]).name, evidence=seen, fix=fix)


def _name_whom_victims_lost(scene: Scene, first: WorkerEnd) -> Finding:
    gone = _who_left(scene, first)
    silent = [view.beat.rank for view in scene.running() if view.told_s <= first.time_s] if gone else []
    if gone and not silent and len(gone) == 1:
        what = f"it exited with code 0{_when_left(scene, gone[0], first)}"
        fix = "every rank must run the same number of steps: check how the data is divided"
        about: dict[str, Any] = {"evidence": find_evidence(first), "confidence": Confidence.LIKELY, "fix": fix}
        return scene.fault(DEAD_RANK, what, gone[0], **about)
    if gone:
        what = f"rank {first.rank} lost its connection, and one of these is why: {fold_ranks(gone)} exited with code 0"
        what += f", {fold_ranks(silent)} did not report" if silent else ""
        ranks, fix = sorted([*gone, *silent]), "compare how many steps these ranks run: read their .out and .err"
        about = {"evidence": find_evidence(first), "confidence": Confidence.UNDECIDED, "fix": fix}
        return scene.fault(DEAD_RANK, what, *ranks, **about)
    what = "it was the first rank to lose a connection; no rank reports why"
    return scene.fault(
        COLLECTIVE_TIMEOUT, what, first.rank, evidence=find_evidence(first), confidence=Confidence.UNDECIDED, fix=""
    )


def _who_left(scene: Scene, first: WorkerEnd) -> list[int]:
    """Return the ranks that ended with 0 and may be what the first victim lost.

    Connections close before the process is gone. Where it is known how far they were, only those that had called fewer
    collectives than the victim count.
    """
    gone = sorted(rank for rank, left_s in scene.left.items() if left_s < first.time_s + CLOSES_S)
    view = scene.ranks.get(first.rank)
    wanted = {group.name: group.enqueued for group in view.beat.groups} if view else {}
    behind = [
        rank
        for rank in gone
        if (other := scene.ranks.get(rank))
        and any(0 <= group.enqueued < wanted.get(group.name, -1) for group in other.beat.groups)
    ]
    return behind or gone


def _when_left(scene: Scene, rank: int, first: WorkerEnd) -> str:
    early_s = first.time_s - scene.left[rank]
    if early_s < 0:
        return f" when rank {first.rank} lost its connection"
    return f", {early_s:.1f} s before rank {first.rank} lost its connection"


def _ranks_waited_for(end: WorkerEnd) -> tuple[int, ...]:
    """The ranks that join.group named as missing."""
    waited = re.search(r"init_process_group waited \d+ s for ([^;]+);", end.message or "")
    runs = re.findall(r"ranks? ([\d,-]+) \(", waited[1] if waited else "")
    return tuple(rank for run in runs for rank in parse_ranks(run))
