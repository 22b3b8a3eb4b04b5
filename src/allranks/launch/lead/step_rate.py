"""How fast does a job make steps, and what did ranks wait for in the last minute? Remembers the last ones. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from allranks.launch.lead.rank_rows import LateRank
from allranks.model.job_status import MAX_RATES
from allranks.model.ledger import Category, Ledger

WINDOW_S, WINDOW_STEPS = 10.0, 10
"""The rate is that of so many seconds or steps, whichever take longer."""
LATE_FACTOR = 2.0
"""A step that takes so many times longer than those before it counts in the rate, although it has not ended."""
RATE_EVERY_S = 5.0
MINUTE_S = 60.0
LEAST_S = 4.0
"""Of a part of the ledger: a shorter one says nothing."""
MAX_MARKS = 512
MAIN_SHARE = 0.5
"""Of all waiting, that is owed to one rank: then it is named."""
WORTH_NAMING = 0.01
"""Of all ranks' time, that waits for it."""


@dataclass(slots=True)
class StepRate:
    """The steps of one generation."""

    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    """When a further step was seen first, and its number."""
    _next_s: float | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RATES))
    """Every RATE_EVERY_S, over all generations."""

    def begin(self) -> None:
        """A generation begins."""
        self._marks.clear()

    def look(self, step: int | None, now_s: float) -> float | None:
        """Take in the step that the job has reached, and return the steps in a second; None: not known yet."""
        marks = self._marks
        if step is not None and (not marks or step > marks[-1][1]):
            marks.append((now_s, step))
            while len(marks) > 2 and now_s - marks[1][0] >= WINDOW_S and step - marks[1][1] >= WINDOW_STEPS:
                marks.popleft()
        rate = self._find_rate(now_s)
        self._next_s = now_s if self._next_s is None else self._next_s
        if now_s >= self._next_s:
            self._next_s = now_s + RATE_EVERY_S
            self.rates.append(round(rate or 0.0, 4))
        return rate

    def _find_rate(self, now_s: float) -> float | None:
        if len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        passed_s, steps = last_s - first_s, last - first
        is_late = now_s - last_s > LATE_FACTOR * max(passed_s / steps, 1.0)
        return steps / ((now_s - first_s) if is_late else passed_s)


@dataclass(frozen=True, slots=True)
class Waits:
    """What ranks waited for in the last minute."""

    share: float | None = None
    """`wait` and `transfer`, of all ranks' time; None: not known."""
    waits_for: int | None = None
    """The rank that most of `wait` is owed to; None: nobody in particular."""
    late: dict[int, LateRank] = field(default_factory=dict)
    """Ranks that were waited for."""


@dataclass(slots=True)
class LastMinute:
    """The ledger as it was now and then in the last minute: the difference to now is the last minute's."""

    _ledgers: deque[Ledger] = field(default_factory=deque)

    def add(self, ledger: Ledger) -> None:
        """Take in the ledger of now."""
        if self._ledgers and ledger.until_s < self._ledgers[-1].until_s:
            self._ledgers.clear()
        self._ledgers.append(ledger)
        while len(self._ledgers) > 2 and ledger.until_s - self._ledgers[1].until_s >= MINUTE_S:
            self._ledgers.popleft()

    def find_waits(self, num_ranks: int) -> Waits:
        """Return what ranks waited for."""
        if not self._ledgers or self._ledgers[-1].until_s - self._ledgers[0].until_s < LEAST_S:
            return Waits()
        before, now = self._ledgers[0], self._ledgers[-1]
        rank_s = now.rank_s - before.rank_s
        if rank_s <= 0 or not now.is_steps_seen:
            return Waits()
        wait_s, transfer_s = (_grown(before, now, category) for category in (Category.WAIT, Category.TRANSFER))
        earlier = {seen.rank: seen.waited_for_s for seen in before.waited_for}
        owed = {seen.rank: max(0.0, seen.waited_for_s - earlier.get(seen.rank, 0.0)) for seen in now.waited_for}
        steps, others = max(1, now.steps - before.steps), max(1, num_ranks - 1)
        late = {
            rank: LateRank(late_s=owed_s / others / steps, cost_share=min(1.0, owed_s / rank_s * num_ranks / others))
            for rank, owed_s in owed.items()
            if owed_s > 0
        }
        worst = max(owed, key=lambda rank: owed[rank], default=None)
        is_named = worst is not None and owed[worst] >= max(MAIN_SHARE * wait_s, WORTH_NAMING * rank_s, 1e-9)
        share = None if now.is_async else min(1.0, max(0.0, (wait_s + transfer_s) / rank_s))
        return Waits(share, worst if is_named else None, late)


def _grown(before: Ledger, now: Ledger, category: Category) -> float:
    return max(0.0, now.seconds.get(category, 0.0) - before.seconds.get(category, 0.0))
