"""Who waited for whom in a collective, by the times at which all ranks called it and the next one? Pure.

    times = CallTimes()
    times.hear(group, members, rank, [(seq, called_s), ...], node=(3, error_s))    WaitSamples that are complete now

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MAX_OPEN = 512
"""Collectives of a group of which not all ranks have told yet; of large groups so many that MAX_TOLD calls are kept,
and at least MIN_OPEN: those of some seconds. A rank without a hook tells of none."""
MAX_TOLD, MIN_OPEN = 100_000, 64
LOOKS_PER_S, TOLD_PER_S = 2048, 20
"""Of all ranks of a group, how many are gone through in a second at most; and how many collectives a rank tells of."""
PERIOD_PART = 0.1
MAX_GROUPS = 1024
"""Of more groups the oldest is forgotten: scripts may form one for each step."""

NodeError = tuple[int, float]
"""Index of a node, and how wrong its clock may be, in seconds."""


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
    period_s: float = 1.0
    """From one to the next one, lately."""


class CallTimes:
    """Takes in when ranks called which collective."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[str, Sequence[int]], _Group] = defaultdict(_Group)
        self._clocks: dict[int, NodeError] = {}
        """By rank."""

    def hear(
        self, group: str, members: Sequence[int], rank: int, calls: Iterable[tuple[int, float]], *, node: NodeError
    ) -> list[WaitSample]:
        """Take in when a rank called collectives of its group; return of those that are known by it who waited.

        Args:
            calls: number, and when it was called by the leader's clock.
            node: index of the rank's node, and how wrong its clock may be.
        """
        key = group, members
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        state = self._groups[key]
        if rank not in members:
            return []
        self._clocks[rank] = node
        found, whole = [], len(members)
        for seq, called_s in calls:
            if seq <= state.newest:
                continue
            told = state.open.get(seq)
            if told is None:
                told = state.open[seq] = {}
            told.setdefault(rank, called_s)
            if len(told) < whole:
                if len(state.open) > min(_MAX_OPEN, max(MIN_OPEN, MAX_TOLD // whole)):
                    del state.open[min(state.open)]
                continue
            del state.open[seq]
            before, state.newest, calls_before, state.calls = state.newest, seq, state.calls, told
            if not calls_before or seq != before + 1:
                continue
            state.period_s += PERIOD_PART * (called_s - calls_before[rank] - state.period_s)
            if _is_looked_at(seq, whole, state.period_s):
                found.append(self._weigh(group, before, calls_before, told))
        return found

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


def _is_looked_at(seq: int, num_members: int, period_s: float) -> bool:
    """Whether who waited in this one is reckoned: in large groups in some only, spread by the golden ratio."""
    part = LOOKS_PER_S / (num_members * min(TOLD_PER_S, 1 / max(period_s, 1e-3)))
    return seq * 0x9E3779B1 % (1 << 32) < part * (1 << 32)
