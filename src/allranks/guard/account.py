"""How has one rank spent its time in one generation? Its account, from what it booked itself. Pure.

    generation begins      first word            last word      now, a fault, or its end
    |------- front --------|------- Pace --------|--- tail ---|
      start                  its running totals    present state, or unknown

Pace has running totals, so a word that is lost costs nothing, and the account is made anew from the newest one each
time. Front, Pace and tail sum to the wall time by construction. A tail counts as the present state only where it is
short and the rank lives: behind the last word of a dead or silent one it is unknown.

What a rank books as `blocked`, and the part of `backward` in which DDP waits for its last bucket, is split into `wait`
and `transfer`: in windows of some seconds, by the share of the time that the rank waited in the collectives that are
known (waited.py). A long wait shows while it lasts: a call is open, and others have not made it (`wait_long`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.guard.waited import WaitSample
from allranks.model.beat import RankBeat
from allranks.model.ledger import Category
from allranks.model.pace import PACE_STATES, Pace, PaceState

WINDOW_S, MAX_WINDOW_S = 10.0, 60.0
"""Of own time, whose waits are split together; the longer one where no collective is known."""
TAIL_S = 3.0
"""So long may the present state go on behind a word; what is longer is unknown."""
RECENT_S = 30.0
"""What is said of lately is of this time, and at most of twice that."""
MIN_RECENT_S = 1.0
POINT_S, MAX_POINTS = 1.0, 64
"""What is remembered of the way since the last checkpoint: one point a second; of more, every second one goes."""

START, STEP, BACKWARD, DATA, EVAL, SAVE, BLOCKED = range(len(PACE_STATES))
_AT_RISK = (Category.STEP, Category.WAIT, Category.TRANSFER, Category.DATA, Category.EVAL, Category.SAVE)
"""What a fault turns into `redo`."""


@dataclass(slots=True)
class _Window:
    """Where totals stood when it began, in microseconds, and what was seen since."""

    blocked_us: int = 0
    backward_us: int = 0
    passed_us: int = 0
    """All but the start."""
    waited_s: dict[int | None, float] = field(default_factory=dict)
    """In the collectives that are known, by the rank that was last."""
    covered_s: float = 0.0
    """The time of those collectives."""
    long_blocked_s: float = 0.0
    long_backward_s: float = 0.0
    """Long waits, which have been booked: not to be split again."""


@dataclass(frozen=True, slots=True)
class _Point:
    told_s: float
    step: int | None
    """Of the session."""
    at_risk: tuple[float, ...]
    """Seconds by category, in the order of _AT_RISK."""


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


class Account:
    """One rank in one generation.

    Args:
        begun_s: when its time begins, by the leader's clock.
        is_running: its process began before that, under another leader: what it booked before does not count here.
    """

    def __init__(self, rank: int, *, node: int, begun_s: float, is_running: bool = False) -> None:
        self.rank, self.node, self.begun_s = rank, node, begun_s
        self.beat: RankBeat | None = None
        self.pace: Pace | None = None
        self.told_s = begun_s
        self.until_s: float | None = None
        """When it ended, or a fault: nothing is booked behind that."""
        self.is_dead = False
        """It ended badly, or its node is lost."""
        self.has_ended_well = False
        self.waits_s: dict[int | None, float] = {}
        """That are booked, by the rank that was waited for; None: not decided."""
        self.redo_s: tuple[float, ...] = ()
        """In the order of _AT_RISK: work that a fault has lost."""
        self.is_estimated = False
        self._is_running = is_running
        self._base: tuple[int, ...] = (0,) * len(PACE_STATES)
        self._base_steps = 0
        self._front_s: float | None = None
        """Before its process began; negative: it began so long before this account."""
        self._window = _Window()
        self._back_blocked_s = 0.0
        """Of backward, that were booked as blocked."""
        self._long: tuple[str, int, float, float] = ("", 0, 0.0, 0.0)
        """The last long wait: group, number, until when it is booked, and how much of it."""
        self._points: list[_Point] = []
        self._marks: list[tuple[float, float, int]] = []
        """Some moments: time that passed, time blocked, steps."""
        self._mark_s = 0.0

    # What is told

    def hear(self, beat: RankBeat, told_s: float) -> None:
        """Take in a word of its agent; what it says behind its end does not count."""
        pace = beat.pace
        if self.until_s is not None or told_s < self.told_s:
            return
        self.beat, self.is_dead = beat, False
        if pace is None:
            return
        if self._is_running and self.pace is None:
            here_us = min(round(1e6 * (told_s - self.begun_s)), pace.totals_us[pace.state])
            base = [*pace.totals_us]
            base[pace.state] -= here_us
            self._base, self._base_steps = tuple(base), pace.steps
        self.pace, self.told_s = pace, told_s
        front_s = told_s - self.begun_s - self._booked_us / 1e6
        self._front_s = front_s if self._front_s is None else min(self._front_s, front_s)
        passed_us = self._booked_us - self._total(START) - self._window.passed_us
        if passed_us >= 1e6 * (WINDOW_S if self._window.covered_s > 0 else MAX_WINDOW_S):
            self._close_window()
        if told_s >= self._mark_s and self.steps > 0:
            self._mark_s = told_s + RECENT_S
            self._marks = [*self._marks[-1:], self._now_marks()]
        if not self._points or told_s >= self._points[-1].told_s + POINT_S:
            self._points.append(_Point(told_s, beat.step, self._at_risk()))
            if len(self._points) > MAX_POINTS:
                del self._points[1::2]

    def wait_in(self, sample: WaitSample, called_s: float, wait_s: float, covered_s: float) -> None:
        """Take in how long it waited in one collective; before its first step ends, all is `start`."""
        first_s = self.first_step_s
        if self.pace is None or first_s is None or called_s < first_s or covered_s <= 0:
            return
        group, seq, _, booked_s = self._long
        if (group, seq) == (sample.group, sample.seq):
            wait_s, covered_s = max(0.0, wait_s - booked_s), max(0.0, covered_s - booked_s)
        self._window.covered_s += covered_s
        if wait_s > 0:
            whom = sample.rank if sample.is_decided else None
            waited_s = self._window.waited_s
            waited_s[whom] = waited_s.get(whom, 0.0) + wait_s

    def wait_long(self, group: str, seq: int, whom: int | None, since_s: float, until_s: float) -> None:
        """Book that it has waited in a call that is still open, for one that has not made it; as far as it is blocked.

        Args:
            whom: None: for several.
            since_s: when it made the call.
            until_s: when it is known that somebody still had not.
        """
        if self.pace is None or self.pace.state not in (BLOCKED, BACKWARD) or self.until_s is not None:
            return
        known_group, known_seq, booked_until_s, booked_s = self._long
        if (known_group, known_seq) != (group, seq):
            booked_until_s = booked_s = 0.0
        from_s = max(since_s, booked_until_s, self.told_s - self.pace.state_us / 1e6, self.first_step_s or self.told_s)
        wait_s = min(until_s, self.told_s) - from_s
        window, is_backward = self._window, self.pace.state == BACKWARD
        since_us = window.backward_us if is_backward else window.blocked_us
        done_s = window.long_backward_s if is_backward else window.long_blocked_s
        wait_s = min(wait_s, (self._total(self.pace.state) - since_us) / 1e6 - done_s)
        if wait_s <= 0:
            return
        self._long = group, seq, from_s + wait_s, booked_s + wait_s
        self.waits_s[whom] = self.waits_s.get(whom, 0.0) + wait_s
        if is_backward:
            window.long_backward_s += wait_s
            self._back_blocked_s += wait_s
        else:
            window.long_blocked_s += wait_s

    def end(self, at_s: float, *, is_well: bool, is_dead: bool) -> None:
        """Its process ended.

        Args:
            is_dead: badly, and by itself.
        """
        if self.until_s is None:
            self.until_s = max(at_s, self.begun_s)
            self.has_ended_well, self.is_dead = is_well, is_dead

    def stop(self, at_s: float) -> None:
        """A fault has ended its generation; it may have said more meanwhile, which is taken back."""
        self.until_s = max(self.begun_s, at_s if self.until_s is None else min(self.until_s, at_s))

    def has_not_called(self, group: str, seq: int) -> bool:
        """Whether its last word shows that it had not made this call then."""
        return self.beat is not None and any(
            seen.name == group and 0 <= seen.enqueued < seq for seen in self.beat.groups
        )

    # What follows

    @property
    def is_async(self) -> bool:
        """Whether it cannot tell `step`, `wait` and `transfer` apart."""
        return self.pace is not None and self.pace.is_async

    @property
    def saved_s(self) -> float:
        """How long it has saved."""
        return self._total(SAVE) / 1e6

    @property
    def steps(self) -> int:
        """Optimizer steps since this account began."""
        return max(0, self.pace.steps - self._base_steps) if self.pace else 0

    @property
    def first_step_s(self) -> float | None:
        """When its first step ended, by the leader's clock; None: it has not."""
        if self.pace is None or self.pace.steps == 0:
            return None
        return max(self.begun_s, self.told_s - (self._booked_us - self._total(START)) / 1e6)

    def seconds(self, now_s: float) -> dict[Category, float]:
        """Return its time from the beginning until now, or until it ended, by category; sums to that time."""
        found = self._split(now_s)
        if not self.redo_s:
            return found
        for category, lost_s in zip(_AT_RISK, self.redo_s, strict=False):
            moved_s = min(lost_s, found[category])
            found[category] -= moved_s
            found[Category.REDO] = found.get(Category.REDO, 0.0) + moved_s
        return found

    def waits(self, now_s: float) -> Mapping[int | None, float]:
        """Return how long it has waited for whom; sums to its `wait`, before a fault turns some of it into `redo`."""
        waits_s = self._all_waits()
        wait_s = self._split(now_s).get(Category.WAIT, 0.0)
        total_s = sum(waits_s.values())
        return {whom: found_s * wait_s / total_s for whom, found_s in waits_s.items()} if total_s > 0 else {}

    def recent(self) -> Recent | None:
        """Return how it was lately, without its start; None: not known yet."""
        if not self._marks or self.pace is None or self.pace.is_async:
            return None
        (passed_s, blocked_s, steps), (now_s, now_blocked_s, now_steps) = self._marks[0], self._now_marks()
        if now_s - passed_s < MIN_RECENT_S:
            return None
        return Recent(now_s - passed_s, max(0.0, now_blocked_s - blocked_s), now_steps - steps)

    def forget_until(self, step: int) -> None:
        """A checkpoint is complete: a fault no longer loses what came before that step of the session."""
        kept = [number for number, point in enumerate(self._points) if point.step is not None and point.step < step]
        del self._points[: kept[-1] if kept else 0]

    def lose(self, step: int | None, *, since_s: float | None = None) -> float:
        """Turn what it did since a checkpoint into `redo`; returns the seconds. To be called after `stop`.

        Args:
            step: of the checkpoint, as the session counts; None: there is none, so all is lost.
            since_s: where no session counts steps: when the checkpoint was complete.
        """
        last = self._at_risk(self.until_s)
        kept = (0.0,) * len(_AT_RISK)
        at: float | None = since_s if since_s is not None else step
        if at is not None:
            marks = [(point.told_s if since_s is not None else point.step, point.at_risk) for point in self._points]
            told = [(float(mark), at_risk) for mark, at_risk in marks if mark is not None]
            now = self.until_s if since_s is not None else self.beat and self.beat.step
            kept = _interpolate([*told, (float(now), last)] if now is not None else told, at)
        self.redo_s = tuple(max(0.0, end_s - kept_s) for end_s, kept_s in zip(last, kept, strict=True))
        return sum(self.redo_s)

    # Inside

    @property
    def _booked_us(self) -> int:
        return sum(self.pace.totals_us) - sum(self._base) if self.pace else 0

    def _total(self, state: int) -> int:
        return max(0, self.pace.totals_us[state] - self._base[state]) if self.pace else 0

    def _split(self, now_s: float) -> dict[Category, float]:
        until_s = max(self.begun_s, now_s if self.until_s is None else min(now_s, self.until_s))
        whole_s = until_s - self.begun_s
        pace = self.pace
        if pace is None or self._front_s is None:
            return dict.fromkeys(Category, 0.0) | {Category.UNKNOWN: whole_s}
        raw = [self._total(state) / 1e6 for state in range(len(PACE_STATES))]
        front_s, unknown_s = max(0.0, self._front_s), 0.0
        raw[START] = max(0.0, raw[START] + min(0.0, self._front_s))  # a standby began before its generation
        silent_s = self.told_s - self.begun_s - self._booked_us / 1e6 - self._front_s
        unknown_s += max(0.0, silent_s)
        tail_s = until_s - self.told_s
        if tail_s < 0:  # it was stopped before its last word
            back_s = min(-tail_s, raw[pace.state])
            raw[pace.state] -= back_s
        elif self.is_dead or tail_s > TAIL_S:
            unknown_s += tail_s
        else:
            raw[pace.state] += tail_s
        total_s = front_s + unknown_s + sum(raw)
        scale = whole_s / total_s if total_s > whole_s else 1.0  # nonsense in a cell
        front_s, unknown_s, raw = front_s * scale, unknown_s * scale, [part_s * scale for part_s in raw]
        unknown_s += max(0.0, whole_s - front_s - unknown_s - sum(raw))
        if self._is_running:
            front_s, unknown_s = 0.0, unknown_s + front_s
        start_s = front_s + raw[START]
        if self.has_ended_well and pace.steps == 0:
            start_s, unknown_s = 0.0, unknown_s + start_s  # it has trained without a step that is seen
        back_s = min(raw[BACKWARD], self._back_blocked_s + self._open_split()[1])
        blocked_s = raw[BLOCKED] + back_s
        wait_s = min(blocked_s, sum(self._all_waits().values()))
        step_s, transfer_s = raw[STEP] + raw[BACKWARD] - back_s, blocked_s - wait_s
        if pace.is_async:
            step_s, transfer_s = step_s + transfer_s, 0.0
        return dict.fromkeys(Category, 0.0) | {
            Category.START: start_s,
            Category.STEP: step_s,
            Category.WAIT: wait_s,
            Category.TRANSFER: transfer_s,
            Category.DATA: raw[DATA],
            Category.EVAL: raw[EVAL],
            Category.SAVE: raw[SAVE],
            Category.UNKNOWN: unknown_s,
        }

    def _open_split(self) -> tuple[dict[int | None, float], float]:
        """Return of the present window who was waited for how long, and how much of backward was blocked."""
        window, pace = self._window, self.pace
        if pace is None or pace.is_async:
            return {}, 0.0
        back_s = max(0.0, (self._total(BACKWARD) - window.backward_us) / 1e6 - window.long_backward_s)
        back_s *= max(0, pace.back_blocked_permille) / 1000
        blocked_s = back_s + max(0.0, (self._total(BLOCKED) - window.blocked_us) / 1e6 - window.long_blocked_s)
        if window.covered_s <= 0:
            return {None: blocked_s}, back_s
        passed_s = (self._booked_us - self._total(START) - window.passed_us) / 1e6
        passed_s = max(0.0, passed_s - window.long_blocked_s - window.long_backward_s)
        waits_s = {whom: passed_s * wait_s / window.covered_s for whom, wait_s in window.waited_s.items()}
        total_s = sum(waits_s.values())
        scale = blocked_s / total_s if total_s > blocked_s else 1.0
        return {whom: wait_s * scale for whom, wait_s in waits_s.items()}, back_s

    def _close_window(self) -> None:
        waits_s, back_s = self._open_split()
        for whom, wait_s in waits_s.items():
            self.waits_s[whom] = self.waits_s.get(whom, 0.0) + wait_s
        self._back_blocked_s += back_s
        self.is_estimated |= back_s > 0
        booked_us = self._booked_us - self._total(START)
        self._window = _Window(self._total(BLOCKED), self._total(BACKWARD), booked_us)

    def _all_waits(self) -> dict[int | None, float]:
        found = dict(self.waits_s)
        for whom, wait_s in self._open_split()[0].items():
            found[whom] = found.get(whom, 0.0) + wait_s
        return found

    def _at_risk(self, now_s: float | None = None) -> tuple[float, ...]:
        found = self._split(self.told_s if now_s is None else now_s)
        return tuple(found[category] for category in _AT_RISK)

    def _now_marks(self) -> tuple[float, float, int]:
        back_s = self._back_blocked_s + self._open_split()[1]
        passed_s = (self._booked_us - self._total(START)) / 1e6
        return passed_s, self._total(BLOCKED) / 1e6 + back_s, self.steps


def _interpolate(points: list[tuple[float, tuple[float, ...]]], at: float) -> tuple[float, ...]:
    """Return what stood when a mark was reached, between points whose marks never fall; zeros: before the first one.

    Of several points with that mark the first one counts, but the save that follows it belongs to it.
    """
    before: tuple[float, tuple[float, ...]] | None = None
    for mark, values in points:
        if mark == at:
            *_, saved_s = [found[-1] for same, found in points if same == at]
            return (*values[:-1], saved_s)
        if mark > at:
            if before is None:
                break
            part = (at - before[0]) / (mark - before[0])
            return tuple(old + part * (new - old) for old, new in zip(before[1], values, strict=True))
        before = mark, values
    return before[1] if before is not None else (0.0,) * len(_AT_RISK)


assert PACE_STATES[BLOCKED] is PaceState.BLOCKED
