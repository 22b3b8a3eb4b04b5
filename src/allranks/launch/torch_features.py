"""What does a version of torch lack that allranks uses, and what happens instead? Pure.

    lacking("2.5.1+cu124")     [Setting("flight recorder", "none for gloo", ...), ...]

A worker does not read this: each feature is looked for where it is used (its door), so that a torch that is in no table
works as far as it can. This says in advance what they will find, for `allranks env --explain`, and `make versions`
compares it with what real jobs found.
"""

from __future__ import annotations

import re
from enum import StrEnum

from allranks.join.group import TESTED, is_tested
from allranks.model.setting import Setting


class Feature(StrEnum):
    """What allranks takes from torch beyond its documented interface, or adds to it."""

    door: str
    """Where it is looked for, below src/allranks."""

    HOOK = "hook", "join/hook.py"
    KEPT_PORT = "kept port", "join/group.py, _serve"
    MISSING_RANKS = "named missing ranks", "join/group.py, _Arrival"
    SEQUENCE = "sequence numbers", "guard/inside/calls.py"
    RECORDER = "flight recorder", "guard/inside/flight.py, _dump_of"
    BUCKETS = "pinned buckets", "state/resumed/buckets.py, CAN_PIN"
    CHECKPOINTS = "checkpoints", "state/saved/sharded.py"
    STANDBYS = "standbys", "join/standby.py"

    def __new__(cls, value: str, door: str) -> Feature:
        """Keep the door beside the value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.door = door
        return member


_LACKS = (
    (
        (2, 8),
        Feature.RECORDER,
        "none for gloo",
        "the guard sees the collectives that Python code calls, but not those of DDP",
    ),
    ((2, 8), Feature.KEPT_PORT, "without libuv", "rank 0's store uses torch's older server, on the same port"),
)
"""Versions before this one lack a feature: what there is, and what happens instead."""


def lacking(version: str) -> list[Setting]:
    """Return what this version of torch lacks, as far as it was tried.

    >>> [lack.name for lack in lacking("2.5.1+cu124")], lacking("2.13.0+cpu")
    (['flight recorder', 'kept port'], [])
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    own = (int(numbers[1]), int(numbers[2])) if numbers else TESTED[1]
    return [
        Setting(feature.value, what, reason=instead, source=f"torch {version}")
        for before, feature, what, instead in _LACKS
        if own < before
    ]


def describe(version: str) -> list[Setting]:
    """Return the version and what it lacks, as `allranks env --explain` prints it."""
    reason = f"allranks was tested with {' to '.join(f'{major}.{minor}' for major, minor in TESTED)}"
    if not is_tested(version):
        reason += "; with this one the guard may see less"
    return [Setting("torch", version, reason=reason, source="installed package"), *lacking(version)]
