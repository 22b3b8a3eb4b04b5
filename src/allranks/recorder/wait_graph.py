"""Who keeps the others waiting, from all that is known of how far each rank has come? Pure: no files, no logs.

    for stop in find_stops(dumps, world=4):
        stop.kind, stop.ranks, stop.message

A rank waits for the members that have not come to its call (reach.py). A member that waits itself in another group
is no culprit: the walk goes on to whoever it waits for. Where the walk ends is the culprit:

    mismatch    ranks called different things under one number: all later numbers are off, nothing else counts; the
                same thing with another number of elements is likely at most, and counts if nobody is missing
    circle      ranks wait for each other through several groups: who calls them in another order than most
    missing     ranks that wait for nobody and have not called what others wait in; else those that told nothing
    behind      ranks that are in an earlier call than most; or nobody waits, and some ranks have called less (Gloo
                counts a call that timed out as done)
    all there   everybody who is known came, and it does not end: a link, a GPU, a kernel; the recorder cannot tell

A circle is proven where nobody in it can ever go on: the thread is in the call (Gloo), or the GPU has started it and
has the missing one behind it (NCCL). Where a call is only enqueued, it is likely: it may run beside the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from allranks.model.finding import Confidence
from allranks.recorder.calls import Call, Dump, canonical, size_of
from allranks.recorder.reach import KnownGroup, Wait, are_done, list_groups, list_waits
from allranks.report.text import fold_ranks

_MAX_SEQS = 4096
"""Numbers of one group that are compared across its ranks, the newest ones."""
_MAX_SHOWN = 4


class StandstillKind(StrEnum):
    """Why ranks wait."""

    MISMATCH = "mismatch"
    CIRCLE = "circle"
    MISSING = "missing"
    BEHIND = "behind"
    ALL_THERE = "all there"


@dataclass(frozen=True, slots=True)
class Standstill:
    """One answer."""

    kind: StandstillKind
    group: str
    seq: int
    message: str
    calls: tuple[tuple[int, Call], ...]
    """(rank, call) that show it, the culprits' first."""
    ranks: tuple[int, ...] = ()
    """The culprits; all who might be where it is not decided; empty where nobody is."""
    victims: tuple[int, ...] = ()
    confidence: Confidence = Confidence.UNDECIDED
    is_proven: bool = False
    """Of a circle: nobody in it can ever go on."""
    waiting: tuple[int, ...] = ()
    """Whom the message names beside the culprits; of a mismatch, all who are compared."""
    has_other_sizes: bool = False
    """Of a mismatch: all called the same thing, and only its size differs."""

    @property
    def is_decided(self) -> bool:
        """Whether these ranks are the culprits, and not only those who might be."""
        return self.confidence is not Confidence.UNDECIDED


def find_stops(dumps: Sequence[Dump], world: int | None = None) -> list[Standstill]:
    """Return why ranks wait, the culprit's first; nothing where nobody waits and all are equally far.

    Lines of logs become a Dump of each rank that said anything: a watchdog's timeout is an open call, without a number
    seq=0; `last enqueued work: 48213` is `enqueued`. Of a rank that only left a log, `world` tells.

    >>> waits = [Dump(rank, (Call(group="0", seq=48213, op="ALLREDUCE"),)) for rank in range(3)]
    >>> find_stops([*waits, Dump(3, enqueued={"0": 48212}, completed={"0": 48212})])[0].message
    'rank 3 did not enter collective 48213 (ALLREDUCE) of group 0; ranks 0-2 waited in it'
    >>> find_stops(waits, world=4)[0].message
    'ranks 0-2 waited in collective 48213 (ALLREDUCE) of group 0; nothing tells whether rank 3 came'
    >>> stop = find_stops(waits)[0]  # there may be more ranks
    >>> stop.ranks, str(stop.confidence)
    ((), 'undecided')

    Args:
        dumps: at most one of each rank.
    """
    groups = list_groups(dumps, world)
    mismatches = [stop for group in groups if (stop := _mismatch(group))]
    mismatches.sort(key=lambda stop: min((call.created_s or 0.0 for _, call in stop.calls), default=0.0))
    if others := [stop for stop in mismatches if not stop.has_other_sizes]:
        return others
    waits = [wait for group in groups for wait in list_waits(group)]
    stops = _follow(waits, groups) if waits else [*_behind(groups)]
    is_missed = any(stop.kind is StandstillKind.MISSING and stop.confidence is Confidence.CERTAIN for stop in stops)
    return stops if is_missed else mismatches or stops


def _stop(
    group: KnownGroup, kind: StandstillKind, seq: int, message: str, calls: Iterable[tuple[int, Call]], **about: Any
) -> Standstill:
    """Return an answer about one number of a group; `about`: its other fields."""
    about |= {who: tuple(sorted(about.get(who, ()))) for who in ("ranks", "victims", "waiting")}
    return Standstill(kind, group.name, seq, message, tuple(calls), **about)


