"""Is it time for a checkpoint? Asked at every step boundary on rank 0; all ranks get its answer (resumed.agree).

The interval is what state.cadence makes of the stalls of this run, the faults so far and the time that is left. The
first checkpoint comes after a minute: it measures the stall, and shows while somebody still looks that the directory
can be written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from allranks.model.membership import Membership
from allranks.state.cadence import Interval, choose_interval
from allranks.state.saved.checkpoint import Stall

FIRST_S = 60.0


class SaveClock:
    """The clock between two checkpoints.

    Args:
        env: of the agent and SLURM: when the job's time limit is.
        say: takes one line, once the interval is known.
    """

    def __init__(
        self,
        membership: Membership,
        env: Mapping[str, str],
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        ends_at = env.get("SLURM_JOB_END_TIME", "")
        self._ends_at_s = float(ends_at) if ends_at.isdecimal() else None
        self._say = say
        self._clock = clock
        self._began_s = self._saved_s = clock()
        self._stalls_s: list[float] = []
        self._interval = Interval(FIRST_S, "the first one")

    def is_due(self) -> bool:
        """Tell whether the interval has passed."""
        return self._clock() - self._saved_s >= self._interval.seconds

    def save_done(self, stall: Stall, write_s: float | None) -> None:
        """Reckon anew from here, with the stall of this save, and how long the last complete one took to write."""
        num_nodes = self._membership.num_nodes
        self._stalls_s.append(stall.seconds)
        self._saved_s = self._clock()
        self._interval = choose_interval(
            # The first copy also makes the shared memory; it is no measure once there are others.
            stall_s=statistics.median(self._stalls_s[1:] or self._stalls_s),
            write_s=write_s,
            num_nodes=num_nodes,
            node_s=num_nodes * (self._saved_s - self._began_s),
            num_faults=self._membership.epoch,
            left_s=None if self._ends_at_s is None else max(0.0, self._ends_at_s - time.time()),
        )
        if len(self._stalls_s) == 1:
            self._say(f"checkpoints: {self._interval.reason}")
