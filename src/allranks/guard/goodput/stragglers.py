"""Which rank comes late to nearly every collective, and what does that cost the others? Pure.

A collective makes all ranks equally slow, so step times show nothing; who called it last does. Where collectives were
late by more than clocks may be wrong (waited.py), nearly always by the same rank, and it costs the others enough of
their time, in several windows in a row, that rank is named once. A small lag takes more windows, and NUM_STEPS steps.
Never more than a warning: slow is not broken.

A rank that evaluates now and then is late in few of them, and a blocking call right after a late one is not late at
all. The cost is time on the clock, so collectives that are late together (the buckets of one backward pass) count once.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from allranks.guard.goodput.waited import MAX_GROUPS, WaitSample

WINDOW_SAMPLES = 12
WINDOW_S = 4.0
NUM_WINDOWS = 3
"""In a row that blame the same rank, if its lag is large."""
LARGE_LAG_S = 0.02
NUM_SMALL_WINDOWS, MIN_LAST, MIN_WAITED = 6, 0.7, 0.8
"""A smaller lag is weighed over so many windows together: that rank is the last one in so many of the collectives that
somebody was late in, and so much of the time that ranks wait is for it. Of two ranks, chance makes one late in half."""
NUM_STEPS = 200
"""A smaller lag is not reported before so many steps, or so many collectives where no step is seen."""
MIN_LATE = 0.3
"""Of the collectives of a window: so many are late."""
MIN_TIMES_LAST = 0.8
"""Of those that are late: so many because of one rank."""
MIN_LAG_S = 0.001
"""A smaller lag is none: the scheduler of a busy machine takes as long."""
MIN_SHARE = 0.05
"""Fraction of the wall time of all others; less is not reported. A lag is none below this part of the time from one
collective to the next one, either."""
ERROR_FACTOR = 3.0
"""So many times the clocks' error must the lag be."""
LATELY = 64
"""Collectives of a group that tell how late ranks are now."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that keeps the others waiting."""

    rank: int
    lag_s: float
    """By how much it is later than all others: the median of the collectives that it was late in."""
    share: float
    """Fraction of wall time that all others waited for it."""
    num_late: int
    """Collectives that it was late in, of `num_collectives` that were looked at."""
    num_collectives: int
    since_step: int = 0
    """How many steps its process had made when that began; of a script without steps, collectives."""
    is_by_loads: bool = False
    """It loads and saves longer than the median of all: where its host runs ahead of a GPU, no collective shows more.
    `lag_s` is that of each step."""


@dataclass(frozen=True, slots=True)
class _Lag:
    rank: int
    """The last one."""
    called_s: float
    lag_s: float
    error_s: float
    waited_s: float
    """For it, mean over the others."""
    passed_s: float
    """Until the next one, mean over all ranks."""
    step: int

    @property
    def is_late(self) -> bool:
        """Whether it is neither noise nor what the clocks may be wrong by."""
        return self.lag_s >= max(MIN_LAG_S, ERROR_FACTOR * self.error_s)


@dataclass(slots=True)
class _Group:
    window: list[_Lag] = field(default_factory=list)
    closed: deque[list[_Lag]] = field(default_factory=lambda: deque(maxlen=NUM_SMALL_WINDOWS))
    """The last windows."""
    rank: int | None = None
    num_blamed: int = 0
    """So many of them in a row blame that rank."""
    lately: deque[_Lag] = field(default_factory=lambda: deque(maxlen=LATELY))


