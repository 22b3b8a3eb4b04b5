"""What has the training thread of one rank spent its time on, as it books that itself? Frozen data.

Written by guard.inside.thread_marks in the worker's cell, read by its agent, sent in each heartbeat, and made into the
ledger (model.ledger) by the leader.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class PaceState(StrEnum):
    """What a training thread does now, as it books it itself; the order is that of `Pace` and of the cell."""

    START = "start"
    STEP = "step"
    """Outside of backward."""
    BACKWARD = "backward"
    DATA = "data"
    EVAL = "eval"
    """Known only afterwards, so no rank is in it."""
    SAVE = "save"
    BLOCKED = "blocked"
    """In a collective or in `Work.wait`."""


PACE_STATES = tuple(PaceState)


class Pace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank has booked since its process began: totals in microseconds, in the order of PACE_STATES.

    The time in the present state is in the totals up to now, so they sum to the age of the process.
    """

    state: Annotated[int, msgspec.Meta(ge=0, le=len(PACE_STATES) - 1)]
    """Index of the present one in PACE_STATES."""
    state_us: Amount
    """For how long it has been in it."""
    steps: Amount
    """Optimizer steps that have ended; of several optimizers, those of the one that steps most often."""
    totals_us: tuple[Amount, Amount, Amount, Amount, Amount, Amount, Amount]
    back_blocked_permille: Annotated[int, msgspec.Meta(ge=-1, le=1000)] = -1
    """Share of its backward passes in which DDP waits for its last bucket, measured on some of them; -1: not known."""
    is_async: bool = False
    """The host runs ahead of its device (NCCL): `step`, `wait` and `transfer` cannot be told apart."""
    has_left: bool = False
    """Its script is over; what its interpreter then does is not booked."""

    @property
    def total_us(self) -> int:
        """Age of the process, as booked."""
        return sum(self.totals_us)
