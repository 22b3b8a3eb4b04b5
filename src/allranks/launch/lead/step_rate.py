"""How fast does a job make steps? Remembers the last ones. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from allranks.model.job_status import MAX_RATES

WINDOW_S, WINDOW_STEPS = 10.0, 10
"""The rate is that of so many seconds or steps, whichever take longer."""
LATE_FACTOR = 2.0
"""A step that takes so many times longer than those before it counts in the rate, although it has not ended."""
RATE_EVERY_S = 5.0
MAX_MARKS = 512


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
