"""What did not end the job, since it went on afterwards? Pure.

A process that made a step, recovered or finished later has survived what it reported before, unless that was an end.
All ranks take part in a step: a step of another process some seconds later says the same of all but an exception of any
kind, which may be of a process that the others do not wait for. What another process did in a later line of the same
file, or at an unknown time, only raises doubt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from signal import SIGABRT, SIGKILL

from allranks.facts.fact import FactKind, Said, Who
from allranks.facts.item import SUFFERED, Item, Sort, is_outside
from allranks.facts.rules import CLOCKS_S, DAY_S
from allranks.model.finding import Confidence

GOES_ON_S = 10.0
"""The others' last step may be reported this much later than the failure that kept them from the next one."""
LINGERS_S = 60.0
"""A process that raised an exception ends within this time, unless it hangs."""
_HARD_ENDS = frozenset((FactKind.ENDED, FactKind.SCHEDULER_END, FactKind.NODE_LOST))
"""No process survives them."""
_JOB = ("job", None)
"""A name of the whole job, beside those of its processes."""


class _Later:
    """The last sign of life of each process, and of the job, by clock and by file."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._times: dict[Hashable, float] = {}
        self._lines: dict[Hashable, int] = {}
        self._items = items
        self.has_finished = any(item.kind is FactKind.FINISHED for item in items)
        for item in items:
            if item.kind is FactKind.RECOVERED:
                self._add((item.process, item.fact.interface), item)
                self._add((("kernel", Who(node=item.who.node)), item.fact.interface), item)
            elif item.sort is Sort.PROGRESS:
                is_jobs = item.kind is FactKind.FINISHED and not item.who
                self._add(_JOB if is_jobs else (item.process, None), item)
                self._add("anybody", item)
                self._add(("on", item.who.node), item)
            elif item.sort is Sort.LOSS or (item.sort is Sort.WAIT and item.fact.seq is not None):
                self._add((item.sort, item.process), item)

    def _add(self, whose: Hashable, item: Item) -> None:
        time, place = (whose, item.when.clock), item.place
        if item.when.clock and item.when.earliest_s is not None:
            self._times[time] = max(self._times.get(time, item.when.earliest_s), item.when.earliest_s)
        self._lines[whose, place.source] = max(self._lines.get((whose, place.source), 0), place.line)

    def is_by_time(self, whose: Hashable, item: Item, gap_s: float = 0.0) -> bool:
        """Whether it certainly lived later than the item."""
        later_s = self._times.get((whose, item.when.clock))
        return later_s is not None and item.when.latest_s is not None and later_s - item.when.latest_s > gap_s

    def is_days_before(self, item: Item) -> bool:
        """Whether all that the job told, or its end, came a day later; a hang may be ended days after its reason."""
        first_s = self._first.get(item.when.clock)
        return first_s is not None and item.when.latest_s is not None and first_s - item.when.latest_s > DAY_S

    @cached_property
    def _first(self) -> dict[str, float]:
        """By clock, the first time that the job told."""
        own = ((item.when.clock, item.when.earliest_s) for item in self._items if not is_outside(item))
        return dict(sorted(((clock, time_s) for clock, time_s in own if time_s is not None), reverse=True))

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
    survived: set[Item] = set()
    stopped = next((item for item in items if item.kind is FactKind.SCHEDULER_END and item.strength == 0), None)
    has_kill = any(item.fact.signal == SIGKILL and item.sort is Sort.END for item in items)  # nobody says why
    for item in items:
        if item.sort is Sort.PROGRESS:
            continue
        own = [_JOB, (item.process, None), (item.process, item.fact.interface)]
        if item.kind in _HARD_ENDS:
            own = [_JOB] if item.kind is FactKind.ENDED and is_outside(item) else []
        is_raised = item.kind is FactKind.RAISED
        end = ends.get(item.process)
        # A process that ends with an exception prints what it had buffered below it.
        has_ended = end is not None and end.when.after_s(item.when) <= LINGERS_S
        may_be_buffered = is_raised and has_ended
        is_later = any(later.is_by_time(whose, item) for whose in own)
        is_later |= not may_be_buffered and any(later.is_by_line(whose, item) for whose in own)
        is_its_last = has_ended and (is_raised or item.sort in SUFFERED)  # whenever the others made a step
        may_be_caught = not item.fact.is_generic and not item.fact.is_fatal
        if item.kind is FactKind.ENDED:  # of an earlier run
            is_later |= later.is_by_time("anybody", item, DAY_S)
        if is_outside(item) or (item.kind is FactKind.LINK_FAULT and item.who.node):  # clocks of nodes differ
            is_later |= later.is_by_time(("on", item.who.node), item, GOES_ON_S)
            is_later |= later.is_by_time("anybody", item, CLOCKS_S)
            is_later |= not item.fact.is_of_job and later.is_days_before(item)
        elif may_be_caught and not is_its_last and item.kind not in {*_HARD_ENDS, FactKind.DEVICE_FAULT}:
            is_later |= later.is_by_time("anybody", item, GOES_ON_S)
        if is_later:
            survived.add(item)
        elif is_raised and may_be_caught and item.fact.said is not Said.INFERRED:  # that is why they wait
            is_aborted = end is not None and end.fact.signal == SIGABRT
            suffered = [(sort, item.process) for sort in (Sort.WAIT, Sort.LOSS)[: 1 + is_aborted]]
            is_below = later.is_by_line("anybody", item) or later.has_finished
            item.is_doubted = any(later.is_by_time(what, item) or later.is_by_line(what, item) for what in suffered)
            item.is_doubted |= not may_be_buffered and is_below
            item.is_doubted |= end is None and stopped is not None and stopped.when.after_s(item.when) > GOES_ON_S
        elif is_raised and end is None and stopped is not None:  # caught, and told in full; or the others' buffers
            item.is_doubted = not item.fact.is_fatal or later.is_by_line("anybody", item)
        if is_raised and item.fact.is_generic and not item.fact.is_fatal and (end is None or end.fact.code is None):
            item.is_doubted |= has_kill  # caught, and lived on
        is_likely = is_raised and item.fact.confidence is Confidence.LIKELY
        item.is_weak = item.is_doubted or (is_likely and item.process not in ends)
        item.is_real &= not item.is_weak
    return survived
