"""The progress of a slow command, on standard error if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

SHOW_AFTER_S = 2.0
EVERY_S = 0.2
Item = TypeVar("Item")


def counted(items: Sequence[Item], verb: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Item]:
    """Yield the items; after SHOW_AFTER_S, say how many of them are done: `allranks: 120 of 4000 runs read`.

    Args:
        verb: what is done with each, `runs read`.
    """
    line, next_s = ProgressLine(), clock() + SHOW_AFTER_S
    try:
        for number, item in enumerate(items):
            if clock() >= next_s:
                next_s = clock() + EVERY_S
                line.write(f"allranks: {number} of {len(items)} {verb}")
            yield item
    finally:
        line.clear()


class ProgressLine:
    """One line of a terminal that is written again and again."""

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()
        self._width = 0

    def write(self, text: str) -> None:
        """Show this instead of what the line had."""
        if self.is_shown:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        """Leave nothing on the line."""
        if self._width:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0


class ReadProgress:
    """Progress of reading logs, if it takes longer than SHOW_AFTER_S."""

    def __init__(self, total: int, *, is_packed: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = 0
        self._total = 0 if is_packed else total  # a packed size does not tell the unpacked size
        self._clock, self._line = clock, ProgressLine()
        self._next_s = clock() + SHOW_AFTER_S
        self.clear = self._line.clear

    def add(self, count: int) -> None:
        """Count bytes that were read."""
        self.done += count
        if not self._line.is_shown or (now := self._clock()) < self._next_s:
            return
        self._next_s = now + EVERY_S
        text = f"allranks: {self.done / 1e9:.1f} GB read"
        if self.done <= self._total:
            text = f"allranks: {self.done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {100 * self.done // self._total} %"
        self._line.write(text)
