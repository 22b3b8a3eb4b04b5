"""The table of progress: who is in which call of which group, and which of its members are not? Pure.

    for group in list_groups(dumps, world=4):
        for wait in list_waits(group):
            wait.waiting, wait.missing, wait.unknown

Every collective of a process group has a number, the same on all ranks. A rank waits in the first number that it has
called and that is not done. Where the recorder says what the GPU has started, a call that is only enqueued is no wait:
the rank has not come to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.recorder.calls import Call, Dump

DEFAULT_GROUP = "0"
DEFAULT_DESC = "default_pg"
_NO_DESC = ("", "undefined")


@dataclass(slots=True)
class KnownGroup:
    """One process group, and what its members called."""

    name: str
    desc: str
    order: Sequence[int]
    """Global ranks of its members, as far as they are known."""
    dumps: dict[int, Dump]
    """Of its members."""
    calls: dict[int, dict[int, list[Call]]]
    """Collectives by rank and number; several under one number where they are coalesced."""
    pairs: dict[int, list[Call]]
    """Sends and receives that are not done, by rank."""
    is_sure: bool
    """Its members were told, or it is that of all ranks."""
    is_complete: bool
    """`order` has all of them."""

    @property
    def shown(self) -> str:
        """Its name, with its description where it has one."""
        return f"group {self.name}" + (f" ({self.desc})" if self.desc not in _NO_DESC else "")

    @property
    def kind(self) -> str:
        """What it shares with the other groups of its kind: all tensor-parallel ones have one description."""
        return self.name if self.desc in _NO_DESC else self.desc

    def called(self, rank: int) -> int | None:
        """The last number that a rank has called; None: unknown."""
        if calls := self.calls.get(rank):
            return max(calls)
        dump = self.dumps[rank]
        is_counted = max(dump.enqueued.get(self.name, -1), dump.completed.get(self.name, -1)) >= 0
        return 0 if is_counted or dump.is_whole else None

    def reach(self, rank: int) -> int | None:
        """The last number that a rank has come to; None: unknown."""
        called = self.called(rank)
        return called if called is None else min(called, self.dumps[rank].started.get(self.name, called))

    def open_at(self, rank: int) -> int | None:
        """The number of the call that a rank waits in."""
        calls, reach = self.calls.get(rank, {}), self.reach(rank) or 0
        return min((seq for seq, told in calls.items() if seq <= reach and not are_done(told)), default=None)

    def is_blocked(self, rank: int) -> bool:
        """Whether the thread that would call the next collective is in one of this group."""
        return any(call.blocks and not call.is_done for told in self.calls.get(rank, {}).values() for call in told)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Ranks that are in one call."""

    group: KnownGroup
    seq: int
    waiting: frozenset[int]
    missing: frozenset[int]
    """Members that have not come."""
    unknown: frozenset[int]
    """Members of which nobody knows where they are."""
    call: Call
    """Of the first that waits."""

    @property
    def shown(self) -> str:
        """`collective 5 (all_reduce) of group 0`."""
        if self.call.is_p2p:
            return f"{self.call.op} {self.seq} of {self.group.shown}"
        what = f"collective {self.seq}" if self.seq > 0 else "a collective"
        return f"{what}{f' ({self.call.op})' if self.call.op else ''} of {self.group.shown}"


def are_done(calls: Iterable[Call]) -> bool:
    """Whether a number is over: all calls under it are."""
    return all(call.is_done for call in calls)


# --- Groups -----------------------------------------------------------------------------------------------------------


