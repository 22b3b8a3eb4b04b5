"""Which checkpoint is the best one so far? The link `best` in the directory of checkpoints leads to it.

    checkpoints/best -> step_400        step_400/value.json: {"loss": 0.31}

Tidying never deletes the checkpoint that the link leads to (state.saved.tidy). The value lies in the checkpoint itself,
so a run that goes on from an older checkpoint still knows the best value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.model.errors import UsageError
from allranks.report.text import say
from allranks.state.saved.parts import list_checkpoints
from allranks.state.saved.tidy import BEST

_VALUE = "value.json"


class Best:
    """The best checkpoint in this directory by the value that `keep_best` names; None: none is kept for its value."""

    def __init__(self, directory: Path, keep_best: tuple[str, str] | None) -> None:
        if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("min", "max")):
            raise UsageError(f'track(keep_best={keep_best!r}): expected a name and "min" or "max": ("loss", "min")')
        self._directory = directory
        self._name, mode = keep_best or ("", "min")
        self._sign = 1 if mode == "min" else -1

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse with UsageError any value but the one that `keep_best` names."""
        if values and [*values] != [self._name]:
            wanted = f"keep_best names {self._name}" if self._name else 'track(keep_best=("loss", "min")) is not set'
            raise UsageError(f"state.save({', '.join(values)}=...): {wanted}")

    def consider(self, step: int, values: Mapping[str, Any]) -> None:
        """Set the link to the newest checkpoint of this step if its value is better than that of the linked one."""
        if not values:
            return
        link, value = self._directory / BEST, float(values[self._name])
        try:
            best = float(json.loads((link / _VALUE).read_text())[self._name])
        except (OSError, KeyError, TypeError, ValueError, RecursionError):  # there is none, or nobody can read it
            best = self._sign * float("inf")
        if self._sign * value < self._sign * best:  # never true of NaN
            newest = self._directory / f"step_{step}"
            fresh = self._directory / f"{BEST}.new"
            try:
                takes = list_checkpoints(self._directory)
                newest = next((path for path in takes if path.name.partition(".")[0] == newest.name), newest)
                (newest / _VALUE).write_text(json.dumps({self._name: value}))
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(newest.name)
                fresh.replace(link)
            except OSError as exc:
                say(f"{newest} is the best checkpoint so far, but the link {link} cannot be set: {exc.strerror}")
