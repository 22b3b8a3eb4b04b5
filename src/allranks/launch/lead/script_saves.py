"""When did a script without a session save? From what rank 0 has booked as `save`, in torch.save and DCP. Pure.

    saves = ScriptSaves()
    if (saved := saves.look(pace, now_s)) is not None: ...      # once a second

Nobody knows what was saved, nor whether it can be loaded, so this is told as not verified. A checkpoint is often
several files, one after the other: saves are one until a look finds less than QUIET_S more. So a few numbers that are
saved in each step are none, and a script that never stops saving is told once, at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from allranks.model.pace import PACE_STATES, Pace, PaceState

QUIET_S = 0.02
"""Between two looks."""
LEAST_S = 0.05
"""Of all saves that are one: less is not told."""
EVERY_S = 10.0
"""Between two that are told, at least."""
APART_S = 0.5
"""Between two looks, at least: a new phase is looked at in between, which shows no quiet."""
_SAVE = PACE_STATES.index(PaceState.SAVE)


class ScriptSave(NamedTuple):
    """Saves of rank 0 that belong together."""

    optimizer_steps: int
    """It had made so many since its process began; of a short save, a second's worth more or less."""
    save_s: float


@dataclass(slots=True)
class ScriptSaves:
    """What rank 0 of one generation has saved."""

    _seen: Pace | None = None
    """At the last look."""
    _steps: int = 0
    """Before it began to save."""
    _new_us: int = 0
    """Saved since then, and not told."""
    _told_s: float = -math.inf
    _looked_s: float = -math.inf

    def look(self, pace: Pace | None, now_s: float, *, is_over: bool = False) -> ScriptSave | None:
        """Return what was saved since the last time, if that is over.

        Args:
            pace: of rank 0.
            is_over: it saves nothing more, as its generation has ended.
        """
        if now_s < self._looked_s + APART_S and not is_over:
            return None
        self._looked_s = now_s
        before, self._seen = self._seen, pace or self._seen
        if pace is None or before is None:  # what was saved before the first look, another leader has told
            return None
        is_saving, gain_us = pace.state == _SAVE, pace.totals_us[_SAVE] - before.totals_us[_SAVE]
        is_quiet = not is_saving and gain_us < 1e6 * QUIET_S
        if not is_quiet:
            if not self._new_us:
                self._steps = pace.steps if is_saving else before.steps
            self._new_us += max(0, gain_us)
        elif self._new_us < 1e6 * LEAST_S:
            self._new_us = 0
        is_due = is_over or (is_quiet and now_s >= self._told_s + EVERY_S)
        if is_saving or not is_due or not self._new_us:
            return None
        saved, self._new_us = ScriptSave(self._steps, round(self._new_us / 1e6, 3)), 0
        self._told_s = now_s
        return saved if saved.save_s >= LEAST_S else None
