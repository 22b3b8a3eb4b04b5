"""May one fact explain another? The rules for pairs of facts, most of them of different processes. Pure."""

from __future__ import annotations

from signal import SIGABRT, SIGKILL

from allranks.facts.fact import FactKind, Said, Same
from allranks.facts.item import Item, Sort, is_outside, is_start
from allranks.model.finding import Confidence

MONITOR_S = 5.0
"""A launcher may see an end this much later than peers see their lost connections."""
CLOCKS_S = 1200.0
"""The clocks of two nodes may differ by this much."""
LOADER_S = 60.0
"""So soon a rank notices that a process of its data loader is gone: torch looks every 5 s."""
DAY_S = 86_400.0
"""After so long it may be of another run, or another process of that pid; clocks of other time zones differ by less."""
OF_AN_EXCEPTION = 1
"""Exit code of Python after an exception that nobody caught."""

# --- Which was first --------------------------------------------------------------------------------------------------


def not_later(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before the effect.

    A launcher may see an end later than peers see its loss. What it wrote, a process wrote before it ended.
    """
    is_seen_late = reason.kind is FactKind.ENDED and effect.sort >= Sort.ABSENT
    is_own_word = reason.process == effect.process and reason.fact.said is Said.SELF and effect.kind is FactKind.ENDED
    late_s = CLOCKS_S if is_own_word else MONITOR_S if is_seen_late else 0.0
    return reason.when.after_s(effect.when) <= late_s


def sooner(reason: Item, effect: Item) -> bool:
    """Whether the reason came before the effect: by their times or the ends of their processes, else by lines."""
    if reason.seen.is_before(effect.seen) or effect.seen.is_before(reason.seen):
        return reason.seen.is_before(effect.seen)
    return _is_one_file(reason, effect) and reason.place.line < effect.place.line


def not_after(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before the effect, also by their lines in one file."""
    return not sooner(effect, reason)


def is_soon(reason: Item, effect: Item) -> bool:
    """Whether the effect is known to have come soon after the reason, or shortly before by another clock."""
    mine = reason.when.earliest_s if reason.when.latest_s is None else reason.when.latest_s
    its = effect.when.earliest_s if effect.when.latest_s is None else effect.when.latest_s
    if reason.when.clock != effect.when.clock or mine is None or its is None:
        return False
    return abs(its - mine) <= CLOCKS_S


def _is_one_file(reason: Item, effect: Item) -> bool:
    return reason.place.source == effect.place.source and min(reason.place.line, effect.place.line) > 0


# --- Why a process lost another one, or waited ------------------------------------------------------------------------


def may_keep_away(reason: Item, effect: Item) -> bool:
    """Whether it may be why a rank is absent: not a fault that is told from outside, of another machine."""
    is_elsewhere = is_outside(reason) and reason.who.compare_machines(effect.who) is Same.NO
    return not_later(reason, effect) and not is_elsewhere


def is_reason(item: Item) -> bool:
    """Whether it may be why others lost its process, and did not itself follow from a loss."""
    has_suffered = any(cause.sort is not Sort.BREAK for cause in item.causes)
    return item.sort is Sort.BREAK or (item.sort in {Sort.END, Sort.ABSENT} and not has_suffered)


def named_before(reason: Item, effect: Item) -> bool:
    """Whether the reason may have come before a loss that names its process or machine.

    The end of that process is the reason even if another clock says that it came later: clocks of nodes differ.
    """
    is_other_clock = not _is_one_file(reason, effect) or reason.who.compare_machines(effect.who) is Same.NO
    return not_later(reason, effect) or (is_other_clock and reason.is_real)


def lost_before(reason: Item, effect: Item) -> bool:
    """Whether others' loss or wait may be why this process lost somebody or waited: certainly before, for these two."""
    return sooner(reason, effect) if effect.sort in {Sort.LOSS, Sort.WAIT} else not_later(reason, effect)


def may_prevent(reason: Item, effect: Item) -> bool:
    """Whether a link or a setting may explain it; a setting explains no wait in the middle of a job."""
    is_unsure = Confidence.UNDECIDED is reason.fact.confidence is not effect.fact.confidence
    is_hint = reason.kind is FactKind.LINK_FAULT or not effect.fact.seq
    return is_hint and not is_unsure and effect.sort is not Sort.ORDER and not_later(reason, effect)


def by_another_clock(reason: Item, effect: Item) -> bool:
    """Whether the reason broke on another machine, and only that machine's clock dates it after the loss.

    Nodes' clocks differ by minutes, and not all of them can be compared: the last resort, and never certain. In a file
    that several nodes write to, the order of the lines counts.
    """
    is_elsewhere = reason.who.compare_machines(effect.who) is Same.NO
    is_line_before = reason.place.line < effect.place.line or not _is_one_file(reason, effect)
    return is_elsewhere and is_line_before and reason.when.after_s(effect.when) <= CLOCKS_S


# --- Why a process ended, or failed -----------------------------------------------------------------------------------


def may_be_its_parent(reason: Item, effect: Item) -> bool:
    """Whether the kernel killed a process that is no rank, as a data loader, of which this one may be the rank.

    It then ends by an exception. Nobody says that it is the parent, so it is never certain.
    """
    is_helper = reason.kind is FactKind.ENDED and reason.fact.said is Said.KERNEL and reason.who.rank is None
    is_soon = not_later(reason, effect) and effect.when.after_s(reason.when) <= LOADER_S
    is_end = effect.is_first and effect.fact.code == OF_AN_EXCEPTION
    return is_helper and reason.is_real and is_end and is_soon


def strikes(reason: Item, effect: Item) -> bool:
    """Whether what happened to a machine explains a fact of a process on it."""
    if reason.kind is FactKind.DEVICE_FAULT:
        is_unsure = effect.kind is FactKind.RAISED and reason.strength < effect.strength and not effect.fact.is_generic
        is_same = effect.kind is FactKind.DEVICE_FAULT and is_outside(reason) and not is_outside(effect)
        return effect.kind is FactKind.ENDED or is_unsure or is_same
    if reason.kind is FactKind.LINK_FAULT:  # what is lost by it ends a process by its watchdog, or by an exception
        is_end = effect.fact.signal == SIGABRT or reason.fact.said is Said.INFERRED
        return Sort.END < effect.sort < Sort.ORDER or is_end
    return reason.kind is FactKind.NODE_LOST and effect.sort is not Sort.BREAK


def may_crash_it(reason: Item, effect: Item) -> bool:
    """Whether a crash may have followed from a loss of its own process: one on its machine, reported before."""
    is_near = reason.who.compare_machines(effect.who) is Same.YES
    return is_near and reason.who.compare(effect.who) is Same.UNKNOWN and sooner(reason, effect)


def is_its_child(reason: Item, effect: Item) -> bool:
    """Whether a kernel tells the end of the process that an exception names: of its data loader's worker.

    Numbers are used again, so both tell the same end.
    """
    is_kernels = reason.kind is FactKind.ENDED and reason.fact.said is Said.KERNEL and reason.who.pid is not None
    is_there = is_kernels and reason.who.compare_machines(effect.who) is not Same.NO
    is_same = is_there and reason.fact.cause == effect.fact.cause
    return is_same and any(f"(pid {reason.who.pid})" in thing for thing in effect.fact.things)


def keeps_from_starting(reason: Item, effect: Item) -> bool:
    """Whether it may be why a launcher could not start a process: it is certain, and stands above that.

    A container's runtime prints what its programs wrote, and then that it gives up.
    """
    is_certain = reason.kind is FactKind.RAISED and reason.strength == 0 and not reason.fact.is_fatal
    is_its = reason.who.compare(effect.who) is not Same.NO
    return is_start(effect) and is_certain and is_its and _is_one_file(reason, effect) and sooner(reason, effect)


def is_same_told(reason: Item, effect: Item) -> bool:
    """Whether both tell of one thing, and only the first one knows of whom."""
    is_same = reason.kind is effect.kind and reason.fact.cause == effect.fact.cause
    return is_same and bool(reason.who) and not_later(reason, effect)


def may_be_its_own(reason: Item, effect: Item) -> bool:
    """Whether it may be the same process's, although nothing says so: one knows its rank, the other its local rank."""
    mine, its = reason.who, effect.who
    # So native code ends after an error; ranks that are known are aborted by their watchdogs, too.
    aborts = reason.kind is FactKind.RAISED and effect.fact.signal == SIGABRT and its.rank is None
    is_alike = reason.fact.signal == effect.fact.signal or aborts
    is_failure = reason.kind in {FactKind.RAISED, FactKind.ENDED} and is_alike
    if not is_failure or mine.compare(its) is not Same.UNKNOWN or not not_later(reason, effect):
        return False
    is_anybodys = not mine and reason.fact.confidence is Confidence.UNDECIDED  # who may have gone on
    is_before = not_after(reason, effect) if is_start(reason) else not reason.is_weak or sooner(reason, effect)
    if is_anybodys or not is_before:
        return False
    numbers = {who.local_rank if who.rank is None else who.rank for who in (mine, its)}
    return bool(mine.node or its.node) or None in numbers or len(numbers) == 1


def ends_others(reason: Item, effect: Item) -> bool:
    """Whether another process's end explains one that gives no reason itself."""
    if reason.sort is Sort.BREAK:
        if effect.fact.signal == SIGKILL:  # only what was before it can be why somebody sent it
            return sooner(reason, effect)
        return not_later(reason, effect) and not_after(reason, effect)
    if reason.is_first and effect.is_first:  # by their launchers, whose lines have no order
        return reason.when.is_before(effect.when)
    mine, its = ((not end.is_first, end.fact.signal == SIGABRT) for end in (reason, effect))
    return sooner(reason, effect) if mine == its else mine < its and not_later(reason, effect)


def may_end_it(reason: Item, effect: Item) -> bool:
    """Whether a process that ended without a reason may have lost others, or waited for them, as the reason's did.

    If nobody knows whose loss it is, it may be its own. Who was the first to end did so by itself, unless others had
    given up waiting before.
    """
    if effect.fact.signal == SIGKILL:
        return False  # no loss sends it
    if reason.who.compare(effect.who) is Same.UNKNOWN:
        return not_after(reason, effect)
    if effect.fact.signal == SIGABRT and not effect.is_first:  # by its own watchdog
        return not_later(reason, effect)
    return reason.sort is Sort.WAIT and sooner(reason, effect)


def suffered_before(reason: Item, effect: Item) -> bool:
    """Whether others gave up waiting, or lost somebody, before the job was ended.

    What is lost by that end may stand above it.
    """
    return sooner(reason, effect) if reason.sort is Sort.WAIT else reason.when.is_before(effect.when)
