"""`allranks watch --json` as a user runs it, and when each of its documents came."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .jobs import DrillError

FIRST_S = 30.0
POLL_S = 0.02
Heard = tuple[float, dict[str, Any]]
"""When a document came (monotonic), and what it says."""


class Watcher:
    """A running watch.

    Args:
        command: its command line.
        log: keeps its documents.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._heard: list[Heard] = []
        self._errors = log.with_suffix(".err")
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                list(command), stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True,
                start_new_session=True, cwd=log.parent,
            )  # fmt: skip
        self._log = log
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("w") as log:
            for line in self.process.stdout:
                now_s = time.monotonic()
                log.write(f"{now_s:.3f} {line}")
                with contextlib.suppress(json.JSONDecodeError):
                    self._heard.append((now_s, json.loads(line)))

    @property
    def has_found_nothing(self) -> bool:
        """Whether it has ended without a document."""
        return self.process.poll() is not None and not self._heard

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")[-1500:]

    def heard(self) -> list[Heard]:
        return list(self._heard)

    def wait_for_looks(self, seconds: float) -> None:
        """Wait until it has looked for so long.

        Raises:
            DrillError: it says nothing.
        """
        began_s = time.monotonic()
        while not self._heard or self._heard[0][0] > time.monotonic() - seconds:
            if self.process.poll() is not None or time.monotonic() > began_s + FIRST_S + seconds:
                raise DrillError(f"allranks watch says nothing: {self.errors()}")
            time.sleep(POLL_S)

    def wait_until(self, is_heard: Callable[[list[Heard]], bool], deadline_s: float) -> None:
        while time.monotonic() < deadline_s and not is_heard(self.heard()):
            time.sleep(POLL_S)

    def wait_until_calm(self, timeout_s: float) -> str:
        """Wait for a document that says nothing of anybody; return what is still said after that time, else nothing."""
        began_s, said = time.monotonic(), "no document"
        while time.monotonic() < began_s + timeout_s:
            at_s, document = self._heard[-1] if self._heard else (0.0, {})
            told = [*document.get("verdicts", ()), *document.get("states", ())]
            if at_s > began_s and not told:
                return ""
            said = str(told)[:200] if told else said
            time.sleep(POLL_S)
        return said

    def end(self) -> None:
        """End it as Ctrl-C does, and wait."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._reader.join(5)
