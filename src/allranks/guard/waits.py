"""Who waits for whom, over all process groups, and who keeps them all waiting? Pure; the walk is recorder.wait_graph.

Ranks that wait in a collective are nobody's fault, nor is a rank that waits in one group while others wait for it in
another: the walk goes on to whoever waits for nobody. Such a rank may be honestly slow (it evaluates, it writes a
checkpoint), so it is only named, aloud and ever more rarely, and ended when nothing has moved for hang_s.

Ranks that wait for each other can never go on: such a circle is judged as soon as it is proven.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import msgspec

from allranks.guard.faults import (
    COLLECTIVE_MISMATCH,
    COLLECTIVE_TIMEOUT,
    DEAD_RANK,
    FILESYSTEM_HANG,
    HANG_LIMIT,
    MISSING_RANK,
    STUCK_RANK,
)
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.idle import show_printed
from allranks.guard.mismatch import user_error
from allranks.guard.scene import SILENT_S, RankView, Scene
from allranks.model.beat import POINT_TO_POINT, CallSeen, GroupSeen, ProcessState, RankBeat
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Evidence
from allranks.recorder.calls import Call, Dump, canonical
from allranks.recorder.wait_graph import Standstill, StandstillKind, find_stops
from allranks.report.text import fold_ranks

CROSSING_S = 1.0
"""Beats of two nodes about the same moment come no further apart."""
LEFT_S = 3.0
"""How long others must have waited for a rank that has left with 0: beats of a healthy end may cross."""
CAME_S = 1.5
"""How long after the end of a rank others must tell that they still wait for it."""
WALK_S = 7e-4
"""For each rank, between two looks for circles: a walk takes 70 us a rank, so they are a tenth of the leader's time."""
MAX_NAMED = 4
_ONE_ORDER = "every rank must call the collectives of its groups in the same order: compare the places named here"
_FILE_CALLS = ("fsync", "torch/serialization", "write_bytes", "shutil")


_WAITED = re.compile(r"Timed out waiting (\d+)ms|ran for (\d+) milliseconds before timing out")
"""Source: gloo/transport/tcp/unbound_buffer.cc; torch 2.13, ProcessGroupNCCL.cpp."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why ranks wait now."""

    stop: Standstill
    sinks: tuple[int, ...]
    """Who keeps the others waiting; empty where nobody does, or nobody can tell."""
    waiting: tuple[int, ...]
    waited_s: float
    """How long the one that waits longest has."""
    stuck_s: float
    """How long nothing has moved: neither of who waits, nor of the sinks."""


def longest_wait_s(scene: Scene, now_s: float) -> float:
    """Return how long the rank that waits longest has waited; 0: nobody waits."""
    return now_s - min(scene.waiting_since_s.values(), default=now_s)


def find_waiting(
    scene: Scene, now_s: float, *, names_unknown: bool = False, gave_up: Mapping[int, float] = MappingProxyType({})
) -> Waiting | None:
    """Return why ranks wait and who is it; None: nobody waits, or the next beats must tell first.

    Args:
        names_unknown: also ranks of which only older words are known may keep the others waiting.
        gave_up: ranks that ended by a timeout, and the seconds that they had waited until then.
    """
    views = {view.beat.rank: view for view in scene.running()}
    views |= {rank: _as_it_waited(scene.ranks[rank], wait_s) for rank, wait_s in gave_up.items() if rank in scene.ranks}
    dumps = _dumps_of(scene, views)
    stops = (stop for stop in find_stops(dumps) if stop.kind is not StandstillKind.BEHIND)
    if (stop := next(stops, None)) is None:
        return None
    sinks = stop.ranks if stop.kind is StandstillKind.MISSING else ()
    waiting = tuple(rank for rank in sorted({*stop.ranks, *stop.victims}.difference(sinks)) if rank in views)
    waiting = waiting or tuple(rank for rank, view in views.items() if view.waits_s(now_s) > 0)
    if not waiting:
        return None
    waited_s = max(views[rank].waits_s(now_s) for rank in waiting)
    is_told = not {dump.rank for dump in dumps}.isdisjoint(sinks)
    if sinks and not is_told and not names_unknown and not _fell_silent(scene, sinks, waited_s):
        return None  # they have gone on since they told of themselves: the next beat says where
    moved_s = [view.moved_s for rank in (*waiting, *sinks) if (view := views.get(rank))]
    return Waiting(stop, sinks, waiting, waited_s, stuck_s=now_s - max(moved_s, default=now_s))


