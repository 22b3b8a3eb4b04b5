"""The solver's own view of one fact: what sort of thing it is, of which process, and what explains it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, SIGTRAP, SIGXCPU, SIGXFSZ

from allranks.facts.fact import Fact, FactKind, Place, Said, When, Who
from allranks.model.finding import Confidence


class Sort(IntEnum):
    """What a fact can be in the story, the most direct first."""

    BREAK = 1
    """Something broke by itself, or somebody decided it."""
    END = 2
    """A process ended, and the fact does not say why: an exit code, SIGABRT, a SIGKILL that nobody claims."""
    ABSENT = 3
    """Others wait for it: it never came, or is behind."""
    HINT = 4
    """It may explain what was lost: a link, a setting."""
    LOSS = 5
    WAIT = 6
    GONE = 7
    """The store or the rendezvous is."""
    ORDER = 8
    """Another one's failure ended it: SIGTERM, a launcher's cleanup."""
    PROGRESS = 9


_SORTS = {
    FactKind.RAISED: Sort.BREAK,
    FactKind.DEVICE_FAULT: Sort.BREAK,
    FactKind.NODE_LOST: Sort.BREAK,
    FactKind.SCHEDULER_END: Sort.BREAK,
    FactKind.MISSING: Sort.ABSENT,
    FactKind.LINK_FAULT: Sort.HINT,
    FactKind.SETTING: Sort.HINT,
    FactKind.PEER_LOST: Sort.LOSS,
    FactKind.WAITED: Sort.WAIT,
    FactKind.STORE_GONE: Sort.GONE,
}
_CRASHES = frozenset((SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGXCPU, SIGXFSZ))
_STRENGTHS = {Confidence.CERTAIN: 0, Confidence.LIKELY: 1, Confidence.UNDECIDED: 3}
SUFFERED = frozenset((Sort.LOSS, Sort.WAIT, Sort.GONE))
GENERIC = 2


def sort_of(fact: Fact) -> Sort:
    """Return what this fact can be."""
    if fact.kind is FactKind.LAUNCHER_KILL:
        return Sort.BREAK if fact.cause else Sort.ORDER
    if fact.kind is not FactKind.ENDED:
        return _SORTS.get(fact.kind, Sort.PROGRESS)
    signal = fact.signal
    if signal is None and fact.code is None:
        return Sort.BREAK if is_claimed(fact) else Sort.END
    if signal is None:
        return Sort.PROGRESS if fact.code == 0 else Sort.END
    if signal in _CRASHES or (signal == SIGKILL and is_claimed(fact)):
        return Sort.BREAK
    return Sort.END if signal in {SIGKILL, SIGABRT} or fact.is_first_observed else Sort.ORDER


def is_claimed(fact: Fact) -> bool:
    """Whether who sent a SIGKILL says so: the kernel, or the scheduler for a reason that it gives."""
    return fact.said is Said.KERNEL or (fact.said is Said.SCHEDULER and not fact.alternatives)


def is_outside(item: Item) -> bool:
    """Whether a kernel or the scheduler tells it of a machine, or of a process that nobody knows as the job's."""
    is_told = item.fact.said in {Said.KERNEL, Said.SCHEDULER} and item.kind is not FactKind.SCHEDULER_END
    return is_told and (item.who.rank, item.who.local_rank) == (None, None)


def is_start(item: Item) -> bool:
    """Whether a launcher or the scheduler tells that it could not start a process, as far as it knows."""
    is_told = item.kind is FactKind.RAISED and item.fact.said in {Said.LAUNCHER, Said.SCHEDULER}
    return is_told and item.fact.confidence is not Confidence.CERTAIN


