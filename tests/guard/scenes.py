"""Small pictures of a job for tables of cases: three or more nodes with one rank each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allranks.guard.scene import Scene
from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, RankBeat, TrySeen
from allranks.model.cluster import GuardTable
from allranks.model.membership import Member, Membership
from allranks.wire.protocol import WorkerEnd

FAST = GuardTable(join_s=25, gone_s=3, beat_s=0.2, stopped_s=1.5, stalled_s=1.5, slow_s=30, hang_s=120)
NOW_S = 1000.0


def members(num: int, *, workers: int = 1) -> tuple[Member, ...]:
    return tuple(
        Member(name=f"node{i + 1:02}", first_rank=i * workers, num_workers=workers, host=f"node{i + 1:02}")
        for i in range(num)
    )


def call(seq: int = 5, op: str = "all_reduce", size: int = 8, dtype: str = "Float", **more: Any) -> CallSeen:
    sizes, dtypes = (((size,),), (dtype,)) if size else ((), ())
    place = more.pop("place", "train.py:12 in step")
    return CallSeen(group=more.pop("group", "0"), seq=seq, op=op, sizes=sizes, dtypes=dtypes, place=place, **more)


def waiting(rank: int, *calls: CallSeen, num: int, for_s: float = 2.0, **more: Any) -> RankBeat:
    """A rank in a collective of the default group, or in none where it has no open call."""
    seq = max((each.seq for each in calls), default=0)
    is_open = any(not each.is_done for each in calls)
    group = GroupSeen(
        name="0",
        ranks=tuple(range(num)),
        enqueued=seq,
        completed=seq - 1 if is_open else seq,
        waiting_s=for_s if is_open else 0.0,
    )
    return RankBeat(rank=rank, pid=100 + rank, silent_s=0.0, groups=(group,), calls=tuple(calls), **more)


def away(rank: int, *, num: int, seq: int = 4, at: str = "evaluate.py:88 in run", **more: Any) -> RankBeat:
    """A rank in user code that has called `seq` collectives."""
    group = GroupSeen(name="0", ranks=tuple(range(num)), enqueued=seq, completed=seq)
    return RankBeat(rank=rank, pid=100 + rank, silent_s=more.pop("silent_s", 0.0), main_at=at, groups=(group,), **more)


def beat(
    index: int,
    *ranks: RankBeat,
    links: Sequence[LinkSeen] = (),
    tries: Sequence[TrySeen] = (),
    further: Sequence[str] = (),
    **more: Any,
) -> NodeBeat:
    return NodeBeat(
        node_index=index,
        generation=0,
        ranks=ranks,
        links=tuple(links),
        tries=tuple(tries),
        addresses=(address(index), *further),
        try_ports=(4000, 4001),
        **more,
    )


def address(index: int, network: str = "data") -> str:
    return f"192.168.20.{index + 1}" if network == "data" else f"10.0.0.{index + 1}"


def scene(
    beats: Sequence[NodeBeat],
    *,
    num: int | None = None,
    settings: GuardTable = FAST,
    began_s: float = NOW_S - 500,
    ends: Mapping[int, WorkerEnd] | None = None,
    left: Sequence[int] = (),
) -> Scene:
    """All nodes have spoken just now."""
    num = num or len(beats)
    addresses = {i: {network: address(i, network) for network in ("data", "control")} for i in range(num)}
    made = Scene(settings, Membership(members=members(num)), addresses, began_s)
    for each in beats:
        assert made.hear(each, NOW_S)
    made.ends.update({rank: (end, NOW_S) for rank, end in (ends or {}).items()})
    made.left.update(dict.fromkeys(left, NOW_S))
    return made


def end(rank: int, exit_code: int = 1, **more: Any) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=f"node{rank + 1:02}", exit_code=exit_code, time_s=NOW_S, **more)