def who_gave_up(scene: Scene) -> dict[int, float]:
    """Return the ranks that ended by a timeout, each with the seconds that torch says it waited; 0: it does not say."""
    words = {end.rank: end.message or end.stderr_tail or "" for end, _ in scene.ends.values()}
    return {
        rank: int(told[1] or told[2]) / 1000 if (told := _WAITED.search(text)) else 0.0
        for rank, text in words.items()
        if re.search("[Tt]im(?:ed|ing) out", text)
    }


def find_circle(scene: Scene, now_s: float) -> Standstill | None:
    """Return ranks whose main threads wait for each other and so can never go on; None: the next beats must tell first.

    All of them have told so some time after the last one of them began to wait, and nothing of theirs has moved since.
    """
    if scene.may_leave or longest_wait_s(scene, now_s) < CROSSING_S:
        return None
    blocked = {(call.group, call.seq) for view in scene.running() for call in view.beat.calls if call.blocks}
    if len(blocked) < 2:
        return None
    stop = next(iter(find_stops(_dumps_of(scene, {view.beat.rank: view for view in scene.running()}))), None)
    if stop is None or not stop.is_proven:
        return None
    views = [scene.ranks[rank] for rank in (*stop.ranks, *stop.victims)]
    since_s = max(max(view.moved_s, scene.waiting_since_s.get(view.beat.rank, math.inf)) for view in views)
    said_s = min(view.told_s - (math.inf if view.beat.silent_s is None else view.beat.silent_s) for view in views)
    return stop if said_s > since_s + CROSSING_S else None


def _fell_silent(scene: Scene, ranks: tuple[int, ...], waited_s: float) -> bool:
    """Whether ranks have told nothing since the others began to wait, as one that holds the GIL from then on.

    A rank that was silent before the wait may have moved on; its position is unknown.
    """
    silences_s = [scene.ranks[rank].beat.silent_s or 0.0 for rank in ranks if rank in scene.ranks]
    return all(SILENT_S < silence_s <= waited_s + SILENT_S + CROSSING_S for silence_s in silences_s)


def is_typed_at(scene: Scene, waiting: Waiting) -> bool:
    """Tell whether somebody may be typing at the rank that the others wait for, as in a debugger."""
    return any(rank in scene.ranks and scene.ranks[rank].beat.reads_terminal for rank in waiting.sinks)


def say_slow(scene: Scene, waiting: Waiting, now_s: float) -> str:
    """Return the line for people: `slow: rank 3 has been in user code for 41 s: evaluate.py:88; 5 ranks wait`.

    Without `slow:` where the job is not ended for it.
    """
    count = len(waiting.waiting)
    waits = f"{count} rank{'s' if count != 1 else ''} wait{'s' if count == 1 else ''}"
    if not waiting.sinks:
        what = "wait for each other" if waiting.stop.kind is StandstillKind.CIRCLE else "are in it and do not leave it"
        where = next((f": {call.op or 'collective'}{call.at}" for _, call in waiting.stop.calls), "")
        return f"slow: {fold_ranks(waiting.waiting)} {what} for {waiting.waited_s:.0f} s{where}"
    parts = [_say_sink(scene, rank, waiting, now_s) for rank in waiting.sinks[:MAX_NAMED]]
    more = f" and {len(waiting.sinks) - MAX_NAMED} more" if len(waiting.sinks) > MAX_NAMED else ""
    return f"{'' if is_typed_at(scene, waiting) else 'slow: '}{', '.join(parts)}{more}; {waits}"


