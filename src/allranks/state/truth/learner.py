"""Which tensors must be equal on all ranks? Learned from checks, anew in each process; pure.

    candidate   it has been equal on all ranks so far; what differs now is not replicated, and is never compared again
    watched     it has changed twice, and was equal after that: from then on a difference is a fault
    frozen      it was the same at two equal checks: a rank that changes little of it has a fault, one that changes much
                makes an update

All ranks learn the same, since they go by checks at which all were equal, and by numbers that all have seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

CHANGES = 2
"""So often a tensor changes before it is watched: what each rank computes for itself, differs before that."""


class Standing(StrEnum):
    """What is known of a tensor."""

    CANDIDATE = "candidate"
    WATCHED = "watched"
    FROZEN = "frozen"


@dataclass(slots=True)
class _Seen:
    number: int
    changes: int = 0
    is_unchanged: bool = False


class Learner:
    """What is known of all tensors, by name."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._dropped: set[str] = set()

    def compared(self, names: Iterable[str]) -> list[str]:
        """Return those of these that are compared, in their order."""
        return [name for name in names if name not in self._dropped]

    def agree(self, numbers: Mapping[str, int]) -> None:
        """Take in that all ranks have these numbers."""
        for name in self.compared(numbers):
            seen = self._seen.get(name)
            if seen is None:
                self._seen[name] = _Seen(numbers[name])
            elif seen.number == numbers[name]:
                seen.is_unchanged = True
            else:
                seen.number, seen.changes, seen.is_unchanged = numbers[name], seen.changes + 1, False

    def drop(self, names: Iterable[str]) -> None:
        """Compare these never again."""
        self._dropped |= {*names}

    def standing(self, name: str) -> Standing:
        """Return what is known of this one."""
        seen = self._seen.get(name)
        if seen is None:
            return Standing.CANDIDATE
        if seen.changes >= CHANGES:
            return Standing.WATCHED
        return Standing.FROZEN if seen.is_unchanged and not seen.changes else Standing.CANDIDATE

    def before(self, name: str) -> int | None:
        """Return the number that all ranks had at the last equal check; None: it is new."""
        seen = self._seen.get(name)
        return None if seen is None else seen.number
