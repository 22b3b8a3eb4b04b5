"""Which words of a node can be worked with? Pure.

An agent is of this job (the wire proved it), but what its workers wrote into their cells is anybody's guess: a beat may
hold NaN, ranks of other nodes, ten thousand calls, names with control characters. What is wrong is left out; the rest
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, RankBeat, TrySeen
from allranks.wire.protocol import Member, as_one_line

MAX_GROUPS = 512
MAX_CALLS = 4096
MAX_LINKS = 1024
MAX_SIZES = 64
"""Tensors of one call that are looked at."""
_NETWORKS = ("data", "control")


def vet_beat(beat: NodeBeat, member: Member, num_nodes: int) -> NodeBeat:
    """Return what of a beat can be believed.

    Args:
        beat: as it came.
        member: the node that it came from.
        num_nodes: in the group.
    """
    mine = range(member.first_rank, member.first_rank + member.num_workers)
    seen: dict[int, RankBeat] = {}
    for rank in beat.ranks[: 2 * len(mine)]:
        if rank.rank in mine and rank.rank not in seen and (sound := _vet_rank(rank)) is not None:
            seen[rank.rank] = sound
    return msgspec.structs.replace(
        beat,
        ranks=tuple(seen.values()),
        links=tuple(link for link in beat.links[:MAX_LINKS] if _is_sound_link(link)),
        tries=tuple(
            each if len(each.error) <= 200 else msgspec.structs.replace(each, error=as_one_line(each.error))
            for each in beat.tries[: 4 * num_nodes]
            if _is_sound_try(each, num_nodes)
        ),
        addresses=beat.addresses[:16],
    )


def _vet_rank(rank: RankBeat) -> RankBeat | None:
    ages = (rank.state_for_s, rank.cpu_s, rank.main_at_for_s, rank.step_age_s, rank.silent_s or 0.0)
    if not _are_ages(ages):
        return None
    return msgspec.structs.replace(
        rank,
        groups=tuple(filter(_is_sound_group, rank.groups[:MAX_GROUPS])),
        calls=tuple(filter(_is_sound_call, rank.calls[-MAX_CALLS:])),
        lags=rank.lags[-MAX_CALLS:],
        main_at=as_one_line(rank.main_at),
        phase=as_one_line(rank.phase, at_most=40),
    )


def _are_ages(ages: Iterable[float]) -> bool:
    return all(math.isfinite(age) and age >= 0 for age in ages)


def _is_short(text: str) -> bool:
    return len(text) <= 300 and (text.isprintable() or not text)


def _is_sound_group(group: GroupSeen) -> bool:
    return (
        math.isfinite(group.waiting_s)
        and group.waiting_s >= 0
        and group.enqueued >= -1
        and group.completed >= -1
        and _is_short(group.name)
    )


def _is_sound_call(call: CallSeen) -> bool:
    return (
        _is_short(call.op)
        and _is_short(call.place)
        and _is_short(call.group)
        and len(call.sizes) <= MAX_SIZES
        and all(len(size) <= MAX_SIZES for size in call.sizes)
        and len(call.dtypes) <= MAX_SIZES
        and all(map(_is_short, call.dtypes))
    )


def _is_sound_link(link: LinkSeen) -> bool:
    return _are_ages((link.stalled_s, link.unacked_bytes)) and _is_short(link.peer_address)


def _is_sound_try(each: TrySeen, num_nodes: int) -> bool:
    return 0 <= each.target < num_nodes and each.network in _NETWORKS and _are_ages((each.age_s,))
