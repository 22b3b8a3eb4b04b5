"""What does each rank and node do now, those that do the same in one row? From the guard's scene. Pure.

Up to MAX_SINGLE ranks each has a row of its own. Of more, those in the same state at the same place are one row, and
where that gives too many rows, those in the same state: `1,021 in all_reduce, 3 late`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from allranks.guard.goodput.stragglers import Straggler
from allranks.guard.scene import NodeView, RankView, Scene
from allranks.guard.waits import Waiting
from allranks.model.beat import HELD_STATES, CallSeen, GpuSeen, ProcessState
from allranks.model.job_status import MAX_NODES, MAX_ROWS, NodeRow, RankRow, Stuck
from allranks.model.pace import PACE_STATES, Pace, PaceState

MAX_SINGLE = 32
MAX_PLACES = 24
"""Rows of a larger job that differ in their places only."""
SHOWN_RANKS, SHOWN_NODES = 64, 8
MAX_SHOWN = 512
"""Ranks that all rows of a larger job name together."""
WAITS_S = 1.0
"""A collective that is open for so long is what its rank does, whatever it has booked: DDP blocks inside `backward`."""
SILENT_S = 3.0
COSTLY = 0.02
"""Share of the others' time from which on a rank has a row of its own kind."""
CPU_S = 0.9
"""Between two looks at the processor time of a rank, at least."""
_STATES = tuple(str(state) for state in PACE_STATES)
_BLOCKED = PACE_STATES.index(PaceState.BLOCKED)
STATE_OF_PROCESS = {ProcessState.STOPPED: "stopped", ProcessState.TRACED: "stopped", ProcessState.BLOCKED: "kernel"}
_OF_PHASE = {"": "running", "init": "start", "arriving": "start", "training": "running", "saving": "save"}
_SEVERITY = ("lost", "silent", "stopped", "kernel")


@dataclass(slots=True)
class CpuMeter:
    """How many cores each rank uses, by its processor time in two beats."""

    _before: dict[int, tuple[float, float]] = field(default_factory=dict)
    _cores: dict[int, float] = field(default_factory=dict)

    def look(self, view: RankView) -> float | None:
        """Return the cores that a rank uses; None: not known yet."""
        rank, told_s, cpu_s = view.beat.rank, view.told_s, view.beat.cpu_s
        before = self._before.get(rank)
        if before is None or cpu_s < before[1]:
            self._before[rank] = told_s, cpu_s
            self._cores.pop(rank, None)
        elif (passed_s := told_s - before[0]) >= CPU_S:
            self._before[rank] = told_s, cpu_s
            self._cores[rank] = (cpu_s - before[1]) / passed_s
        return self._cores.get(rank)


@dataclass(slots=True)
class RowDraft:
    """A row while ranks are added to it."""

    state: str
    is_culprit: bool
    place: str
    ranks: list[int] = field(default_factory=list)
    nodes: dict[str, None] = field(default_factory=dict)
    for_s: float = 0.0
    is_suspect: bool = False
    is_at_least: bool = False
    step: int | None = None
    late_s: float = 0.0
    cost_share: float = 0.0
    cpu_cores: float | None = None
    rss_bytes: int = 0
    gpu: GpuSeen | None = None
    segments: int = 0
    retransmits: int = 0

    @property
    def weight(self) -> tuple[object, ...]:
        """Sorts the worst first."""
        severity = _SEVERITY.index(self.state) if self.state in _SEVERITY else len(_SEVERITY)
        is_costly = self.cost_share >= COSTLY
        share = self.cost_share if is_costly else 0.0  # else rows would change places all the time
        return not self.is_culprit, severity, -share, self.state == "ended", self.ranks[:1]

    def merge(self, other: RowDraft) -> None:
        """Take in the ranks of another row."""
        self.ranks += other.ranks
        self.nodes |= other.nodes
        longest = max(self, other, key=lambda row: row.for_s)
        self.for_s, self.is_at_least = longest.for_s, longest.is_at_least
        steps = [step for step in (self.step, other.step) if step is not None]
        self.step = min(steps, default=None)
        self.late_s, self.cost_share = max(self.late_s, other.late_s), max(self.cost_share, other.cost_share)
        cores = [used for used in (self.cpu_cores, other.cpu_cores) if used is not None]
        self.cpu_cores = max(cores, default=None)
        self.rss_bytes = max(self.rss_bytes, other.rss_bytes)
        self.gpu = _worst_gpu(self.gpu, other.gpu)
        self.segments += other.segments
        self.retransmits += other.retransmits

    def show(self, num_shown: int) -> RankRow:
        """Return it as the status has it."""
        return RankRow(
            ranks=tuple(sorted(self.ranks)[:num_shown]),
            num_ranks=len(self.ranks),
            nodes=tuple(list(self.nodes)[:SHOWN_NODES]),
            state=self.state,
            place=self.place,
            for_s=round(self.for_s, 2),
            is_at_least=self.is_at_least and self.for_s > 0,
            step=self.step,
            is_culprit=self.is_culprit,
            is_suspect=self.is_suspect and self.is_culprit,
            late_s=round(self.late_s, 4),
            cost_share=round(self.cost_share, 4),
            cpu_cores=None if self.cpu_cores is None else round(self.cpu_cores, 2),
            rss_bytes=self.rss_bytes or None,
            gpu=self.gpu,
            segments=self.segments,
            retransmits=self.retransmits,
        )


