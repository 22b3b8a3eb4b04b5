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

from allranks.facts.fact import FactKind, Said, Same, Who
from allranks.facts.item import FEW, Item, Sort, directness, is_outside
from allranks.facts.rules import is_soon, sooner
from allranks.facts.story import CauseEdge, Root, RootPart, Story, StoryEnd
from allranks.model.finding import Confidence

MAX_WORLD = 1 << 20
DEPTH = 3
"""Number of parts of directness that decide between two facts; what they are does not."""
_TOLD_THERE = frozenset((FactKind.ENDED, FactKind.RAISED))
"""srun tells them in the job's own file."""
_LESS = {Confidence.CERTAIN: Confidence.LIKELY, Confidence.LIKELY: Confidence.UNDECIDED}


def tell(items: Sequence[Item], survived: Sequence[Item], world: int | None) -> Story:
    """Return the story of an attempt, whose facts know what explains them.

    Args:
        items: all facts that nobody survived, in an order that depends on nothing but them.
        survived: the others.
        world: number of ranks, if known.
    """
    attempt = next((item.fact.attempt for item in (*items, *survived)), 0)
    suffered = [item for item in items if item.sort is not Sort.PROGRESS]
    tops = [item for item in suffered if not item.causes]
    finished = [item for item in items if item.kind is FactKind.FINISHED]
    ends = [item for item in items if item.sort is Sort.END]
    if all(item.fact.said is not Said.LAUNCHER for item in finished):  # the training was over, not yet the job
        ends += [item for item in items if item.sort in {Sort.ABSENT, Sort.WAIT}]
    if any(sooner(earlier, end) for end in ends for earlier in finished[:FEW]):
        finished = []  # who said so was not the last one
    strong = [item for item in tops if _is_strong(item, finished)]
    if not suffered or (finished and not strong):
        outcome = StoryEnd.FINISHED if finished else StoryEnd.NOTHING_KNOWN
        warnings = sorted([*tops, *survived], key=directness)
        return Story(outcome, tuple(_fold(warnings, RootPart.WARNING)), attempt=attempt)
    is_cyclic = not tops
    tops = tops or suffered  # they explain only each other
    weak = [item for item in tops if item.is_weak and not item.fact.is_overcome]
    others = [item for item in tops if item.sort is not Sort.ORDER]
    better = [item for item in others if not item.fact.is_overcome and (item.effects or item.sort is not Sort.HINT)]
    first = _elect(_without_strangers(strong) or weak or better or others or tops, items, world)
    first[0] = _join_same(first[0], tops)
    if all(item.kind is FactKind.SCHEDULER_END for item in strong):
        hung = [item for item in tops if item.may_hang and item not in strong]
        first += [_make_root(group, items, world) for group in _group(hung)]
        first = [_doubt(root, Confidence.UNDECIDED, RootPart.UNDECIDED) for root in first] if hung else first
    told = {fact for root in first for fact in root.facts}
    is_ordered = not strong and any(item.sort is Sort.ORDER and item.fact not in told for item in tops)
    if is_cyclic or is_ordered:  # somebody ended the job, and nobody says why
        first = [_doubt(root, Confidence.UNDECIDED, RootPart.UNDECIDED) for root in first]
    rest = sorted((item for item in tops if item.fact not in told), key=directness)
    also = [item for item in rest if item.is_real and not item.causes]
    warnings = sorted([*(item for item in rest if item not in also), *survived], key=directness)
    roots = (*first, *_fold(also, RootPart.ALSO), *_fold(warnings, RootPart.WARNING))
    broken = {who.rank for root in roots if root.part is not RootPart.WARNING for who in root.blamed}
    victims = {item.who.rank for item in suffered if item.sort >= Sort.LOSS or (item.sort is Sort.END and item.causes)}
    hangs = all(item.sort in {Sort.ABSENT, Sort.HINT, Sort.WAIT} for item in suffered)
    return Story(
        StoryEnd.HANGS if hangs else StoryEnd.FAILED,
        roots,
        tuple(CauseEdge(cause.fact, item.fact, is_named) for item in items for cause, is_named in item.causes.items()),
        tuple(sorted(rank for rank in victims - broken if rank is not None)),
        attempt,
    )


