"""When is a line about a job due, in a log that has no row for it? Once a minute at most, and ever more rarely while
nothing changes. Pure."""

from __future__ import annotations

from collections.abc import Hashable


class Pulse:
    """The lines about one generation.

    After 10 s and 30 s where the ranks have printed nothing yet: do they run at all? Then once a minute; while the job
    does the same as at the line before, each pause is twice as long as the one before, up to an hour.

    Args:
        began_s: monotonic, when the workers were started.
    """

    PAUSES_S = (10.0, 20.0, 30.0)
    """The first ones, while the ranks have printed nothing."""
    PAUSE_S = 60.0
    LONGEST_S = 3600.0
    SILENCE_S = 60.0
    """Shorter silence of ranks that have printed something is no news."""

    def __init__(self, began_s: float) -> None:
        self._heard_s = self._said_s = began_s
        self._has_spoken = False
        """Whether the ranks have written anything."""
        self._pauses_s = iter(self.PAUSES_S)
        self._pause_s = 0.0
        """Before the last line."""
        self._next_s = next(self._pauses_s)
        """The shortest one before the next line."""
        self._state: Hashable = None

    def hear(self, now_s: float) -> None:
        """The ranks have written something."""
        self._has_spoken, self._heard_s, self._next_s = True, now_s, self.PAUSE_S

    def find_silence(self, now_s: float) -> tuple[float, bool] | None:
        """Return for how long the ranks have written nothing, and whether they ever did; None: that is no news."""
        silent_s, least_s = now_s - self._heard_s, self.SILENCE_S if self._has_spoken else self.PAUSES_S[0]
        return (silent_s, self._has_spoken) if silent_s >= least_s else None

    def is_due(self, now_s: float, state: Hashable) -> bool:
        """Whether a line is due; then it counts as said.

        Args:
            state: what the job does; an equal one means that nothing has changed.
        """
        is_same = self._pause_s > 0 and state == self._state
        pause_s = min(max(self._next_s, 2 * self._pause_s if is_same else 0.0), self.LONGEST_S)
        if now_s < self._said_s + pause_s:
            return False
        self._state, self._pause_s, self._said_s = state, pause_s, now_s
        self._next_s = self.PAUSE_S if self._has_spoken else next(self._pauses_s, self.PAUSE_S)
        return True
