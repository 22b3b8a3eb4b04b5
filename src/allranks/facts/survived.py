"""What did not end the job, since it went on afterwards? Pure.

A process that made a step, recovered or finished later has survived what it reported before, unless that was an end.
All ranks take part in a step: a step of another process some seconds later says the same of all but an exception of any
kind, which may be of a process that the others do not wait for. What another process did in a later line of the same
file, or at an unknown time, only raises doubt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from signal import SIGKILL

from allranks.facts.fact import FactKind, Said, Same, Who
from allranks.facts.item import SUFFERED, Item, Sort, is_outside, is_start
from allranks.facts.rules import CLOCKS_S, DAY_S, is_its_child
from allranks.model.finding import Confidence

GOES_ON_S = 10.0
"""The others' last step may be reported this much later than the failure that kept them from the next one."""
LINGERS_S = 60.0
"""A process that raised an exception ends within this time, unless it hangs."""
BEGUN_S = 300.0
"""A job, or a run, that was told to end or has ended makes no steps so long after that."""
GRACE_S = 3600.0
"""A preempted job has at most so long to save and end; meanwhile it may make steps."""
MANY_LINES = 80
"""Other ranks write fewer lines of steps after one of them has failed."""
FEW_LINES = 10
"""A program that is told to end makes a last step, and saves."""
_HARD_ENDS = frozenset((FactKind.ENDED, FactKind.SCHEDULER_END, FactKind.NODE_LOST))
"""No process survives them."""
_JOB, _ANYBODY = "job", "anybody"


class _Later:
    """When and where each process, or anybody, last showed that it lived, by clock and by file."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._last_s: dict[Hashable, float] = {}
        self._last_lines: dict[tuple[Hashable, str, str | None], int] = {}
        self._has_progress = False
        self._first_s: dict[str, float] = {}
        """By clock, the first time that the job itself told."""
        for item in items:
            for whose in _list_living(item):
                self._add(whose, item)
            if item.when.earliest_s is not None and item.fact.said is not Said.KERNEL and not is_outside(item):
                first_s = self._first_s.setdefault(item.when.clock, item.when.earliest_s)
                self._first_s[item.when.clock] = min(first_s, item.when.earliest_s)

    def _add(self, whose: Hashable, item: Item) -> None:
        self._has_progress |= whose is _ANYBODY
        time, line = (whose, item.when.clock), (whose, item.place.source, item.who.pod)
        if item.when.clock and item.when.earliest_s is not None:
            self._last_s[time] = max(self._last_s.get(time, item.when.earliest_s), item.when.earliest_s)
        self._last_lines[line] = max(self._last_lines.get(line, 0), item.place.line)

    def is_by_time(self, whose: Hashable, item: Item, gap_s: float = 0.0) -> bool:
        """Whether it certainly lived so much later than the item."""
        return _is_later(self._last_s.get((whose, item.when.clock)), item, gap_s)

    def is_long_after_line_above(self, whose: Hashable, item: Item) -> bool:
        """Whether it lived much later than the line above the item's, with which a logger writes an exception."""
        last_s, above_s = self._last_s.get((whose, item.when.clock)), item.when.earliest_s
        return last_s is not None and above_s is not None and last_s - above_s > GOES_ON_S

    def is_by_line(self, whose: Hashable, item: Item, gap: int = 0) -> bool:
        """Whether it lived in a later line of the item's file, where pods may stand one behind another."""
        return 0 < item.place.line < self._last_lines.get((whose, item.place.source, item.who.pod), 0) - gap

    def has_stopped(self, item: Item) -> bool:
        """Whether its process is known, and made its last step above it in its file."""
        last = self._last_lines.get(((item.process, None), item.place.source, item.who.pod))
        return bool(item.who) and last is not None and last < item.place.line

    def is_timed(self, item: Item) -> bool:
        """Whether a clock of the item's tells of progress."""
        return item.when.earliest_s is not None and (_ANYBODY, item.when.clock) in self._last_s

    def is_ordered(self, item: Item) -> bool:
        """Whether its file or pod, or a clock of the item's, tells of progress."""
        return self.is_timed(item) or (_ANYBODY, item.place.source, item.who.pod) in self._last_lines

    def is_unordered(self, item: Item) -> bool:
        """Whether progress is told, but not whether that was before or after."""
        return self._has_progress and not self.is_ordered(item)

    def is_all_days_later(self, item: Item) -> bool:
        """Whether all that the job told came a day later; a hang may be ended days after its reason."""
        return _is_later(self._first_s.get(item.when.clock), item, DAY_S)


def _list_living(item: Item) -> Iterator[Hashable]:
    """Yield who shows by a fact that it lives: a process, one of its interfaces, the job."""
    if item.kind is FactKind.RECOVERED:
        yield item.process, item.fact.interface
        yield ("kernel", Who(node=item.who.node)), item.fact.interface
    elif item.kind is FactKind.RAISED and item.fact.is_fatal:
        yield item.process, FactKind.RAISED
    elif item.sort is Sort.PROGRESS:
        yield _ANYBODY
        yield _JOB if item.kind is FactKind.FINISHED and not item.who else (item.process, None)


