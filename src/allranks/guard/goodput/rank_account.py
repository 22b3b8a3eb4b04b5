"""How has one rank spent its time in one generation? Its account, from what it booked itself. Pure.

    generation begins      first word            last word      now, a fault, or its end
    |------- front --------|------- Pace --------|--- tail ---|
      start                  its running totals    present state, or unknown

Pace has running totals, so a word that is lost costs nothing, and the account is made anew from the newest one each
time. Front, Pace and tail sum to the wall time by construction. A tail counts as the present state only where it is
short and the rank lives: behind the last word of a dead or silent one it is unknown, and where the script is over, it
is the end.

What a rank books as `blocked`, and part of its `backward`, is split into `wait` and `transfer` (blocked.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.guard.goodput.blocked import Blocked, Booked
from allranks.model.beat import GroupSeen, RankBeat
from allranks.model.ledger import Category
from allranks.model.pace import PACE_STATES, Pace, PaceState

TAIL_S = 3.0
"""So long may the present state go on behind a word; what is longer is unknown."""
STANDSTILL_US = 5_000_000
"""A rank that a fault finds in one step for longer did no work there. One in a backward pass may wait for others."""
LONG_US = 1_000_000
"""A wait that is told as such."""
POINT_S, MAX_POINTS = 1.0, 64
"""What is remembered of the way since the last checkpoint: one point a second; of more, every second one goes."""

START, STEP, BACKWARD, DATA, EVAL, SAVE, BLOCKED = range(len(PACE_STATES))
_AT_RISK = (Category.STEP, Category.WAIT, Category.TRANSFER, Category.DATA, Category.EVAL, Category.SAVE)
"""What a fault turns into `redo`."""


@dataclass(frozen=True, slots=True)
class _Point:
    told_s: float
    step: int | None
    """Of the session."""
    at_risk: tuple[float, ...]
    """Seconds by category, in the order of _AT_RISK."""


class Account:
    """One rank in one generation.

    Args:
        begun_s: when its time begins, by the leader's clock.
        is_running: its process began before that, under another leader: what it booked before does not count here.
        point_s: how often a point is remembered, to which a fault can go back.
        weigh_s: how often a word is weighed at least: each one for 0, but of many ranks that is too much.
    """

    def __init__(
        self,
        rank: int,
        *,
        node: int,
        begun_s: float,
        is_running: bool = False,
        point_s: float = POINT_S,
        weigh_s: float = 0.0,
    ) -> None:
        self.rank, self.node, self.begun_s = rank, node, begun_s
        self._point_s, self._weigh_s = max(POINT_S, point_s), weigh_s
        self._weighed_s = -math.inf
        """When the last word that was weighed had been told."""
        self.beat: RankBeat | None = None
        self.pace: Pace | None = None
        self.told_s = begun_s
        self.first_s = math.inf
        """When its first step ended; infinite: it has not."""
        self.until_s: float | None = None
        """When it ended, or a fault: nothing is booked behind that."""
        self._is_stopped = False
        self.is_dead = False
        """It ended badly, or its node is lost."""
        self.has_ended_well = False
        self.blocked = Blocked()
        self.redo_s: tuple[float, ...] = ()
        """In the order of _AT_RISK: work that a fault has lost."""
        self._is_running = is_running
        self._base: tuple[int, ...] = (0,) * len(PACE_STATES)
        self._base_steps = 0
        self.groups: tuple[GroupSeen, ...] = ()
        """As it told them last: before its end it destroys them, and then tells its last calls."""
        self._arrived_s: float | None = None
        self._has_left = False
        self._front_s: float | None = None
        """Before its process began; negative: it began so long before this account."""
        self._points: list[_Point] = []
        self._kept_save_s, self._is_keeping = 0.0, False
        """How long it had saved when the last checkpoint was complete; whether that may still grow."""

    # What is told

    def hear(self, beat: RankBeat, told_s: float) -> None:
        """Take in a word of its agent; the last one may come after its end."""
        pace = beat.pace
        if self._is_stopped or told_s < self.told_s or (self.until_s is not None and told_s > self.until_s + TAIL_S):
            return
        self.beat, self.is_dead = beat, self.is_dead and self.until_s is not None
        self.groups = beat.groups or self.groups
        if pace is None:
            return
        self._has_left = pace.has_left
        if self._is_running and self.pace is None:
            here_us = min(round(1e6 * (told_s - self.begun_s)), pace.totals_us[pace.state])
            base = [*pace.totals_us]
            base[pace.state] -= here_us
            self._base, self._base_steps = tuple(base), pace.steps
        before, self.pace, self.told_s = self.pace, pace, told_s
        if beat.begun_ago_s is not None:
            arrived_s = told_s - beat.begun_ago_s
            self._arrived_s = arrived_s if self._arrived_s is None else min(self._arrived_s, arrived_s)
        if told_s >= self._weighed_s + self._weigh_s or self._is_news(before, pace):
            self._weigh(beat, pace)

    def _is_news(self, before: Pace | None, pace: Pace) -> bool:
        """Whether a word is to be weighed at once: its first step, a save, a long wait."""
        return (
            before is None
            or pace.totals_us[SAVE] != before.totals_us[SAVE]
            or (pace.state in (BLOCKED, BACKWARD) and pace.state_us >= LONG_US)
            or (pace.steps > 0 and self.first_s == math.inf)
            or self._is_keeping
        )

    def _weigh(self, beat: RankBeat, pace: Pace) -> None:
        """Reckon what follows from its last word."""
        told_s = self._weighed_s = self.told_s
        front_s = told_s - self.begun_s - self._booked_us / 1e6
        self._front_s = front_s if self._front_s is None else min(self._front_s, front_s)
        if pace.steps > 0:
            passed_s = (self._booked_us - self._total(START)) / 1e6
            self.first_s = self.begun_s + max(0.0, self._front_s + self._total(START) / 1e6)
            self.blocked.is_async = pace.is_async
            self.blocked.tell(
                Booked(
                    passed_s=passed_s,
                    blocked_s=self._total(BLOCKED) / 1e6,
                    backward_s=self._total(BACKWARD) / 1e6,
                    steps=self.steps,
                ),
                permille=-1 if pace.is_async else pace.back_blocked_permille,
            )
        if self._is_keeping:
            self._kept_save_s, self._is_keeping = self.saved_s, pace.state == SAVE
        has_saved = pace.state != SAVE and bool(self._points) and self.saved_s > self._points[-1].at_risk[-1]
        if not self._points or told_s >= self._points[-1].told_s + self._point_s or has_saved:
            self._points.append(_Point(told_s, beat.step, self._at_risk()))
            if len(self._points) > MAX_POINTS:
                del self._points[1::2]

    def wait_long(self, call: tuple[str, int], whom: int | None, since_s: float, until_s: float) -> None:
        """Book that it has waited in a call that is still open, for one that has not made it; as far as it is blocked.

        Args:
            call: group and number.
            whom: None: for several.
            since_s: when it made the call.
            until_s: until when it is known that somebody had not.
        """
        pace, first_s = self.pace, self.first_step_s
        if pace is not None and pace.state in (BLOCKED, BACKWARD) and first_s is not None and self.until_s is None:
            since_s = max(since_s, first_s, self.told_s - pace.state_us / 1e6)
            until_s = min(until_s, self.told_s)
            self.blocked.wait_long(call, whom, since_s, until_s, is_backward=pace.state == BACKWARD)

    def end(self, at_s: float, *, is_well: bool, is_dead: bool) -> None:
        """Its process ended.

        Args:
            is_dead: badly, and by itself.
        """
        if self.until_s is None:
            self.until_s = max(at_s, self.begun_s)
            self.has_ended_well, self.is_dead = is_well, is_dead

    def stop(self, at_s: float, *, has_stood_still: bool = False) -> None:
        """A fault has ended its generation; it may have said more meanwhile, which is taken back.

        Args:
            has_stood_still: no rank has died, so one that has been in one step for long has done no work there.
        """
        self._is_stopped = True
        pace = self.pace
        if has_stood_still and pace is not None and pace.state == STEP and pace.state_us > STANDSTILL_US:
            at_s = min(at_s, self.told_s - pace.state_us / 1e6)
        self.until_s = max(self.begun_s, at_s if self.until_s is None else min(self.until_s, at_s))

    def has_not_called(self, group: str, seq: int) -> bool:
        """Whether its last word shows that it had not made this call then."""
        return self.beat is not None and any(
            seen.name == group and 0 <= seen.enqueued < seq for seen in self.beat.groups
        )

    # What follows

    @property
    def arrived_s(self) -> float | None:
        """When it called init_process_group, by the leader's clock; None: it has not, or before this leader led."""
        return self._arrived_s if self.groups and not self._is_running else None

    @property
    def is_async(self) -> bool:
        """Whether it cannot tell `step`, `wait` and `transfer` apart."""
        return self.pace is not None and self.pace.is_async

    @property
    def loads(self) -> tuple[float, float, int]:
        """How long it has loaded and saved, all of its time since its first step, and steps."""
        load_s = (self._total(DATA) + self._total(SAVE)) / 1e6
        return load_s, (self._booked_us - self._total(START)) / 1e6, self.steps

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
        return self.first_s if self.first_s < math.inf else None

    def close(self, now_s: float) -> tuple[dict[Category, float], Mapping[int | None, float]]:
        """Return its time from the beginning until now, or until it ended, by category; sums to that time.

        And how long it has waited, by the rank that was waited for; what of that a fault has turned into `redo`, too.
        """
        if self.beat is not None and self.pace is not None and self._weighed_s < self.told_s:
            self._weigh(self.beat, self.pace)
        waits_s = self.blocked.waits_s()
        total_s = sum(waits_s.values())
        found = self._split(now_s, total_s)
        if total_s > found[Category.WAIT]:
            part = found[Category.WAIT] / total_s
            waits_s = {whom: part * wait_s for whom, wait_s in waits_s.items()}
        for category, lost_s in zip(_AT_RISK, self.redo_s, strict=False):
            moved_s = min(lost_s, found[category])
            found[category] -= moved_s
            found[Category.REDO] += moved_s
        return found, waits_s

    def forget_until(self, step: int) -> None:
        """A checkpoint is complete: a fault no longer loses what came before that step of the session."""
        kept = [number for number, point in enumerate(self._points) if point.step is not None and point.step < step]
        del self._points[: kept[-1] if kept else 0]
        self._is_keeping = True

    def has_made(self, step: int) -> bool:
        """Whether it was seen at an earlier step of the session than this one."""
        return any(point.step is not None and point.step < step for point in self._points)

    def knows(self, step: int | None) -> bool:
        """Whether it has all of what followed that step: under a new leader, it may have begun later."""
        steps = (point.step for point in self._points if point.step is not None)
        return not self._is_running or (step is not None and step >= next(steps, step + 1))

    def lose(self, step: int | None) -> float:
        """Turn what it did since a step of the session into `redo`; returns the seconds. To be called after `stop`.

        Args:
            step: of the last complete checkpoint; None: there is none, so all is lost.
        """
        if step is None:
            return self._lose((0.0,) * len(_AT_RISK))
        marks = [(point.step, point.at_risk) for point in self._points]
        if self.beat is not None:
            marks.append((self.beat.step, self._at_risk(self.until_s)))
        *kept, saved_s = _interpolate([(mark, at_risk) for mark, at_risk in marks if mark is not None], step)
        return self._lose((*kept, max(saved_s, self.saved_s if self._is_keeping else self._kept_save_s)))

    def lose_since(self, at_s: float) -> float:
        """Do so since a moment, by the leader's clock, where no session counts steps."""
        marks = [(point.told_s, point.at_risk) for point in self._points if point.told_s < (self.until_s or math.inf)]
        if self.until_s is not None and self.until_s > at_s:
            marks.append((self.until_s, self._at_risk(self.until_s)))
        return self._lose(_interpolate(marks, at_s))

    # Inside

    def _lose(self, kept: tuple[float, ...]) -> float:
        last = self._at_risk(self.until_s)
        self.redo_s = tuple(max(0.0, end_s - kept_s) for end_s, kept_s in zip(last, kept, strict=True))
        return sum(self.redo_s)

    @property
    def _booked_us(self) -> int:
        return sum(self.pace.totals_us) - sum(self._base) if self.pace else 0

    def _total(self, state: int) -> int:
        return max(0, self.pace.totals_us[state] - self._base[state]) if self.pace else 0

    def _split(self, now_s: float, waited_s: float) -> dict[Category, float]:
        until_s = max(self.begun_s, now_s if self.until_s is None else min(now_s, self.until_s))
        whole_s = until_s - self.begun_s
        pace = self.pace
        if pace is None or self._front_s is None:
            return dict.fromkeys(Category, 0.0) | {Category.UNKNOWN: whole_s}
        raw = [self._total(state) / 1e6 for state in range(len(PACE_STATES))]
        front_s, end_s, unknown_s = max(0.0, self._front_s), 0.0, 0.0
        raw[START] = max(0.0, raw[START] + min(0.0, self._front_s))  # a standby began before its generation
        booked_until_s = self.begun_s + self._front_s + self._booked_us / 1e6
        if until_s < booked_until_s:  # its end, or a fault, came before its last word
            raw[pace.state] -= min(booked_until_s - until_s, raw[pace.state])
        elif self._has_left and not self.is_dead:
            end_s = until_s - booked_until_s
        elif self.is_dead or until_s > self.told_s + TAIL_S:
            unknown_s += until_s - booked_until_s
        else:
            is_over = self.until_s is not None
            going_on_s = until_s - (booked_until_s if is_over else max(self.told_s, booked_until_s))
            unknown_s += until_s - booked_until_s - going_on_s
            raw = _go_on(raw, pace, going_on_s)
        total_s = front_s + end_s + unknown_s + sum(raw)
        scale = whole_s / total_s if total_s > whole_s else 1.0  # nonsense in a cell
        front_s, end_s, unknown_s, *raw = (part_s * scale for part_s in (front_s, end_s, unknown_s, *raw))
        unknown_s += max(0.0, whole_s - front_s - end_s - unknown_s - sum(raw))
        if self._is_running:
            front_s, unknown_s = 0.0, unknown_s + front_s
        start_s = front_s + raw[START]
        if self.has_ended_well and pace.steps == 0:
            start_s, unknown_s = 0.0, unknown_s + start_s  # it has trained without a step that is seen
        back_s = min(raw[BACKWARD], self.blocked.backward_s)
        blocked_s = raw[BLOCKED] + back_s
        wait_s = min(blocked_s, waited_s)
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
            Category.END: end_s,
            Category.UNKNOWN: unknown_s,
        }

    def _at_risk(self, now_s: float | None = None) -> tuple[float, ...]:
        found = self._split(self.told_s if now_s is None else now_s, sum(self.blocked.waits_s().values()))
        return tuple(found[category] for category in _AT_RISK)


def _go_on(raw: Sequence[float], pace: Pace, tail_s: float) -> list[float]:
    """Return the seconds by state, and so many more: in the present one, or as before where it changes more often."""
    worked_s = sum(raw) - raw[START]
    if pace.state == START or pace.state_us >= 1e6 * tail_s or worked_s <= 0:
        return [found_s + (tail_s if state == pace.state else 0.0) for state, found_s in enumerate(raw)]
    return [found_s * (1.0 if state == START else 1 + tail_s / worked_s) for state, found_s in enumerate(raw)]


def _interpolate(points: Sequence[tuple[float, tuple[float, ...]]], at: float) -> tuple[float, ...]:
    """Return what stood when a mark was reached, between points whose marks never fall; zeros: before the first one."""
    before: tuple[float, tuple[float, ...]] | None = None
    for mark, values in points:
        if mark == at:
            return values
        if mark > at:
            if before is None:
                break
            part = (at - before[0]) / (mark - before[0])
            return tuple(old + part * (new - old) for old, new in zip(before[1], values, strict=True))
        before = mark, values
    return before[1] if before is not None else (0.0,) * len(_AT_RISK)


assert PACE_STATES[BLOCKED] is PaceState.BLOCKED