def judge_hang(scene: Scene, waiting: Waiting, now_s: float, *, limit: str = HANG_LIMIT) -> GuardVerdict:
    """Return the verdict on what has not moved for hang_s, or for the time of another limit."""
    if not waiting.sinks:
        return _judge_nobody(scene, waiting)
    ranks = waiting.sinks
    nodes = tuple(sorted({scene.node_of(rank).index for rank in ranks}))
    views = [scene.ranks[rank] for rank in ranks if rank in scene.ranks]
    is_file = bool(views) and all(_is_in_file(view.beat) for view in views)
    is_decided = waiting.stop.is_decided or len(ranks) == 1
    what = ", ".join(_say_sink(scene, rank, waiting, now_s, is_short=True) for rank in ranks[:MAX_NAMED])
    what += f"; {fold_ranks(waiting.waiting)} waited for it in {_shown(waiting.stop)}"
    evidence, confidence = _evidence(scene, waiting, now_s), Confidence.LIKELY if is_decided else Confidence.UNDECIDED
    about: dict[str, Any] = {"evidence": evidence, "confidence": confidence}
    about["values"] = scene.values(*ranks) | {"limit": limit}
    finding = scene.fault(FILESYSTEM_HANG if is_file else STUCK_RANK, what, *ranks, **about)
    return GuardVerdict(
        findings=(finding,), exit_code=Exit.HANG, ranks=ranks, nodes=nodes if is_file else (), cures=is_file
    )


def judge_circle(scene: Scene, stop: Standstill) -> GuardVerdict:
    """Return the verdict on ranks that wait for each other; an error of the user's code, wherever it runs."""
    in_it = {(rank, call.group, call.seq): call for rank, view in scene.ranks.items() for call in view.beat.calls}
    seen = [
        f"rank {rank}: {call}, number {call.seq} of group {call.group}{call.at}"
        for rank, known in stop.calls
        if (call := in_it.get((rank, known.group, known.seq))) is not None
    ]
    names = {scene.node_of(rank).name for rank in stop.ranks}
    node = next(iter(names)) if len(names) == 1 else None
    about: dict[str, Any] = {"node": node, "evidence": seen, "confidence": stop.confidence, "fix": _ONE_ORDER}
    finding = scene.fault(COLLECTIVE_MISMATCH, f"{stop.message}; none of these calls can end", *stop.ranks, **about)
    return user_error(finding, stop.ranks)


def judge_left(scene: Scene, waiting: Waiting) -> GuardVerdict | None:
    """Return the verdict where others wait for ranks that have ended with 0, and so can never come."""
    gone = tuple(rank for rank in waiting.sinks if rank in scene.left)
    if not gone or len(gone) < len(waiting.sinks) or min(waiting.waited_s, waiting.stuck_s) < LEFT_S:
        return None
    left_s = max(scene.left[rank] for rank in gone)
    if all(scene.ranks[rank].told_s < left_s + CAME_S for rank in waiting.waiting):
        return None  # they may have left, too: their last words are from before
    what = f"it exited with code 0, and {fold_ranks(waiting.waiting)} waited for it in {_shown(waiting.stop)}"
    fix = "every rank must run the same number of steps: check how the data is divided"
    seen = [waiting.stop.message]
    finding = scene.fault(DEAD_RANK, what, *gone, evidence=seen, confidence=Confidence.LIKELY, fix=fix)
    return GuardVerdict(findings=(finding,), exit_code=Exit.USER_CODE, ranks=gone, is_retryable=False)


def judge_never_came(scene: Scene) -> GuardVerdict | None:
    """Return the verdict where ranks wait in init_process_group for one that had ended with 0 some time before."""
    if not scene.left:
        return None
    waiting = [view for view in scene.running() if view.beat.phase == "arriving" and (view.beat.silent_s or 0) < 1]
    told_s = max((view.told_s for view in waiting), default=0.0)
    gone = tuple(sorted(rank for rank, left_s in scene.left.items() if told_s >= left_s + CAME_S))
    if not gone:
        return None
    ranks = fold_ranks(sorted(view.beat.rank for view in waiting))
    what = f"it exited with code 0 before it reached init_process_group, where {ranks} waited for it"
    seen = [f"rank {view.beat.rank} waits{_at(view.beat.main_at)}" for view in waiting[:MAX_NAMED]]
    fix = "find out why it exited: read its .out and .err in the run directory"
    finding = scene.fault(MISSING_RANK, what, *gone, evidence=seen, fix=fix)
    return GuardVerdict(findings=(finding,), exit_code=Exit.USER_CODE, ranks=gone, is_retryable=False)


