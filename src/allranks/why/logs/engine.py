"""What finds patterns in a chunk: hyperscan (`hyper.py`), or Python's `re` where that is missing (`plain.py`)."""

from __future__ import annotations

from array import array
from typing import Protocol

ID_BITS = 16
"""A match's end and its pattern's index share one integer: half the time of a tuple, an eighth of its memory."""


class Engine(Protocol):
    """Patterns, compiled. Not thread-safe."""

    def sample(self, flooding: frozenset[int]) -> None:
        """From now on, report only the first match of these patterns in each text; they are named by their indexes."""

    def find(self, text: bytes, base: int, ends: array[int]) -> None:
        """Append `base + end << ID_BITS | pattern` for each segment and each pattern that matches in it, unordered."""
