"""What does a version of torch lack that allranks uses, and what happens instead? Pure.

A worker does not read this: each feature is looked for where it is used (its door, tests/versions/table.py), so that a
torch that is in no table works as far as it can. This says in advance what they will find, for
`allranks env --explain`, and `make versions` compares it with what real jobs found.
"""

from __future__ import annotations

import re

from allranks.join.group import TESTED, is_tested
from allranks.model.setting import Setting


def describe(version: str) -> list[Setting]:
    """Return the version and what it lacks, as far as it was tried.

    >>> [each.name for each in describe("2.5.1+cu124")], [each.name for each in describe("2.13.0+cpu")]
    (['torch', 'flight recorder', 'kept port'], ['torch'])
    """
    reason = f"allranks was tested with {' to '.join(f'{major}.{minor}' for major, minor in TESTED)}"
    if not is_tested(version):
        reason += "; with this one the guard may see less"
    settings = [Setting("torch", version, reason, source="installed package")]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < (2, 8):
        instead = "the guard sees the collectives that Python code calls, but not those of DDP"
        settings.append(Setting("flight recorder", "none for gloo", instead, source=f"torch {version}"))
        instead = "rank 0's store uses torch's older server, on the same port"
        settings.append(Setting("kept port", "without libuv", instead, source=f"torch {version}"))
    return settings
