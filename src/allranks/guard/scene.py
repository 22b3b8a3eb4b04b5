"""What the leader knows of all nodes and ranks now: the last report of each, and its age. The guard's rules read it.

Times are of the guard's clock, which stands still while the leader itself was asleep (a suspended job, a laptop lid).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.guard.guard_verdict import name_fault
from allranks.model.beat import HELD_STATES, CallSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.cluster import GuardTable
from allranks.model.finding import Finding
from allranks.model.fix import ANYBODY, Reader
from allranks.model.hostlist import fold_hosts
from allranks.model.membership import Member, Membership
from allranks.wire.protocol import TryTarget, WorkerEnd

FRESH_S = 1.5
"""Words that are no older than this, or than two beats and a half, speak of now."""
NOTICE_S = 0.05
"""How late an agent notices the end of a process (launch.loop, PUMP_S); an exception has its own time."""
UNTIMED_S = 0.1
"""How wrong the times of a node may be before its clock is known: a message may be so long on its way."""
MAX_KEPT_CALLS = 1 << 18
"""Of all ranks together, in 80 MB at most; and MIN_KEPT_CALLS of each. A healthy worker tells 16 of each group."""
MIN_KEPT_CALLS = 64
SILENT_S = 3.0
"""A beat thread that has not spoken for so long cannot run: it does so several times a second."""


@dataclass(slots=True)
class Tried:
    """What came of one try, and when it ended."""

    seen: TrySeen
    at_s: float

    @property
    def is_ok(self) -> bool:
        """Whether packets of every size came through, or the machine answered that nobody listens."""
        return self.seen.refused or (self.seen.connects and self.seen.carries is not False)


@dataclass(slots=True)
class RankView:
    """One rank, as its node told of it last."""

    beat: RankBeat
    told_s: float
    """When its node said so."""
    moved_s: float
    """When any of its groups, or its step, was last seen to move on."""
    marks: tuple[object, ...] = ()

    @property
    def is_leaving(self) -> bool:
        """Whether its script is through: its last word may be older than the end of its last collective."""
        return self.beat.phase == "leaving"

    def waits_s(self, now_s: float) -> float:
        """How long its oldest open collective has been open; 0: none is."""
        if self.is_leaving:
            return 0.0
        longest = max([group.waiting_s for group in self.beat.groups], default=0.0)
        return longest + now_s - self.told_s if longest > 0 else 0.0

    @property
    def is_deaf(self) -> bool:
        """Whether its beat thread cannot run, so that what it says of its groups may be old."""
        return self.beat.silent_s is not None and self.beat.silent_s > SILENT_S


@dataclass(slots=True)
class NodeView:
    """One node."""

    index: int
    member: Member
    began_s: float
    """When the generation began, or its agent came back before its first beat."""
    addresses: Mapping[str, str]
    """By network, `data` and `control`, where they are known; the name of its data `interface`, and by its address that
    of any other one."""
    agent_port: int = 0
    beat: NodeBeat | None = None
    heard_s: float | None = None
    lost_reason: str = ""
    lost_s: float | None = None
    """Since when its connection is gone."""
    tries: dict[tuple[int, str], Tried] = field(default_factory=dict)
    """That this node made: by target and network, the newest one."""
    clock_error_s: float = UNTIMED_S
    """How wrong the times of its workers' ends may be, by the leader's clock."""
    oom_kills: int = 0
    oom_s: float | None = None
    """When that number was last seen to rise."""

    @property
    def name(self) -> str:
        """As the Plan has it."""
        return self.member.name

    @property
    def ranks(self) -> range:
        """Of its workers."""
        return range(self.member.first_rank, self.member.first_rank + self.member.num_workers)

    def silent_s(self, now_s: float) -> float:
        """Since its last beat, or since the generation began."""
        return now_s - (self.began_s if self.heard_s is None else self.heard_s)

    def heard_later(self, other: NodeView) -> bool:
        """Whether it has spoken since another node fell silent."""
        return other is not self and (self.heard_s or self.began_s) > (other.heard_s or other.began_s)

    def address(self, network: str) -> str:
        """Where it is tried; empty: not known."""
        known = self.addresses.get(network, "")
        return known or (self.beat.addresses[0] if network == "data" and self.beat and self.beat.addresses else "")

    def targets(self, data: str = "") -> tuple[TryTarget, ...]:
        """Return where it can be tried; once where both networks are one.

        Args:
            data: its address on the data network; empty: the first one.
        """
        networks = ("data",) if self.address("control") == self.address("data") else ("data", "control")
        ports = self.beat.try_ports if self.beat else (self.agent_port, self.agent_port)
        return tuple(
            TryTarget(node_index=self.index, network=network, address=address, port=port)
            for network, port in zip(networks, ports, strict=False)
            if (address := (data if network == "data" else "") or self.address(network)) and port
        )


class Scene:
    """All nodes and ranks of one generation.

    Args:
        membership: whose beats count: its epoch is their generation.
        addresses: of the nodes, by index and network.
        now_s: when the generation began.
        reader: for whom fixes are.
        leader: index of the leader's node; it is not that of rank 0 after a change of leaders.
        ports: of the nodes' agents, by index: where they can be tried before their first beat.
    """

    def __init__(
        self,
        settings: GuardTable,
        membership: Membership,
        addresses: Mapping[int, Mapping[str, str]],
        now_s: float,
        *,
        reader: Reader = ANYBODY,
        leader: int = 0,
        ports: Mapping[int, int] | None = None,
    ) -> None:
        self.settings, self.reader = settings, reader
        self.membership = membership
        self.leader = leader
        self.nodes = [
            NodeView(i, member, now_s, addresses.get(i, {}), (ports or {}).get(i, 0))
            for i, member in enumerate(membership.members)
        ]
        self.stuck_at: Mapping[int, str] = {}
        """By node: its address on another data interface than the first, where connections are stuck."""
        self.slept_s, self.woke_s = 0.0, now_s
        """How long the leader did not run, the last time, and when it went on."""
        self.deaf_s = -math.inf
        """When most of the nodes were silent, the last time: the leader's own link may have failed."""
        self.moved_s = now_s
        """When any rank has last made a step, or begun or completed a call."""
        self.ranks: dict[int, RankView] = {}
        self.ends: dict[int, tuple[WorkerEnd, float]] = {}
        """Of workers that ended badly by themselves, and when that was heard."""
        self.sorted_ends: tuple[int, object] = (0, None)
        """What guard.ends made of so many of them."""
        self.left: dict[int, float] = {}
        """Workers that ended with 0, and when."""
        self.may_leave = False
        """Whether the job was told to stop, so that each rank may end with 0 by itself."""
        self.ended: set[int] = set()
        """All that ended, those too that were told to."""
        self.calls_version = 0
        """Changes whenever a rank tells of other calls than before."""
        self.num_ranks = membership.world_size
        self.everybody = range(self.num_ranks)
        self.waiting_since_s: dict[int, float] = {}
        """Of each rank that is in a collective and has not ended: since when it waits."""
        self._triers: set[int] = set()
        self._held: dict[int, RankView] = {}
        """Ranks whose process cannot run."""
        self._node_of = {rank: node for node in self.nodes for rank in node.ranks}

    @property
    def triers(self) -> list[NodeView]:
        """Nodes that have tried to reach others, in their order."""
        return [self.nodes[index] for index in sorted(self._triers)]

    @property
    def fresh_s(self) -> float:
        """How old words about now may be."""
        return max(FRESH_S, 2.5 * self.settings.beat_s)

    @property
    def is_all_well(self) -> bool:
        """Whether every worker ended with 0."""
        return len(self.left) == self.num_ranks

    def node_of(self, rank: int) -> NodeView:
        """The node that a rank runs on."""
        return self._node_of[rank]

    def end(self, end: WorkerEnd, now_s: float) -> None:
        """Take in that a worker ended, well or badly; what is told twice, or of nobody, counts once or not at all."""
        if end.rank in self.ended or end.rank not in self._node_of:
            return
        self.ended.add(end.rank)
        if end.exit_code == 0 or not end.ended_by_us:
            self.waiting_since_s.pop(end.rank, None)
        if end.exit_code == 0:
            self.left[end.rank] = now_s
        elif not end.ended_by_us:
            self.ends[end.rank] = end, now_s

    def time_error_s(self, one: WorkerEnd, other: WorkerEnd) -> float:
        """How wrong the time between two ends may be: by the clocks of two nodes, and by how late an end is noticed."""
        nodes = {self.node_of(end.rank).index: self.node_of(end.rank) for end in (one, other)}
        clocks_s = sum(node.clock_error_s for node in nodes.values()) if len(nodes) > 1 else 0.0
        return clocks_s + max(0.0 if end.message and end.exit_code > 0 else NOTICE_S for end in (one, other))

    def running(self) -> Iterator[RankView]:
        """Ranks that have told of themselves and have not ended."""
        return (view for rank, view in self.ranks.items() if rank not in self.left and rank not in self.ends)

    def have_all_told(self, since_s: float) -> bool:
        """Whether each rank that runs has told of itself since then."""
        return all(view.told_s > since_s for view in self.running())

    def held(self, *states: ProcessState, for_s: float) -> list[RankBeat]:
        """Ranks that have been in one of these states for so long, in their order."""
        held = (view for rank, view in self._held.items() if rank not in self.left and rank not in self.ends)
        beats = (view.beat for view in held if view.beat.state in states)
        return sorted((beat for beat in beats if beat.state_for_s >= for_s), key=lambda beat: beat.rank)

    def fault(self, cause_id: str, message: str, *ranks: int, **more: Any) -> Finding:
        """Return a finding about these ranks and, where `more` names no node, theirs; all others are its victims."""
        nodes = {self.node_of(rank).index: self.node_of(rank) for rank in sorted(ranks)}
        values = self.values(*ranks)
        names = [node.name for node in nodes.values()]
        if "victims" not in more:  # a look at all ranks
            more["victims"] = self.others(*ranks)
        about: dict[str, Any] = {"node": fold_hosts(names), "ranks": ranks, "values": values, "reader": self.reader}
        return name_fault(cause_id, message, **about | more)

    def values(self, *ranks: int) -> dict[str, object]:
        """Return what a fix may name of these ranks."""
        indices = {self.node_of(rank).index for rank in ranks}
        name = self.interface(*indices)
        return ({"interface": name} if name else {}) | ({"rank": min(ranks)} if ranks else {})

    def interface(self, *indices: int) -> str | None:
        """Return the data interface of these nodes, or of all; None if it is not known or not the same."""
        nodes = [self.nodes[index] for index in indices or range(len(self.nodes))]
        names = {node.addresses.get(self.stuck_at.get(node.index, "interface")) for node in nodes}
        return names.pop() if len(names) == 1 else None

    def others(self, *ranks: int) -> tuple[int, ...]:
        """All ranks but these and those that have left well: the victims."""
        skipped = self.left.keys() | set(ranks)
        return tuple(rank for rank in self._node_of if rank not in skipped)

    def hear(self, beat: NodeBeat, now_s: float, *, told_s: float | None = None) -> NodeBeat | None:
        """Take in a node's word, and return what of it counts; None: it is of no node of ours or another generation.

        Args:
            told_s: when the node sent it, by the same clock, where that can be told.
        """
        told_s = now_s if told_s is None else told_s
        if not 0 <= beat.node_index < len(self.nodes) or beat.generation != self.membership.epoch:
            return None
        node = self.nodes[beat.node_index]
        own = node.ranks
        is_own = all(rank.rank in own for rank in beat.ranks)
        if not is_own or any(result.target >= len(self.nodes) for result in beat.tries):
            beat = msgspec.structs.replace(
                beat,
                ranks=tuple(rank for rank in beat.ranks if rank.rank in own),
                tries=tuple(result for result in beat.tries if result.target < len(self.nodes)),
            )
        most = max(MIN_KEPT_CALLS, MAX_KEPT_CALLS // max(1, self.num_ranks))
        if any(len(rank.calls) > most for rank in beat.ranks):
            ranks = (msgspec.structs.replace(rank, calls=keep_calls(rank.calls, most)) for rank in beat.ranks)
            beat = msgspec.structs.replace(beat, ranks=tuple(ranks))
        node.beat, node.heard_s = beat, now_s
        node.lost_reason, node.lost_s = "", None  # it speaks
        if beat.oom_kills > node.oom_kills:
            node.oom_kills, node.oom_s = beat.oom_kills, now_s
        for rank in beat.ranks:
            self._hear_rank(rank, told_s)
        for seen in beat.tries:
            at_s, before = told_s - seen.age_s, node.tries.get((seen.target, seen.network))
            if before is None or at_s >= before.at_s + 0.3:  # a node tells the same try in several beats
                self.note_try(node, Tried(seen, at_s))
        return beat

    def note_try(self, node: NodeView, tried: Tried) -> None:
        """Take in what came of a node's newest try to reach another one."""
        self._triers.add(node.index)
        node.tries[tried.seen.target, tried.seen.network] = tried

    def _hear_rank(self, beat: RankBeat, told_s: float) -> None:
        marks = (beat.step, *[(group.name, group.enqueued, group.completed) for group in beat.groups])
        view = self.ranks.get(beat.rank)
        moved_s = view.moved_s if view is not None and view.marks == marks else told_s
        self.moved_s = max(self.moved_s, moved_s)
        self.calls_version += view is None or beat.calls != view.beat.calls
        view = self.ranks[beat.rank] = RankView(beat, told_s, moved_s, marks)
        # Kept as it is told: to go through all ranks for each look takes a tenth of a second with 100,000 of them.
        waited_s = view.waits_s(told_s) if beat.groups else 0.0
        if waited_s > 0 and beat.rank not in self.left and beat.rank not in self.ends:
            self.waiting_since_s[beat.rank] = told_s - waited_s
        else:
            self.waiting_since_s.pop(beat.rank, None)
        if beat.state in HELD_STATES:
            self._held[beat.rank] = view
        else:
            self._held.pop(beat.rank, None)


def keep_calls(calls: Sequence[CallSeen], most: int) -> tuple[CallSeen, ...]:
    """Return so many of a rank's calls, in their order: the open ones first of all, then the last ones."""
    by_weight = sorted(range(len(calls)), key=lambda number: (calls[number].is_done, -number))
    return tuple(calls[number] for number in sorted(by_weight[:most]))
