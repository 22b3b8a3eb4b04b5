"""How far is each node's wall clock from the leader's clock? Pure; NTP's way (RFC 5905, on-wire protocol).

A Ping carries the leader's time, `sent_s`; the node says it back with how long it held it, `held_s`, and its own wall
clock, `node_s`; it arrives at `now_s` of the leader's clock. The smaller the way there and back, the better the guess:
of the last ones the fastest counts. Two clocks also drift apart, so that an older way says less.

The leader's clock is its monotonic one, so the offsets are large numbers; only their differences mean anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
DRIFT = 3e-5
"""Seconds in a second, that two clocks may drift apart: twice what NTP takes for one (RFC 5905, PHI)."""
STEP_S = 0.005
"""A clock that is this much off from what the last ways allow was set."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    delay_s: float
    offset_s: float

    @property
    def worth(self) -> float:
        """The smaller, the better the guess is, now and at any later time."""
        return self.delay_s / 2 - DRIFT * self.at_s


@dataclass(slots=True)
class NodeClock:
    """One node's wall clock against the leader's."""

    offset_s: float | None = None
    """What to take from the node's wall clock to have the leader's; None: not known yet."""
    error_s: float = 0.0
    """How wrong that may be."""
    _samples: deque[_Sample] = field(default_factory=deque)
    _best: _Sample | None = None

    def hear(self, *, sent_s: float, held_s: float, node_s: float, now_s: float) -> bool:
        """Take in one exchange; True: the node's clock was set since the last one, so what was measured is void."""
        delay_s = now_s - sent_s - held_s
        if not 0 <= delay_s < WINDOW_S:
            return False
        new = _Sample(now_s, delay_s, node_s - now_s + delay_s / 2)
        best = self._best
        was_set = best is not None and abs(new.offset_s - best.offset_s) > (new.delay_s + best.delay_s) / 2 + STEP_S
        if was_set:
            self._samples.clear()
            self._best = None
        self._samples.append(new)
        if self._best is None or new.worth <= self._best.worth:
            self._best = new
        while self._samples[0].at_s < now_s - WINDOW_S:
            if self._samples.popleft() is self._best:
                self._best = min(self._samples, key=lambda sample: sample.worth)
        self.offset_s, self.error_s = self._best.offset_s, self._best.worth + DRIFT * now_s
        return was_set