def list_groups(dumps: Sequence[Dump], world: int | None = None) -> list[KnownGroup]:
    """Return the groups. Sub groups of one mesh may share a name: their members tell them apart.

    Without the number of ranks (`world`), only those below the highest known one count.
    """
    named: defaultdict[str, dict[Sequence[int], list[Dump]]] = defaultdict(lambda: defaultdict(list))
    calls: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
    dumps = sorted(dumps, key=lambda dump: dump.rank)
    for dump in dumps:
        for call in dump.calls:
            calls[call.group, dump.rank].append(call)
        numbered = dump.enqueued.keys() | dump.completed.keys()
        for name in {call.group for call in dump.calls} | numbered | dump.members.keys():
            named[name][dump.members.get(name, ())].append(dump)
    everybody = range(max(world or 0, 1 + max((dump.rank for dump in dumps), default=-1)))
    groups = []
    for name, by_members in named.items():
        unknown = by_members.pop((), [])
        for order, those in by_members.items():
            rest = [dump for dump in unknown if dump.rank in order]
            groups.append(_group(name, order, [*those, *rest], calls, is_sure=True, is_complete=True))
        unknown = [dump for dump in unknown if not any(dump.rank in order for order in by_members)]
        is_default = name == DEFAULT_GROUP or any(dump.descs.get(name) == DEFAULT_DESC for dump in unknown)
        if unknown and is_default and not by_members:
            is_sure = not any(name in dump.formed_again for dump in unknown)
            groups.append(_group(name, everybody, dumps, calls, is_sure=is_sure, is_complete=world is not None))
        elif unknown:
            ranks = sorted(dump.rank for dump in unknown)
            groups.append(_group(name, ranks, unknown, calls, is_sure=False, is_complete=False))
    return sorted(groups, key=lambda group: (group.name, group.order[0]))


def _group(
    name: str,
    order: Sequence[int],
    dumps: Sequence[Dump],
    all_calls: Mapping[tuple[str, int], Sequence[Call]],
    **about: Any,
) -> KnownGroup:
    """Return one group; `about`: how well its members are known."""
    calls: dict[int, dict[int, list[Call]]] = {}
    pairs: defaultdict[int, list[Call]] = defaultdict(list)
    for dump in dumps:
        mine = calls.setdefault(dump.rank, {})
        for call in all_calls.get((name, dump.rank), ()):
            if not call.is_p2p:
                mine.setdefault(call.seq, []).append(call)
            elif not call.is_done and call.peer is not None:
                pairs[dump.rank].append(call)
        for call in _counted(name, dump, mine):
            mine.setdefault(call.seq, [call])
    desc = next((desc for dump in dumps if (desc := dump.descs.get(name))), "")
    return KnownGroup(name, desc, order, {dump.rank: dump for dump in dumps}, calls, dict(pairs), **about)


def _counted(name: str, dump: Dump, told: Mapping[int, Sequence[Call]]) -> Iterator[Call]:
    """Yield what is counted and not described: where a rank is, though not in what."""
    enqueued, completed = dump.enqueued.get(name, -1), dump.completed.get(name, -1)
    last = max(told, default=0)
    if enqueued > completed >= 0 and all(map(are_done, told.values())):
        yield Call(group=name, seq=completed + 1, op="")
    if (reached := max(enqueued, completed)) > last:
        yield Call(group=name, seq=reached, op="", is_done=not 0 <= completed < reached)


# --- Who waits --------------------------------------------------------------------------------------------------------


def list_waits(group: KnownGroup) -> Iterator[Wait]:
    """Yield who is in which call of a group: collectives by their numbers, then sends and receives."""
    waiting: defaultdict[int, set[int]] = defaultdict(set)
    for rank in group.dumps:
        if (seq := group.open_at(rank)) is not None:
            waiting[seq].add(rank)
    reaches = {rank: reach for rank in group.dumps if (reach := group.reach(rank)) is not None}
    unknown = frozenset(group.order) - reaches.keys()
    for seq, ranks in sorted(waiting.items()):
        missing = frozenset(rank for rank, reach in reaches.items() if reach < seq)
        yield Wait(group, seq, frozenset(ranks), missing, unknown, group.calls[min(ranks)][seq][0])
    yield from _pair_waits(group)


def _pair_waits(group: KnownGroup) -> Iterator[Wait]:
    """Sends and receives whose other side is in none with them."""
    for rank, calls in group.pairs.items():
        call = calls[0]
        if call.peer is None or not 0 <= call.peer < len(group.order):
            continue
        peer = group.order[call.peer]
        mine = group.order.index(rank) if rank in group.order else -1
        is_there = any(other.peer == mine for other in group.pairs.get(peer, ()))
        waiting = frozenset({rank, peer} if is_there else {rank})
        unknown = frozenset({peer} - group.dumps.keys())
        yield Wait(group, call.seq, waiting, frozenset({peer}) - waiting - unknown, unknown, call)
