"""Which of the facts that nothing explains broke the job, which broke by itself later, which is a warning? Pure.

Certainly earlier wins; then the launcher's first observed failure; then directness. Two equal ends without an order are
two culprits; other candidates without an order are undecided. A loss that nothing explains blames the peer that it
names, a wait whoever of all ranks did not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from signal import SIGABRT

from msgspec.structs import replace

from allranks.facts.fact import FactKind, Said, Who
from allranks.facts.item import FEW, Item, Sort, directness, is_strangers
from allranks.facts.rules import sooner
from allranks.facts.story import CauseEdge, Root, RootPart, Story, StoryEnd
from allranks.model.finding import Confidence

MAX_WORLD = 1 << 20
DEPTH = 3
"""Number of parts of directness that decide between two facts; what they are does not."""
AT_ONCE_S = 10.0
"""Seconds in which all ranks come to the same line."""
_LESS = {Confidence.CERTAIN: Confidence.LIKELY, Confidence.LIKELY: Confidence.UNDECIDED}
_OWN = frozenset((Sort.BREAK, Sort.END))
_SUFFERED = frozenset((Sort.LOSS, Sort.WAIT, Sort.GONE, Sort.ORDER))


def tell(items: Sequence[Item], survived: Sequence[Item], world: int | None) -> Story:
    """Return the story of an attempt, whose facts know what explains them.

    Args:
        items: all facts that nobody survived, in an order that depends on nothing but them.
        survived: the others.
        world: number of ranks, if known.
    """
    attempt = next((item.fact.attempt for item in (*items, *survived)), 0)
    tops = [item for item in items if not item.causes and item.sort is not Sort.PROGRESS]
    cyclic = _find_cycles(items, tops)
    tops += cyclic
    finished = [item for item in items if item.kind is FactKind.FINISHED]
    ends = [item for item in items if item.sort is Sort.END and item.is_real]
    if any(sooner(earlier, end) for end in ends for earlier in finished[:FEW]):
        finished = []  # who said so was not the last one
    strong = [item for item in tops if not item.causes and _is_strong(item, finished)]
    if not tops or (finished and not strong):
        outcome = StoryEnd.FINISHED if finished else StoryEnd.NOTHING_KNOWN
        return Story(
            outcome, tuple(_fold(sorted([*tops, *survived], key=directness), RootPart.WARNING)), attempt=attempt
        )
    weak = [item for item in tops if item.is_weak or (item.sort is Sort.BREAK and item.is_named)]
    weak = [item for item in weak if item.is_named] or weak
    others = [item for item in tops if item.sort is not Sort.ORDER]
    chosen = _without_strangers(strong) or weak or cyclic or others or tops
    first = _elect(chosen, items, world, is_cyclic=chosen is cyclic)
    first[0] = _join_same(first[0], tops)
    told = {fact for root in first for fact in root.facts}
    if not strong and any(item.sort is Sort.ORDER and item.fact not in told for item in tops):
        # Somebody ended the job, and nobody says why.
        first = [_doubt(root, Confidence.UNDECIDED, RootPart.UNDECIDED) for root in first]
    rest = sorted((item for item in tops if item.fact not in told), key=directness)
    also = [item for item in rest if item.is_real and not item.causes]
    warnings = [item for item in rest if not item.is_real or item.causes]
    roots = (
        *first,
        *_fold(also, RootPart.ALSO),
        *_fold(sorted([*warnings, *survived], key=directness), RootPart.WARNING),
    )
    broken = {who.rank for root in roots if root.part is not RootPart.WARNING for who in root.blamed}
    suffered = [item for item in items if item.sort in _SUFFERED or (item.sort is Sort.END and item.causes)]
    return Story(
        StoryEnd.FAILED if any(item.sort in _OWN | {Sort.LOSS, Sort.GONE, Sort.ORDER} for item in items)
        else StoryEnd.HANGS,
        roots,
        tuple(CauseEdge(cause.fact, item.fact, is_named) for item in items for cause, is_named in item.causes.items()),
        tuple(sorted({item.who.rank for item in suffered if item.who.rank is not None} - broken)),
        attempt,
    )  # fmt: skip


def _find_cycles(items: Sequence[Item], tops: Sequence[Item]) -> list[Item]:
    """Return facts that explain only each other, those of one kind for each cycle."""
    seen = set(tops)
    _visit(tops, seen)
    found: list[Item] = []
    for item in sorted(items, key=directness):
        if item not in seen and item.causes:
            reached = {item}
            _visit([item], reached)
            found += [other for other in sorted(reached - seen, key=directness) if other.is_like(item)]
            seen |= reached
    return found


def _visit(start: Iterable[Item], seen: set[Item]) -> None:
    left = list(start)
    while left:
        following = [effect for effect in left.pop().effects if effect not in seen]
        seen.update(following)
        left += following


def _is_strong(item: Item, finished: Sequence[Item]) -> bool:
    """Whether it can have broken the job, whatever else is known."""
    if item.sort in _OWN:
        return item.is_real
    if item.fact.confidence is Confidence.UNDECIDED or any(not end.who for end in finished):
        return False
    if item.sort is Sort.GONE and any(end.process == item.process for end in finished):
        return False  # it had no more need of the store
    is_reason = item.sort is Sort.HINT and bool(item.effects)
    return is_reason or item.sort in {Sort.ABSENT, Sort.LOSS, Sort.WAIT, Sort.GONE}


def _without_strangers(strong: list[Item]) -> list[Item]:
    """Return the candidates without kills of processes that nobody ties to the job, if a rank failed by itself.

    An exception of its own that nobody caught is no consequence of such a kill; what follows from the end of a data
    loader says so. If the kill came before it, it is likely at most.
    """
    own = [item for item in strong if item.kind is FactKind.RAISED and item.fact.said is Said.SELF and item.who]
    raised = [item for item in own if item.fact.confidence is not Confidence.UNDECIDED and not item.is_weak]
    strangers = [item for item in strong if is_strangers(item) and not item.is_named and not item.blamed]
    for item in raised:
        item.is_doubted |= any(sooner(stranger, item) for stranger in strangers)
    return [item for item in strong if item not in strangers] if raised else strong


def _elect(chosen: Sequence[Item], items: Sequence[Item], world: int | None, *, is_cyclic: bool) -> list[Root]:
    """Return the culprit, or the candidates."""
    earliest = _find_earliest(chosen)
    most = min(directness(item)[:DEPTH] for item in earliest)
    equals = [item for item in earliest if directness(item)[:DEPTH] == most]
    named = [item for item in equals if item.is_named] or equals
    best = reduce(
        lambda first, item: item if sooner(item, first) and not item.is_like(first) else first,
        sorted(named, key=directness),
    )
    rivals = [item for item in named if not item.is_like(best)]
    unordered = [item for item in rivals if not sooner(best, item)]
    like = [best, *(item for item in equals if item is not best and item.is_like(best))]
    root = _make_root(like, items, world)
    if is_cyclic:
        return [_doubt(root, Confidence.UNDECIDED, RootPart.UNDECIDED)]
    if not unordered:
        return [_doubt(root, Confidence.LIKELY) if rivals else root]
    are_sure = all(item.sort is Sort.BREAK and item.strength == 0 for item in (best, *unordered))
    confidence, part = (Confidence.LIKELY, RootPart.CULPRIT) if are_sure else (Confidence.UNDECIDED, RootPart.UNDECIDED)
    roots = [root, *(_make_root(group, items, world) for group in _group(unordered))]
    return [_doubt(other, confidence, part) for other in roots]


def _join_same(root: Root, tops: Sequence[Item]) -> Root:
    """Return the root with what raised the very same elsewhere: whose exit a launcher saw first tells nothing then."""
    best = root.fact
    if best.kind is not FactKind.RAISED or not best.told or len(root.blamed) != len(root.facts):
        return root
    same = [
        item for item in tops
        if not item.causes and item.fact not in root.facts
        and (item.kind, item.fact.told, item.fact.things) == (best.kind, best.told, best.things)
        and not replace(best.when, latest_s=(best.when.latest_s or 0.0) + AT_ONCE_S).is_before(item.when)
    ]  # fmt: skip
    return replace(
        root,
        facts=(*root.facts, *(item.fact for item in same)),
        blamed=tuple(dict.fromkeys((*root.blamed, *_people(same)))),
    )


def _find_earliest(items: Sequence[Item]) -> list[Item]:
    """Return those before which none of the others certainly was."""
    ended: dict[str, float] = {}
    for item in items:
        if item.when.clock and item.when.latest_s is not None:
            ended[item.when.clock] = min(ended.get(item.when.clock, item.when.latest_s), item.when.latest_s)
    return [
        item
        for item in items
        if item.when.earliest_s is None or item.when.earliest_s <= ended.get(item.when.clock, item.when.earliest_s)
    ]


def _doubt(root: Root, most: Confidence, part: RootPart | None = None) -> Root:
    """Return the root with no more than this confidence."""
    return replace(root, part=part or root.part, confidence=_at_most(most, root.confidence))


def _make_root(like: Sequence[Item], items: Sequence[Item], world: int | None) -> Root:
    """Return the root of equal facts, with who is to blame and how sure that is."""
    best = like[0]
    confidence, part = best.fact.confidence, RootPart.CULPRIT
    blamed = _people(like)
    if best.sort is Sort.END:  # nobody says why it ended; one of several may have followed from another
        is_abort = best.fact.signal == SIGABRT  # for a reason that it had told somewhere
        confidence = _at_most(Confidence.UNDECIDED if is_abort else Confidence.LIKELY, confidence)
        if len({item.process for item in like}) > 1:
            confidence, part = Confidence.UNDECIDED, RootPart.UNDECIDED
    elif best.sort is Sort.ABSENT:
        if not best.who:
            confidence = _at_most(Confidence.LIKELY, confidence)
    elif best.sort is Sort.LOSS:
        confidence, blamed = _LESS.get(confidence, confidence), _find_peers(like)
        if not any(who.rank is not None for who in blamed) and (silent := _find_silent(items, world)):
            blamed = silent
    elif best.sort is Sort.WAIT:
        waiting = [item for item in items if item.sort is Sort.WAIT and item.fact.group == best.fact.group]
        blamed, sureness = _find_absent(waiting, items, world)
        confidence = _at_most(sureness, confidence)
        part = RootPart.CULPRIT if blamed else RootPart.UNDECIDED
    elif best.sort is Sort.GONE:
        # If others waited there for all to join, it works, and nothing tells who did not reach it.
        is_reached = any(effect.sort is Sort.WAIT and effect.fact.seq is None for effect in best.effects)
        confidence, blamed = _at_most(Confidence.UNDECIDED if is_reached else Confidence.LIKELY, confidence), ()
    elif best.sort is Sort.ORDER:
        confidence, blamed = _LESS.get(confidence, confidence), ()
    elif best.kind is FactKind.LAUNCHER_KILL:  # it was stuck, perhaps because it waited for another one
        confidence = _at_most(Confidence.LIKELY, confidence)
    elif not best.who:  # only somebody's end without a reason tells whose it is
        confidence = _at_most(Confidence.LIKELY, confidence) if blamed else confidence
    if best.is_doubted:
        confidence = _at_most(Confidence.LIKELY, confidence)
    return Root(tuple(item.fact for item in like), part, confidence, blamed)


def _at_most(most: Confidence, confidence: Confidence) -> Confidence:
    return max(most, confidence, key=lambda sureness: sureness.doubt)


def _people(items: Iterable[Item]) -> tuple[Who, ...]:
    return tuple(dict.fromkeys(who for item in items for who in item.blamed or (item.who,) if who))


def _find_peers(losses: Sequence[Item]) -> tuple[Who, ...]:
    """Return the peers that most of them name; two that name each other are both blamed."""
    counts = Counter(item.fact.peer for item in losses if item.fact.peer)
    most = max(counts.values(), default=0)
    return tuple(peer for peer, count in counts.items() if count == most)


def _find_silent(items: Sequence[Item], world: int | None) -> tuple[Who, ...]:
    """Return the one rank that says nothing where all others say that they lost somebody, or waited."""
    suffered = {item.who.rank for item in items if item.sort in {Sort.LOSS, Sort.WAIT}} - {None}
    if world is None or world < FEW or len(suffered) != world - 1:
        return ()
    silent = set(range(world)) - suffered
    return tuple(next((item.who for item in items if item.who.rank == rank), Who(rank=rank)) for rank in silent)


def _find_absent(
    waiting: Sequence[Item], items: Sequence[Item], world: int | None
) -> tuple[tuple[Who, ...], Confidence]:
    """Return the ranks that did not come to where the others wait, and how sure that is."""
    ranks = (item.who.rank if item.who else item.fact.speaker.rank for item in items)
    heard = {rank for rank in ranks if rank is not None}
    known = range(min(world if world is not None else max(heard, default=-1) + 1, MAX_WORLD))
    group = waiting[0].fact.group
    has_all = group is None or group == "0" or "default" in group
    if not has_all:  # who belongs to it is not known
        waiting = [item for item in items if item.sort is Sort.WAIT]
    waiting = [item for item in waiting if item.fact.seq is not None] or waiting
    came = {item.who.rank for item in waiting}
    at_most = max(len(came) - 1, world is not None) if has_all else len(came) // 4
    came |= {item.who.rank for item in items if item.sort is Sort.LOSS}
    absent = [rank for rank in known if rank not in came]
    if not 0 < len(absent) <= at_most:
        return (), Confidence.UNDECIDED
    are_together = len({(item.fact.seq, item.fact.op) for item in waiting}) == 1 or len(absent) == 1
    people = {item.who.rank: item.who for item in items}
    blamed = tuple(people.get(rank, Who(rank=rank)) for rank in absent)
    return blamed, Confidence.LIKELY if are_together else Confidence.UNDECIDED


def _group(items: Iterable[Item]) -> list[list[Item]]:
    """Return equal facts of several processes together."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(item.likeness, []).append(item)
    return list(groups.values())


def _fold(items: Iterable[Item], part: RootPart) -> Iterable[Root]:
    for group in _group(items):
        yield Root(tuple(item.fact for item in group), part, group[0].fact.confidence, _people(group))
