"""Which rank comes late to nearly every collective, and what does that cost the others? Pure.

A collective makes all ranks equally slow, so step times show nothing; who called it last does. All ranks tell when
they called the same ones (chosen by number), and their nodes' clocks are put on one (clocks.py). In a window of them
the last one has a lag behind the one before it. Where collectives were late by more than clocks may be wrong, and
nearly always by the same rank, in three windows in a row, it is named. Never more than a warning: slow is not broken.

A rank that evaluates now and then is late in few of them, and a blocking call right after a late one is not late at
all. What it costs is time on the clock, so collectives that are late together (the buckets of one backward pass) count
once: where all others went on to the next collective before the last rank came to this one, nobody waited in this one.
That shows only in collectives that follow one another, so ranks tell of runs of them (guard/inside/flight.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW_SAMPLES = 12
WINDOW_S = 4.0
NUM_WINDOWS = 3
MIN_LATE = 0.3
"""Of the collectives of a window: so many are late."""
MIN_TIMES_LAST = 0.8
"""Of those that are late: so many because of one rank."""
MIN_LAG_S = 0.02
MIN_SHARE = 0.05
"""Fraction of the wall time of all others; less is not reported."""
ERROR_FACTOR = 3.0
"""So many times the clocks' error must the lag be."""
_MAX_OPEN = 512
"""Collectives of a group of which not all ranks have told yet; of large groups so many that MAX_TOLD calls are kept,
and at least MIN_OPEN: those of some seconds. A rank without a hook tells of none."""
MAX_TOLD, MIN_OPEN = 100_000, 64
MAX_GROUPS = 1024
"""Of more groups the oldest is forgotten: scripts may form one for each step."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that keeps the others waiting."""

    rank: int
    lag_s: float
    """By how much it is later than all others: the median of the collectives that it was late in."""
    share: float
    """Upper bound of the fraction of wall time that all others waited for it."""
    num_late: int
    """Collectives that it was late in, of `num_collectives` that were looked at."""
    num_collectives: int


@dataclass(frozen=True, slots=True)
class _Lag:
    seq: int
    called_s: float
    """When the last rank came, by the leader's clock."""
    rank: int
    """The last one."""
    lag_s: float
    """Behind the one before it."""
    error_s: float

    @property
    def before_s(self) -> float:
        """When all others had come."""
        return self.called_s - self.lag_s


@dataclass(slots=True)
class _Group:
    open: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """By number: of each rank, when it called, and how wrong that may be."""
    window: list[_Lag] = field(default_factory=list)
    blamed: list[list[_Lag]] = field(default_factory=list)
    """The last windows in a row that blame one and the same rank."""
    rank: int | None = None
    """That rank."""
    newest: int = 0


class Stragglers:
    """Takes in when ranks called which collective, and names who is late."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[str, Sequence[int]], _Group] = defaultdict(_Group)
        self._named: dict[int, Straggler] = {}

    def hear(self, group: str, members: Sequence[int], rank: int, seq: int, called_s: float, error_s: float) -> None:
        """Take in when a rank called a collective of its group, by the leader's clock, and how wrong that may be."""
        if (group, members) not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        state = self._groups[group, members]
        if rank not in members or seq <= state.newest - _MAX_OPEN:
            return
        told = state.open.setdefault(seq, {})
        told.setdefault(rank, (called_s, error_s))
        if len(told) < len(members):
            if len(state.open) > min(_MAX_OPEN, max(MIN_OPEN, MAX_TOLD // len(members))):
                del state.open[min(state.open)]
            return
        del state.open[seq]
        if seq <= state.newest:
            return
        state.newest = seq
        order = sorted((progress[0], who) for who, progress in told.items())
        (before, _), (last, who) = order[-2], order[-1]
        state.window.append(_Lag(seq, last, who, last - before, max(progress[1] for progress in told.values()) * 2))
        self._close_window(state)

    def forget(self) -> None:
        """A clock was set: what was measured before compares with nothing."""
        self._groups.clear()

    def named(self) -> Iterable[Straggler]:
        """Return who was named since the last time this was asked."""
        named, self._named = self._named, {}
        return named.values()

    def _close_window(self, state: _Group) -> None:
        window = state.window
        span_s = window[-1].called_s - window[0].called_s
        if len(window) < WINDOW_SAMPLES or span_s < WINDOW_S:
            if len(window) > 64 * WINDOW_SAMPLES:
                window.clear()
            return
        state.window = []
        rank = _find_late(window)
        if rank is None or rank != state.rank:
            state.blamed = []
        state.rank = rank
        if rank is None:
            return
        state.blamed = [*state.blamed, window][-NUM_WINDOWS:]
        if len(state.blamed) == NUM_WINDOWS and (named := _weigh(state.blamed, rank)).share >= MIN_SHARE:
            self._named[rank] = named


def _least_s(window: Sequence[_Lag]) -> float:
    """From which lag on a collective of this window counts as late."""
    return max(MIN_LAG_S, ERROR_FACTOR * median(lag.error_s for lag in window))


def _find_late(window: Sequence[_Lag]) -> int | None:
    """Return the rank that was late in one window; None: nobody was, or now this one and now that one."""
    late = [lag for lag in window if lag.lag_s >= _least_s(window)]
    if len(late) < MIN_LATE * len(window):
        return None
    rank, times = Counter(lag.rank for lag in late).most_common(1)[0]
    return rank if times >= MIN_TIMES_LAST * len(late) else None


def _weigh(windows: Sequence[Sequence[_Lag]], rank: int) -> Straggler:
    """Return by how much this rank was late in these windows, and what that cost the others."""
    lags = [lag for window in windows for lag in window]
    late = [lag for window in windows for lag in window if lag.rank == rank and lag.lag_s >= _least_s(window)]
    return Straggler(
        rank=rank,
        lag_s=median(lag.lag_s for lag in late),
        share=_share(lags, rank),
        num_late=len(late),
        num_collectives=len(lags),
    )


def _share(lags: Sequence[_Lag], rank: int) -> float:
    """Of the time that runs of collectives took, how much everybody waited for this rank; 0 where none follow.

    Whether the others waited in the last one of a run does not show; they are taken to have done so.
    """
    waited_s = passed_s = 0.0
    clear_s = lags[0].called_s
    for before, lag, after in zip(lags, lags[1:], [*lags[2:], None], strict=False):
        if lag.seq != before.seq + 1:
            clear_s = lag.called_s
            continue
        passed_s += max(0.0, lag.called_s - before.called_s)
        follower = after if after is not None and after.seq == lag.seq + 1 else None
        went_on = follower is not None and follower.before_s < lag.called_s - lag.lag_s / 2
        if lag.rank == rank and not went_on:
            waited_s += max(0.0, lag.called_s - max(lag.before_s, clear_s))
            clear_s = lag.called_s
    return waited_s / passed_s if passed_s else 0.0
