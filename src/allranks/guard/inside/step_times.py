"""How long does a step of this rank wait for communication? What torch's log of each DistributedDataParallel says.

    steps = Steps(cell, note)
    steps.watch(torch._C._distributed_c10d)     every DDP that the script makes from now on is known

DDP times its first 10 steps and every 100th after these, also where nobody asks. Its log has, in nanoseconds, forward
and backward pass, communication (from the first bucket that is sent to the last one that has come back), and how much
of it the backward pass overlaps. What is left of the communication is waiting. A hook that waits inside of itself
(torch's PowerSGD) counts as backward pass.

The log is found by its own class, which each DDP makes one of, so no class or object of the script is touched. It is
read in a thread of its own: the reducer holds the lock of its log while it waits for collectives, so a read may take as
long as a collective that hangs, and the beat must go on. Runs in the worker's Python.
"""

from __future__ import annotations

import functools
import json
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .cell import Cell

EVERY_S, LATER_S = 1.0, 5.0
"""Between two reads, of some 0.1 ms each: at first, and when torch times every 100th step only."""
TIMED_FIRST = 10
"""Steps that torch times at first. Source: torch/csrc/distributed/c10d/reducer.cpp, should_collect_runtime_stats."""
WARM_UP = 2
"""Steps that do not count: the first one allocates, and the second one has new buckets."""
KEPT = 5
"""Timed steps of each DDP of which the median is told."""
END_S = 0.5
"""How long the end of the process may wait for a read."""
_TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")
_BEGAN = "forward_compute_time_start"


class Timed(NamedTuple):
    """One step of one DDP, as torch timed it; all times in seconds."""

    iteration: int
    began_s: float
    """By the wall clock."""
    forward_s: float
    backward_s: float
    communication_s: float
    overlap_s: float


class Steps:
    """The logs of this process, and the thread that reads them.

    Args:
        note: is told what cannot be seen, and why.
    """

    def __init__(self, cell: Cell, note: Callable[[str], None]) -> None:
        self._cell = cell
        self._note = note
        self._logs: list[tuple[weakref.ref[Any], deque[Timed]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allranks-steps", daemon=True)
        self._told: Mapping[str, float] = {}

    def watch(self, inside: Any) -> None:
        """Take note of each log that is made from now on; the first one starts the thread."""
        kind: Any = getattr(inside, "Logger", None)
        if not hasattr(kind, "_get_ddp_logging_data"):
            self._note("this torch has no log of DDP: how long steps wait for communication is not seen")
            return
        construct = kind.__init__

        @functools.wraps(construct)
        def construct_and_note(log: Any, *args: Any, **kwargs: Any) -> None:
            construct(log, *args, **kwargs)
            if self._cell.is_mine:
                self._logs.append((weakref.ref(log), deque(maxlen=KEPT)))
                if not self._thread.ident:
                    self._thread.start()

        kind.__init__ = construct_and_note

    def end(self) -> None:
        """Stop, before the interpreter goes: a thread that it ends inside C++ would abort the process."""
        self._ended.set()
        if self._thread.ident:
            self._thread.join(END_S)

    def _run(self) -> None:
        while self._cell.is_mine:
            newest = max((timed[-1].iteration for _, timed in list(self._logs) if timed), default=0)
            if self._ended.wait(EVERY_S if newest < TIMED_FIRST else LATER_S):
                return
            try:
                self._look()
            except Exception as exc:  # a torch whose inside we do not know
                self._note(f"the log of DDP cannot be read: {exc!r}")
                return

    def _look(self) -> None:
        """Read all logs, and tell what is new."""
        for known in list(self._logs):
            if (log := known[0]()) is None:
                self._logs.remove(known)  # not replaced: the script's thread may append meanwhile
                continue
            found, timed = read_timed(log._get_ddp_logging_data().ints_map), known[1]
            if found is not None and found.iteration > (timed[-1].iteration if timed else WARM_UP):
                timed.append(found)
        told = combine([timed for _, timed in self._logs])
        if told and told != self._told:
            self._told = told
            self._cell.ddp(json.dumps(told, separators=(",", ":")).encode())


def read_timed(told: Mapping[str, int]) -> Timed | None:
    """Return the step that a log has timed last; None: none yet, or not all of it."""
    times = [told.get(name, -1) / 1e9 for name in _TIMES]
    if min(times) < 0 or told.get(_BEGAN, 0) <= 0:
        return None
    return Timed(told.get("iteration", 0), told[_BEGAN] / 1e9, *times)


def combine(logs: Iterable[Sequence[Timed]]) -> dict[str, float]:
    """Return what is told of all logs, with the fields of model.beat.DdpSeen; nothing where no step is timed.

    Of several DDPs, the steps are those of the one that communicates most, and each other one adds what it takes
    meanwhile.
    """
    known = [(timed, _step_s(timed)) for timed in logs if timed]
    if not known:
        return {}
    means = [(timed, step_s, Timed(*map(statistics.median, zip(*timed, strict=True)))) for timed, step_s in known]
    main, step_s, _ = max(means, key=lambda mean: mean[2].communication_s / (mean[1] or 1e9))
    scaled = [(mean, step_s / own_s if own_s else float(timed is main)) for timed, own_s, mean in means]
    return {
        "iteration": main[-1].iteration,
        "step_s": round(step_s, 6),
        **{
            name: round(sum(getattr(mean, name) * scale for mean, scale in scaled), 6)
            for name in ("forward_s", "backward_s", "communication_s", "overlap_s")
        },
    }


def _step_s(timed: Sequence[Timed]) -> float:
    """Return the time from one step to the next, with all that comes between them; 0: only one was timed."""
    first, last = timed[0], timed[-1]
    return max(0.0, (last.began_s - first.began_s) / (last.iteration - first.iteration)) if len(timed) > 1 else 0.0
