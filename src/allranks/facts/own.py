"""How does a process explain itself? By what it reported before; one fact of a sort at most is left over. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from signal import SIGABRT, SIGKILL

from allranks.facts.fact import START, FactKind, Same, When
from allranks.facts.item import FEW, Item, Sort
from allranks.facts.rules import OF_AN_EXCEPTION, not_later, sooner
from allranks.model.finding import Confidence

DEFAULT_GROUP = "0"
"""Of lines that name no group."""


@dataclass(frozen=True, slots=True)
class _Own:
    """The facts of one process that stand for those of their sort."""

    broke: Item | None
    """What it raised explains how it ended, unless it only says that something failed."""
    end: Item | None
    lost: Item | None
    """The first that it lost, or waited for."""
    order: Item | None
    link: Item | None
    behind: Item | None
    """All ranks together show that it is behind in the group in which it waits."""
    gave_up: bool
    """Because of the store, by an exception."""
    away: Item | None
    """It did not come to the start of the job."""


def explain_process(items: Sequence[Item]) -> None:
    """Explain the facts of one process by each other."""
    own = _choose(items)
    if own.broke is not None and own.end is not None:
        date(own.broke, own.end)
    for item in items:
        is_kill, is_abort = (item.fact.signal == signal for signal in (SIGKILL, SIGABRT))
        for reason in _reasons(item, own):
            if reason is None:
                continue
            is_sure = reason.fact.confidence is not Confidence.UNDECIDED and not item.is_first
            if is_kill and reason.kind is FactKind.RAISED and not is_sure:
                continue
            is_at_start = item.sort is Sort.ABSENT and _is_at_start(item)
            is_anytime = (is_abort and reason is own.lost) or is_at_start  # who gives up late waited before
            if not_later(reason, item) or is_anytime:  # the times of an end are rough
                reason.explain(item, is_named=True)
                break


def date(broke: Item, end: Item) -> None:
    """Give what broke what was seen of its process's end: that it was the first, and the time if it has none."""
    broke.is_first |= end.is_first
    if end.fact.signal is None and not end.who.is_node:  # it ended with an exit code, as after an exception
        broke.is_real, broke.is_weak = not broke.is_doubted, broke.is_doubted
    if not broke.when.clock and end.when.clock:
        broke.when, broke.seen = When(None, end.when.latest_s, end.when.clock), end.when


def _choose(items: Sequence[Item]) -> _Own:
    by_sort: defaultdict[Sort, list[Item]] = defaultdict(list)
    for item in items:
        by_sort[item.sort].append(item)
    gone = [item for item in by_sort[Sort.GONE] if item.fact.confidence is not Confidence.UNDECIDED]
    # Who names a peer on its own machine is not who wrote the line.
    lost_peers = [item for item in by_sort[Sort.LOSS] if item.fact.peer.compare_machines(item.who) is not Same.YES]
    suffered = [*lost_peers, *by_sort[Sort.WAIT], *(gone or by_sort[Sort.GONE])]
    suffered = [item for item in suffered if not any(other.when.is_before(item.when) for other in suffered[:FEW])]
    lost = _first(suffered, lambda item: item.sort is Sort.LOSS and not item.fact.peer)
    behind = [item for item in by_sort[Sort.ABSENT] if lost is not None and _is_behind(item, lost)]
    return _Own(
        broke=_first(by_sort[Sort.BREAK], _rank_of_reason),
        end=_first(by_sort[Sort.END], lambda item: (not item.is_first) + 2 * (item.fact.code is None)),
        lost=lost,
        order=_first(by_sort[Sort.ORDER]),
        link=_first([item for item in by_sort[Sort.HINT] if item.kind is FactKind.LINK_FAULT]),
        behind=_first(behind),
        gave_up=any(item.fact.is_fatal for item in by_sort[Sort.GONE]),
        away=_first([item for item in by_sort[Sort.ABSENT] if _is_at_start(item)]),
    )


def _reasons(item: Item, own: _Own) -> tuple[Item | None, ...]:
    """Return what may explain a fact of the same process, the best first."""
    broke, end, lost = own.broke, own.end, own.lost
    sure = None if broke is None or broke.is_doubted else broke
    if item.sort is Sort.BREAK:
        return (lost if item.kind is FactKind.ENDED and lost is not None and sooner(lost, item) else None), broke
    if item.sort is Sort.END:
        is_gone_later = lost is not None and lost.sort is Sort.GONE and not sooner(lost, item)
        if own.gave_up and item.fact.code == OF_AN_EXCEPTION:
            is_gone_later = lost is not None and sooner(item, lost)
        lost_before = None if item.fact.signal == SIGKILL or is_gone_later else lost
        link, away = (own.link, own.away) if item.fact.signal is None else (None, None)
        return sure, lost_before, broke, link, None if item.is_first else own.order, away, end
    if item.sort is Sort.ORDER:
        return broke, own.order
    if item.sort is Sort.ABSENT:
        if item is own.behind:
            return (sure,)
        end_before = end if lost is None and end is not None and end.fact.signal != SIGABRT else None
        if _is_at_start(item) and end is not None and end.fact.signal is None:
            end_before = None  # an exit code without a word tells less
        # Who waits for the others to join has come.
        is_waiting = lost is not None and lost.sort is Sort.WAIT and _is_at_start(lost) and _is_at_start(item)
        is_else = lost is not None and (lost.fact.group != item.fact.group or is_waiting)
        return sure, end_before, lost if is_else else None
    if item.sort in {Sort.LOSS, Sort.WAIT, Sort.GONE}:
        if item is lost and sure is None and own.behind is not None:
            return (own.behind,)
        is_lost_first = lost is not None and broke is not None and sooner(lost, broke) and broke.seen is broke.when
        return (lost if broke is None or lost is None or is_lost_first else broke,)
    return ()


def _first(items: Sequence[Item], key: Callable[[Item], int] = lambda _: 0) -> Item | None:
    """Return the earliest of those with the lowest key, None of none."""
    lowest = min(map(key, items), default=0)
    best = [item for item in items if key(item) == lowest]
    return reduce(lambda first, item: item if sooner(item, first) else first, best) if best else None


def _is_behind(absent: Item, wait: Item) -> bool:
    """Whether all ranks together show that it is behind in the group in which it waits."""
    is_same_group = (absent.fact.group or DEFAULT_GROUP) == (wait.fact.group or DEFAULT_GROUP)
    return (
        absent.kind is FactKind.MISSING
        and wait.sort is Sort.WAIT
        and is_same_group
        and 0 <= wait.number <= absent.number
    )


def _is_at_start(item: Item) -> bool:
    """Whether it is about the meeting of all ranks, and not about a collective."""
    return item.fact.seq == START if item.sort is Sort.ABSENT else (item.fact.seq, item.fact.group) == (None, None)


def _rank_of_reason(item: Item) -> int:
    return 2 * item.strength + 3 * (item.kind is FactKind.ENDED) + 10 * item.is_doubted