# --- Different calls under one number ---------------------------------------------------------------------------------


def _mismatch(group: KnownGroup) -> Standstill | None:
    """The first number under which ranks called different things; None, too, where they may be of different groups."""
    if any(group.name in dump.formed_again for dump in group.dumps.values()):
        return None
    by_seq: defaultdict[int, dict[int, list[Call]]] = defaultdict(dict)
    for rank, calls in group.calls.items():
        for seq in sorted(calls)[-_MAX_SEQS:]:
            if all(call.op for call in calls[seq]):
                by_seq[seq][rank] = calls[seq]
    for seq, ranks in sorted(by_seq.items()):
        length = min(map(len, ranks.values()))  # of a coalesced one, a rank may have called only a part yet
        is_over = all(map(are_done, ranks.values()))
        kinds: Mapping[int, tuple[object, ...]]
        kinds = {rank: tuple(canonical(call.op) for call in calls[:length]) for rank, calls in ranks.items()}
        has_other_sizes = len(set(kinds.values())) < 2
        if has_other_sizes and not is_over:
            kinds = _sizes({rank: calls[:length] for rank, calls in ranks.items()})
        if len(set(kinds.values())) < 2:
            continue
        (usual, most), (_, next_most) = Counter(kinds.values()).most_common(2)
        odd = {rank for rank, kind in kinds.items() if kind != usual}
        is_tie = next_most == most
        first, other = min(odd), min(ranks.keys() - odd)
        at = next(at for at in range(length) if kinds[first][at] != kinds[other][at])
        one, two = ranks[first][at], ranks[other][at]
        message = f"at collective {seq} of {group.shown} {fold_ranks(odd)} called {one}{one.at}, "
        message += f"{fold_ranks(ranks.keys() - odd)} {two}{two.at}"
        blamed, victims = (ranks, set[int]()) if is_tie else (odd, set(group.dumps) - odd)
        confidence = Confidence.LIKELY if has_other_sizes else Confidence.CERTAIN
        confidence = Confidence.UNDECIDED if is_tie or is_over else confidence
        return _stop(
            group, StandstillKind.MISMATCH, seq, message, ((first, one), (other, two)), ranks=blamed, victims=victims,
            waiting=ranks, confidence=confidence, has_other_sizes=has_other_sizes,
        )  # fmt: skip
    return None


_FREE_INPUTS = ("scatter", "all_to_all")
_FREE_OUTPUTS = ("gather", "all_to_all")


def _sizes(by_rank: Mapping[int, Sequence[Call]]) -> dict[int, tuple[object, ...]]:
    """What must be the same on all ranks that called the same thing; nothing where one does not tell its sizes."""
    everything = [call for calls in by_rank.values() for call in calls]
    if not all(call.sizes or call.output_sizes for call in everything):
        return {}
    has_dtypes = all(call.dtypes or call.output_dtypes for call in everything)

    def size(call: Call) -> tuple[object, object]:
        op = canonical(call.op)
        return (
            () if op.startswith(_FREE_INPUTS) else size_of(op, call.sizes, call.dtypes * has_dtypes),
            () if op.startswith(_FREE_OUTPUTS) else size_of(op, call.output_sizes, call.output_dtypes * has_dtypes),
        )

    return {rank: tuple(map(size, calls)) for rank, calls in by_rank.items()}


# --- Who waits for whom -----------------------------------------------------------------------------------------------


def _follow(waits: Sequence[Wait], groups: Sequence[KnownGroup]) -> list[Standstill]:
    """Walk from everybody who waits to where the walks end."""
    if stuck := _find_stuck(waits, is_proven=True):
        return [_circle(waits, groups, stuck, is_proven=True)]
    waiting = frozenset().union(*(wait.waiting for wait in waits))
    if sinks := frozenset().union(*(wait.missing for wait in waits)) - waiting:
        return [_name_missing(waits, sinks, waiting, is_seen=True)]
    if stuck := _find_stuck(waits, is_proven=False):
        return [_circle(waits, groups, stuck, is_proven=False)]
    apart = [*_apart(waits)]
    unknown = frozenset().union(*(wait.unknown for wait in waits)) - waiting
    if unknown and not apart:
        return [_name_missing(waits, unknown, waiting, is_seen=False)]
    ends = [wait for wait in waits if not wait.missing]
    if alone := [stop for wait in ends if (stop := _alone(wait, waits))]:
        return alone
    return [*apart, *(_all_there(wait) for wait in ends)]


