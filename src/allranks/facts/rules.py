"""May one fact explain another? The rules for pairs of facts, most of them of different processes. Pure."""

from __future__ import annotations

from signal import SIGABRT, SIGKILL

from allranks.facts.fact import START, FactKind, Said, Same
from allranks.facts.item import Item, Sort
from allranks.model.finding import Confidence

MONITOR_S = 5.0
"""A launcher may see an end this much later than peers see their lost connections."""
NODE_S = 600.0
"""A scheduler misses a node this much later: SlurmdTimeout is 300 s."""

CLOCKS_S = 1200.0
"""The clocks of two nodes may differ by this much."""
LOADER_S = 60.0
"""So soon a rank notices that a process of its data loader is gone: torch looks every 5 s."""
OF_AN_EXCEPTION = 1
"""Exit code of Python after an exception that nobody caught."""


def not_later(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before the effect. A launcher may see an end later than peers see its loss."""
    if not effect.when.is_before(reason.when):
        return True
    delay_s = (reason.when.earliest_s or 0.0) - (effect.when.latest_s or 0.0)
    if reason.kind is FactKind.NODE_LOST:
        return effect.sort >= Sort.LOSS and delay_s <= NODE_S
    is_loss = effect.sort in {Sort.LOSS, Sort.GONE, Sort.ORDER}
    return is_loss and reason.kind is FactKind.ENDED and reason.fact.said >= Said.SCHEDULER and delay_s <= MONITOR_S


def sooner(reason: Item, effect: Item) -> bool:
    """Whether the reason came before the effect: by their times, else by the ends of their processes, else by lines."""
    for mine, its in ((reason.when, effect.when), (reason.seen, effect.seen)):
        if mine.is_before(its) or its.is_before(mine):
            return mine.is_before(its)
    return _is_line_before(reason, effect)


def _is_line_before(reason: Item, effect: Item) -> bool:
    first, second = reason.place, effect.place
    return first is not None and second is not None and first.source == second.source and 0 < first.line < second.line


def not_after(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before the effect, also by their lines in one file."""
    return not sooner(effect, reason)


def named_before(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before a loss that names its process or machine.

    The end of that process is the reason even if another clock says that it came later: clocks of nodes differ.
    """
    is_other_clock = not _is_one_file(reason, effect) or reason.who.compare_machines(effect.who) is Same.NO
    return not_later(reason, effect) or (is_other_clock and reason.is_real)


def by_another_clock(reason: Item, effect: Item) -> bool:
    """Whether the reason is a certain break on another machine, which only that machine's clock dates after the loss.

    Nodes' clocks differ by minutes, and not all of them can be compared: the last resort, and never certain. In a file
    that several nodes write to, the order of the lines counts.
    """
    gap_s = (reason.when.earliest_s or 0.0) - (effect.when.latest_s or 0.0)
    is_elsewhere = reason.who.compare_machines(effect.who) is Same.NO
    if not is_elsewhere or gap_s > CLOCKS_S or (_is_one_file(reason, effect) and not _is_line_before(reason, effect)):
        return False
    return reason.sort is Sort.BREAK and reason.strength == 0


def _is_one_file(reason: Item, effect: Item) -> bool:
    return reason.place is not None and effect.place is not None and reason.place.source == effect.place.source


def is_reason(item: Item) -> bool:
    """Whether it may be why others lost its process, and did not itself follow from a loss."""
    has_suffered = any(cause.sort is not Sort.BREAK for cause in item.causes)
    return item.sort in {Sort.BREAK, Sort.ABSENT} or (item.sort is Sort.END and not has_suffered)


def is_likely(reason: Item, effect: Item) -> bool:
    """Whether a line that usually means a failure explains what another process lost."""
    is_own_word = reason.fact.said is not Said.OBSERVER
    return is_own_word and reason.fact.confidence is not Confidence.UNDECIDED and not_later(reason, effect)


def may_crash_it(reason: Item, effect: Item) -> bool:
    """Whether a crash may have followed from a loss of its own process: one on its machine, reported before."""
    mine, its = reason.who, effect.who
    is_near = mine.compare(its) is Same.UNKNOWN and mine.compare_machines(its) is Same.YES
    return is_near and sooner(reason, effect)


def keeps_away(reason: Item, effect: Item) -> bool:
    """Whether a process whose end nobody saw failed by an exception before all ranks met, and so did not come."""
    return reason.fact.is_fatal and effect.fact.seq == START and not_later(reason, effect)


def is_same_told(reason: Item, effect: Item) -> bool:
    """Whether both tell of one thing, and only the first one knows of whom."""
    is_same = reason.kind is effect.kind and reason.fact.cause == effect.fact.cause
    return is_same and bool(reason.who) and not_later(reason, effect)


def may_be_its_own(reason: Item, effect: Item) -> bool:
    """Whether it may be the same process's, although nothing says so: one knows its rank, the other its local rank."""
    mine, its = reason.who, effect.who
    if reason.kind not in {FactKind.RAISED, FactKind.ENDED}:
        return False
    if mine.compare(its) is not Same.UNKNOWN or effect.when.is_before(reason.when):
        return False
    if not _is_same_end(reason, effect):
        return False
    is_unsure = reason.is_weak or reason.fact.confidence is Confidence.UNDECIDED
    if is_unsure and not (reason.fact.said is Said.SELF and sooner(reason, effect)):
        return False
    numbers = {who.local_rank if who.rank is None else who.rank for who in (mine, its)}
    return bool(mine.node or its.node) or None in numbers or len(numbers) == 1


def _is_same_end(reason: Item, effect: Item) -> bool:
    """Whether the effect's process can have ended in the way that the reason tells."""
    if effect.fact.signal is None and effect.fact.code is None:
        return True
    if reason.kind is FactKind.ENDED and reason.fact.signal is None and reason.fact.code is None:  # it was killed
        return effect.fact.signal is not None
    return reason.fact.signal == effect.fact.signal


def ends_others(reason: Item, effect: Item) -> bool:
    """Whether another process's end explains one that gives no reason itself."""
    is_kill = effect.fact.signal == SIGKILL
    if reason.sort is Sort.BREAK:
        return sooner(reason, effect) if is_kill or effect.is_first else not_later(reason, effect)
    mine, its = ((not end.is_first, end.fact.signal == SIGABRT) for end in (reason, effect))
    return sooner(reason, effect) if mine == its else mine < its and not_later(reason, effect)


def may_end_it(reason: Item, effect: Item) -> bool:
    """Whether a process that ended without a reason may have lost others, or waited for them, as the reason's did.

    If nobody knows whose loss it is, it may be its own.
    """
    is_elsewhere = reason.who.compare_machines(effect.who) is Same.NO
    is_unknown = reason.who.compare(effect.who) is Same.UNKNOWN and not is_elsewhere
    if effect.fact.signal == SIGKILL and (effect.is_first or reason.sort is not Sort.WAIT):
        return False  # no loss sends it
    if effect.fact.signal is None and reason.who.compare(effect.who) is Same.NO:
        # If others had given up waiting for all to join, it may have, too, by an exception; else, who was the first
        # ended by itself.
        is_start = reason.sort is Sort.WAIT and reason.fact.seq is None and not reason.fact.peer
        gave_up = is_start and sooner(reason, effect) and effect.fact.code == OF_AN_EXCEPTION
        if effect.is_first or gave_up:
            return gave_up
    if reason.fact.peer and reason.fact.peer.compare_machines(effect.who) is Same.YES:
        return False  # it is the one that was lost
    is_own_choice = effect.is_first and effect.fact.signal is None and effect.fact.code != OF_AN_EXCEPTION
    if is_unknown and not is_own_choice and effect.fact.signal != SIGKILL and not_after(reason, effect):
        return True
    if effect.fact.signal == SIGABRT:  # by its own watchdog, unless it was the first of all
        is_timeout = reason.sort is Sort.WAIT and sooner(reason, effect)
        return is_timeout if effect.is_first else not_later(reason, effect)
    if not reason.when.is_before(effect.when):
        return False
    gap_s = (effect.when.earliest_s or 0.0) - (reason.when.latest_s or 0.0)
    return gap_s > MONITOR_S or reason.sort is Sort.WAIT


def is_failure_before(reason: Item, effect: Item) -> bool:
    """Whether others had certainly lost or awaited somebody before."""
    return reason.when.is_before(effect.when) and reason.fact.confidence is not Confidence.UNDECIDED


def may_prevent(reason: Item, effect: Item) -> bool:
    """Whether a link or a setting may explain it; a setting explains no wait in the middle of a job."""
    is_unsure = reason.fact.confidence is Confidence.UNDECIDED or reason.fact.said is Said.OBSERVER
    if effect.sort is Sort.ORDER or (is_unsure and effect.fact.confidence is not Confidence.UNDECIDED):
        return False
    is_at_start = effect.fact.seq is None or effect.fact.seq <= 1
    return not_later(reason, effect) and (reason.kind is FactKind.LINK_FAULT or is_at_start)


def may_be_its_parent(reason: Item, effect: Item) -> bool:
    """Whether the kernel killed a process that is no rank, as a data loader, of which this one may be the rank.

    It then ends by an exception. Nobody says that it is the parent, so it is never certain.
    """
    is_helper = reason.kind is FactKind.ENDED and reason.fact.said is Said.KERNEL and reason.who.rank is None
    is_there = is_helper and reason.who.compare_machines(effect.who) is Same.YES and not_later(reason, effect)
    is_dated = effect.when.clock == reason.when.clock and effect.when.earliest_s is not None
    gap_s = (effect.when.earliest_s or 0.0) - (reason.when.latest_s or 0.0) if is_dated else 0.0
    is_end = effect.is_first and effect.fact.code == OF_AN_EXCEPTION
    return is_there and reason.is_real and is_end and gap_s <= LOADER_S


def strikes(reason: Item, effect: Item) -> bool:
    """Whether what happened to a machine explains a fact of a process on it."""
    if reason is effect:
        return False
    if reason.kind is FactKind.ENDED:  # the kernel killed some process there: the one that a SIGKILL ended
        return reason.who.is_node and reason.sort is Sort.BREAK and _is_same_end(reason, effect)
    if reason.kind is FactKind.DEVICE_FAULT:
        is_named = effect.kind is FactKind.RAISED and reason.strength <= effect.strength and not effect.fact.is_generic
        return effect.kind is FactKind.ENDED or is_named
    return True
