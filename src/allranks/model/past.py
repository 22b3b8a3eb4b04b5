"""What has happened to a job so far: what its next leader must know. Data only.

The leader sends it with each Plan, so that every agent has it when the leader is lost.
"""

from __future__ import annotations

import msgspec

from allranks.model.finding import Finding


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The properties by which two crashes are compared."""

    cause: str
    ranks: tuple[int, ...]
    step: int | None
    what: str
    """Message or traceback."""


class History(msgspec.Struct, kw_only=True):
    """The faults so far, and the restarts that are left."""

    restarts_left: int
    retries_errors: bool = False
    """An error of the user's code is retried like any fault, as often as there are restarts (`--restart-on-error`)."""
    crashes: list[Crash] = msgspec.field(default_factory=list)
    faults: dict[int, int] = msgspec.field(default_factory=dict)
    """How often each rank was the culprit since the last checkpoint."""
    checkpoint: int | None = None
    """Step of the newest one at the last fault."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader tells the next one."""

    history: History
    survived: tuple[Finding, ...] = ()
    """Faults after which the job went on."""
    excluded: tuple[int, ...] = ()
    """Nodes that were at fault, by their index in the job."""