def _name_missing(
    waits: Sequence[Wait], culprits: frozenset[int], waiting: frozenset[int], *, is_seen: bool
) -> Standstill:
    """Tell of the wait that lacks most of the culprits, who have not come (`is_seen`), or of whom nothing is known."""
    lacking = [(wait, (wait.missing if is_seen else wait.unknown) & culprits) for wait in waits]
    wait, lacks = max(lacking, key=lambda item: (len(item[1]), -(item[0].call.created_s or 0.0)))
    dumps = wait.group.dumps
    calls = [(rank, dumps[rank].calls[-1]) for rank in sorted(lacks) if rank in dumps and dumps[rank].calls][:2]
    there, late = fold_ranks(wait.waiting), fold_ranks(lacks)
    message = f"{there} waited in {wait.shown}{wait.call.at}; nothing tells whether {late} came"
    if is_seen:
        message = f"{late} did not enter {wait.shown}; {there} waited in it{wait.call.at}"
    if is_seen and calls:
        rank, last = calls[0]
        message += f"; the last call of {fold_ranks([rank])} was {last}{last.at}"
    if lacks != culprits:
        message += f"; others waited for {fold_ranks(culprits - lacks)}"
    is_decided = lacks == culprits and (is_seen or len(culprits) < len(waiting))
    confidence = Confidence.CERTAIN if is_seen and wait.group.is_sure else Confidence.LIKELY
    return _stop(
        wait.group, StandstillKind.MISSING, wait.seq, message, [*calls, (min(wait.waiting), wait.call)],
        ranks=culprits, victims=waiting - culprits, waiting=wait.waiting,
        confidence=confidence if is_decided else Confidence.UNDECIDED,
    )  # fmt: skip


def _alone(wait: Wait, waits: Sequence[Wait]) -> Standstill | None:
    """A few ranks in a call of a group whose members are not known, while all others wait for them in other groups."""
    others = [other for other in waits if other.group is not wait.group and other.missing & wait.waiting]
    elsewhere = frozenset().union(*(other.waiting for other in others)) - wait.waiting
    if wait.group.is_complete or 2 * len(wait.waiting) > len(elsewhere):
        return None
    most = max(others, key=lambda other: len(other.waiting))
    message = f"{fold_ranks(wait.waiting)} waited in {wait.shown}{wait.call.at}, and did not enter {most.shown}; "
    message += f"{fold_ranks(most.waiting)} waited in it{most.call.at}"
    calls = [(min(wait.waiting), wait.call), (min(most.waiting), most.call)]
    about = {"ranks": wait.waiting, "victims": elsewhere, "waiting": most.waiting, "confidence": Confidence.LIKELY}
    return _stop(wait.group, StandstillKind.CIRCLE, wait.seq, message, calls, **about)


def _all_there(wait: Wait) -> Standstill:
    who, group = fold_ranks(wait.waiting), wait.group
    message = f"all ranks entered {wait.shown}, and {who} never left it{wait.call.at}"
    if not group.is_complete or wait.unknown:
        message = f"{who} waited in {wait.shown}{wait.call.at}; nothing tells whether all others came"
    calls, about = [(min(wait.waiting), wait.call)], {"victims": wait.waiting, "waiting": wait.waiting}
    return _stop(group, StandstillKind.ALL_THERE, wait.seq, message, calls, **about)


def _apart(waits: Sequence[Wait]) -> Iterator[Standstill]:
    """Ranks of one group that wait in an earlier call than the others, who came through it."""
    by_group: defaultdict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        if not wait.call.is_p2p:
            by_group[id(wait.group)].append(wait)
    for own in by_group.values():
        (early, *later), group = sorted(own, key=lambda wait: wait.seq), own[0].group
        if not later:
            continue
        ahead = frozenset().union(*(wait.waiting for wait in later))
        late, kind, last = early.waiting, StandstillKind.BEHIND, max(later, key=lambda wait: len(wait.waiting))
        if early.call.op and last.call.op and canonical(early.call.op) != canonical(last.call.op):
            kind, late = StandstillKind.MISMATCH, min(late, ahead, key=len)
        rest = (early.waiting | ahead) - late
        if len(late) > len(rest):
            continue
        is_tie = kind is StandstillKind.MISMATCH and len(late) == len(rest)
        message = f"{fold_ranks(early.waiting)} waited in {early.shown}{early.call.at}, "
        message += f"{fold_ranks(last.waiting)} in {last.shown}{last.call.at}"
        calls = [(min(wait.waiting), wait.call) for wait in (early, last)]
        yield _stop(
            group, kind, last.seq, message, calls if late == early.waiting else calls[::-1], waiting=rest,
            ranks=late | rest if is_tie else late, victims=() if is_tie else rest,
            confidence=Confidence.UNDECIDED if is_tie else Confidence.LIKELY,
        )  # fmt: skip


# --- Circles ----------------------------------------------------------------------------------------------------------


