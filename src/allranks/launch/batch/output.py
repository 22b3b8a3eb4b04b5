"""What has a job printed? Lines of several files, merged by the time at which they were written.

    for line in merge(files, tail=20):
        print(line.file.prefix, line.text)

The agents write down when each rank's file grew (report.growth), as exactly as a quarter of a second at first. Within
that time, and in files without such an index, the lines of one file stay together; those without an index have the time
of their file's last change. Each node has its own clock.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import BinaryIO

from allranks.files.regular import open_regular
from allranks.launch.followed import NOISE, find_hole
from allranks.report.growth import Growth
from allranks.why.window import read_bound

BLOCK_BYTES = 1 << 16
LINE_BYTES = 1 << 20
"""Longer lines are shown in pieces."""
NEW_BYTES = 4 << 20
"""Of each file, that are read before they are shown."""


@dataclass(slots=True, kw_only=True)
class File:
    """One file that a job writes, and how far it has been read."""

    path: Path
    stream: str
    """`out` or `err`."""
    prefix: str = ""
    """What stands before each line; empty for a file that is shown alone."""
    is_raw: bool = False
    """Whether its bytes are shown as they are, also those of a line that has not ended."""
    node: str | None = None
    rank: int | None = None
    growth: Growth = field(default_factory=Growth)
    position: int = 0
    """What is before it has been read."""
    is_live: bool = False
    """Whether it is read as it grows: then its last change is the time of its new lines."""
    drawn: bytes = b""
    """The state of its progress bar that was shown last."""

    @property
    def changed_s(self) -> float:
        """Unix time of its last change; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime
        return 0.0

    def read(self, *, is_last: bool, start: int | None = None) -> Iterator[OutputLine]:
        """Yield the lines from `position`, or `start`, on; the one that has not ended only where it is the last."""
        self.position = self.position if start is None else start
        changed_s = self.changed_s
        with contextlib.suppress(OSError), self._open() as file:
            file.seek(self.position)
            while text := file.readline(LINE_BYTES):
                if not text.endswith(b"\n") and not is_last and len(text) < LINE_BYTES:
                    break
                if text.startswith(b"\0") and (length := find_hole(file.fileno(), self.position)):
                    self.position = file.seek(self.position + length)
                    continue
                self.position += len(text)
                time_s = self.growth.time_of(self.position)
                is_known = self.is_live or bool(self.growth.sizes)
                yield OutputLine(self, text, changed_s if time_s is None else time_s, is_known)

    def _open(self) -> BinaryIO:
        """Open it, unless it is no regular file, or a link in a run directory: SLURM's own output a user may link."""
        return open_regular(self.path, follows_links=self.rank is None)

    def find_tail(self, count: int) -> int:
        """Return where the last `count` lines begin."""
        with contextlib.suppress(OSError), self._open() as file:
            end = place = file.seek(0, os.SEEK_END)
            missing = count
            while place > 0:
                step = min(BLOCK_BYTES, place)
                place -= step
                file.seek(place)
                block = file.read(step)
                at = step - 1 if place + step == end else step  # the newline at the end begins no line
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    missing -= 1
                    if not missing:
                        return place + at + 1
        return 0


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of a file."""

    file: File
    raw: bytes
    """With its newline, if it has one."""
    time_s: float
    """Unix time of the clock of the node that wrote it."""
    is_time_known: bool = True
    """Whether this is more than the last change of the whole file."""

    @property
    def text(self) -> bytes:
        """What a terminal would show of it, without its newline: of a line that redraws itself, the last state."""
        return self.raw.rstrip(b"\r\n").rpartition(b"\r")[2]

    @property
    def time(self) -> str:
        """Local time, `2026-11-23T03:15:00.2`."""
        return datetime.fromtimestamp(self.time_s).isoformat(timespec="milliseconds")[:-2]


def merge(
    files: Sequence[File], *, tail: int | None = None, since: str | None = None, is_last: bool = True
) -> Iterator[OutputLine]:
    """Return the lines that the files have, in the order of their times.

    Args:
        files: in the order that lines of one time get.
        tail: the number of lines at the end; None: all.
        since: a time as `allranks why --since` takes it; a duration counts back from the last line.
        is_last: whether a line that has not ended is one; else it is left for the next read.
    Raises:
        UsageError: `since` is no time.
    """
    starts = dict.fromkeys(range(len(files)), 0)
    since_s = begin_of(since, max((file.changed_s for file in files), default=0.0)) if since else None
    for number, file in enumerate(files):
        if since_s is not None:
            starts[number] = file.growth.size_at(since_s)
        if tail is not None:
            starts[number] = max(starts[number], file.find_tail(tail) if tail else file.path.stat().st_size)
    lines = heapq.merge(
        *(file.read(is_last=is_last, start=starts[number]) for number, file in enumerate(files)),
        key=lambda line: line.time_s,
    )
    found = (line for line in lines if since_s is None or line.time_s >= since_s)
    return found if tail is None else iter(deque(found, maxlen=tail))


def begin_of(since: str, last_s: float) -> float:
    """Return a time as the user gives it as Unix time.

    Args:
        since: `2026-03-25T10:00` and `10:00` in local time, `30m` back from the last line.
        last_s: the time of that.
    Raises:
        UsageError: it is none of these.
    """
    bound = read_bound(since)
    if isinstance(bound, timedelta):
        return last_s - bound.total_seconds()
    if isinstance(bound, time):
        return datetime.combine(date.fromtimestamp(last_s), bound).timestamp()
    return datetime.fromisoformat(since.strip()).timestamp()


def read_new(files: Sequence[File], *, is_last: bool = False) -> list[OutputLine]:
    """Return lines that have been written since the last read, in the order of their times; none: there are no more.

    Args:
        is_last: whether a line that has not ended is one.
    """
    lines = []
    for file in files:
        begin = file.position
        for line in file.read(is_last=is_last or file.is_raw):
            lines.append(line)
            if file.position - begin > NEW_BYTES:
                break
    new = [line for line in lines if not line.file.drawn or line.text != line.file.drawn]
    for line in lines:
        line.file.drawn = b""
    return sorted(new, key=lambda line: line.time_s)


def read_bar(file: File) -> OutputLine | None:
    """Return the last line of a file if it redraws itself, a progress bar, and has changed. It stays unread."""
    position = file.position
    line = next(file.read(is_last=True), None)
    file.position = position
    if line is None or line.raw.endswith(b"\n") or b"\r" not in line.raw.rstrip(b"\r") or line.text == file.drawn:
        return None
    file.drawn = line.text
    return line


def is_noise(line: OutputLine) -> bool:
    """Whether every rank of a healthy job prints this line."""
    return bool(line.file.prefix) and NOISE in line.raw
