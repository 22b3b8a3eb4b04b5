"""How much of the time that a rank was blocked was `wait`, for whom, and how much was `transfer`? Pure.

A rank books the time in collectives that block as `blocked`; in `backward`, DDP blocks from its last bucket on, which
is a share that is measured on some passes. In windows of some seconds, the share of the time that the rank waited in
the collectives that are known (waited.py) is applied to the whole window, and never more than what was blocked.
Where no collective is known, all that was blocked is `wait` on nobody: it must not count as work.

Times at which ranks called cannot show whether a rank was blocked in a collective, or went on computing and called the
next one later (DDP's buckets): the same lag would count once for each bucket. But a rank that is waited for does not
wait itself, so the others are blocked longer than it by just what they wait for it. How much less that is than
the collectives say is `trust`, made from the books of all ranks by `weigh_trust`.

A long wait shows while it lasts: a call is open, and others have not made it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import mean

from allranks.guard.goodput.waited import WaitSample

WINDOW_S, MAX_WINDOW_S = 10.0, 60.0
"""Of own time, whose waits are split together; the longer one where no collective is known."""
RECENT_S, MIN_RECENT_S = 30.0, 1.0
"""What is said of lately is of this time, at least of the second one, and at most of twice the first one."""
MIN_TRUST_SHARE = 0.005
"""Of the time, that ranks wait for one more than that one waits itself: below it, there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Booked:
    """What a rank has booked up to a moment, without its start: seconds."""

    passed_s: float = 0.0
    blocked_s: float = 0.0
    """In collectives that block."""
    backward_s: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Window:
    since: Booked = field(default_factory=Booked)
    waited_s: dict[int | None, float] = field(default_factory=dict)
    """In the collectives that are known, by the rank that was last."""
    covered_s: float = 0.0
    """The time of those collectives."""
    long_blocked_s: float = 0.0
    long_backward_s: float = 0.0
    """Long waits, which have been booked: not to be split again."""


@dataclass(frozen=True, slots=True)
class Recent:
    """One rank lately."""

    passed_s: float
    blocked_s: float
    steps: int

    @property
    def wait_share(self) -> float:
        """`wait` and `transfer`, of its time."""
        return min(1.0, self.blocked_s / self.passed_s)


