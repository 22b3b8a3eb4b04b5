"""The phases of a job, the reasons to ask its workers to leave, and the terms of the job. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

GRACE_S = 3.0
"""Seconds between the first signal and SIGKILL when the job ends: with reaping, all processes are gone within 5 s."""


ASLEEP_S = 2.0
"""Between two turns of an agent, or of the leader: what is longer was its own sleep (Ctrl-Z, a virtual machine that was
stopped), and nobody else was late."""


class Phase(StrEnum):
    """Where the job is."""

    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    OVER = "over"


class Reason(StrEnum):
    """Why workers were asked to save and leave."""

    REQUEUE = "requeue"
    """The time limit is near: save, and come again."""
    LEAVE = "leave"
    """The job is to end."""
    GROW = "grow"
    """A node has come: save, start again with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the job is about, beyond the plan of one generation."""

    job: str
    attempt: int
    wanted_backend: str
    store_address: str
    store_port: int
    min_nodes: int
    max_restarts: int
    capacity_s: float
    """How long to wait for nodes below the minimum."""
    beat_s: float
    checkpoints: Path
    """Where `allranks.session()` saves."""
