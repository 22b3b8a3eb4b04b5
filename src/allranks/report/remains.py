"""What do the files of a run without a verdict show: when was it last alive, and what did its ranks print last?

    last_alive(run.attempt_path)               # Unix time of its newest file

The leader touches events.jsonl every ALIVE_S, so a run whose ranks print nothing has a time, too. All times are
those of the file system.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allranks.files.regular import open_regular
from allranks.report.mask import mask_secrets
from allranks.report.rundir import ALIVE_S as ALIVE_S
from allranks.report.text import one_line

MAX_FILES = 64
"""Number of ranks whose files are looked at: each costs a request to a file server."""
MAX_RANKS = 4
"""Number of ranks whose last line is told."""
TAIL_BYTES = 4096
MAX_TEXT = 160
_RANK_FILE = re.compile(r"rank_([0-9]{1,8})\.(out|err)")


@dataclass(frozen=True, slots=True)
class LastWord:
    """The last line that a rank has printed."""

    rank: int
    text: str
    path: Path
    time_s: float
    """When its file was last written to, Unix time."""


def last_alive(attempt: Path) -> float | None:
    """Return when an attempt was last alive, as its files tell; None if it has none."""
    times = [time_s for *_, time_s in _rank_files(attempt)]
    with contextlib.suppress(OSError):
        times.append((attempt / "events.jsonl").lstat().st_mtime)
    return max(times, default=None)


def last_words(attempt: Path) -> list[LastWord]:
    """Return the last line of each of the first MAX_RANKS ranks that have printed something."""
    newest: dict[int, LastWord] = {}
    for rank, path, time_s in _rank_files(attempt):
        known = newest.get(rank)
        if (known is None or known.time_s < time_s) and (text := _last_line(path)):
            newest[rank] = LastWord(rank, text, path, time_s)
    return [newest[rank] for rank in sorted(newest)[:MAX_RANKS]]


def last_line_of(folder: Path, rank: int) -> str:
    """Return the last line that a rank has printed, on stdout or stderr, whichever grew last; empty for none.

    Args:
        folder: of the rank's node in an attempt.
    """
    newest: tuple[float, Path] | None = None
    for path in (folder / f"rank_{rank}.out", folder / f"rank_{rank}.err"):
        with contextlib.suppress(OSError):
            if (status := path.lstat()).st_size and (newest is None or status.st_mtime >= newest[0]):
                newest = status.st_mtime, path
    return _last_line(newest[1]) if newest else ""


def _rank_files(attempt: Path) -> Iterator[tuple[int, Path, float]]:
    found = [(int(name[1]), path) for path in attempt.glob("*/rank_*.*") if (name := _RANK_FILE.fullmatch(path.name))]
    for rank, path in sorted(found)[: 2 * MAX_FILES]:
        with contextlib.suppress(OSError):
            if (status := path.lstat()).st_size:
                yield rank, path, status.st_mtime


def _last_line(path: Path) -> str:
    """Return the last line of a file that is not empty, without secrets and control characters."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = [line for line in re.split(rb"[\r\n]", file.read(TAIL_BYTES)) if line.strip()]
        text = one_line(mask_secrets(lines[-1].decode(errors="replace"))) if lines else ""
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4].rstrip() + " ..."
    return ""
