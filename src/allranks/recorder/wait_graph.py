"""Who keeps the others waiting, from what every rank's flight recorder holds (calls.py)? Pure: no files, no logs.

    for stop in find_stops(dumps):
        stop.kind, stop.ranks, stop.message

Every collective of a process group has a number, the same on all ranks. A rank waits in the first number that it has
called and that is not done; it waits for the members that have not come so far. A member that waits itself in another
group is no culprit: the walk goes on to whoever it waits for. Where the walk ends is the culprit:

    mismatch    ranks called different things under one number: all later numbers are off, nothing else counts
    missing     ranks that wait for nobody and have not called what others wait in
    no dump     nobody else is missing, and of these ranks nothing is known
    circle      ranks wait for each other through several groups
    all there   everybody came, and it does not end: a link, a GPU, a kernel; the recorder cannot tell
    behind      nobody waits, and some ranks have called less (Gloo counts a call that timed out as done)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from allranks.recorder.calls import Call, Dump
from allranks.report.text import fold_ranks

DEFAULT_GROUP = "0"
DEFAULT_DESC = "default_pg"
_MAX_SEQS = 4096
"""Numbers of one group that are compared across its ranks, the newest ones."""


class StandstillKind(StrEnum):
    """Why ranks wait."""

    MISMATCH = "mismatch"
    MISSING = "missing"
    NO_DUMP = "no dump"
    CIRCLE = "circle"
    ALL_THERE = "all there"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Standstill:
    """One answer."""

    kind: StandstillKind
    ranks: tuple[int, ...]
    """The culprits; all who might be where it is not decided; empty where nobody is."""
    victims: tuple[int, ...]
    group: str
    seq: int
    is_decided: bool
    message: str
    calls: tuple[tuple[int, Call], ...]
    """(rank, call) that show it, the culprits' first."""
    waited_s: float | None = None
    """How long the others had been waiting when the dumps were taken; None: nobody can tell."""


def find_stops(dumps: Sequence[Dump]) -> list[Standstill]:
    """Return why ranks wait, the culprit's first; nothing where nobody waits and all are equally far."""
    groups = _list_groups(dumps)
    if mismatches := [stop for group in groups if (stop := _mismatch(group))]:
        return sorted(mismatches, key=lambda stop: min((call.created_s or 0.0 for _, call in stop.calls), default=0.0))
    waits = [wait for group in groups for wait in (*_waits(group), *_pair_waits(group))]
    return _follow(waits, {dump.rank: dump for dump in dumps}) if waits else [*_behind(groups)]


# --- Groups -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
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

    def shown(self) -> str:
        return f"group {self.name}" + (f" ({self.desc})" if self.desc and self.desc != "undefined" else "")

    def stop(
        self, kind: StandstillKind, seq: int, message: str, calls: Iterable[tuple[int, Call]], **about: Any
    ) -> Standstill:
        """Return an answer about one number of this group; `about`: ranks, victims, is_decided, and who waits."""
        ranks, victims, waiting = (tuple(sorted(about.get(who, ()))) for who in ("ranks", "victims", "waiting"))
        is_decided = about.get("is_decided", False)
        waited_s = self.waited_s(waiting, seq)
        return Standstill(kind, ranks, victims, self.name, seq, is_decided, message, tuple(calls), waited_s)

    def waited_s(self, ranks: Iterable[int], seq: int) -> float | None:
        """Half of those who wait had waited this long."""
        waited = [
            taken - call.created_s
            for rank in ranks
            if (taken := self.dumps[rank].taken_s) is not None
            for call in self.calls.get(rank, {}).get(seq, ())[:1]
            if call.created_s is not None
        ]
        return median(waited) if waited else None

    def reach(self, rank: int) -> int | None:
        """The last number that a rank has called; None: unknown."""
        if calls := self.calls.get(rank):
            return max(calls)
        dump = self.dumps[rank]
        if self.name in dump.enqueued:
            return max(dump.enqueued[self.name], 0)
        return 0 if dump.is_whole else None

    def open_at(self, rank: int) -> int | None:
        """The first number that a rank has called and that is not done."""
        return min((seq for seq, calls in self.calls.get(rank, {}).items() if not _is_done(calls)), default=None)


def _is_done(calls: Iterable[Call]) -> bool:
    return all(call.is_done for call in calls)


def _list_groups(dumps: Sequence[Dump]) -> list[_Group]:
    """Sub groups of one mesh may share a name: their members tell them apart."""
    named: defaultdict[str, dict[Sequence[int], list[Dump]]] = defaultdict(lambda: defaultdict(list))
    calls: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
    for dump in dumps:
        for call in dump.calls:
            calls[call.group, dump.rank].append(call)
        for name in {call.group for call in dump.calls} | dump.enqueued.keys() | dump.members.keys():
            named[name][dump.members.get(name, ())].append(dump)
    groups = []
    for name, by_members in named.items():
        unknown = by_members.pop((), [])
        for order, those in by_members.items():
            rest = [dump for dump in unknown if dump.rank in order]
            groups.append(_group(name, order, [*those, *rest], calls))
        unknown = [dump for dump in unknown if not any(dump.rank in order for order in by_members)]
        if unknown:
            is_default = name == DEFAULT_GROUP or any(dump.descs.get(name) == DEFAULT_DESC for dump in unknown)
            groups.append(_group(name, (), dumps if is_default and not by_members else unknown, calls))
    return groups