def _find_stuck(waits: Sequence[Wait], *, is_proven: bool) -> set[int]:
    """Return the largest set of ranks each of which waits, in all its calls, for another one of the set.

    If `is_proven`, only those count that are held by their calls, and only as long as they cannot come to others'.
    """
    threads = {rank for wait in waits for rank in wait.waiting if wait.group.is_blocked(rank)}
    held: dict[Wait, set[int]] = {}
    lacks: dict[Wait, set[int]] = {}
    for wait in waits:
        group = wait.group
        held[wait], lacks[wait] = {*wait.waiting}, {*wait.missing}
        if is_proven:
            on_gpu = {rank for rank in wait.waiting - threads if group.name in group.dumps[rank].started}
            is_held = (rank for rank in wait.waiting if rank in on_gpu or group.is_blocked(rank))
            is_away = (rank for rank in wait.missing if rank in threads or (group.called(rank) or 0) >= wait.seq)
            held[wait], lacks[wait] = {*is_held}, {*is_away}
    stuck, left = set().union(*held.values()), {*waits}
    while may_end := {wait for wait in left if stuck.isdisjoint(lacks[wait])}:
        stuck.difference_update(*(held[wait] for wait in may_end))
        left -= may_end
    return stuck


def _circle(waits: Sequence[Wait], groups: Sequence[KnownGroup], stuck: set[int], *, is_proven: bool) -> Standstill:
    """Name who called the groups in another order than most."""
    ring = [wait for wait in waits if wait.waiting & stuck and wait.missing & stuck]
    votes = _first_groups(ring, groups, stuck)
    ((usual, most), (_, next_most)) = [*Counter(votes.values()).most_common(2), ("", 0), ("", 0)][:2]
    odd = {rank for rank, kind in votes.items() if kind != usual}
    who = [(wait, fold_ranks(wait.waiting & stuck), fold_ranks(wait.missing & stuck)) for wait in ring[:_MAX_SHOWN]]
    parts = [f"{waiting} waited in {wait.shown}{wait.call.at} for {missing}" for wait, waiting, missing in who]
    confidence = Confidence.CERTAIN if is_proven and all(wait.group.is_sure for wait in ring) else Confidence.LIKELY
    if odd and most > next_most:
        message = f"{fold_ranks(odd)} called the groups in another order than {fold_ranks(votes.keys() - odd)}: "
    else:
        message, odd, confidence = "ranks waited for each other: ", {*votes} or stuck, Confidence.UNDECIDED
    ring.sort(key=lambda wait: not wait.waiting & odd)
    calls = [(min(wait.waiting & stuck), wait.call) for wait in ring[:_MAX_SHOWN]]
    return _stop(
        ring[0].group, StandstillKind.CIRCLE, ring[0].seq, message + ", ".join(parts), calls, is_proven=is_proven,
        ranks=odd, victims=stuck - odd, waiting=ring[0].waiting, confidence=confidence,
    )  # fmt: skip


def _first_groups(ring: Sequence[Wait], groups: Sequence[KnownGroup], stuck: set[int]) -> dict[int, str]:
    """Return the kind of group that each rank called first, of those that are in several kinds of the ring's groups."""
    is_told = len({wait.group.kind for wait in ring}) > 1  # else each group is a kind of its own
    kind_of = {id(group): group.kind if is_told else group.name for group in groups}
    names = {kind_of[id(wait.group)] for wait in ring}
    member_of: defaultdict[int, set[str]] = defaultdict(set)
    for group in groups:
        for rank in stuck.intersection(group.order) if kind_of[id(group)] in names else ():
            member_of[rank].add(kind_of[id(group)])
    first: defaultdict[int, set[str]] = defaultdict(set)
    for wait in ring:
        for rank in wait.waiting & stuck:
            first[rank].add(kind_of[id(wait.group)])
    return {rank: min(kinds) for rank, kinds in first.items() if len(kinds) == 1 and len(member_of[rank]) > 1}


# --- Nobody waits -----------------------------------------------------------------------------------------------------


def _behind(groups: Sequence[KnownGroup]) -> Iterator[Standstill]:
    """Were some ranks less far when the recorders stopped?"""
    for group in groups:
        reaches = {rank: reach for rank in group.dumps if (reach := group.reach(rank)) is not None}
        ahead = max(reaches.values(), default=0)
        late = {rank for rank, reach in reaches.items() if reach < ahead}
        if not late or 2 * len(late) > len(reaches):
            continue
        there = sorted(reaches.keys() - late)
        calls = [(rank, seqs[max(seqs)][0]) for rank in (min(late), there[0]) if (seqs := group.calls.get(rank))]
        message = f"{fold_ranks(late)} had reached collective {reaches[min(late)]} of {group.shown}, "
        message += f"{fold_ranks(there)} to {ahead}{calls[-1][1].at}"
        yield _stop(group, StandstillKind.BEHIND, ahead, message, calls, ranks=late, victims=there)