def _is_strong(item: Item, finished: Sequence[Item]) -> bool:
    """Whether it can have broken the job, whatever else is known."""
    if item.sort <= Sort.END:
        return item.is_real
    is_over = any(not end.who for end in finished)  # what a job that has finished loses does not matter
    is_reason = bool(item.effects) if item.sort is Sort.HINT else item.sort is not Sort.ORDER
    return is_reason and not is_over and item.fact.confidence is not Confidence.UNDECIDED


def _without_strangers(strong: list[Item]) -> list[Item]:
    """Return the candidates without ends and faults that nothing ties to the job, if a rank failed by itself.

    An exception of its own that nobody caught is no consequence of them; what follows from the end of a data loader
    says so. But a fault that stands in the log of who failed may be why.
    """
    own = [item for item in strong if item.sort is Sort.BREAK and item.kind is not FactKind.SCHEDULER_END]
    own = [item for item in own if item.fact.confidence is Confidence.CERTAIN and not is_outside(item)]
    files = {item.place.source for item in own} - {""}
    strangers = [
        item
        for item in strong
        if item.kind is FactKind.ENDED or (item.kind is FactKind.DEVICE_FAULT and item.place.source not in files)
    ]
    is_awaited = any(item.sort is Sort.ABSENT and item.effects for item in strong)  # by the others
    raised = (effect for item in strangers for effect in item.effects if effect.kind is FactKind.RAISED)
    is_known = is_awaited or any(any(effect.causes.values()) for effect in raised)  # one that names the process
    apart = [item for item in strangers if _is_apart(item) and (own or (is_known and not item.effects))]
    return [item for item in strong if item not in apart]


def _elect(chosen: Sequence[Item], items: Sequence[Item], world: int | None) -> list[Root]:
    """Return the culprit, or the candidates."""
    earliest = _find_earliest(chosen)
    most = min(directness(item)[:DEPTH] for item in earliest)
    equals = [item for item in earliest if directness(item)[:DEPTH] == most]
    best = reduce(
        lambda first, item: item if sooner(item, first) and not item.is_like(first) else first,
        sorted(equals, key=lambda item: (item.is_doubted, directness(item))),
    )
    rivals = [item for item in equals if not item.is_like(best)]
    unordered = [item for item in rivals if not sooner(best, item)]
    same = [item for item in equals if item.is_like(best) and item.is_doubted <= best.is_doubted]
    like = [best, *(item for item in same if item is not best)]
    root = _make_root(like, items, world)
    if not unordered:
        return [_doubt(root, Confidence.LIKELY) if rivals else root]
    are_sure = all(item.strength == 0 for item in (best, *unordered))
    confidence, part = (Confidence.LIKELY, RootPart.CULPRIT) if are_sure else (Confidence.UNDECIDED, RootPart.UNDECIDED)
    roots = [root, *(_make_root(group, items, world) for group in _group(unordered))]
    return [_doubt(other, confidence, part) for other in roots]


def _join_same(root: Root, tops: Sequence[Item]) -> Root:
    """Return the root with what raised the very same elsewhere: whose exit a launcher saw first tells nothing then."""
    best = root.fact
    if best.kind is not FactKind.RAISED or not best.told:
        return root
    same = [
        item for item in tops
        if item.fact not in root.facts
        and (item.kind, item.fact.told, item.fact.things) == (best.kind, best.told, best.things)
    ]  # fmt: skip
    facts = (*root.facts, *(item.fact for item in same))
    return replace(root, facts=facts, blamed=tuple(dict.fromkeys((*root.blamed, *_people(same)))))


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
    return replace(root, part=part or root.part, confidence=root.confidence.at_most(most))


