"""The time between the first signal to workers that are to end, and SIGKILL. Data, and no I/O."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

MOST_BETWEEN_LOOKS_S = 0.5
"""The agent looks at ending workers 20 times a second; a longer pause means that the agent itself did not run."""


@dataclass(slots=True, kw_only=True)
class Grace:
    """Workers are being ended."""

    signum: int
    grace_s: float
    looked_s: float
    waited_s: float = 0.0
    """Measured while the agent runs: on a suspended or overloaded machine, workers cannot end either."""
    has_told: bool = False
    has_killed: bool = False
    swept_by_s: float | None = None
    """Set once all have ended."""

    def look(self, now_s: float) -> float:
        """Count the time since the last look, as far as this process ran; return how long was waited."""
        self.waited_s += min(max(now_s - self.looked_s, 0.0), MOST_BETWEEN_LOOKS_S)
        self.looked_s = now_s
        return self.waited_s

    def describe(self, ranks: Collection[int]) -> str:
        """`ranks 2, 3 have not ended after SIGTERM yet; SIGKILL in 2 s`."""
        noun, has = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
        left_s, name = max(0.0, self.grace_s - self.waited_s), signal.Signals(self.signum).name
        at_once = ", or at once with another Ctrl-C" if self.signum == signal.SIGINT else ""
        which = ", ".join(map(str, ranks))
        return f"{noun} {which} {has} not ended after {name} yet; SIGKILL in {left_s:.0f} s{at_once}"
