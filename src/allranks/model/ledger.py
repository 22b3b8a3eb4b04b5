"""Where did the time of a job go? The ledger: every second of every rank is booked in one category. Frozen data.

    worker --cell--> agent (model.pace; book.bin) --heartbeat--> leader (guard.goodput) --> goodput.json, status.json

A worker books each moment of its training thread in one state of its own (guard.inside.thread_marks), so its seconds
sum to its time by construction. It can only book `blocked`, where it waits in a collective. The leader knows when all
ranks called, and splits that into `wait` (for the last one) and `transfer` (all are there). What nobody could book is
`unknown`, and never counts as work.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from allranks.model.beat import Age, Amount, Moment, Word

MAX_RANKS = 64
"""Ranks of which a ledger has rows: those that lost most."""
MAX_LOSSES = 32
MAX_CULPRITS = 64
MAX_RESTARTS = 64


class Category(StrEnum):
    """What a second of a rank was spent on."""

    START = "start"
    """From the start of the process until its first optimizer step ends."""
    STEP = "step"
    """Training: forward, backward, optimizer, and communication beside them."""
    WAIT = "wait"
    """Blocked in a collective that not all ranks have called yet."""
    TRANSFER = "transfer"
    """Blocked in a collective that all ranks have called."""
    DATA = "data"
    """In the DataLoader's `__next__`."""
    EVAL = "eval"
    """Between a step and the last batch before the next backward pass, if that is long."""
    SAVE = "save"
    """In `torch.save`, torch.distributed.checkpoint or a session's save."""
    RESTART = "restart"
    """From a fault until the first new step."""
    REDO = "redo"
    """Steps that a fault has lost: made once more after the restart."""
    QUEUE = "queue"
    """Waiting in SLURM's queue."""
    END = "end"
    """From the end of its script until its process has ended, and until the last rank has."""
    UNKNOWN = "unknown"
    """Nobody could book it: no hook, no torch, no optimizer, a lost node, or a lost book."""


PRODUCTIVE = (Category.STEP, Category.TRANSFER)
"""Goodput is the share of these in all rank-seconds, from submission to end."""


class RankLedger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank, over all generations in which it had this number."""

    rank: Amount
    node: Word = ""
    seconds: Mapping[str, Age]
    """By Category; those of zero are left out."""
    waited_for_s: Age = 0.0
    """How long all others together waited for this one."""
    waited_for_at_start_s: Age = 0.0
    """The same before their first steps: in init_process_group, and in collectives. It is part of their `start`."""
    steps: Amount = 0


class RestartCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault that the job survived, and what it cost."""

    generation: Amount
    """That began after it."""
    attempt: Amount = 0
    cause: Word = ""
    """`AR407 dead-rank`."""
    node: Word = ""
    at_s: Moment = 0.0
    """Since the epoch."""
    restart_s: Age = 0.0
    """Wall time from the fault to the first new step."""
    redo_s: Age | None = None
    """Wall time of the steps that it lost; None: not known."""
    redo_steps: Amount | None = None
    is_redo_guessed: bool = False
    """Counted from rank 0's last `torch.save`, since no session said which steps a checkpoint holds."""


class LostTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way in which the job lost time, and to whom."""

    category: Category
    rank_s: Age
    """Rank-seconds."""
    ranks: tuple[Amount, ...] = ()
    """Whom it is owed to, most first: those waited for, or those that loaded or saved longest; empty: everybody."""
    nodes: tuple[Word, ...] = ()
    """Of these ranks."""
    waited_s: Age = 0.0
    """Of `start`, what all others together waited for the first of these ranks, which came last."""
    is_estimated: bool = False


class Chronic(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is the last one in most steps."""

    rank: Amount
    node: Word
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Of the time of all others, that they waited for it."""
    late_s: Age
    """Median, by how much it comes later than the one before it."""
    since_step: Amount


class Ledger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole account of a job, over all attempts and generations; `seconds` sums to `rank_s`."""

    begun_s: Moment
    """Since the epoch: when the job could have begun (SLURM's EligibleTime), else when it was started."""
    until_s: Moment
    rank_s: Age
    """Wall time times ranks, of each generation those that it had."""
    seconds: Mapping[str, Age]
    """Rank-seconds by Category; those of zero are left out."""
    steps: Amount = 0
    """That count: the ones done again count once."""
    is_async: bool = False
    """`step` holds `wait` and `transfer`, too (see model.pace), so goodput is at most what it says."""
    is_steps_seen: bool = False
    """False: no optimizer step was seen, so there is no goodput."""
    is_estimated: bool = False
    """Part of `wait` and `transfer` is measured on some backward passes and applied to the others."""
    attempts: Amount = 1
    losses: Annotated[tuple[LostTime, ...], msgspec.Meta(max_length=MAX_LOSSES)] = ()
    """Largest first."""
    waited_for: Annotated[tuple[RankLedger, ...], msgspec.Meta(max_length=MAX_CULPRITS)] = ()
    """Ranks that others waited for, at the start or later, most first."""
    ranks: Annotated[tuple[RankLedger, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    """Of more than MAX_RANKS those that lost most."""
    restarts: Annotated[tuple[RestartCost, ...], msgspec.Meta(max_length=MAX_RESTARTS)] = ()
    """The last ones."""
    chronic: tuple[Chronic, ...] = ()
    num_checkpoints: Amount = 0
    save_s: Age = 0.0
    """Longest time that a rank spent saving, summed over the checkpoints: the stall."""

    @property
    def goodput(self) -> float | None:
        """Share of `step` and `transfer` in all rank-seconds; None: no step was seen."""
        if not self.is_steps_seen or self.rank_s <= 0:
            return None
        return min(1.0, sum(self.seconds.get(category, 0.0) for category in PRODUCTIVE) / self.rank_s)
