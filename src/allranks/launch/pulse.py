"""When does the agent report that its workers run but print nothing? At growing intervals. Pure."""

from __future__ import annotations


class Pulse:
    """Silence of the workers, and how long the next one must last to be worth a line.

    Args:
        began_s: monotonic, when they were started.
    """

    FIRST_S = 10.0
    """A script that has written nothing yet: does it run at all?"""
    SPOKEN_S = 300.0
    """A script that has written something: shorter silence between two lines of its own is no news."""
    FACTOR = 6.0
    """Each pause is so many times as long as the one before."""
    LONGEST_S = 3600.0

    def __init__(self, began_s: float) -> None:
        self.has_spoken = False
        """Whether they have written anything."""
        self._pause_s, self._heard_s, self._next_s = self.FIRST_S, began_s, began_s + self.FIRST_S

    def turn(self, now_s: float, *, has_news: bool) -> float | None:
        """Return for how long nothing has been written, where that is worth a line now."""
        if has_news:
            self.has_spoken, self._heard_s = True, now_s
            self._pause_s = max(self._pause_s, self.SPOKEN_S)
            self._next_s = now_s + self._pause_s
        if now_s < self._next_s:
            return None
        self._pause_s = min(self.LONGEST_S, self.FACTOR * self._pause_s)
        self._next_s = now_s + self._pause_s
        return now_s - self._heard_s
