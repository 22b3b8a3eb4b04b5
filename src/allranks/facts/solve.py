"""Who broke a job? Walks from how it ended back to what nothing explains. Pure; reads kinds of facts, never causes.

    story = solve(facts, world=8)
    story.roots[0]          what broke first, who is to be named, and how sure that is

One attempt at a time: the last one that tells of an end, or of steps. In an attempt:

1. What a process survived is a warning (survived.py).
2. A process explains itself: what it raised explains its exit code, its first wait what it reports later (own.py).
3. Between processes, an edge is named (the loss names that peer, the wait is in that group) or possible. Named ones
   come first. Nothing is explained by what certainly came later.
4. Facts that nothing explains are roots (elect.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from signal import SIGKILL

from msgspec.structs import replace

from allranks.facts import rules
from allranks.facts.elect import tell
from allranks.facts.fact import Fact, FactKind, Said
from allranks.facts.item import (
    FEW,
    SUFFERED,
    Item,
    Pool,
    Rule,
    Sort,
    directness,
    is_outside,
    is_start,
    make_items,
)
from allranks.facts.own import date, explain_process
from allranks.facts.rules import not_later, sooner
from allranks.facts.story import Story, StoryEnd
from allranks.facts.survived import GOES_ON_S, find_survived
from allranks.model.finding import Confidence

_ANY = "any group"


def solve(facts: Sequence[Fact], *, world: int | None = None) -> Story:
    """Return what happened in the last attempt that tells of an end, or of steps.

    Args:
        facts: of all attempts, in any order, after identity: one process is described by one `Who`.
        world: number of ranks, if known.
    """
    by_attempt: defaultdict[int, list[Fact]] = defaultdict(list)
    for fact in dict.fromkeys(facts):
        by_attempt[fact.attempt].append(fact)
    story = Story(StoryEnd.NOTHING_KNOWN)
    for attempt in sorted(by_attempt, reverse=True):
        told = _solve_attempt(by_attempt[attempt], world)
        above = {fact.place.source for fact in facts if fact.attempt < attempt and fact.places}
        steps = (fact for fact in by_attempt[attempt] if fact.kind is FactKind.STEP)
        makes_steps = any(fact.place.source in above for fact in steps)  # other files may not tell attempts
        if told.outcome is not StoryEnd.NOTHING_KNOWN or makes_steps:
            return told
        story = story if story.roots else told
    return story


def _solve_attempt(facts: Sequence[Fact], world: int | None) -> Story:
    items = make_items(facts)
    survived = find_survived(items)
    alive = [item for item in items if item not in survived]
    by_process: defaultdict[Hashable, list[Item]] = defaultdict(list)
    for item in alive:
        by_process[item.process].append(item)
    for own in by_process.values():
        explain_process(own)
    _Between(alive, by_process).explain()
    return tell(alive, [item for item in items if item in survived], world)


class _Between:
    """Explains facts by those of other processes, the most direct sort of reasons first."""

    def __init__(self, items: Sequence[Item], by_process: dict[Hashable, list[Item]]) -> None:
        self._items = items
        self._by_process = by_process
        self._on_machine: defaultdict[str | None, list[Item]] = defaultdict(list)
        for item in sorted(items, key=directness):
            for machine in {item.who.node, item.who.pod, item.who.address} - {None}:
                self._on_machine[machine].append(item)
        steps = sorted(
            (item.when for item in items if item.kind is FactKind.STEP), key=lambda when: when.earliest_s or 0.0
        )
        self._last_steps = {when.clock: when for when in steps}
        self._in_group: defaultdict[str | None, list[Item]] = defaultdict(list)
        for item in self._of(Sort.ABSENT, Sort.BREAK):
            if item.kind is FactKind.MISSING or item.fact.group is not None:
                self._in_group[item.fact.group].append(item)
            if item.fact.group is not None:
                self._in_group[_ANY].append(item)

    def explain(self) -> None:
        """Explain all facts that others explain."""
        scheduled = Pool(item for item in self._of(Sort.BREAK) if _is_schedulers(item))
        self._breaks(scheduled)
        self._ends()
        broken = Pool(item for item in self._open(Sort.BREAK, Sort.END) if item.is_real)
        hints = Pool(self._of(Sort.HINT))
        silent = Pool(item for item in self._of(Sort.HINT) if self._is_of_silent_node(item))
        unsure = [item for item in self._open(Sort.BREAK) if not item.is_real and _is_sure(item)]
        weak = Pool(item for item in unsure if not (is_start(item) and self._has_started(item)))
        starts = (item for item in unsure if is_start(item) and item.fact.said is Said.LAUNCHER)
        unstarted = Pool(item for item in starts if not self._has_started(item))
        for item in self._open(Sort.ABSENT):
            if self._by_machine(item) or self._possibly(
                item, (broken, rules.may_keep_away), (silent, self._may_cut_off)
            ):
                continue
            if (start := unstarted.find(item, rules.may_keep_away)) is not None:
                start.explain(item, is_named=False)
                if not start.who:
                    told = (other.who for other in self._by_process[item.process])
                    start.blamed = (*start.blamed, reduce(or_, told, item.who))
        absent, losses, waits = (Pool(self._of(sort)) for sort in (Sort.ABSENT, Sort.LOSS, Sort.WAIT))
        for item in self._of(*SUFFERED, Sort.ORDER):
            if self._possibly(item, (scheduled, sooner)) or self._by_peer(item) or self._by_group(item) or item.causes:
                continue
            if self._by_machine(item) or self._possibly(
                item, (broken, not_later), (absent, not_later), (weak, not_later), (hints, rules.may_prevent),
                (losses, rules.lost_before), (waits, rules.lost_before),
            ):  # fmt: skip
                continue
            if (other := broken.find(item, rules.by_another_clock)) is not None:
                other.explain(item, is_named=False)
                other.is_doubted = True

    def _of(self, *sorts: Sort) -> list[Item]:
        return [item for item in self._items if item.sort in sorts]

    def _open(self, *sorts: Sort) -> list[Item]:
        return [item for item in self._of(*sorts) if not item.causes]

    def _possibly(self, effect: Item, *pools: tuple[Pool, Rule]) -> bool:
        for pool, rule in pools:
            if (reason := pool.find(effect, rule)) is not None:
                reason.explain(effect, is_named=False)
                return True
        return False

    def _breaks(self, scheduled: Pool) -> None:
        """Explain what looks like a break of its own: by its GPU, by the scheduler, or by who knows better."""
        breaks = self._open(Sort.BREAK)
        own = Pool(item for item in breaks if item.kind is not FactKind.SCHEDULER_END and item.is_real)
        ends = Pool(item for item in self._open(Sort.END) if item.is_real)
        suffered = Pool(self._of(Sort.LOSS, Sort.WAIT))
        for item in breaks:
            if item.kind is FactKind.SCHEDULER_END:  # somebody ended a job that had failed, or hung
                is_first = not self._possibly(item, (own, sooner), (ends, sooner), (suffered, rules.suffered_before))
                item.is_doubted |= is_first and own.find(item, rules.not_after) is not None
                for reason in item.causes:
                    reason.is_doubted |= 0.0 < item.when.after_s(reason.when) <= rules.MONITOR_S  # clocks differ
            elif self._by_machine(item) or self._possibly(item, (scheduled, sooner)):
                continue
            elif item.kind is FactKind.ENDED and item.fact.signal != SIGKILL:
                crash = own.find(item, rules.may_be_its_own)
                if crash is not None and (crash.who.is_node or is_outside(item)):  # one crash, told twice
                    crash.explain(item, is_named=False)
                    crash.blamed = crash.blamed or (crash.who if is_outside(item) else item.who,)
                else:
                    self._possibly(item, (suffered, rules.may_crash_it))
            elif item.fact.things and (killed := own.find(item, rules.is_its_child)) is not None:
                killed.explain(item, is_named=True)
                killed.blamed = (replace(item.who, pid=None),) if item.who else ()
            elif (why := own.find(item, rules.keeps_from_starting)) is not None:
                why.explain(item, is_named=False)
                why.blamed = why.blamed or (item.who,) if item.who else ()
            elif item.kind is FactKind.LAUNCHER_KILL or item.fact.said is Said.INFERRED:
                self._possibly(item, (own, not_later))
            elif not item.who:
                self._possibly(item, (own, rules.is_same_told))

    def _ends(self) -> None:
        """Explain ends without a reason: exit codes, SIGABRT, SIGKILL that nobody claims."""
        ends = self._open(Sort.END)
        broken = Pool(item for item in self._open(Sort.BREAK) if item.is_real)
        words = Pool(item for item in self._open(Sort.BREAK) if not (item.is_doubted or item.fact.is_overcome))
        lost = Pool(self._of(*SUFFERED))
        first = Pool(ends)

        def is_repeated(told: Item) -> bool:  # by several processes, perhaps
            same = [item for item in self._of(told.sort) if item.is_like(told) and item.fact.told == told.fact.told]
            if told.fact.said is Said.LAUNCHER:  # which may tell of one failure in several lines
                same = [item for item in same if item.place.text == told.place.text]
            return len(same) > 1

        for item in sorted(ends, key=lambda end: (not end.is_first, end.when.clock, end.when.earliest_s or 0.0)):
            if self._by_machine(item):
                continue
            if (own := words.find(item, rules.may_be_its_own)) is not None:
                if own.fact.said is Said.LAUNCHER and (gone := self._find_lost_since(own, item)):
                    gone.explain(item, is_named=False)
                    continue
                is_taken = own.is_first and bool(own.blamed) and not is_repeated(own)
                own.explain(item, is_named=False)
                date(own, item)
                if not is_taken and (not own.who or (own.who.is_node and item.is_first)):
                    own.blamed = (*own.blamed, item.who)  # it names no process, but its end is known
                continue
            there = [*self._on_machine.get(item.who.node, ()), *self._on_machine.get(item.who.pod, ())]
            child = next((reason for reason in there[: 4 * FEW] if rules.may_be_its_parent(reason, item)), None)
            if child is not None:
                child.explain(item, is_named=False)
                child.blamed, child.is_doubted = (item.who,), True
                continue
            self._possibly(item, (broken, rules.ends_others), (first, rules.ends_others), (lost, rules.may_end_it))

    def _has_started(self, start: Item) -> bool:
        """Whether a process wrote something on the machine where one could not start, as a launcher tells."""
        return any(item.fact.said is Said.SELF and item.who.is_process for item in self._on_machine[start.who.node])

    def _find_lost_since(self, start: Item, end: Item) -> Item | None:
        """Return what was lost between a failed start, of one process or several, and the end of another process."""
        lost = (item for item in self._of(*SUFFERED) if sooner(start, item) and sooner(item, end))
        return next((item for item in lost if rules.may_end_it(item, end)), None)

    def _is_of_silent_node(self, item: Item) -> bool:
        """Whether a node whose ranks nobody knows had a network fault: they may be those that did not come."""
        is_fault = item.kind is FactKind.LINK_FAULT and item.who.node is not None and _is_sure(item)
        return is_fault and all(other.who.rank is None for other in self._on_machine[item.who.node])

    def _by_machine(self, effect: Item) -> bool:
        """Explain it by what happened to its machine."""
        for machine in (effect.who.node, effect.who.pod, effect.who.address):
            for reason in self._on_machine.get(machine, ())[: 4 * FEW]:
                is_cut_off = reason.kind is FactKind.LINK_FAULT and effect.sort is Sort.ABSENT
                is_before = self._may_cut_off(reason, effect) if is_cut_off else not_later(reason, effect)
                if is_before and rules.strikes(reason, effect):
                    reason.explain(effect, is_named=True)
                    reason.is_doubted |= is_cut_off and effect.when.latest_s is None  # perhaps it broke later
                    return True
        return False

    def _by_peer(self, effect: Item) -> bool:
        """Explain it by the end of a peer that it names, or that its process names elsewhere."""
        told = [item.fact.peer for item in (effect, *self._by_process[effect.process]) if item.fact.peer]
        for peer in dict.fromkeys(told):
            near = [self._on_machine.get(machine, ())[: 4 * FEW] for machine in (peer.node, peer.pod, peer.address)]
            own = sorted(self._by_process.get(("rank", peer.rank), ()), key=directness)
            for reason in chain(own, *near):
                if rules.is_reason(reason) and rules.named_before(reason, effect) and reason.process != effect.process:
                    reason.explain(effect, is_named=True)
                    return True
        return False

    def _by_group(self, effect: Item) -> bool:
        """Explain a wait by who is missing in its group, or called something else there."""
        if effect.sort is not Sort.WAIT:
            return False
        groups = (effect.fact.group, None) if effect.fact.group is not None else (None, _ANY)
        reasons = [item for group in groups for item in self._in_group.get(group, ())[: 4 * FEW]]
        for reason in [item for item in reasons if not_later(item, effect)][:FEW]:
            reason.explain(effect, is_named=True)
        return bool(effect.causes)

    def _may_cut_off(self, link: Item, absent: Item) -> bool:
        """Whether a network fault may keep a rank away: soon before it did not come, and no step was made since."""
        step = self._last_steps.get(link.when.clock)
        went_on = step is not None and step.after_s(link.when) > GOES_ON_S
        return not_later(link, absent) and rules.is_soon(link, absent) and not went_on


def _is_sure(item: Item) -> bool:
    return item.fact.confidence is not Confidence.UNDECIDED


def _is_schedulers(item: Item) -> bool:
    """Whether the scheduler ended the job of its own accord; what it says less surely may follow from an exit code."""
    return item.kind is FactKind.SCHEDULER_END and item.is_real
