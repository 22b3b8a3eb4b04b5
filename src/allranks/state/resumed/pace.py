"""Is it time for a checkpoint? Asked at every step boundary on rank 0; all ranks get its answer (resumed.agree).

The interval is what state.cadence makes of the stalls of this run, the faults so far and the time that is left. The
first checkpoint comes after a minute: it measures the stall, and shows while somebody still looks that the directory
can be written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from allranks.state.cadence import Interval, choose_interval
from allranks.state.saved.checkpoint import Stall

FIRST_S = 60.0


class Pace:
    """The clock between two checkpoints.

    Args:
        num_nodes: that train together.
        num_faults: restarts of this job so far.
        ends_at_s: when the job's time limit is, since the epoch; None: not known.
        say: takes one line, once the interval is known.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        num_faults: int,
        ends_at_s: float | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_nodes = num_nodes
        self._num_faults = num_faults
        self._ends_at_s = ends_at_s
        self._say = say
        self._clock = clock
        self._began_s = self._saved_s = clock()
        self._stalls_s: list[float] = []
        self._write_s: float | None = None
        self._interval = Interval(FIRST_S, "the first one")

    def is_due(self) -> bool:
        """Tell whether the interval has passed."""
        return self._clock() - self._saved_s >= self._interval.seconds

    def save_done(self, stall: Stall, write_s: float | None) -> None:
        """Reckon anew from here, with the stall of this save, and how long the last complete one took to write."""
        now_s, is_first = self._clock(), not self._stalls_s
        self._stalls_s.append(stall.seconds)
        self._saved_s = now_s
        self._interval = choose_interval(
            # The first copy also makes the shared memory; it is no measure once there are others.
            stall_s=statistics.median(self._stalls_s[1:] or self._stalls_s),
            write_s=write_s,
            num_nodes=self._num_nodes,
            node_s=self._num_nodes * (now_s - self._began_s),
            num_faults=self._num_faults,
            left_s=None if self._ends_at_s is None else max(0.0, self._ends_at_s - time.time()),
        )
        if is_first:
            self._say(f"checkpoints: {self._interval.reason}")


def pace_from_env(env: Mapping[str, str], *, num_nodes: int, say: Callable[[str], None]) -> Pace:
    """The pace of the job that this environment, of the agent and SLURM, tells of; `num_nodes` where it does not."""
    ends_at = env.get("SLURM_JOB_END_TIME", "")
    return Pace(
        num_nodes=int(env.get("GROUP_WORLD_SIZE") or num_nodes),
        num_faults=int(env.get("TORCHELASTIC_RESTART_COUNT") or 0),
        ends_at_s=float(ends_at) if ends_at.isdecimal() else None,
        say=say,
    )