def _group(
    name: str, order: Sequence[int], dumps: Sequence[Dump], all_calls: Mapping[tuple[str, int], Sequence[Call]]
) -> _Group:
    calls: dict[int, dict[int, list[Call]]] = {}
    pairs: defaultdict[int, list[Call]] = defaultdict(list)
    for dump in dumps:
        mine = calls.setdefault(dump.rank, {})
        for call in all_calls.get((name, dump.rank), ()):
            if not call.is_p2p:
                mine.setdefault(call.seq, []).append(call)
            elif not call.is_done and call.peer is not None:
                pairs[dump.rank].append(call)
    desc = next((desc for dump in dumps if (desc := dump.descs.get(name))), "")
    ranks = order or tuple(sorted(dump.rank for dump in dumps))
    return _Group(name, desc, ranks, {dump.rank: dump for dump in dumps}, calls, dict(pairs))


# --- Different calls under one number ---------------------------------------------------------------------------------


def _mismatch(group: _Group) -> Standstill | None:
    """The first number under which ranks called different things."""
    by_seq: defaultdict[int, dict[int, list[Call]]] = defaultdict(dict)
    for rank, calls in group.calls.items():
        for seq in sorted(calls)[-_MAX_SEQS:]:
            by_seq[seq][rank] = calls[seq]
    for seq in sorted(by_seq):
        ranks = by_seq[seq]
        if len(ranks) < 2:
            continue
        length = min(map(len, ranks.values()))  # of a coalesced one, a rank may have called only a part yet
        is_over = all(map(_is_done, ranks.values()))
        kinds = {rank: _kind(calls[:length], is_over=is_over) for rank, calls in ranks.items()}
        if len(set(kinds.values())) < 2:
            continue
        (usual, most), (_, next_most) = Counter(kinds.values()).most_common(2)
        odd = {rank for rank, kind in kinds.items() if kind != usual}
        is_tie = next_most == most
        first, other = min(odd), min(ranks.keys() - odd)
        one, two = _difference(ranks[first], ranks[other])
        message = f"at collective {seq} of {group.shown()} {fold_ranks(odd)} called {one}{one.at}, "
        message += f"{fold_ranks(ranks.keys() - odd)} {two}{two.at}"
        blamed, victims = (ranks, set[int]()) if is_tie else (odd, set(group.dumps) - odd)
        about = {"ranks": blamed, "victims": victims, "waiting": ranks, "is_decided": not is_tie and not is_over}
        return group.stop(StandstillKind.MISMATCH, seq, message, ((first, one), (other, two)), **about)
    return None


_FREE_INPUTS = ("scatter", "all_to_all", "alltoall")
_FREE_OUTPUTS = ("gather", "all_to_all", "alltoall")


def _kind(calls: Sequence[Call], *, is_over: bool) -> tuple[object, ...]:
    """What must be the same on all ranks; of a collective that ended everywhere only which it was."""
    if is_over:
        return tuple(call.op for call in calls)
    return tuple(
        (
            call.op,
            () if call.op.startswith(_FREE_INPUTS) else (call.sizes, call.dtypes),
            () if call.op.startswith(_FREE_OUTPUTS) else (call.output_sizes, call.output_dtypes),
        )
        for call in calls
    )


def _difference(first: Sequence[Call], second: Sequence[Call]) -> tuple[Call, Call]:
    pairs = [*zip(first, second, strict=False)]
    return next((pair for pair in pairs if len({_kind([call], is_over=False) for call in pair}) > 1), pairs[0])


# --- Who waits for whom -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    group: _Group
    seq: int
    waiting: frozenset[int]
    missing: frozenset[int]
    unknown: frozenset[int]
    """Members without a dump."""
    call: Call
    """Of the first that waits."""

    def shown(self) -> str:
        what = f"{self.call.op} {self.seq}" if self.call.is_p2p else f"collective {self.seq} ({self.call.op})"
        return f"{what} of {self.group.shown()}"


def _waits(group: _Group) -> Iterator[_Wait]:
    waiting: defaultdict[int, set[int]] = defaultdict(set)
    for rank in group.dumps:
        if (seq := group.open_at(rank)) is not None:
            waiting[seq].add(rank)
    reaches = {rank: group.reach(rank) for rank in group.dumps}
    unknown = frozenset(group.order) - group.dumps.keys()
    for seq, ranks in sorted(waiting.items()):
        missing = frozenset(rank for rank, reach in reaches.items() if reach is not None and reach < seq)
        yield _Wait(group, seq, frozenset(ranks), missing, unknown, group.calls[min(ranks)][seq][0])


