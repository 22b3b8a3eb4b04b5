"""How are steps of srun started, listened to and ended?

    with run_steps([command], env) as output:
        while not output.has_ended:
            for line in output.lines():       # waits TICK_S at the most
                ...

Whoever leaves the block, with an exception too, leaves no step behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

TICK_S = 0.2
END_S = 2.0
"""For srun to end its step after SIGTERM, before it is killed."""


class Line(NamedTuple):
    """One line of a step."""

    text: str
    is_aside: bool
    """From standard error: srun's words, and the site's."""


class Output:
    """What steps write, while they do."""

    def __init__(self, processes: Iterable[subprocess.Popen[bytes]], selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._rest: dict[int, bytes] = {}
        for process in processes:
            for stream, is_aside in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, is_aside)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can come."""
        return not self._selector.get_map()

    def lines(self) -> Iterator[Line]:
        """Yield the lines that have come, or come within TICK_S."""
        for key, _ in self._selector.select(TICK_S):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            *lines, self._rest[key.fd] = (self._rest.get(key.fd, b"") + (data or b"\n")).split(b"\n")
            for line in lines:
                yield Line(line.decode(errors="replace"), key.data)


@contextlib.contextmanager
def run_steps(commands: Iterable[Sequence[str]], env: Mapping[str, str]) -> Iterator[Output]:
    """Start steps, and end what still runs of them when the block is left.

    Args:
        commands: a line of srun for each.
        env: that srun gets.
    """
    with contextlib.ExitStack() as left, selectors.DefaultSelector() as selector:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches us, and we end it in order
            )
            left.callback(_end, process)
            processes.append(process)
        yield Output(processes, selector)


def words_of(lines: Iterable[str]) -> str:
    """Return what SLURM said, on one line, without who says it and without our own members' lines."""
    said = [re.sub(r"^(srun|squeue|slurmstepd[\w.-]*|slurm_\w+)(:? error)?: (error: )?", "", line) for line in lines]
    kept = [line for each in said if (line := each.strip()) and not _is_noise(line)]
    return "".join(c if c.isprintable() else " " for c in "; ".join(dict.fromkeys(kept))[:300])


def _is_noise(line: str) -> bool:
    return line.startswith("allranks: ") or "lacks support" in line


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs: srun passes SIGTERM on to its step, and gives up a place in the queue."""
    with process:
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)  # all is said: it ends by itself
        for end, patience_s in ((process.terminate, END_S), (process.kill, 1.0)):
            if process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
