"""Who waited for whom in a collective, by the times at which all ranks called it and the next one? Pure.

    times = CallTimes()
    sample = times.hear(group, members, rank, seq, called_s, error_s, node=3)    a WaitSample, or None

All ranks tell when they called the same collectives (chosen by number, guard/inside/flight.py), and their nodes' clocks
are put on one (clocks.py). A collective ends for nobody before the last rank has called it. So a rank that called
the next one after that waited from its own call to the last rank's; a rank that went on before (the buckets of
one backward pass, asynchronous calls) did not wait in this one. Only collectives that follow one another show this, so
the last one of a run says nothing.

A wait that is shorter than the clocks of the two nodes may be wrong by is none: it counts as transfer. Ranks of one
node have one clock. If the last rank comes after the one before it by less than the clocks' error, it is not decided
which of them the others waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_OPEN = 512
"""Collectives of a group of which not all ranks have told yet; of large groups so many that MAX_TOLD calls are kept,
and at least MIN_OPEN: those of some seconds. A rank without a hook tells of none."""
MAX_TOLD, MIN_OPEN = 100_000, 64
MAX_GROUPS = 1024
"""Of more groups the oldest is forgotten: scripts may form one for each step."""


@dataclass(frozen=True, slots=True)
class WaitSample:
    """One collective that all ranks of its group have called, and the time until they called the next one."""

    group: str
    seq: int
    rank: int
    """The last one."""
    called_s: float
    """When it called, by the leader's clock."""
    lag_s: float
    """Behind the one before it."""
    error_s: float
    """How wrong that lag may be."""
    waited: Sequence[tuple[int, float, float, float]]
    """Of each rank: when it called this one, how long it waited, and the time to its next call."""

    @property
    def is_decided(self) -> bool:
        """Whether the clocks are good enough to tell who the last one is."""
        return self.lag_s > self.error_s


@dataclass(slots=True)
class _Group:
    open: dict[int, dict[int, float]] = field(default_factory=dict)
    """By number: when each rank called it."""
    newest: int = 0
    """Number of the last one that all ranks have told of."""
    calls: dict[int, float] = field(default_factory=dict)
    """Of that one."""


class CallTimes:
    """Takes in when ranks called which collective."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[str, Sequence[int]], _Group] = defaultdict(_Group)
        self._clocks: dict[int, tuple[int, float]] = {}
        """By rank: its node, and how wrong that node's clock may be."""

    def hear(
        self, group: str, members: Sequence[int], rank: int, seq: int, called_s: float, error_s: float, *, node: int
    ) -> WaitSample | None:
        """Take in when a rank called a collective of its group; return who waited in the one before it, once known.

        Args:
            called_s: by the leader's clock.
            error_s: how wrong that may be.
            node: index of the rank's node.
        """
        if (group, members) not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        state = self._groups[group, members]
        if rank not in members or seq <= state.newest - _MAX_OPEN:
            return None
        self._clocks[rank] = node, error_s
        told = state.open.setdefault(seq, {})
        told.setdefault(rank, called_s)
        if len(told) < len(members):
            if len(state.open) > min(_MAX_OPEN, max(MIN_OPEN, MAX_TOLD // len(members))):
                del state.open[min(state.open)]
            return None
        del state.open[seq]
        if seq <= state.newest:
            return None
        (before, calls), state.newest, state.calls = (state.newest, state.calls), seq, told
        return self._weigh(group, before, calls, told) if calls and seq == before + 1 else None

    def forget(self) -> None:
        """A clock was set: what was measured before compares with nothing."""
        self._groups.clear()

    def _weigh(self, group: str, seq: int, calls: dict[int, float], following: dict[int, float]) -> WaitSample:
        last = max(calls, key=calls.__getitem__)
        last_s, (last_node, last_error_s) = calls[last], self._clocks[last]
        second = max((rank for rank in calls if rank != last), key=calls.__getitem__)
        errors_s = {last_node: 0.0}
        waited = []
        for rank, called_s in calls.items():
            node, error_s = self._clocks[rank]
            error_s = errors_s.setdefault(node, error_s + last_error_s)
            wait_s, went_on_s = last_s - called_s, following[rank]
            has_waited = wait_s > error_s and went_on_s >= last_s - error_s
            waited.append((rank, called_s, wait_s if has_waited else 0.0, max(0.0, went_on_s - called_s)))
        lag_s = last_s - calls[second]
        return WaitSample(group, seq, last, last_s, lag_s, errors_s[self._clocks[second][0]], waited)
