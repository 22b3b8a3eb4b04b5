"""How often should a run save? Young and Daly, with what was measured; pure, and without torch.

    >>> day_s = 86400
    >>> interval = choose_interval(stall_s=0.2, write_s=9, num_nodes=100, node_s=100 * day_s, num_faults=10)
    >>> interval.reason
    'every 3 min, which loses the least time: a save stalls 0.2 s, and a fault comes every 24 h on 100 nodes (10 seen)'

A checkpoint costs its stall, C: the time it holds up the training, not the time it takes to write. A fault costs half
an interval of lost work, R to restart, and comes every M seconds. The interval that wastes the least is
T = C + sqrt(2 (M + R) C + C^2), which for small C is Young's and Daly's sqrt(2 C M).

M is what is known least: a run has seen no fault or a few. So it begins with a prior, as if one fault had been seen in
1000 days of a node, and every node-second and fault since is added to that. More nodes, shorter M, shorter interval.

Source: Young 1974; Daly 2006; "Training LLMs with fault tolerant HSDP", arXiv 2410.18124 (the form with R).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_FAULTS = 1.0
PRIOR_NODE_S = 1000 * 86400.0
"""One fault of a node in 1000 days: large clusters report one in 300 to 1000 days."""
RESTART_S = 60.0
"""From a fault to the next step."""
STALL_UNTIL_MEASURED_S = 1.0
"""On the safe side: an asynchronous save takes less, and then the interval is reckoned anew."""
SHORTEST_S = 10.0
LONGEST_S = 1800.0
"""What one is willing to lose on one machine, whatever the faults say: somebody trips over the cable."""
LONGEST_DISTRIBUTED_S = 900.0
"""The same with several nodes, where a lost one takes everybody's work along."""
WALL_TIME_SHARE = 10
"""At least so many intervals in the time that is left: a limit, a preemption or a cancel is no fault in M."""
WRITE_SHARE = 2.0
"""The writer is idle half of the time at least, so that no save waits for the one before it."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How long to train between two checkpoints, and why."""

    seconds: float
    reason: str


def choose_interval(
    *,
    stall_s: float | None,
    write_s: float | None,
    num_nodes: int,
    node_s: float = 0.0,
    num_faults: int = 0,
    left_s: float | None = None,
) -> Interval:
    """Return the interval between checkpoints that wastes the least time.

    Args:
        stall_s: time that a save holds up the training, the median of those measured; None: none was yet.
        write_s: time from a save to a whole checkpoint; None: not measured.
        num_nodes: that train together; a fault of one stops all.
        node_s: time that nodes of this job have run, summed over the nodes.
        num_faults: that have been seen in that time.
        left_s: until the time limit; None: there is none, or it is not known.
    """
    between_s = (PRIOR_NODE_S + node_s) / (PRIOR_FAULTS + num_faults) / num_nodes
    cost_s = STALL_UNTIL_MEASURED_S if stall_s is None else max(stall_s, 1e-3)
    best_s = cost_s + math.sqrt(2 * (between_s + RESTART_S) * cost_s + cost_s**2)
    known = (
        f"a save stalls {_show(cost_s)}{' (assumed)' if stall_s is None else ''}, and a fault comes every "
        f"{_show(between_s)} on {num_nodes} node{'s' * (num_nodes > 1)} ({num_faults or 'none'} seen)"
    )
    is_one = num_nodes == 1
    upper_s, upper = (LONGEST_S, "the longest") if is_one else (LONGEST_DISTRIBUTED_S, "the longest on several nodes")
    if left_s is not None and left_s / WALL_TIME_SHARE < upper_s:
        upper_s, upper = left_s / WALL_TIME_SHARE, f"a tenth of the {_show(left_s)} that are left"
    lower_s, lower = SHORTEST_S, "the shortest"
    if write_s is not None and write_s * WRITE_SHARE > lower_s:
        lower_s, lower = write_s * WRITE_SHARE, f"twice the {_show(write_s)} that writing takes"
    seconds, why = best_s, "which loses the least time"
    if best_s > upper_s and upper_s >= lower_s:
        seconds, why = upper_s, upper
    elif best_s < lower_s or upper_s < lower_s:
        seconds, why = lower_s, lower
    return Interval(seconds, f"every {_show(seconds)}, {why}: {known}")


def _show(seconds: float) -> str:
    """In the unit that people would take.

    >>> _show(0.25), _show(42), _show(600), _show(7200), _show(1e6)
    ('0.25 s', '42 s', '10 min', '2 h', '12 days')
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