@dataclass(slots=True, eq=False)
class Item:
    """A fact, while its story is looked for."""

    fact: Fact
    index: int
    """Its place in an order that depends on nothing but the facts."""
    process: Hashable
    sort: Sort
    when: When
    """Of its fact; if that has none, all the time until its process was seen to end."""
    seen: When
    """Of its fact, or when its process was seen to end."""
    is_first: bool
    """Its launcher saw it before the others."""
    causes: dict[Item, bool] = field(default_factory=dict)
    """What explains it; True: by name."""
    effects: list[Item] = field(default_factory=list)
    blamed: tuple[Who, ...] = ()
    is_doubted: bool = False
    """Perhaps the job survived it."""
    is_weak: bool = False
    """A line that usually means a failure, of a process that nobody saw end: it counts if nothing better is known."""

    may_hang: bool = False
    """Perhaps the job hung by it, until somebody ended the job."""

    who: Who = field(init=False)
    kind: FactKind = field(init=False)
    place: Place = field(init=False)
    """The first line that states it."""
    strength: int = field(init=False)
    """How sure it is of itself: 0 certain, 1 likely, 2 something failed, 3 undecided."""
    is_real: bool = field(init=False)
    """Whether something certainly broke here, whatever it was."""

    def __post_init__(self) -> None:
        fact = self.fact
        self.who, self.kind = fact.who, fact.kind
        self.place = fact.place
        doubt = _STRENGTHS[fact.confidence]
        if self.sort is Sort.END:
            doubt = GENERIC
        elif fact.is_fatal:
            doubt = min(doubt, GENERIC)
        self.strength = max(doubt, GENERIC) if fact.is_generic else doubt
        self.is_real = self.sort <= Sort.END and self.strength < _STRENGTHS[Confidence.UNDECIDED]

    @property
    def likeness(self) -> tuple[object, ...]:
        """The same for facts that differ only in whose they are, and when."""
        return self.fact.kind, self.fact.cause, self.fact.signal, self.fact.code, self.sort

    def is_like(self, other: Item) -> bool:
        """Whether both state the same, of two processes."""
        return self.likeness == other.likeness

    def explain(self, effect: Item, *, is_named: bool) -> None:
        """Make it a cause of the effect."""
        if effect is not self and self not in effect.causes:
            effect.causes[self] = is_named
            self.effects.append(effect)


def make_items(facts: Sequence[Fact]) -> list[Item]:
    """Return the facts in an order that depends on nothing but them, each with its process.

    After identity, one process has one `Who`. What is left: a local rank is that of its file, where each node has such
    a one, and an unknown writer is that of its file.
    """
    by_place: dict[tuple[object, ...], list[Fact]] = {}
    for fact in facts:
        rank = float("inf") if fact.who.rank is None else fact.who.rank
        by_place.setdefault((fact.kind, rank, *fact.place.at), []).append(fact)
    places = [by_place[key] for key in sorted(by_place)]
    ordered = [fact for here in places for fact in (sorted(here, key=repr) if len(here) > 1 else here)]
    items = []
    for index, fact in enumerate(ordered):
        is_writers = fact.said is Said.SELF and fact.places  # of the unknown writer of its file
        process = _name(fact.who) if fact.who else ("writer", fact.place.source if is_writers else index)
        if fact.who.is_node and fact.said is Said.KERNEL:  # what it tells is of no process there that writes
            process = "kernel", fact.who
        if isinstance(process, Who) and process.local_rank is not None and process.pid is None and fact.places:
            process = process.local_rank, fact.place.source
        items.append(Item(fact, index, process, sort_of(fact), fact.when, fact.when, fact.is_first_observed))
    return items


def _name(who: Who) -> Hashable:
    return who if who.rank is None else ("rank", who.rank)


def directness(item: Item) -> tuple[object, ...]:
    """Return how directly it tells of a failure, as a key: the lower, the better; the last part only breaks ties."""
    return not item.is_real, not item.is_first, item.strength, item.sort, item.fact.said, item.index


Rule = Callable[[Item, Item], bool]
"""Whether the first may explain the second."""
FEW = 3
"""One process has at most two facts of one sort that nothing of its own explains."""


class Pool:
    """Reasons of one sort. Finds one for an effect without trying all: the best, the earliest, those of its file."""

    def __init__(self, items: Iterable[Item]) -> None:
        ordered = sorted(items, key=lambda item: item.index)
        self._best = sorted(ordered, key=directness)
        self._clocks: defaultdict[str, list[Item]] = defaultdict(list)
        self._sources: defaultdict[str, list[Item]] = defaultdict(list)
        for item in sorted(ordered, key=lambda item: item.when.earliest_s or 0.0):
            self._clocks[item.when.clock].append(item)
        for item in sorted(ordered, key=lambda item: item.place.line):
            self._sources[item.place.source].append(item)

    def find(self, effect: Item, rule: Rule) -> Item | None:
        """Return the best reason of another process."""
        on_clock, in_file = self._clocks.get(effect.when.clock, ()), self._sources.get(effect.place.source, ())
        tried = (*self._best[: 2 * FEW], *on_clock[:FEW], *in_file[:FEW])
        return next((item for item in tried if item.process != effect.process and rule(item, effect)), None)
