"""What did not end the job, since it went on afterwards? Pure.

A process that made a step, recovered or finished later has survived what it reported before, unless that was an end.
All ranks take part in a step: a step of another process some seconds later says the same of all but an exception of any
kind, which may be of a process that the others do not wait for. What another process did in a later line of the same
file, or at an unknown time, only raises doubt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from signal import SIGABRT

from allranks.facts.fact import FactKind, Said
from allranks.facts.item import Item, Sort
from allranks.model.finding import Confidence

GOES_ON_S = 10.0
"""The others' last step may be reported this much later than the failure that kept them from the next one."""
LINGERS_S = 60.0
"""A process that raised an exception ends within this time, unless it hangs."""
_HARD_ENDS = frozenset((FactKind.ENDED, FactKind.SCHEDULER_END, FactKind.NODE_LOST))
"""No process survives them."""
_PROGRESS = frozenset((FactKind.STEP, FactKind.RECOVERED, FactKind.FINISHED))
_JOB = ("job",)
"""A name of the whole job, beside those of its processes."""


class _Later:
    """The last sign of life of each process, and of the job, by clock and by file."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._times: dict[Hashable, float] = {}
        self._lines: dict[Hashable, int] = {}
        self.recovered: set[Hashable] = set()
        self.finished = {item.process for item in items if item.kind is FactKind.FINISHED}
        for item in items:
            if item.kind not in _PROGRESS:
                continue
            is_jobs = item.kind is FactKind.FINISHED and not item.who
            interface = item.fact.interface if item.kind is FactKind.RECOVERED else None
            self._add((_JOB if is_jobs else item.process, interface), item)
            if item.kind is not FactKind.RECOVERED:
                self._add("anybody", item)
                self._add(("on", item.who.node), item)
            elif item.who.node is not None:
                for port in {(item.who.node, interface), (item.who.node, "any")}:
                    self._add(port, item)
                    self.recovered.add(port)
        for item in items:
            if item.sort is Sort.WAIT and item.fact.seq is not None:
                self._add(("waited", item.process), item)
            elif item.sort is Sort.LOSS:
                self._add(("lost", item.process), item)

    def _add(self, whose: Hashable, item: Item) -> None:
        time, place = (whose, item.when.clock), item.place
        if item.when.clock and item.when.earliest_s is not None:
            self._times[time] = max(self._times.get(time, item.when.earliest_s), item.when.earliest_s)
        self._lines[whose, place.source] = max(self._lines.get((whose, place.source), 0), place.line)

    def is_by_time(self, whose: Hashable, item: Item, gap_s: float = 0.0) -> bool:
        """Whether it certainly lived later than the item."""
        later_s = self._times.get((whose, item.when.clock))
        return later_s is not None and item.when.latest_s is not None and later_s - item.when.latest_s > gap_s

    def is_dated(self, whose: Hashable, item: Item) -> bool:
        """Whether it says on the item's clock when it lived."""
        return (whose, item.when.clock) in self._times

    def is_in_file(self, whose: Hashable, item: Item) -> bool:
        """Whether the item's file, whose lines have an order, says that it lived."""
        return self._lines.get((whose, item.place.source), 0) > 0

    def is_by_line(self, whose: Hashable, item: Item) -> bool:
        """Whether it lived in a later line of the item's file."""
        return 0 < item.place.line < self._lines.get((whose, item.place.source), 0)


def find_survived(items: Sequence[Item]) -> set[Item]:
    """Return what the job certainly survived; what it perhaps survived is doubted from now on."""
    later = _Later(items)
    ends: dict[Hashable, Item] = {}
    for item in items:
        if item.kind is FactKind.ENDED and item.sort <= Sort.END:
            ends.setdefault(item.process, item)
            ends.setdefault(item.who.node, item)
    survived: set[Item] = set()
    schedules = [item for item in items if item.kind is FactKind.SCHEDULER_END and item.strength == 0]
    for item in items:
        if item.sort is Sort.PROGRESS:
            continue
        if item.kind in _HARD_ENDS:
            if _is_of_nobody(item) and (later.is_by_time((_JOB, None), item) or later.is_by_line((_JOB, None), item)):
                survived.add(item)
            continue
        process = item.process if item.who else item.writer
        own = ((process, None), (process, item.fact.interface), (_JOB, None))
        is_raised = item.kind is FactKind.RAISED
        end = ends.get(item.process) or (ends.get(item.who.node) if item.who.is_node else None)
        # A process that ends with an exception prints what it had buffered below it.
        has_ended = end is not None and not _is_long_after(end, item)
        may_be_buffered = is_raised and has_ended
        is_its_last = has_ended and item.sort in {Sort.LOSS, Sort.WAIT, Sort.GONE}  # whenever the others made a step
        is_later = any(later.is_by_time(whose, item) for whose in own)
        is_later |= not may_be_buffered and any(later.is_by_line(whose, item) for whose in own)
        if item.kind is FactKind.LINK_FAULT and item.who.is_node:  # its kernel's word for what NCCL saw recover
            for port in ((item.who.node, item.fact.interface or "any"), (item.who.node, None)):
                is_later |= later.is_by_time(port, item) or later.is_by_line(port, item)
                is_later |= not item.when.clock and port in later.recovered and not later.is_in_file(port, item)
        may_be_caught = not item.fact.is_generic and not item.fact.is_fatal
        is_all_ranks = may_be_caught and item.kind is not FactKind.DEVICE_FAULT
        is_all_ranks &= not may_be_buffered and not is_its_last
        # Clocks of nodes differ: of a link, the steps of its own machine tell.
        by_own = ("on", item.who.node) if item.kind is FactKind.LINK_FAULT and item.who.node else "anybody"
        whose = by_own if later.is_dated(by_own, item) else "anybody"
        is_later |= is_all_ranks and later.is_by_time(whose, item, GOES_ON_S)
        if is_later:
            survived.add(item)
        elif is_raised and may_be_caught and item.fact.said is not Said.INFERRED:  # that is why they wait
            is_aborted = end is not None and end.fact.signal == SIGABRT
            item.is_doubted = _is_doubted(item, later, may_be_buffered=may_be_buffered, is_aborted=is_aborted)
            item.is_doubted |= end is None and any(_is_long_after(other, item, GOES_ON_S) for other in schedules[:1])
        is_likely = is_raised and item.fact.confidence is Confidence.LIKELY
        item.is_weak = item.is_doubted or (is_likely and item.process not in ends)
        item.is_real &= not item.is_weak
    return survived


def _is_of_nobody(item: Item) -> bool:
    """Whether the kernel or the scheduler killed some process, and nobody says that it was one of the job's ranks."""
    is_seen = item.kind is FactKind.ENDED and item.fact.said in {Said.KERNEL, Said.SCHEDULER}
    return is_seen and (item.who.rank, item.who.local_rank) == (None, None)


def _is_long_after(end: Item, item: Item, gap_s: float = LINGERS_S) -> bool:
    """Whether a process ended so long after what it raised that something else was the reason."""
    return end.when.after_s(item.when) > gap_s


def _is_doubted(item: Item, later: _Later, *, may_be_buffered: bool, is_aborted: bool) -> bool:
    """Whether its process perhaps went on: it waited, was aborted after a loss, or others made a step."""
    suffered = ("waited", item.process), *([("lost", item.process)] if is_aborted else [])
    if any(later.is_by_time(what, item) or later.is_by_line(what, item) for what in suffered):
        return True
    is_step_below = later.is_by_line("anybody", item)
    return not may_be_buffered and (is_step_below or bool(later.finished - {item.process}))
