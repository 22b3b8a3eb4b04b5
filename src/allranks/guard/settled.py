"""Has what was found stayed the same for so long that beats which cross cannot be the reason? Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

SETTLED_S = 0.8
"""How long what ranks are in must stay the same where nobody has died of it."""
_Found = TypeVar("_Found")


class Settled(Generic[_Found]):
    """What the looks at one matter have found."""

    def __init__(self) -> None:
        self._found: _Found | None = None
        self._since_s = 0.0

    def see(self, found: _Found | None, now_s: float) -> _Found | None:
        """Take in what a look has found, and return what `find` does."""
        if found != self._found:
            self._found, self._since_s = found, now_s
        return self.find(now_s)

    def find(self, now_s: float) -> _Found | None:
        """Return what all looks have found for SETTLED_S; None: they differ, or have found nothing."""
        return self._found if now_s >= self._since_s + SETTLED_S else None
