"""What does a version of torch lack that allranks uses, and what happens instead? Pure.

    lacking("2.5.1+cu124")     [Lack(feature=Feature.RECORDER, ...)]

A worker does not read this: each feature is looked for where it is used (its door), so that a torch that is in no table
works as far as it can. This says in advance what they will find, for `allranks env --explain`, and `make versions`
compares it with what real jobs found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from allranks.join.group import TESTED, is_tested
from allranks.model.setting import Setting

TESTED_RANGE = " to ".join(f"{major}.{minor}" for major, minor in TESTED)


class Feature(StrEnum):
    """What allranks takes from torch beyond its documented interface, or adds to it."""

    HOOK = "hook"
    KEPT_PORT = "kept port"
    MISSING_RANKS = "named missing ranks"
    SEQUENCE = "sequence numbers"
    RECORDER = "flight recorder"
    BUCKETS = "pinned buckets"
    CHECKPOINTS = "checkpoints"
    STANDBYS = "standbys"


DOORS = {
    Feature.HOOK: "join/hook.py",
    Feature.KEPT_PORT: "join/group.py, _serve",
    Feature.MISSING_RANKS: "join/group.py, _Arrival",
    Feature.SEQUENCE: "guard/inside/calls.py",
    Feature.RECORDER: "guard/inside/flight.py, _dump_of",
    Feature.BUCKETS: "state/resumed/buckets.py, CAN_PIN",
    Feature.CHECKPOINTS: "state/saved/sharded.py",
    Feature.STANDBYS: "join/standby.py",
}
"""Where each is looked for, below src/allranks."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that versions before one lack."""

    feature: Feature
    before: tuple[int, int]
    what: str
    """`none for gloo`"""
    instead: str
    """What happens, for people."""


LACKS: Sequence[Lack] = (
    Lack(
        Feature.RECORDER,
        (2, 8),
        "none for gloo",
        "the guard sees the collectives that Python code calls, but not those of DDP",
    ),
    Lack(Feature.KEPT_PORT, (2, 8), "without libuv", "rank 0's store uses torch's older server, on the same port"),
)


def lacking(version: str) -> list[Lack]:
    """Return what this version of torch lacks, as far as it was tried.

    >>> [lack.feature.value for lack in lacking("2.5.1+cu124")], lacking("2.13.0+cpu")
    (['flight recorder', 'kept port'], [])
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    own = (int(numbers[1]), int(numbers[2])) if numbers else TESTED[1]
    return [lack for lack in LACKS if own < lack.before]


def describe(version: str) -> list[Setting]:
    """Return the version and what it lacks, as `allranks env --explain` prints it."""
    reason = f"allranks was tested with {TESTED_RANGE}"
    if not is_tested(version):
        reason += "; with this one the guard may see less"
    found = [Setting("torch", version, reason=reason, source="installed package")]
    for lack in lacking(version):
        found.append(Setting(lack.feature, lack.what, reason=lack.instead, source=f"torch {version}"))
    return found