def judge_blocked(scene: Scene) -> GuardVerdict | None:
    """Return the verdict on processes that the kernel has held for hang_s, whoever waits for them."""
    held = scene.held(ProcessState.BLOCKED, for_s=scene.settings.hang_s)
    if not held:
        return None
    ranks = tuple(beat.rank for beat in held)
    nodes = tuple(sorted({scene.node_of(rank).index for rank in ranks}))
    what = f"{fold_ranks(ranks)} waited in the kernel for {held[0].state_for_s:.0f} s: "
    what += "a disk or a file server does not answer"
    seen = [f"rank {view.rank}, pid {view.pid}: state D in /proc{_at(view.main_at)}" for view in held[:8]]
    finding = scene.fault(FILESYSTEM_HANG, what, *ranks, evidence=seen)
    cures = len(nodes) < len(scene.nodes)
    return GuardVerdict(findings=(finding,), exit_code=Exit.HANG, ranks=ranks, nodes=nodes, cures=cures)


# --- Beats as dumps ---------------------------------------------------------------------------------------------------


def _dumps_of(scene: Scene, views: Mapping[int, RankView]) -> list[Dump]:
    """What the walk needs of all ranks that run or have left."""
    progress, everybody = _Progress(views.values()), scene.everybody
    dumps = [dump for view in views.values() if (dump := _dump_of(view, progress, everybody)) is not None]
    return dumps + [_dump_of_left(scene.ranks[rank].beat, everybody) for rank in scene.left if rank in scene.ranks]


def _as_it_waited(view: RankView, waited_s: float) -> RankView:
    """Return a rank that gave up its last call as it was until then: Gloo counts a call that timed out as done."""
    beat = view.beat
    last = max(beat.calls, key=lambda call: call.created_ns, default=None)
    if last is None or canonical(last.op) in POINT_TO_POINT:
        return view
    groups = tuple(
        msgspec.structs.replace(group, completed=min(group.completed, last.seq - 1), waiting_s=waited_s)
        if group.name == last.group
        else group
        for group in beat.groups
    )
    calls = (*(call for call in beat.calls if call is not last), msgspec.structs.replace(last, is_done=False))
    return replace(view, beat=msgspec.structs.replace(beat, phase="training", calls=calls, groups=groups))


class _Progress:
    """How far the ranks have come in each group; of thousands, no look at one may go through all others."""

    def __init__(self, views: Iterable[RankView]) -> None:
        told: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for view in views:
            for group in view.beat.groups:
                told[group.name].append((view.moved_s, group.completed))
        self._groups: dict[str, tuple[list[float], list[int]]] = {}
        for name, moves in told.items():
            moves.sort(reverse=True)
            self._groups[name] = [-moved_s for moved_s, _ in moves], [*accumulate((done for _, done in moves), max)]

    def completed(self, name: str, *, since_s: float) -> int:
        """The most that a rank has completed which has moved on since; 0: none has."""
        negated, most = self._groups[name]
        num_since = bisect_right(negated, -since_s)
        return most[num_since - 1] if num_since else 0


def _dump_of(view: RankView, progress: _Progress, everybody: range) -> Dump | None:
    """What the walk needs of one rank; None where others show that it has gone on since it said so."""
    if view.is_leaving:
        return _dump_of_left(view.beat, everybody)
    said_s = view.told_s - max(view.beat.silent_s or 0.0, CROSSING_S)
    if any(_has_gone_on(group, progress.completed(group.name, since_s=said_s)) for group in view.beat.groups):
        return None
    return _as_dump(view.beat, everybody)


def _dump_of_left(beat: RankBeat, everybody: range) -> Dump:
    """Of a rank that has left, or is about to: what it called is done, whatever its last beat said."""
    groups = tuple(msgspec.structs.replace(group, completed=group.enqueued) for group in beat.groups)
    return _as_dump(msgspec.structs.replace(beat, calls=(), groups=groups), everybody)


def _has_gone_on(group: GroupSeen, completed: int) -> bool:
    """Whether others have since finished what this rank was in, or more than the next one: so it is not there now."""
    first_open = group.completed + 1 if group.waiting_s > 0 else group.enqueued + 2
    return completed >= max(first_open, 1)


