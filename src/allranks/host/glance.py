"""Reads the stacks of processes with py-spy, in a thread, so that the caller does not wait.

glance = Glance(4711)
glance.wait(within_s)               # or not
glance.place                        # "train.py:12 in step"
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from allranks.host import stacks
from allranks.host.job_processes import WantedStacks
from allranks.host.threads import start_thread
from allranks.model.safe_text import as_one_line


class Glance:
    """A look of py-spy at processes, in a thread of its own: one that does not come back is left alone."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids
        self.began_s = time.monotonic()
        self.found: list[stacks.Process] = []
        self._thread = start_thread(self._run, name="allranks-look")

    def wait(self, within_s: float) -> None:
        """Wait until the look is over, for at most so long."""
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.found.extend(stacks.look(WantedStacks(pids=self.pids), node="").processes)

    @property
    def place(self) -> str:
        """Where the main thread is in the user's code; empty: not known."""
        threads = (thread for process in self.found for thread in process.threads if thread.is_main)
        frames = (frame for thread in threads for frame in thread.frames if not stacks.is_library(frame.file))
        frame = next(frames, None)
        return f"{Path(frame.file).name}:{frame.line} in {frame.function}" if frame else ""


def render(process: stacks.Process) -> str:
    """Return a stack as py-spy prints it, so that whoever reads py-spy's dumps reads this."""
    lines = [f"Process {process.pid}: state {process.state}, {process.cpu:.2f} cores"]
    if process.problem:
        lines.append(f"no stack: {process.problem}")
    for number, thread in enumerate(process.threads):
        lines += ["", f'Thread {process.pid if thread.is_main else number} (idle): "{as_one_line(thread.name)}"']
        lines += [
            f"    {as_one_line(frame.function)} ({as_one_line(frame.file, at_most=4096)}:{frame.line})"
            for frame in thread.frames
        ]
    return "\n".join(lines) + "\n"
