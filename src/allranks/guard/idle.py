"""Has no rank made any progress for long, whoever waits for whom? Pure.

Progress is a collective, a step, output, or processor time of a rank or its children (node/activity.py). Ranks that all
stand still may wait for nobody that waits.py knows of: all sleep, or each one cleans up after an exception. After
hang_s the run is ended, but not where standing still may be all right: a job that has formed no group and printed no
traceback (a server, a download), and a rank that waits for a line from a terminal. Those are only named.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.guard.faults import HANG_LIMIT, STUCK_RANK
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.scene import RankView, Scene
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Evidence
from allranks.model.raised import find_origin
from allranks.report.text import fold_ranks

MAX_NAMED = 4
_FORMED = ("training", "saving", "leaving")
"""Phases of a rank whose group has been formed."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Ranks that run, of which none makes progress."""

    views: tuple[RankView, ...]
    for_s: float
    """Since the last progress of any."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(view.beat.rank for view in self.views)

    @property
    def printed(self) -> tuple[RankView, ...]:
        """Those that printed a traceback before they stopped."""
        return tuple(view for view in self.views if view.beat.printed)

    @property
    def is_worth_a_look(self) -> bool:
        """Whether it is said early: a job without a group may well stand still."""
        return self.excuse is None or any(view.beat.reads_terminal for view in self.views)

    @property
    def excuse(self) -> str | None:
        """Why it is not ended; None: it is."""
        if readers := [view.beat.rank for view in self.views if view.beat.reads_terminal]:
            return f"{fold_ranks(readers)} wait{'s' * (len(readers) == 1)} for input from the terminal"
        has_formed = any(view.beat.groups or view.beat.phase in _FORMED for view in self.views)
        return None if has_formed or self.printed else "it has formed no process group"


def find_idle(scene: Scene, now_s: float, *, for_s: float) -> Idle | None:
    """Return the ranks that run, if none has made progress for so long; None: one has, or may have."""
    if now_s - scene.moved_s < for_s or len(scene.left) + len(scene.ends) == scene.num_ranks:
        return None
    views, idle_s = [], []
    for view in scene.running():
        if view.beat.idle_s < for_s or view.told_s < now_s - scene.fresh_s:
            return None
        views.append(view)
        idle_s.append(view.beat.idle_s + now_s - view.told_s)
    is_whole = len(views) + len(scene.left) + len(scene.ends) == scene.num_ranks
    return Idle(tuple(sorted(views, key=lambda view: view.beat.rank)), min(idle_s)) if is_whole else None


def judge_idle(scene: Scene, now_s: float) -> GuardVerdict | None:
    """Return the verdict where no rank has made progress for hang_s."""
    idle = find_idle(scene, now_s, for_s=scene.settings.hang_s)
    if idle is None or idle.excuse is not None:
        return None
    blamed = idle.printed or tuple(view for view in idle.views if not view.waits_s(now_s)) or idle.views
    ranks = tuple(view.beat.rank for view in blamed)
    what = f"no rank has made progress for {idle.for_s:.0f} s: no collective, step, output or processor time"
    if idle.printed:
        origins = [find_origin(view.beat.printed, is_one=False) for view in idle.printed]
        words = dict.fromkeys(
            f"{origin.headline}{f' ({origin.place})' if origin.place else ''}" for origin in origins if origin
        )
        who = "it" if len(ranks) == 1 else "they"
        what = f"{who} printed {', '.join(words) or 'a traceback'} and did not end; {what}"
    elif places := dict.fromkeys(view.beat.main_at for view in blamed if view.beat.main_at):
        what += f"; {', '.join(list(places)[:MAX_NAMED])}"
    values = scene.values(*ranks) | {"limit": HANG_LIMIT}
    seen = _evidence(idle, blamed)
    finding = scene.fault(STUCK_RANK, what, *ranks, evidence=seen, confidence=Confidence.LIKELY, values=values)
    return GuardVerdict(findings=(finding,), exit_code=Exit.HANG, ranks=ranks)


def say_idle(idle: Idle) -> str:
    """Return the line for people; it begins with `slow:` only where the job ends after hang_s of this."""
    places = dict.fromkeys(view.beat.main_at for view in idle.views if view.beat.main_at)
    where = f": {', '.join(list(places)[:MAX_NAMED])}" if places else ""
    if idle.excuse is None:
        return f"slow: no rank has made progress for {idle.for_s:.0f} s{where}"
    return f"no rank has made progress for {idle.for_s:.0f} s{where}; the job goes on: {idle.excuse}"


def show_printed(view: RankView) -> Evidence | None:
    """Return the traceback that a rank printed before it stopped, as evidence."""
    return Evidence(seen=view.beat.printed) if view.beat.printed else None


def _evidence(idle: Idle, blamed: tuple[RankView, ...]) -> list[str | Evidence]:
    shown: list[str | Evidence] = [printed for view in blamed[:1] if (printed := show_printed(view))]
    for view in blamed[:MAX_NAMED]:
        beat = view.beat
        at = f" at {beat.main_at}" if beat.main_at else ""
        shown.append(f"rank {beat.rank}, pid {beat.pid}: {beat.state}, {beat.cpu_s:.0f} s of processor time{at}")
    if len(blamed) < len(idle.views):
        others = set(idle.ranks) - {view.beat.rank for view in blamed}
        shown.append(f"{fold_ranks(others)} made no progress either")
    return shown
