"""Which tensors must be equal on all ranks? Learned from checks, anew in each process; pure.

    candidate   it has been equal on all ranks so far; what differs now is not replicated, and is never compared again
    changed     the same, and its number was once another one than at the check before
    watched     it has changed twice, and was equal after that: from then on a difference is a fault
    frozen      it was the same at two equal checks: a rank that changes little of it has a fault, one that changes much
                makes an update

What each rank computes for itself differs before it has changed twice. All ranks learn the same, since they go by
checks at which all were equal, and by numbers that all have seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Standing(StrEnum):
    """What is known of a tensor."""

    CANDIDATE = "candidate"
    CHANGED = "changed"
    WATCHED = "watched"
    FROZEN = "frozen"


_NEXT = {
    Standing.CANDIDATE: (Standing.FROZEN, Standing.CHANGED),
    Standing.FROZEN: (Standing.FROZEN, Standing.CHANGED),
    Standing.CHANGED: (Standing.CHANGED, Standing.WATCHED),
    Standing.WATCHED: (Standing.WATCHED, Standing.WATCHED),
}
"""After a check at which all ranks have the number of the check before, and after one at which all have another one."""


class Learner:
    """What is known of all tensors, by name."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, Standing]] = {}
        """The number that all ranks had at the last equal check, and what is known since."""
        self._dropped: set[str] = set()

    def compared(self, names: Iterable[str]) -> list[str]:
        """Return those of these that are compared, in their order."""
        return [name for name in names if name not in self._dropped]

    def agree(self, numbers: Mapping[str, int]) -> None:
        """Take in that all ranks have these numbers."""
        for name in self.compared(numbers):
            before, standing = self._seen.get(name, (None, None))
            following = _NEXT[standing][numbers[name] != before] if standing else Standing.CANDIDATE
            self._seen[name] = numbers[name], following

    def drop(self, names: Iterable[str]) -> None:
        """Compare these never again."""
        self._dropped |= {*names}

    def known(self, name: str) -> tuple[int | None, Standing]:
        """Return the number that all ranks had at the last equal check, None if it is new, and what is known of it."""
        return self._seen.get(name, (None, Standing.CANDIDATE))