def _as_dump(beat: RankBeat, everybody: range) -> Dump:
    return Dump(
        rank=beat.rank,
        calls=tuple(_as_call(call) for call in beat.calls),
        enqueued={group.name: group.enqueued for group in beat.groups},
        completed={group.name: group.completed for group in beat.groups},
        members={group.name: group.ranks or everybody for group in beat.groups},
    )


def _as_call(call: CallSeen) -> Call:
    # What was called is mismatch.py's to compare: the walk only asks who is where.
    is_p2p = canonical(call.op) in POINT_TO_POINT
    told = msgspec.structs.asdict(call) | {"op": call.op if is_p2p else "", "sizes": (), "dtypes": ()}
    return Call(**told, is_p2p=is_p2p)


# --- As people read it ------------------------------------------------------------------------------------------------


def _say_sink(scene: Scene, rank: int, waiting: Waiting, now_s: float, *, is_short: bool = False) -> str:
    who = "it" if is_short and len(waiting.sinks) == 1 else f"rank {rank}"
    if rank in scene.left:
        return f"{who} has exited with code 0"
    view = scene.ranks.get(rank)
    if view is None:
        return f"{who} has sent no heartbeat"
    beat = view.beat
    away_s = min(now_s - view.moved_s, max(waiting.waited_s, 0.0)) if now_s > view.moved_s else waiting.waited_s
    place = f": {beat.main_at}" if beat.main_at else ""
    if beat.reads_terminal:
        return f"{who} has waited for input from the terminal for {away_s:.0f} s{place}"
    if beat.state in (ProcessState.STOPPED, ProcessState.TRACED):
        return f"{who} is stopped for {beat.state_for_s:.0f} s"
    if beat.state is ProcessState.BLOCKED:
        return f"{who} waits in the kernel for {beat.state_for_s:.0f} s (state D: a disk, a file server){place}"
    if view.is_deaf:
        return f"{who} has run no other thread for {beat.silent_s:.0f} s (one thread holds the GIL){place}"
    return f"{who} has been in user code for {away_s:.0f} s{place}"


def _evidence(scene: Scene, waiting: Waiting, now_s: float) -> list[str | Evidence]:
    stuck = [scene.ranks[rank] for rank in waiting.sinks[:MAX_NAMED] if rank in scene.ranks]
    lines: list[str | Evidence] = [printed for view in stuck if (printed := show_printed(view))]
    lines.append(f"{fold_ranks(waiting.waiting)} waited for {waiting.waited_s:.0f} s in {_shown(waiting.stop)}")
    for view in stuck:
        beat = view.beat
        moved = f"last moved {now_s - view.moved_s:.0f} s ago{_at(beat.main_at)}"
        last = f"; last call {beat.calls[-1]}{beat.calls[-1].at}" if beat.calls else ""
        used = f"{beat.state}, {beat.cpu_s:.0f} s of processor time"
        lines.append(f"rank {beat.rank}, pid {beat.pid}: {used}, {moved}{last}")
    return lines


def _judge_nobody(scene: Scene, waiting: Waiting) -> GuardVerdict:
    is_circle = waiting.stop.kind is StandstillKind.CIRCLE
    what = f"all ranks entered {_shown(waiting.stop)}, but it did not end: a link, a GPU, or a send without a receive"
    if is_circle:
        what = "ranks waited for each other in several groups"
    what += f"; no progress for {waiting.stuck_s:.0f} s"
    fix = _ONE_ORDER if is_circle else ""
    seen = [f"rank {rank}: group {call.group}, number {call.seq}{call.at}" for rank, call in waiting.stop.calls]
    about: dict[str, Any] = {"node": None, "victims": waiting.waiting, "confidence": Confidence.UNDECIDED, "fix": fix}
    finding = scene.fault(COLLECTIVE_TIMEOUT, what, *(waiting.stop.ranks if is_circle else ()), evidence=seen, **about)
    return GuardVerdict(findings=(finding,), exit_code=Exit.HANG)


def _shown(stop: Standstill) -> str:
    return f"collective {stop.seq} of group {stop.group}"


def _is_in_file(beat: RankBeat) -> bool:
    return beat.state is ProcessState.BLOCKED or any(name in beat.main_at for name in _FILE_CALLS)


def _at(place: str) -> str:
    return f" at {place}" if place else ""
