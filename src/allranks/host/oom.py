"""How many processes has the kernel killed because memory ran out: of this job, and on this machine?

count_oom_kills() - count_oom_kills_at_the_start > 0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def count_oom_kills(*, root: Path = Path("/")) -> int:
    """Return the kernel's count since it started; 0 where it does not say. Only what it grows by means anything.

    The machine's own count has every kill since Linux 4.13; the cgroups' are for containers that do not see it.

    Args:
        root: where /proc and /sys are; tests feed a tree.
    """
    counts = [0]
    counts += _numbers(root / "proc/vmstat", r"^oom_kill (\d+)$")
    for path in _cgroups(root):
        counts += _numbers(path / "memory.events", r"^oom_kill (\d+)$")
        counts += _numbers(path / "memory.oom_control", r"^oom_kill (\d+)$")
    return sum(counts)


def _cgroups(root: Path) -> Iterator[Path]:
    """The own cgroup and those above it, where a job's limit may stand; version 2 and 1."""
    for _, controllers, path in re.findall(r"^(\d+):([^:]*):(/.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _numbers(path: Path, pattern: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, _read(path), re.MULTILINE)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