def _worst_gpu(one: GpuSeen | None, other: GpuSeen | None) -> GpuSeen | None:
    """Return the lower use of the two, and the memory of the fuller one."""
    if one is None or other is None:
        return one or other
    fuller = other if other.used_mib > one.used_mib else one
    is_idler = other.percent is not None and (one.percent is None or other.percent < one.percent)
    if fuller is one and not is_idler:  # of most ranks: there are thousands
        return one
    percent = other.percent if is_idler else one.percent
    return GpuSeen(percent=percent, used_mib=fuller.used_mib, total_mib=fuller.total_mib)


def see_ranks(
    scene: Scene,
    now_s: float,
    *,
    waiting: Waiting | None,
    steps: Mapping[int, int],
    late: Mapping[int, Straggler],
    cpu: CpuMeter,
) -> tuple[RankRow, ...]:
    """Return what the ranks do, the worst first.

    Args:
        now_s: by the guard's clock.
        waiting: why ranks wait, if they do so for long.
        steps: of a session, by rank.
        late: what ranks cost the others lately.
    """
    culprits = frozenset(waiting.sinks) if waiting is not None else frozenset[int]()
    away = {node.index: _where_is(node, now_s) for node in scene.nodes}
    is_single = scene.num_ranks <= MAX_SINGLE
    rows: dict[object, RowDraft] = {}
    for node in scene.nodes:
        for rank in node.ranks:
            view, is_culprit = scene.ranks.get(rank), rank in culprits
            state, for_s, place = _see_rank(scene, rank, view, away[node.index], now_s)
            lateness = late.get(rank)
            cost_share = lateness.share if lateness is not None else 0.0
            # Where a rank of many is in its code changes all the time: it tells something where others wait for it.
            place = place if is_single or is_culprit or state not in _STATES else ""
            key = rank if is_single else (state, is_culprit, cost_share >= COSTLY, place)
            if (row := rows.get(key)) is None:
                row = rows[key] = RowDraft(state, is_culprit, place)
            row.ranks.append(rank)
            row.nodes[node.name] = None
            if for_s > row.for_s:
                row.for_s = for_s
            if lateness is not None:
                row.late_s, row.cost_share = max(row.late_s, lateness.lag_s), max(row.cost_share, cost_share)
            if view is None:
                continue
            beat = view.beat
            step = steps.get(rank, beat.pace.steps if beat.pace is not None and not steps else None)
            if step is not None and (row.step is None or step < row.step):
                row.step = step
            if (cores := cpu.look(view)) is not None and cores > (row.cpu_cores or 0.0):
                row.cpu_cores = cores
            load = beat.load
            if (rss_bytes := load.rss_mib << 20) > row.rss_bytes:
                row.rss_bytes = rss_bytes
            if load.gpu_total:
                row.gpu = _worst_gpu(row.gpu, load.gpu)
            row.segments += beat.segments
            row.retransmits += beat.retransmits
    return show_rows(rows.values(), is_single=is_single)


