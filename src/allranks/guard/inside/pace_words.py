"""Where in a cell does the book of the training thread stand? Written by guard.inside.thread_marks, read by the agent.

All totals sum to the time from the beginning to the last mark. So a mark writes two words, the total of the state that
ends and then the new state, and since when the thread is in that needs none: whoever dies or is read between the two
has a whole book. An evaluation is known only afterwards: it is told as what is to be taken from `step` and `data`.
Standard library only.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs every Python process some milliseconds
    from collections.abc import Callable

PACE, PACE_WORDS = 32, 15
"""First word in the cell, and how many."""
STATE, BEGAN, STEPS, TOTALS = 0, 1, 2, 3
"""Counted from PACE: the present state and 1 (0: nothing is booked), CLOCK_MONOTONIC at the beginning, steps that have
ended, and nanoseconds by state, in the order of model.pace.PACE_STATES."""
STEP_MOVED, DATA_MOVED = 10, 11
"""Nanoseconds of `step` and of `data` that are `eval`."""
BACK, ASYNC = 12, 13
"""Permille of the backward passes that is waiting, and 1 (0: not known); whether the host runs ahead of its device."""
LEFT = 14
"""CLOCK_MONOTONIC when the script was over (0: it is not): the end of the interpreter, which takes a second where torch
is loaded and the cores are busy, belongs to no state."""
_LOOKS = 64
"""A mark takes a microsecond, and comes some thousand times a second."""


def read_book(look: Callable[[], None], words: memoryview[int]) -> tuple[int, ...] | None:
    """Return the words as they were at one moment, which two looks in a row have seen; None: nothing is booked.

    Args:
        look: is called before each look.
    """
    seen = b""
    for _ in range(_LOOKS):
        look()
        before, seen = seen, bytes(words)
        if seen == before:
            found = struct.unpack(f"{PACE_WORDS}Q", seen)
            return found if found[STATE] else None
    return None