def _is_later(time_s: float | None, item: Item, gap_s: float) -> bool:
    return time_s is not None and item.when.latest_s is not None and time_s - item.when.latest_s > gap_s


def _is_near(item: Item, stop: Item) -> bool:
    """Whether it certainly was soon before the job was ended, or below."""
    above_s, stop_s = item.when.earliest_s, stop.when.earliest_s
    is_known = item.when.clock == stop.when.clock and above_s is not None and stop_s is not None
    return is_known and (stop_s or 0.0) - (above_s or 0.0) <= BEGUN_S


class _Attempt:
    """One start of the job: did it go on after what its facts state?"""

    def __init__(self, items: Sequence[Item]) -> None:
        self._later = _Later(items)
        self._ends: dict[Hashable, Item] = {}
        for item in items:
            if item.kind is FactKind.ENDED and item.sort <= Sort.END:
                self._ends.setdefault(item.process, item)
        suffered = {*SUFFERED, Sort.END, Sort.ORDER}
        self._has_failed = any(item.sort in suffered or item.kind in _HARD_ENDS for item in items)
        """Whether anything beside exceptions tells that the job did not go on."""
        self._has_code = any(item.fact.code for item in items)
        """Whether a process ended with an exit code, as after an exception that nobody caught."""
        has_suffered = any(item.sort in SUFFERED for item in items)  # and ended for that, perhaps
        self._first = [item for item in items if item.kind is FactKind.ENDED and item.is_first and not has_suffered]
        self._is_gone = any(item.kind is FactKind.LAUNCHER_KILL for item in items)
        """Whether a launcher tells that it ended the processes."""
        self._is_over = any(item.kind is FactKind.FINISHED for item in items)
        self._stops = [item for item in items if item.kind is FactKind.SCHEDULER_END and item.strength == 0]
        signaled = [item for item in items if item.kind is FactKind.ENDED and item.fact.signal is not None]
        self._was_killed = any(item.sort is Sort.END and item.fact.signal == SIGKILL for item in signaled)
        died = [item for item in signaled if item.sort <= Sort.END and item.fact.said is not Said.SELF]
        self._has_died = not all(map(is_outside, died))
        """Whether somebody tells that a process died of a signal."""
        self._was_signaled = self._was_killed or (self._has_died and not has_suffered)

    def has_survived(self, item: Item) -> bool:
        """Whether its process, or the job, certainly went on afterwards."""
        later = self._later
        if is_start(item) and later.is_by_line(_ANYBODY, item):  # all ranks take part in a step: it was tried again
            return True
        own: list[Hashable] = [_JOB, (item.process, None), (item.process, item.fact.interface)]
        if item.kind in _HARD_ENDS:
            own = [_JOB] if is_outside(item) else []
        is_last = self._is_last_word(item)
        is_buffered = is_last and (item.process in self._ends or not item.who)
        if item.kind is FactKind.RAISED and not item.who and (item.fact.is_caught or is_last):
            own = [_JOB]  # its file does not tell whose the steps are
            if self._was_outlived(item):
                return True
        if any(later.is_by_time(whose, item) or (later.is_by_line(whose, item) and not is_buffered) for whose in own):
            return True
        last = item.process, FactKind.RAISED
        has_raised = item.fact.is_caught and (later.is_by_time(last, item) or later.is_by_line(last, item))
        if has_raised and (item.who or later.is_by_line(_ANYBODY, item)):
            return True
        if (item.fact.said is Said.KERNEL or is_outside(item)) and later.is_all_days_later(item):
            return True
        if is_outside(item) or item.kind in {FactKind.LINK_FAULT, FactKind.SCHEDULER_END}:  # clocks of nodes differ
            may_save = item.kind is FactKind.SCHEDULER_END and not self._is_gone
            return later.is_by_time(_ANYBODY, item, GRACE_S if may_save else CLOCKS_S)
        if is_last or item.kind in {*_HARD_ENDS, FactKind.DEVICE_FAULT}:
            return False
        if item.fact.is_generic and not item.fact.is_caught:
            return self._was_overcome(item)
        return later.is_by_time(_ANYBODY, item, GOES_ON_S) or self._was_overcome(item)

    def _was_outlived(self, item: Item) -> bool:
        """Whether steps of nobody known stand so late or so far below that the other ranks would have ended by then."""
        whose, later = (item.process, None), self._later
        if item.fact.is_caught:
            is_late = later.is_long_after_line_above(whose, item)
            return is_late if later.is_timed(item) else later.is_by_line(whose, item, 2 * FEW_LINES)
        is_far_below = later.is_by_time(whose, item) and later.is_by_line(whose, item, MANY_LINES)
        return is_far_below or later.is_by_time(whose, item, LINGERS_S)

    def _was_overcome(self, item: Item) -> bool:
        """Whether it was an exception that its program caught: nothing tells of a failure, and the others went on."""
        is_sure = item.fact.confidence is Confidence.CERTAIN
        if item.kind is not FactKind.RAISED or self._has_failed or (is_sure and not item.fact.is_caught):
            return False
        is_soon = self._later.is_timed(item) and not self._later.is_long_after_line_above(_ANYBODY, item)
        if item.fact.is_caught and (is_soon or self._later.has_stopped(item)):
            return False
        return self._later.is_by_line(_ANYBODY, item, FEW_LINES if is_sure else 0)

    def is_doubtful(self, item: Item) -> bool:
        """Whether it is an exception that may have been caught, so that its process went on."""
        end = self._ends.get(item.process)
        if item.kind is FactKind.SCHEDULER_END:  # perhaps it was begun again
            return self._later.is_by_line(_ANYBODY, item, FEW_LINES) or self._later.is_by_time(_ANYBODY, item, BEGUN_S)
        if item.kind is not FactKind.RAISED or (end is not None and end.fact.code is not None):
            return False
        is_below = self._later.is_by_line(_ANYBODY, item)
        is_explained = self._has_failed and (bool(item.who) or self._has_code)
        is_unordered = not is_explained and self._later.is_unordered(item)
        is_late = self._later.is_long_after_line_above(_ANYBODY, item)
        was_last = not self._was_killed and self._later.is_ordered(item) and not is_below
        is_killed = end is not None or (self._was_signaled and not (self._has_code or was_last))
        is_elsewhere = {first.who.compare_machines(item.who) for first in self._first} == {Same.NO}
        if item.fact.is_caught and (is_late or is_unordered or is_killed or is_elsewhere):  # it sends no signal
            return True
        is_alone = self._is_over or not (item.who or self._has_died)
        if is_unordered and not item.fact.is_fatal and is_alone:  # its words alone
            return True
        if item.fact.is_fatal:
            return is_below and not self._has_code
        if item.fact.is_generic:
            return bool(self._stops) or self._was_killed
        return bool(self._stops) or (is_below and not self._is_last_word(item))

    def may_hang(self, item: Item) -> bool:
        """Whether the job may have hung by a caught exception until it was ended: progress is known, all of it before.

        A program that is told to end may log exceptions, too.
        """
        if not (item.fact.is_caught and self._stops and self._later.is_ordered(item)):
            return False
        is_before = self._later.is_by_line(_ANYBODY, item) or self._later.is_long_after_line_above(_ANYBODY, item)
        is_told_to_end = any(_is_near(item, stop) for stop in self._stops)
        return not (is_before or is_told_to_end)

    def is_weak(self, item: Item) -> bool:
        """Whether it is a line that usually means a failure, of a process that nobody saw end."""
        is_likely = item.kind is FactKind.RAISED and item.fact.confidence is Confidence.LIKELY
        return is_likely and item.process not in self._ends

    def _is_last_word(self, item: Item) -> bool:
        """Whether its process failed by it, or ended soon: what stands below was buffered, or is a last progress bar.

        Where a training stands below, that is another start's (why/appended.py).
        """
        if item.kind is FactKind.RAISED and item.fact.is_fatal:
            return True
        end = self._ends.get(item.process)
        is_end = end is not None and end.when.after_s(item.when) <= LINGERS_S
        return is_end and (item.kind is FactKind.RAISED or item.sort in SUFFERED)


