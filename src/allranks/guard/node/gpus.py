"""How busy are the GPUs of this node's ranks? The agent's half: nobody waits for nvidia-smi.

    gpus = GpuMeter(os.environ)
    gpus.look(now_s, pids)      # with each beat; asks in a thread, every few seconds at most
    gpus.of_rank[3]

An answer takes nvidia-smi from 50 ms to some seconds (eight GPUs, no persistence mode), so the slower it is, the less
often it is asked: it runs for SHARE of the time, but each MOST_S. Only where it says nothing, it is asked more rarely.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from allranks.host.gpu_load import GpuLoad, load_of, read_gpu_loads
from allranks.host.threads import start_thread
from allranks.model.beat import GpuSeen

EVERY_S = 5.0
"""Between two questions, at least."""
SHARE = 0.01
MOST_S = 60.0
"""Between an answer and the next question: the first one starts the driver, and may take 12 s."""
DEADLINE_S = 20.0
OLD_S = 3.0
"""An answer counts for so many times the pause after it: nvidia-smi may hang from now on."""


class GpuMeter:
    """Asks for one node.

    Args:
        env: of the agent; CUDA_VISIBLE_DEVICES in it orders the GPUs.
        read: returns how busy they are; runs in a thread, that
        start: starts; it returns None where it cannot.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        read: Callable[[], tuple[GpuLoad, ...]] = lambda: read_gpu_loads(deadline_s=DEADLINE_S),
        start: Callable[..., object] = start_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._visible, self._read, self._start, self._clock = env.get("CUDA_VISIBLE_DEVICES"), read, start, clock
        self._answer: tuple[tuple[GpuLoad, ...], float] | None = None
        """What came last, and how long it took; set by the thread."""
        self._is_asked = False
        self._due_s: float | None = None
        self._old_s = 0.0
        self._loads: tuple[GpuLoad, ...] = ()
        self.of_rank: Mapping[int, GpuSeen] = {}
        """As the last answer had it; without ranks of which it is not known."""

    def look(self, now_s: float, pids: Mapping[int, int]) -> None:
        """Take in an answer, and ask again when it is time.

        Args:
            pids: of the ranks, by rank.
        """
        if self._due_s is None:  # its ranks have not begun yet
            self._due_s = now_s + EVERY_S
        if (answer := self._answer) is not None:
            self._answer, self._is_asked = None, False
            self._loads, took_s = answer
            pause_s = max(EVERY_S, min(took_s / SHARE, MOST_S if self._loads else math.inf))
            self._due_s, self._old_s = now_s + pause_s, now_s + OLD_S * pause_s
            self.of_rank = load_of(pids, self._loads, visible=self._visible)
        elif self.of_rank and now_s > self._old_s:
            self.of_rank = {}
        if pids and not self._is_asked and now_s >= self._due_s:
            self._is_asked = self._start(self._ask, name="allranks-gpus") is not None
            self._due_s = now_s + EVERY_S

    def _ask(self) -> None:
        began_s, loads = self._clock(), tuple[GpuLoad, ...]()
        try:
            loads = self._read()
        finally:  # whatever happens to it, it is asked again
            self._answer = loads, self._clock() - began_s