def _make_root(like: Sequence[Item], items: Sequence[Item], world: int | None) -> Root:
    """Return the root of equal facts, with who is to blame and how sure that is."""
    best = like[0]
    most, part, blamed = Confidence.CERTAIN, RootPart.CULPRIT, _people(like)
    if best.sort is Sort.END:  # nobody says why it ended; one of several may have followed from another
        is_abort = best.fact.signal == SIGABRT  # for a reason that it had told somewhere
        most = Confidence.UNDECIDED if is_abort else Confidence.LIKELY
        if len({item.process for item in like}) > 1:
            most, part = Confidence.UNDECIDED, RootPart.UNDECIDED
    elif best.sort is Sort.LOSS:
        most = _LESS.get(best.fact.confidence, Confidence.UNDECIDED)
        blamed = _find_silent(items, world, least=FEW) or _find_peers(like)
    elif best.sort is Sort.WAIT:
        blamed, most = _find_absent(best.fact.group, items, world)
        part = RootPart.CULPRIT if blamed else RootPart.UNDECIDED
    elif best.sort in {Sort.GONE, Sort.ORDER}:
        most, blamed = Confidence.LIKELY, ()
    if best.kind is FactKind.ENDED and not blamed:  # its launcher names nobody: who did not lose it
        blamed = _find_silent(items, world, least=2)
    # Who was stuck may have waited for another one; if it has no name, only somebody's end tells whose it is.
    is_unsure = best.kind is FactKind.LAUNCHER_KILL or (not best.who and (blamed or best.sort is Sort.ABSENT))
    files = {item.place.source for item in items if not is_outside(item)}
    is_told_there = best.kind in _TOLD_THERE or best.place.source in files
    is_elsewhere = best.fact.said is Said.KERNEL or not is_told_there
    if best.is_doubted or is_unsure or (is_elsewhere and all(map(_is_apart, like))):
        most = most.at_most(Confidence.UNDECIDED if best.is_doubted and best.fact.is_caught else Confidence.LIKELY)
    return Root(tuple(item.fact for item in like), part, best.fact.confidence.at_most(most), blamed)


def _is_apart(item: Item) -> bool:
    """Whether it is told from outside, and nothing ties it to the job: no name, and nobody who soon failed by it."""
    named = [effect for effect in item.effects if effect.causes[item] and not is_outside(effect)]
    own = [effect for effect in named if effect.who.compare(item.who) is not Same.NO]
    return is_outside(item) and not item.fact.is_of_job and not any(is_soon(item, effect) for effect in own)


def _people(items: Iterable[Item]) -> tuple[Who, ...]:
    return tuple(dict.fromkeys(who for item in items for who in item.blamed or (item.who,) if who))


def _find_peers(losses: Sequence[Item]) -> tuple[Who, ...]:
    """Return the peers that most of them name; two that name each other are both blamed."""
    counts = Counter(item.fact.peer for item in losses if item.fact.peer)
    most = max(counts.values(), default=0)
    return tuple(peer for peer, count in counts.items() if count == most)


def _find_silent(items: Sequence[Item], world: int | None, *, least: int) -> tuple[Who, ...]:
    """Return the one rank that says nothing where all others, of `least` ranks or more, lost somebody or waited."""
    suffered = {item.who.rank for item in items if item.sort in {Sort.LOSS, Sort.WAIT}}
    silent = _find_others(suffered, items, world)
    return silent if len(silent) == 1 and world is not None and world >= least else ()


def _find_absent(group: str | None, items: Sequence[Item], world: int | None) -> tuple[tuple[Who, ...], Confidence]:
    """Return the ranks that did not come to where the others wait, and how sure that is."""
    waiting = [item for item in items if item.sort is Sort.WAIT and item.fact.group == group]
    came = {item.who.rank for item in waiting}
    absent = _find_others(came | {item.who.rank for item in items if item.sort is Sort.LOSS}, items, world)
    if not 0 < len(absent) <= max(len(came) - 1, world is not None):
        return (), Confidence.UNDECIDED
    are_together = len({(item.fact.seq, item.fact.op) for item in waiting}) == 1 or len(absent) == 1
    groups = {item.fact.group or "0" for item in items if item.sort is Sort.WAIT}  # of others nobody knows the members
    has_all = all(name == "0" or "default" in name for name in groups)
    return absent, Confidence.LIKELY if are_together and has_all else Confidence.UNDECIDED


def _find_others(ranks: set[int | None], items: Sequence[Item], world: int | None) -> tuple[Who, ...]:
    """Return the other ranks of the job, as far as they are known."""
    people = {item.who.rank: item.who for item in reversed(items) if item.who.rank is not None}
    known = range(min(world if world is not None else max(people, default=-1) + 1, MAX_WORLD))
    return tuple(people.get(rank, Who(rank=rank)) for rank in known if rank not in ranks)


def _group(items: Iterable[Item]) -> list[list[Item]]:
    """Return equal facts of several processes together."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(item.likeness, []).append(item)
    return list(groups.values())


def _fold(items: Iterable[Item], part: RootPart) -> Iterable[Root]:
    for group in _group(items):
        yield Root(tuple(item.fact for item in group), part, group[0].fact.confidence, _people(group))
