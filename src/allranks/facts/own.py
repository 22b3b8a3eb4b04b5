"""How does a process explain itself? By what it reported before; one fact of a sort at most is left over. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from signal import SIGKILL

from allranks.facts.fact import START, FactKind, When
from allranks.facts.item import Item, Sort
from allranks.facts.rules import not_later, sooner
from allranks.model.finding import Confidence

DEFAULT_GROUP = "0"
"""Of lines that name no group."""


@dataclass(frozen=True, eq=False)
class _Own:
    """What stands for the facts of one process: of each sort, the first."""

    broke: Item | None
    """What it raised explains how it ended, unless it only says that something failed."""
    lost: Item | None
    order: Item | None
    away: Item | None
    """It did not come to the start of the job."""
    end: Item | None

    @cached_property
    def is_lost_first(self) -> bool:
        """Whether it broke after it had lost somebody."""
        return self.lost is not None and self.broke is not None and sooner(self.lost, self.broke)

    def list_reasons(self, item: Item) -> tuple[Item | None, ...]:
        """Return what may explain one of its facts, the best first."""
        broke, lost = self.broke, self.lost
        match item.sort:
            case Sort.BREAK:
                return (broke,)
            case Sort.END:
                return broke, lost, self.order, self.away, self.end
            case Sort.ABSENT:
                return broke, lost if lost is not None and _is_elsewhere(item, lost) else None
            case Sort.ORDER:
                return broke, self.order
            case Sort.LOSS | Sort.WAIT | Sort.GONE:
                return (lost, broke) if self.is_lost_first else (broke, lost)
        return ()


def explain_process(items: Sequence[Item]) -> None:
    """Explain the facts of one process by each other: by the first of each sort that stands for the others."""
    own = _read(items)
    if own.broke is not None and own.end is not None:
        date(own.broke, own.end)
    if own.broke is not None and own.broke.fact.is_generic and own.is_lost_first:  # perhaps in words of its own
        own.broke.is_doubted = True
    for item in items:
        for reason in own.list_reasons(item):
            if reason is not None and not_later(reason, item) and not _is_no_reason(reason, item):
                reason.explain(item, is_named=True)
                break


def _read(items: Sequence[Item]) -> _Own:
    by_sort: defaultdict[Sort, list[Item]] = defaultdict(list)
    for item in items:
        by_sort[item.sort].append(item)
    away = [item for item in by_sort[Sort.ABSENT] if item.fact.seq == START]
    return _Own(
        broke=_first([item for item in by_sort[Sort.BREAK] if not item.fact.is_overcome], lambda item: item.strength),
        lost=_first_lost(by_sort),
        order=_first(by_sort[Sort.ORDER]),
        away=_first(away),
        end=_first(by_sort[Sort.END]),
    )


def _is_no_reason(reason: Item, effect: Item) -> bool:
    """Whether it is an exception, and the effect a SIGKILL: none sends one."""
    return effect.sort is Sort.END and effect.fact.signal == SIGKILL and reason.kind is FactKind.RAISED


def date(broke: Item, end: Item) -> None:
    """Give what broke what was seen of its process's end: that it was the first, and the time if it has none."""
    broke.is_first |= end.is_first
    if end.fact.signal is None:  # it ended with an exit code, as after an exception
        broke.is_real, broke.is_weak = not broke.is_doubted, broke.is_doubted
    if not broke.when.clock:
        broke.when, broke.seen = When(None, end.when.latest_s, end.when.clock), end.when


def _first_lost(by_sort: defaultdict[Sort, list[Item]]) -> Item | None:
    """Return the first that it lost, or waited for."""
    suffered = [item for sort in (Sort.LOSS, Sort.WAIT, Sort.GONE) for item in by_sort[sort]]
    return _first(suffered, _is_vague)


def _is_vague(item: Item) -> bool:
    """Whether it tells less than another loss of its process would."""
    if item.sort is Sort.LOSS:
        return not item.fact.peer
    return item.sort is Sort.GONE and item.fact.confidence is Confidence.UNDECIDED


def _first(items: Sequence[Item], key: Callable[[Item], int] = lambda _: 0) -> Item | None:
    """Return the earliest of those with the lowest key, None of none."""
    first: Item | None = None
    for item in items:
        if first is None or key(item) < key(first) or (key(item) == key(first) and sooner(item, first)):
            first = item
    return first


def _is_elsewhere(absent: Item, lost: Item) -> bool:
    """Whether it may be missing because of what it lost or waited for: not where it waits itself."""
    is_same_group = (absent.fact.group or DEFAULT_GROUP) == (lost.fact.group or DEFAULT_GROUP)
    is_behind = is_same_group and lost.fact.seq is not None and lost.fact.seq <= (absent.fact.seq or -1)
    return absent.fact.group != lost.fact.group and not is_behind
