"""Does a worker still do anything, as seen from outside? Its output, its processor time, and those of its children.

    activity = Activity(hang_s=600, outputs=[Output(folder, name, start), ...])
    activity.look(pid, marks, now_s)    # with each beat; looks outside once in a window
    activity.idle_s                     # how long it has made no progress

`marks` are what the worker tells of itself: its step and its calls. What a rank that waits uses anyway is no progress:
threads that beat, poll or send metrics.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from allranks.files.folder import Folder
from allranks.host.process import Usage, read_usage
from allranks.model.beat import MAX_PRINTED
from allranks.model.raised import last_printed

IDLE_SHARE = 0.02
"""Of one core: a rank that uses less makes no progress. One that sleeps, with its beat and Gloo, uses 0.002."""
IDLE_WRITES_BYTES_S = 8192
"""A slow download writes more, threads that wake each other through a pipe write less."""
IDLE_READS_BYTES_S = 262_144
"""Data and checkpoints come faster from a slow file server; a process that reads metrics in /proc is slower."""
TAIL_BYTES = 16384
"""Of stderr, in which the last traceback is looked for."""
WINDOWS = 30
"""In hang_s."""
MIN_WINDOW_S, MAX_WINDOW_S = 0.5, 10.0
PRINTED_SHARE = 0.8
"""Of hang_s: a traceback that was printed so long before is told."""
MAX_GAP_S = 5.0
"""Looks come several times a second; after a longer pause, the agent itself did not run."""


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a worker writes, and where its own part begins."""

    folder: Folder
    name: str
    start: int = 0

    def size(self) -> int:
        """Of the whole file; 0: nobody can tell."""
        with contextlib.suppress(OSError):
            return self.folder.status(self.name).st_size
        return 0

    def tail(self, num_bytes: int = TAIL_BYTES) -> str:
        """Return the end of its own part."""
        with contextlib.suppress(OSError), self.folder.open_read(self.name) as file:
            file.seek(max(self.start, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
        return ""


class ProcessActivity(NamedTuple):
    """What a process has done so far, as seen from outside."""

    pid: int
    usage: Usage
    sizes: tuple[int, ...]
    """Of its output."""


class Activity:
    """What one worker did lately.

    Args:
        outputs: its files; tracebacks are in the last one.
    """

    def __init__(self, *, hang_s: float, outputs: Sequence[Output] = (), root: Path = Path("/")) -> None:
        self._hang_s, self._outputs, self._root = hang_s, outputs, root
        self._window_s = min(MAX_WINDOW_S, max(MIN_WINDOW_S, hang_s / WINDOWS))
        self._marks: object = None
        self._before: ProcessActivity | None = None
        self._looked_s = self._called_s = self._active_s = 0.0
        self._printed: tuple[tuple[int, ...], str] = ((), "")
        self.reads_terminal = False

    @property
    def idle_s(self) -> float:
        """For how long it has made no progress, at the last look."""
        return self._called_s - self._active_s

    @property
    def printed(self) -> str:
        """The traceback that it printed last, where it has made no progress for long since."""
        if self._before is None or not self._outputs or self.idle_s < PRINTED_SHARE * self._hang_s:
            return ""
        if self._printed[0] != self._before.sizes:
            self._printed = self._before.sizes, last_printed(self._outputs[-1].tail())[-MAX_PRINTED:]
        return self._printed[1]

    def look(self, pid: int, marks: object, now_s: float) -> None:
        """Take in what the worker tells of itself, and look at its process where a window has passed."""
        if self._before is None:
            self._called_s = self._active_s = now_s
        self._active_s += max(0.0, now_s - self._called_s - MAX_GAP_S)
        self._called_s = now_s
        if marks != self._marks:
            self._marks, self._active_s = marks, now_s
        if self._before is not None and now_s < self._looked_s + self._window_s:
            return
        now = ProcessActivity(pid, read_usage(pid, root=self._root), tuple(output.size() for output in self._outputs))
        if self._before is None or is_active(self._before, now, now_s - self._looked_s):
            self._active_s = now_s
        self._before, self._looked_s, self.reads_terminal = now, now_s, now.usage.reads_terminal


def is_active(before: ProcessActivity, now: ProcessActivity, past_s: float) -> bool:
    """Tell whether a worker has made progress between two looks."""
    used_s = now.usage.cpu_s - before.usage.cpu_s
    read_bytes = now.usage.read_bytes - before.usage.read_bytes
    written_bytes = now.usage.written_bytes - before.usage.written_bytes
    does_io = read_bytes >= IDLE_READS_BYTES_S * past_s or written_bytes >= IDLE_WRITES_BYTES_S * past_s
    return does_io or used_s >= IDLE_SHARE * past_s or (before.pid, before.sizes) != (now.pid, now.sizes)