def show_rows(rows: Iterable[RowDraft], *, is_single: bool) -> tuple[RankRow, ...]:
    """Return the rows, the worst first; where not each rank has its own, those of many places as one."""
    found = list(rows) if is_single else _fold(rows)
    shown = sorted(found, key=lambda row: row.weight)[:MAX_ROWS]
    num_shown = min(SHOWN_RANKS, max(4, MAX_SHOWN // max(1, len(shown))))
    return tuple(row.show(num_shown) for row in shown)


def _fold(rows: Iterable[RowDraft]) -> list[RowDraft]:
    """Return the rows, those that differ in their places only as one where there are many."""
    found = list(rows)
    if len(found) <= MAX_PLACES:
        return found
    folded: dict[tuple[str, bool, bool], RowDraft] = {}
    for row in found:
        key = row.state, row.is_culprit, row.cost_share >= COSTLY
        if (known := folded.get(key)) is None:
            folded[key] = row
        else:
            known.merge(row)
            known.place = known.place if known.place == row.place else ""
    return list(folded.values())


def _where_is(node: NodeView, now_s: float) -> tuple[str, float]:
    """Return `lost` or `silent`, and for how long; empty: it speaks."""
    if node.lost_s is not None:
        return "lost", now_s - node.lost_s
    silent_s = node.silent_s(now_s)
    return ("silent", silent_s) if silent_s > SILENT_S and node.heard_s is not None else ("", 0.0)


def _see_rank(
    scene: Scene, rank: int, view: RankView | None, away: tuple[str, float], now_s: float
) -> tuple[str, float, str]:
    """Return what a rank does, since when, and where."""
    if rank in scene.ended:
        return "ended", 0.0, ""
    if away[0]:
        return *away, view.beat.main_at if view is not None else ""
    if view is None:
        return "start", 0.0, ""
    beat, ago_s = view.beat, max(0.0, now_s - view.told_s)
    if beat.state in HELD_STATES and beat.state_for_s >= WAITS_S:
        return STATE_OF_PROCESS[beat.state], beat.state_for_s + ago_s, beat.main_at
    waits_s, pace = view.waits_s(now_s) if rank in scene.waiting_since_s else 0.0, beat.pace
    is_blocked = pace is not None and pace.state == _BLOCKED
    if waits_s >= WAITS_S or is_blocked:
        call = find_open(beat.calls)
        for_s = max(waits_s, _for_s(pace, ago_s)) if pace is not None and is_blocked else waits_s
        name = call.op if call is not None else "collective"
        return name or "collective", for_s, (call.place if call is not None else "") or beat.main_at
    if beat.phase == "leaving":
        return "leaving", 0.0, beat.main_at
    if pace is not None:
        return _STATES[pace.state], _for_s(pace, ago_s), beat.main_at
    return _OF_PHASE.get(beat.phase, "running"), 0.0, beat.main_at


def _for_s(pace: Pace, ago_s: float) -> float:
    """Return how long a rank has been in its state: since its last beat, too, unless it changes state all the time."""
    state_s = pace.state_us / 1e6
    return state_s + ago_s if state_s >= WAITS_S else state_s


def find_open(calls: Iterable[CallSeen]) -> CallSeen | None:
    """Return the oldest call that is not done."""
    return next((call for call in calls if not call.is_done), None)


def see_stuck(scene: Scene, waiting: Waiting, now_s: float, *, is_ended_for_it: bool) -> Stuck:
    """Return who waits for whom, as the status has it.

    Args:
        now_s: by the guard's clock.
        is_ended_for_it: whether the job is ended when nothing has moved for hang_s.
    """
    stop = waiting.stop
    calls = (
        call
        for rank in waiting.waiting
        if (view := scene.ranks.get(rank)) is not None
        for call in view.beat.calls
        if call.group == stop.group and call.seq == stop.seq
    )
    op = next((call.op for call in calls if call.op), "collective")
    first = scene.ranks.get(waiting.sinks[0]) if waiting.sinks else None
    left_s = scene.settings.hang_s - min(waiting.waited_s, waiting.stuck_s)
    return Stuck(
        op=op,
        for_s=round(waiting.waited_s, 2),
        num_waiting=len(waiting.waiting),
        ranks=tuple(sorted(waiting.sinks)[:SHOWN_RANKS]),
        place=first.beat.main_at if first is not None else "",
        ends_in_s=round(max(0.0, left_s), 1) if is_ended_for_it else None,
    )


def see_nodes(scene: Scene, now_s: float) -> tuple[NodeRow, ...]:
    """Return the nodes, those that are lost, silent or busy first; of more than MAX_NODES these only.

    Args:
        now_s: by the guard's clock.
    """

    def weigh(node: NodeView) -> tuple[object, ...]:
        state, _ = _where_is(node, now_s)
        busy = max((nic.busy_share for nic in node.beat.interfaces), default=0.0) if node.beat is not None else 0.0
        return state != "lost", state != "silent", -round(busy, 1), node.index

    return tuple(_see_node(node, scene.ended, now_s) for node in heapq.nsmallest(MAX_NODES, scene.nodes, key=weigh))


def _see_node(node: NodeView, ended: Set[int], now_s: float) -> NodeRow:
    beat = node.beat
    ranks = beat.ranks if beat is not None else ()
    return NodeRow(
        name=node.name,
        num_ranks=sum(rank not in ended for rank in node.ranks),
        silent_s=round(max(0.0, node.silent_s(now_s)), 1),
        is_lost=node.lost_s is not None,
        interfaces=beat.interfaces[:4] if beat is not None else (),
        retransmits=sum(rank.retransmits for rank in ranks),
        segments=sum(rank.segments for rank in ranks),
        shm_used=round(beat.shm_used, 3) if beat is not None else 0.0,
    )
