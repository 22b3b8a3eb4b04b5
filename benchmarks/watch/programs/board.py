"""A shared page of memory: orders of the harness to the ranks, and how far each rank is. Standard library only.

    board = Board(path); board.order(Code.LOOP, rank=1); ... board.step_of(1), board.struck_s

The harness creates the file; every rank maps it. No system call is needed to read it: a rank that looks at it in a loop
looks like one that only computes.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path

SIZE, FIRST_ROW, ROW = 4096, 128, 32
AHEAD = 5
"""Steps between an order and the step at which all ranks know it."""


NOBODY = 255


class Code(IntEnum):
    """What the ordered rank does at the ordered step."""

    NOTHING = 0
    EXIT = 1
    SKIP = 2
    NEW_GROUP = 3  # all ranks; a rank that the order names stops itself first
    READ = 4
    LOOP = 5
    GIL = 6
    REGEX = 7
    BROADCAST = 8


class Board:
    """One job's page.

    Args:
        path: the file; it is created with zeros where it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(fd, SIZE)
            self._page = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)

    def order(self, code: Code, rank: int, *, num_ranks: int) -> None:
        """Order a rank to do something at a step that no rank has reached; the step is written last."""
        struct.pack_into("<BBBx4xQd", self._page, 0, code, rank, 0, 0, 0.0)
        newest = max(self.step_of(other) for other in range(num_ranks))
        struct.pack_into("<Q", self._page, 8, newest + AHEAD)

    def release(self) -> None:
        """End a fault that can be ended."""
        self._page[2] = 1

    def stop(self) -> None:
        """Let all ranks end well after the same step, as for an order."""
        newest = max(self.step_of(rank) for rank in range(64))
        struct.pack_into("<Q", self._page, 24, newest + AHEAD)

    # Of a rank.

    def code_at(self, step: int, rank: int) -> Code:
        """Return what a rank is to do at this step."""
        code, who = self._page[0], self._page[1]
        (at_step,) = struct.unpack_from("<Q", self._page, 8)
        if at_step != step or (who != rank and code != Code.NEW_GROUP):
            return Code.NOTHING
        return Code(code)

    def is_over(self, step: int) -> bool:
        """Whether this step is the last."""
        (last,) = struct.unpack_from("<Q", self._page, 24)
        return bool(last and step >= last)

    def is_named(self, rank: int) -> bool:
        """Whether the order names this rank."""
        return self._page[1] == rank

    @property
    def is_released(self) -> bool:
        return bool(self._page[2])

    def strike(self) -> None:
        """Note when a rank begins what was ordered."""
        struct.pack_into("<d", self._page, 16, time.monotonic())

    def tell(self, rank: int, step: int) -> None:
        """Note that a rank begins a step."""
        struct.pack_into("<QQd", self._page, FIRST_ROW + ROW * rank, step, os.getpid(), time.monotonic())

    # Of the harness.

    @property
    def struck_s(self) -> float:
        """When the ordered rank began it; 0: it has not."""
        return float(struct.unpack_from("<d", self._page, 16)[0])

    def step_of(self, rank: int) -> int:
        return int(struct.unpack_from("<Q", self._page, FIRST_ROW + ROW * rank)[0])

    def pid_of(self, rank: int) -> int:
        """Return a rank's pid in its own namespace; 0: it has not begun."""
        return int(struct.unpack_from("<Q", self._page, FIRST_ROW + ROW * rank + 8)[0])