class Blocked:
    """The waits of one rank in one generation."""

    def __init__(self) -> None:
        self.trust = 1.0
        """What part of the waits in collectives is believed."""
        self.is_async = False
        """Only long waits show; all other time in which it is blocked may be work of its device."""
        self._waits_s: dict[int | None, float] = {}
        """That are booked, by the rank that was waited for; None: not decided."""
        self._backward_s = 0.0
        """Of backward, that are booked as blocked."""
        self._now = Booked()
        self._blocked_share, self._is_share_known = 0.0, False
        """Of backward."""
        self._window, self._before = _Window(), _Window()
        self._long: tuple[str, int, float, float] = ("", 0, 0.0, 0.0)
        """The last long wait: group, number, until when it is booked, and how much of it."""
        self._marks: list[tuple[Booked, float]] = []
        """Some moments, and how much of backward was blocked until then."""

    # What is told

    def tell(self, now: Booked, *, permille: int) -> None:
        """Take in what the rank has booked.

        Args:
            permille: of backward, that is blocked; -1: not known.
        """
        if permille >= 0 and not self._is_share_known:
            self._is_share_known, self._marks = True, []  # until now, all of backward counted as work
        self._now, self._blocked_share = now, max(0, permille) / 1000
        passed_s = now.passed_s - self._window.since.passed_s
        if passed_s >= (WINDOW_S if self._window.covered_s > 0 else MAX_WINDOW_S):
            self._close_window()
        if not self._marks or now.passed_s >= self._marks[-1][0].passed_s + RECENT_S:
            self._marks = [*self._marks[-1:], (now, self.backward_s)]

    def wait_in(self, sample: WaitSample, wait_s: float, covered_s: float) -> None:
        """Take in how long it waited in one collective, and the time until it called the next one."""
        group, seq, _, booked_s = self._long
        if (group, seq) == (sample.group, sample.seq):
            wait_s, covered_s = max(0.0, wait_s - booked_s), max(0.0, covered_s - booked_s)
        window = self._window
        window.covered_s += covered_s
        if wait_s > 0:
            whom = sample.rank if sample.is_decided else None
            window.waited_s[whom] = window.waited_s.get(whom, 0.0) + wait_s

    def wait_long(
        self, call: tuple[str, int], whom: int | None, since_s: float, until_s: float, *, is_backward: bool
    ) -> None:
        """Book a wait in a call that is still open, as far as it has not been booked and the rank was blocked.

        Args:
            call: group and number.
            whom: None: for several.
            is_backward: it is blocked in its backward pass.
        """
        booked_until_s, booked_s = self._long[2:] if self._long[:2] == call else (0.0, 0.0)
        since_s, window = max(since_s, booked_until_s), self._window
        free_s = self._now.blocked_s - window.since.blocked_s - window.long_blocked_s
        if is_backward:
            free_s = self._now.backward_s - window.since.backward_s - window.long_backward_s
        wait_s = min(until_s - since_s, free_s)
        if wait_s <= 0:
            return
        self._long = *call, since_s + wait_s, booked_s + wait_s
        self._waits_s[whom] = self._waits_s.get(whom, 0.0) + wait_s
        if is_backward:
            window.long_backward_s += wait_s
            self._backward_s += wait_s
        else:
            window.long_blocked_s += wait_s

    # What follows

    @property
    def is_estimated(self) -> bool:
        """Whether part of it is measured on some backward passes and applied to the others."""
        return self.backward_s > 0 and self._blocked_share > 0

    @property
    def backward_s(self) -> float:
        """Of backward, that was blocked."""
        return self._backward_s + self._open_backward_s

    def waits_s(self) -> dict[int | None, float]:
        """Return how long it waited, by the rank that was waited for; None: not decided."""
        found = dict(self._waits_s)
        for whom, wait_s in self._split().items():
            found[whom] = found.get(whom, 0.0) + wait_s
        return found

    def recent(self) -> Recent | None:
        """Return how it was lately; None: not known yet."""
        if not self._marks:
            return None
        (then, backward_s), now = self._marks[0], self._now
        if now.passed_s < then.passed_s + MIN_RECENT_S:
            return None
        blocked_s = max(0.0, now.blocked_s - then.blocked_s) + max(0.0, self.backward_s - backward_s)
        return Recent(now.passed_s - then.passed_s, blocked_s, now.steps - then.steps)

    def shares(self) -> tuple[float, Mapping[int | None, float]] | None:
        """Return of the last windows the share of time that was blocked, and those of waits by the collectives.

        None: not known.
        """
        since = self._before.since
        passed_s, covered_s = self._now.passed_s - since.passed_s, self._before.covered_s + self._window.covered_s
        if passed_s <= 0 or covered_s <= 0:
            return None
        blocked_s = self._now.blocked_s - since.blocked_s
        blocked_s += self._blocked_share * (self._now.backward_s - since.backward_s)
        waited_s = dict(self._before.waited_s)
        for whom, wait_s in self._window.waited_s.items():
            waited_s[whom] = waited_s.get(whom, 0.0) + wait_s
        return blocked_s / passed_s, {whom: wait_s / covered_s for whom, wait_s in waited_s.items()}

    # Inside

    @property
    def _open_backward_s(self) -> float:
        window = self._window
        backward_s = self._now.backward_s - window.since.backward_s - window.long_backward_s
        return self._blocked_share * max(0.0, backward_s)

    def _split(self) -> Mapping[int | None, float]:
        """Return the waits of the present window."""
        window, now = self._window, self._now
        if self.is_async:
            return {}
        blocked_s = max(0.0, now.blocked_s - window.since.blocked_s - window.long_blocked_s) + self._open_backward_s
        if window.covered_s <= 0:
            return {None: blocked_s} if blocked_s > 0 else {}
        passed_s = now.passed_s - window.since.passed_s - window.long_blocked_s - window.long_backward_s
        part = self.trust * max(0.0, passed_s) / window.covered_s
        total_s = part * sum(window.waited_s.values())
        part *= blocked_s / total_s if total_s > blocked_s else 1.0
        return {whom: part * wait_s for whom, wait_s in window.waited_s.items()}

    def _close_window(self) -> None:
        self._waits_s = self.waits_s()
        self._backward_s = self.backward_s
        self._before, self._window = self._window, _Window(self._now)


def weigh_trust(ranks: Mapping[int, Blocked]) -> float:
    """Return which part of the waits in collectives is borne out by how long ranks were blocked; 1: cannot be told."""
    shares = {rank: found for rank, blocked in ranks.items() if (found := blocked.shares()) is not None}
    waited: dict[int, float] = {}
    for _, waits in shares.values():
        for whom, share in waits.items():
            if whom is not None:
                waited[whom] = waited.get(whom, 0.0) + share
    whom = max(waited, key=waited.__getitem__, default=-1)
    if whom not in shares or len(shares) < 2:
        return 1.0
    own_blocked, own_waits = shares.pop(whom)
    others: Collection[tuple[float, Mapping[int | None, float]]] = shares.values()
    seen = mean(sum(waits.values()) for _, waits in others) - sum(own_waits.values())
    borne_out = mean(blocked for blocked, _ in others) - own_blocked
    return min(1.0, max(0.0, borne_out / seen)) if seen > MIN_TRUST_SHARE else 1.0
