"""Which job id does a new lab begin with? The one after the last of the previous lab of this user.

A run directory is called after its job, so an id that is given twice would mix two jobs' files. The number is kept in
the cache: SLURM's own state ends with the lab.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from allranks.lab.release import cache_dir

RESERVED = 1000
"""Ids that a new lab takes at once. `down` gives the unused ones back; a lab whose machine went down does not."""
MAX_FIRST = 60_000_000
"""SLURM's ids end at 67043327 (MaxJobId); then they begin again."""


def begin(*, env: Mapping[str, str]) -> int:
    """Return the first job id of a new lab, and reserve RESERVED ids for it; 1 if the cache cannot be read."""
    first = _read(env)
    _write(env, first + RESERVED)
    return first


def end(lab_dir: Path, *, env: Mapping[str, str]) -> None:
    """Give back the ids that a lab did not use, before it is removed; also those of a lab that was killed."""
    with contextlib.suppress(OSError):
        known = re.search(r"(?m)^FirstJobId=(\d+)", (lab_dir / "slurm" / "slurm.conf").read_text())
        first = following = int(known[1]) if known else 1
        with contextlib.suppress(OSError), (lab_dir / "slurmctld.log").open(errors="replace") as log:
            used = (int(number) for line in log for number in re.findall(r"\bJobId=(\d+)", line))
            following = max(following, max(used, default=0) + 1)
        if _read(env) == first + RESERVED or following > _read(env):  # no other lab has begun since
            _write(env, following)


def _path(env: Mapping[str, str]) -> Path:
    return cache_dir(env).parent / "lab-next-job"


def _read(env: Mapping[str, str]) -> int:
    with contextlib.suppress(OSError, ValueError):
        if 0 < (number := int(_path(env).read_text())) <= MAX_FIRST:
            return number
    return 1


def _write(env: Mapping[str, str], number: int) -> None:
    with contextlib.suppress(OSError):
        _path(env).parent.mkdir(parents=True, exist_ok=True)
        _path(env).write_text(f"{number}\n")
