"""When did each output file of a node grow? A small index beside the files, so that `logs` can merge lines by time.

    1795847021.253 rank_0.out=120 rank_1.err=88

Each line has a time of the node's clock, and the size of each file that has grown since the line before. A thread of
the agent writes it: a slow file server delays nobody. The time of a rank's line is known as exactly as the index is
dense, at first to a quarter of a second.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.files.folder import Folder
from allranks.files.regular import open_regular

NAME = "growth"
INTERVALS_S = ((1 << 20, 0.25), (8 << 20, 1.0))
"""Up to these sizes of the index in bytes, it is written so often: 8 MB are the output of many hours."""
LAST_INTERVAL_S = 10.0
JOIN_S = 1.0
MAX_BYTES = 32 << 20
"""Of an index: weeks of output. What is beyond it is not read, and lines of that time are shown in the files' order."""
_LINE = re.compile(rb"([0-9]{1,10}\.[0-9]{1,6})((?: [^\s=]{1,255}=[0-9]{1,18}(?![^ ]))+)")
_PAIR = re.compile(rb" ([^\s=]+)=([0-9]+)")


class GrowthRecorder:
    """Writes the index of one node until `end`.

    Args:
        on_error: is told why it could not be written: often the first to notice that a disk is full.
    """

    def __init__(self, folder: Folder, on_error: Callable[[OSError], None] = lambda _: None) -> None:
        self._folder, self._is_over, self._on_error = folder, threading.Event(), on_error
        self._files: tuple[str, ...] = ()
        self._sizes: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="allranks-growth", daemon=True)
        self._thread.start()

    def watch(self, names: Iterable[str]) -> None:
        """Watch these files of the folder from now on."""
        self._files = tuple(names)

    def end(self) -> None:
        """Write the last line."""
        self._is_over.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        interval_s, is_over = INTERVALS_S[0][1], False
        while not is_over:
            is_over = self._is_over.wait(interval_s)
            try:
                interval_s = self._record()
            except OSError as exc:
                self._on_error(exc)

    def _record(self) -> float:
        sizes = {}
        for name in self._files:
            with contextlib.suppress(OSError):  # somebody has removed it
                sizes[name] = self._folder.status(name).st_size
        grown = {name: size for name, size in sizes.items() if size != self._sizes.get(name, 0)}
        with self._folder.append(NAME) as file:
            if grown:
                file.write(index_line(time.time(), grown).encode())
            written = file.tell()
        self._sizes = sizes
        return next((interval_s for most, interval_s in INTERVALS_S if written < most), LAST_INTERVAL_S)


def index_line(time_s: float, sizes: Mapping[str, int]) -> str:
    """Return a line of the index."""
    return f"{time_s:.3f} {' '.join(f'{name}={size}' for name, size in sizes.items())}\n"


@dataclass(slots=True)
class Growth:
    """How one file has grown."""

    times_s: list[float] = field(default_factory=list)
    """Unix times, in order."""
    sizes: list[int] = field(default_factory=list)
    """The size at each time."""

    def time_of(self, end: int) -> float | None:
        """Return when the bytes before `end` were there; None if the index does not tell."""
        at = bisect_left(self.sizes, end)
        return self.times_s[at] if at < len(self.times_s) else None

    def size_at(self, time_s: float) -> int:
        """Return the size at a time: what was written since begins there, or a little later."""
        at = bisect_left(self.times_s, time_s)
        return self.sizes[at - 1] if at else 0


def read_growth(folder: Path) -> dict[str, Growth]:
    """Return how the output files of a node have grown, by name; empty without an index."""
    with contextlib.suppress(OSError), open_regular(folder / NAME) as file:
        return parse_growth(file.read(MAX_BYTES))
    return {}


def parse_growth(data: bytes) -> dict[str, Growth]:
    """Return what an index says; whatever is no line of one is left out."""
    found: dict[str, Growth] = {}
    for line in data.split(b"\n"):
        if not (read := _LINE.match(line)):  # the last line may be half written
            continue
        for name, size in _PAIR.findall(read[2]):
            growth = found.setdefault(name.decode(errors="replace"), Growth())
            # Clocks are set back, and files cut; both lists stay in order.
            growth.times_s.append(max([float(read[1]), *growth.times_s[-1:]]))
            growth.sizes.append(max([int(size), *growth.sizes[-1:]]))
    return found
