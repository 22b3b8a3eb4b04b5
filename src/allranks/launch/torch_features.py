"""What does a version of torch lack that allranks uses, and what happens instead? Pure.

A worker does not read this: each feature is looked for where it is used (its door, tests/versions/table.py), so that a
torch that is in no table works as far as it can. This says in advance what they will find, for
`allranks env --explain`, and `make versions` compares it with what real jobs found.
"""

from __future__ import annotations

import re

from allranks.join.group import TESTED, is_tested
from allranks.model.setting import Setting

_NEW_IN_2_8 = (
    ("flight recorder", "none for gloo", "the guard sees the collectives that Python code calls, but not those of DDP"),
    ("kept port", "without libuv", "rank 0's store uses torch's older server, on the same port"),
)
"""What there is before this version, and what happens instead."""


def describe(version: str) -> list[Setting]:
    """Return the version and what it lacks, as far as it was tried.

    >>> [each.name for each in describe("2.5.1+cu124")], [each.name for each in describe("2.13.0+cpu")]
    (['torch', 'flight recorder', 'kept port'], ['torch'])
    """
    reason = f"allranks was tested with {' to '.join(f'{major}.{minor}' for major, minor in TESTED)}"
    if not is_tested(version):
        reason += "; with this one the guard may see less"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    own = (int(numbers[1]), int(numbers[2])) if numbers else TESTED[1]
    lacked = _NEW_IN_2_8 if own < (2, 8) else ()
    lacks = [Setting(name, what, reason=instead, source=f"torch {version}") for name, what, instead in lacked]
    return [Setting("torch", version, reason=reason, source="installed package"), *lacks]