class Stragglers:
    """Takes in who waited for whom, and names who is late."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, _Group] = defaultdict(_Group)
        self._named: dict[int, Straggler] = {}
        self._new: list[Straggler] = []
        self.trust = 1.0
        """What part of the waits is borne out by the time that ranks were blocked (guard/goodput/blocked.py)."""

    def compare(self, loads: Mapping[int, tuple[float, float, int]]) -> None:
        """Take in how long ranks whose collectives come back at once have loaded and saved.

        Args:
            loads: by rank: seconds of data and save, of all since its first step, and steps.
        """
        shares = {rank: load_s / passed_s for rank, (load_s, passed_s, _) in loads.items() if passed_s > 0}
        if len(shares) < 2:
            return
        rank, middle = max(shares, key=shares.__getitem__), median(shares.values())
        (_, passed_s, steps), share = loads[rank], shares[rank] - middle
        if share >= MIN_SHARE and steps >= NUM_STEPS and rank not in self._named:
            found = Straggler(rank, share * passed_s / steps, min(1.0, share), 0, 0, is_by_loads=True)
            self._named[rank] = found
            self._new.append(found)

    def hear(self, sample: WaitSample, *, step: int | None) -> None:
        """Take in one collective.

        Args:
            step: how many the last rank has made; None: not seen.
        """
        if sample.group not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        state = self._groups[sample.group]
        lag = _Lag(
            rank=sample.rank,
            called_s=sample.called_s,
            lag_s=sample.lag_s,
            error_s=sample.error_s,
            waited_s=sum(wait_s for _, _, wait_s, _ in sample.waited) / (len(sample.waited) - 1),
            passed_s=fmean(covered_s for _, _, _, covered_s in sample.waited),
            step=sample.seq if step is None else step,
        )
        state.window.append(lag)
        state.lately.append(lag)
        self._close_window(state)

    def forget(self) -> None:
        """A clock was set: what was measured before compares with nothing."""
        self._groups.clear()

    def named(self) -> Iterable[Straggler]:
        """Return who was named since the last time this was asked; each rank once."""
        new, self._new = self._new, []
        return new

    def lately(self) -> Mapping[int, Straggler]:
        """Return of the last collectives who was late in them, whether that is worth a line or not."""
        found: dict[int, Straggler] = {}
        for state in self._groups.values():
            for rank in {lag.rank for lag in _late(state.lately)}:
                weighed = _weigh(state.lately, rank, self.trust)
                if rank not in found or found[rank].share < weighed.share:
                    found[rank] = weighed
        return found

    def _close_window(self, state: _Group) -> None:
        window = state.window
        span_s = window[-1].called_s - window[0].called_s
        if len(window) < WINDOW_SAMPLES or span_s < WINDOW_S:
            if len(window) > 64 * WINDOW_SAMPLES:
                window.clear()
            return
        state.window = []
        state.closed.append(window)
        rank = _find_late(window)
        state.num_blamed = state.num_blamed + 1 if rank == state.rank else 1
        state.rank = rank
        found: Straggler | None = None
        if rank is not None and state.num_blamed >= NUM_WINDOWS:
            found = _weigh([*itertools.chain(*[*state.closed][-NUM_WINDOWS:])], rank, self.trust)
        if found is None or found.lag_s < LARGE_LAG_S:
            is_time = len(state.closed) == NUM_SMALL_WINDOWS and window[-1].step >= NUM_STEPS
            found = self._find_small(state.closed) if is_time else None
        if found is not None and found.share >= MIN_SHARE and found.rank not in self._named:
            self._named[found.rank] = found
            self._new.append(found)

    def _find_small(self, windows: Sequence[Sequence[_Lag]]) -> Straggler | None:
        """Return who is late by little in windows together, and still in the last one."""
        lags = [*itertools.chain(*windows)]
        waited: defaultdict[int, float] = defaultdict(float)
        for lag in lags:
            waited[lag.rank] += lag.waited_s
        rank = max(waited, key=waited.__getitem__)
        clear = [lag for lag in lags if lag.is_late]
        late = [lag for lag in clear if lag.rank == rank]
        is_often = len(late) >= max(MIN_LATE * len(lags), MIN_LAST * len(clear))
        if not is_often or waited[rank] < MIN_WAITED * sum(waited.values()):
            return None
        now = _weigh(windows[-1], rank, self.trust, late=[lag for lag in windows[-1] if lag.rank == rank])
        return _weigh(lags, rank, self.trust, late=late) if now.share >= MIN_SHARE else None


def _late(lags: Sequence[_Lag]) -> list[_Lag]:
    """Return the collectives whose last rank came so late that it counts, against the time between two of them."""
    least_s = MIN_SHARE * fmean(lag.passed_s for lag in lags) if lags else 0.0
    return [lag for lag in lags if lag.lag_s >= least_s and lag.is_late]


def _find_late(window: Sequence[_Lag]) -> int | None:
    """Return the rank that was late in one window; None: nobody was, or now this one and now that one."""
    late = _late(window)
    if len(late) < MIN_LATE * len(window):
        return None
    rank, times = Counter(lag.rank for lag in late).most_common(1)[0]
    return rank if times >= MIN_TIMES_LAST * len(late) else None


def _weigh(lags: Sequence[_Lag], rank: int, trust: float, *, late: Sequence[_Lag] | None = None) -> Straggler:
    """Return by how much this rank was late in these collectives, and what that cost the others.

    Args:
        late: those of them that it was late in.
    """
    late = [lag for lag in _late(lags) if lag.rank == rank] if late is None else late
    passed_s = sum(lag.passed_s for lag in lags)
    return Straggler(
        rank=rank,
        lag_s=median(lag.lag_s for lag in late) if late else 0.0,
        share=min(1.0, trust * sum(lag.waited_s for lag in late) / passed_s) if passed_s > 0 else 0.0,
        num_late=len(late),
        num_collectives=len(lags),
        since_step=lags[0].step,
    )
