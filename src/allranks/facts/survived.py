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

    def last_line_of(self, item: Item) -> int:
        """Return the last line of an item's file in which anybody lived; 0: there is none."""
        return self._lines.get(("anybody", item.place.source), 0)

    def is_by_line(self, whose: Hashable, item: Item) -> bool:
        """Whether it lived in a later line of the item's file."""
        return 0 < item.place.line < self._lines.get((whose, item.place.source), 0)


class _Attempt:
    """One start of the job: did it go on after what its facts state?"""

    def __init__(self, items: Sequence[Item]) -> None:
        self._later = _Later(items)
        self._ends: dict[Hashable, Item] = {}
        for item in items:
            if item.kind is FactKind.ENDED and item.sort <= Sort.END:
                self._ends.setdefault(item.process, item)
        failures = {*SUFFERED, Sort.END, Sort.ORDER}
        self._has_failed = any(item.sort in failures or item.kind in _HARD_ENDS for item in items)
        """Whether anything tells that the job did not go on, beside exceptions."""
        orders = (item for item in items if item.kind is FactKind.SCHEDULER_END and item.strength == 0)
        self._stopped = next(orders, None)
        self._codes = [place for item in items if item.fact.code for place in item.fact.places]
        """Where processes ended with an exit code."""
        self._has_kill = any(item.fact.signal == SIGKILL and item.sort is Sort.END for item in items)
        """Whether a process got SIGKILL, and nobody says why."""

    def has_survived(self, item: Item) -> bool:
        """Whether its process, or the job, certainly went on afterwards."""
        later = self._later
        own = [_JOB, (item.process, None), (item.process, item.fact.interface)]
        if item.kind in _HARD_ENDS:
            own = [_JOB] if item.kind is FactKind.ENDED and is_outside(item) else []
        if any(later.is_by_time(whose, item) for whose in own):
            return True
        below = own[: not self._has_code_below(item)] if _is_last_word(item) else own
        if not self._may_stand_above_its_buffer(item) and any(later.is_by_line(whose, item) for whose in below):
            return True
        if item.kind is FactKind.ENDED and later.is_by_time("anybody", item, DAY_S):  # of an earlier run
            return True
        if is_outside(item) or (item.kind is FactKind.LINK_FAULT and item.who.node):  # clocks of nodes differ
            is_later_there = later.is_by_time(("on", item.who.node), item, GOES_ON_S)
            is_days_ago = not item.fact.is_of_job and later.is_days_before(item)
            return is_later_there or is_days_ago or later.is_by_time("anybody", item, CLOCKS_S)
        if self._was_overcome(item):
            return True
        is_its_last = self._has_ended(item) and (item.kind is FactKind.RAISED or item.sort in SUFFERED)
        if is_its_last or not _may_be_caught(item) or item.kind in {*_HARD_ENDS, FactKind.DEVICE_FAULT}:
            return False
        return later.is_by_time("anybody", item, GOES_ON_S)

    def _was_overcome(self, item: Item) -> bool:
        """Whether it was an exception that its program caught: nobody saw a process end, and the others went on."""
        if item.kind is not FactKind.RAISED or item.fact.is_fatal or item.fact.confidence is Confidence.CERTAIN:
            return False
        if self._ends or (self._has_failed and item.fact.confidence is not Confidence.UNDECIDED):
            return False
        return self._later.is_by_line("anybody", item) or self._later.is_by_time("anybody", item, GOES_ON_S)

    def is_doubtful(self, item: Item) -> bool:
        """Whether an exception may have been caught, so that its process went on."""
        if item.kind is not FactKind.RAISED:
            return False
        end, stopped = self._ends.get(item.process), self._stopped
        may_live_on = not item.fact.is_fatal and (end is None or end.fact.code is None)
        if item.fact.is_generic and may_live_on and self._has_kill:
            return True
        if not _may_be_caught(item) or item.fact.said is Said.INFERRED:
            # Caught, and told in full; or its bar or the others' buffers stand below it.
            is_below = self._later.is_by_line("anybody", item)
            is_told = stopped is not None and (is_below or not item.fact.is_fatal)
            is_last = is_below and _is_last_word(item) and not self._has_code_below(item)
            return end is None and (is_told or is_last)
        is_aborted = end is not None and end.fact.signal == SIGABRT
        waits = [(sort, item.process) for sort in (Sort.WAIT, Sort.LOSS)[: 1 + is_aborted]]
        if any(self._later.is_by_time(wait, item) or self._later.is_by_line(wait, item) for wait in waits):
            return True
        is_below = self._later.is_by_line("anybody", item) or self._later.has_finished
        if is_below and not self._may_stand_above_its_buffer(item):
            return True
        return end is None and stopped is not None and stopped.when.after_s(item.when) > GOES_ON_S

    def is_weak(self, item: Item) -> bool:
        """Whether it is a line that usually means a failure, of a process that nobody saw end."""
        is_likely = item.kind is FactKind.RAISED and item.fact.confidence is Confidence.LIKELY
        return is_likely and item.process not in self._ends

    def _has_ended(self, item: Item) -> bool:
        """Whether its process ended soon afterwards, whenever the others made a step."""
        end = self._ends.get(item.process)
        return end is not None and end.when.after_s(item.when) <= LINGERS_S

    def _has_code_below(self, item: Item) -> bool:
        """Whether it may be what a process raised that ended with an exit code, above the steps of what ran next."""
        lines = (place.line for place in self._codes if place.source == item.place.source)
        code = min((line for line in lines if line > item.place.line), default=0)
        return code > 0 and not item.place.line < self._later.last_line_of(item) < code

    def _may_stand_above_its_buffer(self, item: Item) -> bool:
        """Whether what its process had printed before may stand below it: that comes when the process ends."""
        return item.kind is FactKind.RAISED and self._has_ended(item)


def _may_be_caught(item: Item) -> bool:
    return not item.fact.is_generic and not item.fact.is_fatal


def _is_last_word(item: Item) -> bool:
    """Whether it is an exception that nobody caught, of a process that nobody names.

    A progress bar is drawn once more when Python lets it go, which is below the exception that ended the loop. Where a
    training stands below, that is another start's (why/appended.py).
    """
    is_uncaught = item.fact.is_fatal and item.fact.confidence is Confidence.CERTAIN
    return item.kind is FactKind.RAISED and is_uncaught and not item.who


def find_survived(items: Sequence[Item]) -> set[Item]:
    """Return what the job certainly survived; what it perhaps survived is doubted from now on."""
    attempt = _Attempt(items)
    told = [item for item in items if item.sort is not Sort.PROGRESS]
    survived = {item for item in told if attempt.has_survived(item)}
    for item in told:
        item.is_doubted = item not in survived and attempt.is_doubtful(item)
        item.is_weak = item.is_doubted or attempt.is_weak(item)
        item.is_real &= not item.is_weak
    return survived
