"""A job that never runs: ranks compute, wait for each other and tell of it, in simulated time, and the guard listens.

Each rank runs a program, a generator of what it does: `Compute` for some seconds, `Call` of a collective, which ends
when all members of the group have called theirs of the same number. A fault changes the world at its time. What the
agents and kernels would tell of that goes to a real Guard.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.verdict import Guard
from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.cluster import GuardTable
from allranks.model.membership import Member
from allranks.wire.protocol import Beat, Plan, Try, WorkerEnd

FAST = GuardTable(join_s=25, gone_s=3, beat_s=0.2, stopped_s=1.5, stalled_s=1.5, slow_s=30, hang_s=120)
EPOCH_S = 1_700_000_000.0
LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41"
ABORTED = "gloo::EnforceNotMet ... Received data size doesn't match expected size. Is there a mismatch?"


@dataclass(frozen=True)
class Compute:
    seconds: float
    place: str = "train.py:10 in step"
    holds_gil: bool = False
    phase: str = "training"


@dataclass(frozen=True)
class Call:
    group: str = "0"
    op: str = "all_reduce"
    size: int = 1000
    dtype: str = "Float"
    place: str = "train.py:12 in step"


Program = Iterator[Compute | Call]


@dataclass
class Rank:
    rank: int
    node: int
    program: Program
    doing: Compute | Call | None = None
    since_s: float = 0.0
    version: int = 0
    seqs: dict[str, int] = field(default_factory=dict)
    """Called, by group."""
    done: dict[str, int] = field(default_factory=dict)
    last: list[CallSeen] = field(default_factory=list)
    lags: list[tuple[str, int, int]] = field(default_factory=list)
    has_begun: bool = False
    end: int | None = None
    ended_s: float = 0.0
    stopped_s: float | None = None
    blocked_s: float | None = None
    frozen: RankBeat | None = None
    """What it told last before its GIL was held."""


@dataclass
class Network:
    """Who reaches whom; by pair of nodes and network. Not in there: all is well."""

    silent: set[tuple[int, int, str]] = field(default_factory=set)
    large_lost: set[tuple[int, int, str]] = field(default_factory=set)
    lossy: dict[int, float] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    stuck_since_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def cut(self, one: int, others: Sequence[int], *, networks: Sequence[str] = ("data",)) -> None:
        for other in others:
            for network in networks:
                self.silent |= {(one, other, network), (other, one, network)}


class World:
    """One job.

    Args:
        programs: of each rank.
        groups: members by name; "0" has all.
        ranks_per_node: how many share a node.
        settings: the guard's.
        skews_s: of each node's clock.
        seed: of delays and jitter.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        groups: Mapping[str, Sequence[int]] | None = None,
        ranks_per_node: int = 1,
        settings: GuardTable = FAST,
        skews_s: Sequence[float] = (),
        seed: int = 0,
        late_beats: float = 0.0,
        long_pauses: float = 0.0,
        start_s: float = 0.0,
        ask_every_s: float = 0.1,
    ) -> None:
        self.settings = settings
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.began_s = self.now_s
        self.ranks = [Rank(i, i // ranks_per_node, program) for i, program in enumerate(programs)]
        self.num_nodes = self.ranks[-1].node + 1
        self.groups = {"0": tuple(range(len(programs))), **{k: tuple(v) for k, v in (groups or {}).items()}}
        self.skews_s = list(skews_s) or [self.rng.uniform(-300, 300) for _ in range(self.num_nodes)]
        self.network = Network()
        self.late_beats, self.long_pauses = late_beats, long_pauses
        self.silent_nodes: set[int] = set()
        self.oom_kills = [0] * self.num_nodes
        self.tries: list[dict[tuple[int, str], tuple[float, TrySeen]]] = [{} for _ in range(self.num_nodes)]
        self.lines: list[tuple[float, str]] = []
        self.judged: GuardVerdict | None = None
        self.judged_s = 0.0
        self.ask_every_s = ask_every_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._arrives_s: dict[int, float] = {}
        self._open: dict[tuple[str, int], list[int]] = {}
        members = tuple(
            Member(name=f"node{i + 1:02}", first_rank=i * ranks_per_node, num_workers=ranks_per_node, host="h")
            for i in range(self.num_nodes)
        )
        self.guard = Guard(settings)
        self.guard.begin(
            Plan(
                members=members,
                node_index=0,
                attempt=0,
                store_address="10.0.0.1",
                store_port=1,
                backend="gloo",
                backend_reason="",
            ),
            self.now_s,
            addresses={i: {"data": f"192.168.20.{i + 1}", "control": f"10.0.0.{i + 1}"} for i in range(self.num_nodes)},
        )
        for rank in self.ranks:
            self.at(self.rng.uniform(0, start_s), lambda rank=rank: self._begin(rank))
        for node in range(self.num_nodes):
            self.at(self.rng.uniform(0, settings.beat_s), lambda node=node: self._beat(node))
        self.at(ask_every_s, self._ask)

    # Time

    def at(self, after_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._number, do))

    def run(self, seconds: float) -> World:
        """Go on for so long, or until a verdict."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s and self.judged is None:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        if self.judged is None:
            self.now_s = end_s
        return self

    # Ranks

    def _begin(self, rank: Rank) -> None:
        rank.has_begun = True
        self._advance(rank)

    def _advance(self, rank: Rank) -> None:
        if rank.end is not None or rank.stopped_s is not None:
            return
        rank.version += 1
        rank.frozen = None
        doing = next(rank.program, None)
        rank.doing, rank.since_s = doing, self.now_s
        if doing is None:
            self.end(rank.rank, 0)
        elif isinstance(doing, Compute):
            if doing.holds_gil:
                rank.frozen = self._tell(rank)
            version = rank.version
            self.at(doing.seconds, lambda: self._advance(rank) if rank.version == version else None)
        else:
            self._call(rank, doing)

    def _call(self, rank: Rank, call: Call) -> None:
        seq = rank.seqs[call.group] = rank.seqs.get(call.group, 0) + 1
        created_ns = int(self.wall_s(rank.node) * 1e9)
        rank.last = [
            *rank.last[-7:],
            CallSeen(
                group=call.group,
                seq=seq,
                op=call.op,
                sizes=((call.size,),) if call.size else (),
                dtypes=(call.dtype,) if call.size else (),
                created_ns=created_ns,
                place=call.place,
                blocks=True,
            ),
        ]
        rank.lags = [*rank.lags[-15:], (call.group, seq, created_ns)]
        there = self._open.setdefault((call.group, seq), [])
        there.append(rank.rank)
        if len(there) < len(self.groups[call.group]):
            return
        calls = {self._key(self.ranks[i].doing) for i in there}
        if len(calls) > 1 or self._is_cut(there):
            return  # they never meet
        del self._open[call.group, seq]
        for i in there:
            member = self.ranks[i]
            self.at(self.rng.uniform(0.0005, 0.004), lambda member=member: self._leave(member, call.group, seq))

    @staticmethod
    def _key(doing: object) -> object:
        return (doing.op, doing.size, doing.dtype) if isinstance(doing, Call) else None

    def _leave(self, rank: Rank, group: str, seq: int) -> None:
        if rank.end is not None:
            return
        rank.done[group] = seq
        over = {"is_done": True, "blocks": False}
        rank.last = [msgspec.structs.replace(c, **over) if (c.group, c.seq) == (group, seq) else c for c in rank.last]
        self._advance(rank)

    def _is_cut(self, ranks: Sequence[int]) -> bool:
        nodes = {self.ranks[i].node for i in ranks}
        bad = self.network.silent | self.network.large_lost
        return any((a, b, "data") in bad for a in nodes for b in nodes)

    def wall_s(self, node: int) -> float:
        return EPOCH_S + self.now_s + self.skews_s[node]

    # What happens to them

    def end(self, index: int, exit_code: int, *, message: str | None = None, stderr: str | None = None) -> None:
        rank = self.ranks[index]
        if rank.end is not None:
            return
        rank.end, rank.ended_s = exit_code, self.now_s
        if rank.node in self.silent_nodes:
            return
        self.guard.ended(
            WorkerEnd(
                rank=index,
                node=f"node{rank.node + 1:02}",
                exit_code=exit_code,
                time_s=self.now_s,
                message=message,
                stderr_tail=stderr,
            ),
            self.now_s,
        )

    def break_others(self, index: int) -> None:
        """With Gloo the others read a closed connection."""
        for rank in self.ranks:
            if rank.rank != index and rank.end is None:
                self.at(self.rng.uniform(0.02, 0.46), lambda i=rank.rank: self.end(i, 1, message=LOST))

    def stick(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connections between these nodes get nothing across from now on."""
        for pair in pairs:
            self.network.stuck_since_s[pair] = self.now_s

    # What is told

    def _beat(self, node: int) -> None:
        pause_s = self.settings.beat_s
        if node not in self.silent_nodes:
            beat = self._node_beat(node)
            delay_s = self.rng.uniform(0.0001, 0.003)
            if self.rng.random() < self.late_beats:
                delay_s += self.rng.uniform(0.0, self.settings.gone_s * 0.6)
            sent_s = self.now_s
            self._arrives_s[node] = max(self._arrives_s.get(node, 0.0), sent_s + delay_s)  # a connection keeps order
            self.at(self._arrives_s[node] - sent_s, lambda: self._hear(beat, sent_s))
            if self.rng.random() < self.long_pauses:
                pause_s += self.rng.uniform(0.0, self.settings.gone_s * 2)  # an agent that does not get the processor
        self.at(pause_s, lambda: self._beat(node))

    def _hear(self, beat: NodeBeat, sent_s: float) -> None:
        if beat.node_index in self.silent_nodes:
            return
        there_s = self.rng.uniform(0.0001, 0.003)
        held_s = self.rng.uniform(0.0, self.settings.beat_s)
        ping_s = sent_s - held_s - there_s
        self.guard.hear(Beat(node=beat, ping_ns=int(ping_s * 1e9), held_ns=int(held_s * 1e9)), self.now_s)

    def _node_beat(self, node: int) -> NodeBeat:
        return NodeBeat(
            node_index=node,
            generation=0,
            ranks=tuple(self._rank_beat(rank) for rank in self.ranks if rank.node == node and rank.has_begun),
            links=tuple(
                LinkSeen(
                    own_address=f"192.168.20.{own + 1}",
                    peer_address=f"192.168.20.{peer + 1}",
                    unacked_bytes=4000,
                    stalled_s=self.now_s - since_s,
                    retransmits=3,
                )
                for (own, peer), since_s in self.network.stuck_since_s.items()
                if own == node
            ),
            tries=tuple(
                msgspec.structs.replace(seen, age_s=self.now_s - at_s)
                for at_s, seen in self.tries[node].values()
                if at_s <= self.now_s
            ),
            addresses=(f"192.168.20.{node + 1}",),
            try_ports=(4000, 4001),
            oom_kills=self.oom_kills[node],
            time_ns=int(self.wall_s(node) * 1e9),
        )

    def _rank_beat(self, rank: Rank) -> RankBeat:
        if rank.frozen is not None:
            silent_s = self.now_s - rank.since_s
            return msgspec.structs.replace(rank.frozen, silent_s=silent_s, state=ProcessState.RUNNING)
        return self._tell(rank)

    def _tell(self, rank: Rank) -> RankBeat:
        doing = rank.doing
        in_call = isinstance(doing, Call)
        for_s = self.now_s - rank.since_s
        state, state_for_s = ProcessState.RUNNING, for_s
        if rank.end is not None:
            state, state_for_s = ProcessState.GONE, self.now_s - rank.ended_s
        elif rank.stopped_s is not None:
            state, state_for_s = ProcessState.STOPPED, self.now_s - rank.stopped_s
        elif rank.blocked_s is not None:
            state, state_for_s = ProcessState.BLOCKED, self.now_s - rank.blocked_s
        groups = tuple(
            GroupSeen(
                name=name,
                ranks=members if len(members) < len(self.ranks) else (),
                enqueued=rank.seqs.get(name, 0),
                completed=rank.done.get(name, 0),
                waiting_s=for_s if in_call and doing.group == name else 0.0,
            )
            for name, members in self.groups.items()
            if rank.rank in members
        )
        lags, rank.lags = tuple(rank.lags), []
        return RankBeat(
            rank=rank.rank,
            pid=1000 + rank.rank,
            state=state,
            state_for_s=max(state_for_s, 0.0),
            silent_s=0.05 if rank.stopped_s is None else self.now_s - rank.stopped_s,
            main_at=doing.place if doing else "",
            phase=doing.phase if isinstance(doing, Compute) else "training",
            groups=groups,
            calls=tuple(rank.last) if (in_call and for_s > 0.3) or rank.end else (),
            lags=lags,
        )

    # The leader

    def _ask(self) -> None:
        for index, order in self.guard.wants(self.now_s).items():
            if index not in self.silent_nodes:
                self._try(index, order)
        self.lines += [(self.now_s, line) for line in self.guard.lines(self.now_s)]
        self.judged = self.guard.judge(self.now_s)
        if self.judged is not None:
            self.judged_s = self.now_s
        self.at(self.ask_every_s, self._ask)

    def _try(self, own: int, order: Try) -> None:
        for target in order.targets:
            seen = self._meet(own, target.node_index, target.network)
            took_s = 0.02 if seen.connects and seen.carries is not False else order.within_s
            key = target.node_index, target.network
            self.at(took_s, lambda key=key, seen=seen: self.tries[own].__setitem__(key, (self.now_s, seen)))

    def _meet(self, own: int, peer: int, network: str) -> TrySeen:
        def result(connects: bool, carries: bool | None, *, refused: bool = False) -> TrySeen:
            return TrySeen(target=peer, network=network, connects=connects, carries=carries, refused=refused)

        if (own, peer, network) in self.network.silent:
            return result(False, None)
        if peer in self.network.refused:
            return result(True, None, refused=True)
        if (own, peer, network) in self.network.large_lost:
            return result(True, False)
        loss = max(self.network.lossy.get(own, 0.0), self.network.lossy.get(peer, 0.0)) if network == "data" else 0.0
        if self.rng.random() < loss:
            return result(False, None)
        return result(True, True)
