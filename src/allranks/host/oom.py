"""Did the kernel kill a process of this job because memory ran out, and which one?

    watch = OomWatch()
    ...
    watch.num_kills(), watch.killed_pids()

Counted on the machine (/proc/vmstat) and in the job's cgroups (version 1: memory.oom_control, version 2: memory.events,
both also above this process: a SLURM job's limit lies on the step or the job), and read from the kernel's log where
that is allowed. Only what came since the watch began counts.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory)[^:]*: Kill(?:ed)? process (\d+)")
_MAX_LINES = 4096


class OomWatch:
    """The counters of this process's cgroups and the kernel's log, since it was made."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._files = [path for path in _counters(root) if path.exists()]
        self._begun = {path: _read_count(path) for path in self._files}
        self._log = -1
        self._pids: list[int] = []
        with contextlib.suppress(OSError):
            self._log = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def num_kills(self) -> int:
        """Return how many processes the kernel has killed: by the counter that rose most, and by its log."""
        rises = [_read_count(path) - before for path, before in self._begun.items()]
        return max([*rises, len(self.killed_pids()), 0])

    def killed_pids(self) -> tuple[int, ...]:
        """Return those that the log names, as the machine counts them; none where it may not be read."""
        for _ in range(_MAX_LINES if self._log >= 0 else 0):
            try:
                line = os.read(self._log, 8192)
            except BlockingIOError:
                break
            except OSError:  # EPIPE: older lines were overwritten; the next read goes on
                continue
            if not line:
                break
            self._pids += [int(pid) for pid in _KILLED.findall(line.decode(errors="replace"))]
        return tuple(self._pids)

    def close(self) -> None:
        """Let go of the log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _counters(root: Path) -> list[Path]:
    base = root / "sys/fs/cgroup"
    found = [root / "proc/vmstat"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += [base / own / "memory.events" for own in _with_parents(path)]
        elif "memory" in controllers.split(","):
            found += [base / "memory" / own / "memory.oom_control" for own in _with_parents(path)]
    return list(dict.fromkeys(found))


def _with_parents(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _read_count(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
