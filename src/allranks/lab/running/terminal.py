"""What did a job print, and when? Reads its output file as it grows."""

from __future__ import annotations

import re
import time
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

LOOK_S = 0.02
_CAUSE = re.compile(r"\b(AR\d{3}) [a-z0-9-]+")


class Terminal:
    """Records the time of each line, in its own thread, for the duration of the block.

    Args:
        path: the file; it may be created later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[tuple[float, str]] = []
        """(seconds since the epoch, line)"""
        self._read = 0
        self._is_over = Event()
        self._watcher = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Terminal:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._watcher.join()
        self._look()

    def causes(self, *, since_s: float) -> list[tuple[float, str]]:
        """Return which causes were printed, and when: (seconds since the epoch, id)."""
        found = [(time_s, _CAUSE.search(line)) for time_s, line in self.lines if time_s >= since_s]
        return [(time_s, match[1]) for time_s, match in found if match]

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(line for _, line in self.lines)

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        now_s = time.time()
        self.lines += [(now_s, line) for line in whole.decode(errors="replace").splitlines()]