def _find_retried(items: Sequence[Item], survived: set[Item]) -> Iterator[Item]:
    """Yield the ends of what could not start and was tried again, as far as the next try tells how it ended.

    They stand below that, above any other failure and the steps. Steps alone may have been in a buffer.
    """
    tries: dict[str, tuple[list[Item], bool]] = {}
    """By file, the ends below a failed start, and whether steps are."""
    for item in sorted((item for item in items if item.place.line), key=lambda item: item.place.line):
        ends, has_steps = tries.get(item.place.source, ([], True))
        is_end = item.kind is FactKind.ENDED and item.fact.said in {Said.LAUNCHER, Said.SCHEDULER}
        if is_start(item) and item in survived:
            tries[item.place.source] = ([], False) if has_steps else (ends, False)
        elif item.kind is FactKind.STEP:
            tries[item.place.source] = ends, True
        elif is_end and item.fact.code and not has_steps:
            ends.append(item)
        elif item.kind is FactKind.FINISHED or item.sort <= Sort.END:
            yield from ends if has_steps or item.kind is FactKind.FINISHED else ()
            tries.pop(item.place.source, None)


def find_survived(items: Sequence[Item]) -> set[Item]:
    """Return what the job certainly survived; what it perhaps survived is doubted from now on."""
    attempt = _Attempt(items)
    told = [item for item in items if item.sort is not Sort.PROGRESS]
    survived = {item for item in told if attempt.has_survived(item)}
    survived |= set(_find_retried(items, survived))
    killed = [item for item in told if item.kind is FactKind.ENDED and item.fact.said is Said.KERNEL]
    survived |= {item for item in killed if any(is_its_child(item, raised) for raised in survived)}
    for item in told:
        item.is_doubted = item not in survived and attempt.is_doubtful(item)
        item.is_weak = item.is_doubted or attempt.is_weak(item)
        item.is_real &= not item.is_weak
        item.may_hang = item.is_doubted and attempt.may_hang(item)
    return survived