def _pair_waits(group: _Group) -> Iterator[_Wait]:
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
        yield _Wait(group, call.seq, waiting, frozenset({peer}) - waiting - unknown, unknown, call)


def _follow(waits: Sequence[_Wait], dumps: Mapping[int, Dump]) -> list[Standstill]:
    """Walk from everybody who waits to where the walks end."""
    waiting = frozenset().union(*(wait.waiting for wait in waits))
    sinks = frozenset().union(*(wait.missing for wait in waits)) - waiting
    if sinks:
        return [_name_missing(StandstillKind.MISSING, waits, sinks, waiting, dumps)]
    unknown = frozenset().union(*(wait.unknown for wait in waits))
    if unknown:
        return [_name_missing(StandstillKind.NO_DUMP, waits, unknown, waiting, dumps)]
    if ends := [wait for wait in waits if not wait.missing]:
        return [_all_there(wait) for wait in ends]
    return [_circle(waits, waiting)]


def _name_missing(
    kind: StandstillKind,
    waits: Sequence[_Wait],
    culprits: frozenset[int],
    waiting: frozenset[int],
    dumps: Mapping[int, Dump],
) -> Standstill:
    """Tell of the wait that lacks most of the culprits, the earliest of equal ones."""
    lacking = [(wait, (wait.missing if kind is StandstillKind.MISSING else wait.unknown) & culprits) for wait in waits]
    wait, lacks = max(lacking, key=lambda item: (len(item[1]), -(item[0].call.created_s or 0.0)))
    there = f"{fold_ranks(wait.waiting)} waited in"
    message = f"{fold_ranks(lacks)} did not enter {wait.shown()}; {there} it{wait.call.at}"
    calls = [(rank, dump.calls[-1]) for rank in sorted(lacks) if (dump := dumps.get(rank)) and dump.calls][:2]
    if calls:
        rank, last = calls[0]
        message += f"; the last call of {fold_ranks([rank])} was {last}{last.at}"
    if kind is StandstillKind.NO_DUMP:
        message = f"{fold_ranks(culprits)} left no dump; {there} {wait.shown()}{wait.call.at}"
    if lacks != culprits:
        message += f"; others waited for {fold_ranks(culprits - lacks)}"
    is_decided = lacks == culprits and (kind is StandstillKind.MISSING or len(culprits) < len(waiting))
    calls.append((min(wait.waiting), wait.call))
    about = {"ranks": culprits, "victims": waiting - culprits, "waiting": wait.waiting, "is_decided": is_decided}
    return wait.group.stop(kind, wait.seq, message, calls, **about)


def _all_there(wait: _Wait) -> Standstill:
    who = fold_ranks(wait.waiting)
    message = f"all ranks entered {wait.shown()}, and {who} never left it{wait.call.at}"
    calls = [(min(wait.waiting), wait.call)]
    return wait.group.stop(
        StandstillKind.ALL_THERE, wait.seq, message, calls, victims=wait.waiting, waiting=wait.waiting
    )


def _circle(waits: Sequence[_Wait], waiting: frozenset[int]) -> Standstill:
    """Nobody is outside: following any rank leads back to a wait that was seen."""
    of_rank = {rank: wait for wait in reversed(waits) for rank in wait.waiting}
    path: list[_Wait] = []
    wait = waits[0]
    while wait not in path:
        path.append(wait)
        wait = of_rank[min(wait.missing)]
    ring = path[path.index(wait) :]
    parts = [f"{fold_ranks(link.waiting)} waited in {link.shown()}{link.call.at}" for link in ring[:4]]
    ranks = frozenset().union(*(link.waiting for link in ring))
    message = f"ranks waited for each other: {', '.join(parts)}"
    calls = [(min(link.waiting), link.call) for link in ring[:4]]
    about = {"ranks": ranks, "victims": waiting - ranks, "waiting": ring[0].waiting}
    return ring[0].group.stop(StandstillKind.CIRCLE, ring[0].seq, message, calls, **about)


def _behind(groups: Sequence[_Group]) -> Iterator[Standstill]:
    """Nobody waits; were some ranks less far when the recorders stopped?"""
    for group in groups:
        reaches = {rank: reach for rank in group.dumps if (reach := group.reach(rank)) is not None}
        ahead = max(reaches.values(), default=0)
        late = {rank for rank, reach in reaches.items() if reach < ahead}
        if not late or 2 * len(late) > len(reaches):
            continue
        there = sorted(reaches.keys() - late)
        calls = [(rank, seqs[max(seqs)][0]) for rank in (min(late), there[0]) if (seqs := group.calls.get(rank))]
        if not calls:
            continue
        message = f"{fold_ranks(late)} had reached collective {reaches[min(late)]} of {group.shown()}, "
        message += f"{fold_ranks(there)} to {ahead}{calls[-1][1].at}"
        yield group.stop(StandstillKind.BEHIND, ahead, message, calls, ranks=late, victims=there)
