"""A training that `allranks diff --replay` runs again: it saves and logs nothing, and records a step's operations.

    begin_setup()              in session(): records from here to the first step, if the plan says so
    RerunTracked(parts, ...)   in place of Tracked: each step has a row in the record

It begins at the only checkpoint in the plan's folder, else at step 0, and ends with 0 at the boundary `until`. Saves
have rows, as in the first run; so has a loop that was left by `break`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from allranks.model.errors import UsageError
from allranks.state.resumed.steps import Step
from allranks.state.resumed.telling import Telling
from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Stall
from allranks.state.truth.op_file import SETUP, RerunPlan
from allranks.state.truth.ops import OpRecorder

TOLD_EVERY_S = 0.2
_setup: list[OpRecorder | None] = []
"""What records this process until its first step, and then None."""


def begin_setup() -> None:
    """Record from here on, if the plan says so; once in a process."""
    plan = RerunPlan.inherited()
    if plan is not None and plan.are_ops_recorded and plan.first == SETUP and not _setup:
        _setup.append(recorder := OpRecorder())
        recorder.__enter__()


class RerunTracked(Tracked):
    """The state of such a training, on this rank; its other arguments are those of Tracked."""

    def __init__(self, parts: Mapping[str, Any], *, plan: RerunPlan, **told: Any) -> None:
        super().__init__(parts, **told)
        self._telling = Telling(told["cell"])  # without what the training logs to
        self._plan, self._told_s = plan, 0.0

    def load(self, **told: Any) -> None:
        """Begin at the plan's checkpoint; what a later `track` holds begins at step 0."""
        if self._trace.is_of_first_call:
            super().load(**told)

    def steps(self, loader: Any, **told: Any) -> Iterator[Step]:
        """Yield the steps up to the plan's end.

        Raises:
            UsageError: a later `track` makes steps before that: these are not in the record.
        """
        if not self._trace.is_of_first_call:
            raise UsageError("diff --replay follows the first track() of a script; here a second one makes steps, too")
        for step in super().steps(loader, **told):
            if not self._plan.are_ops_recorded or step.number < self._plan.first:
                yield step
                continue
            recorder = OpRecorder(self._modules, step.number)
            recorder.begin(step.batches)
            try:
                with recorder:
                    yield step
            finally:  # also after a `break`
                self._write(recorder)

    def save(self, **values: Any) -> bool:
        """Do what a save does to the training, and save nothing."""
        self._best.check(values)
        with self._losses:
            self._save()
        return True

    def _save(self, patience_s: float | None = None) -> Stall:
        self._averaging.synchronize()
        self._saved = self._place
        if self._trace.is_of_first_call:
            self._record()
        return Stall(0.0, 0.0)

    def _boundary(self) -> None:
        if _setup and (recorder := _setup[0]) is not None:
            _setup[0] = None
            recorder.__exit__(None, None, None)
            self._write(recorder)
        super()._boundary()
        self._record()
        if self.step >= self._plan.until:
            self._saved = self._place
            self._trace.flush()
            raise SystemExit(0)

    def _record(self) -> None:
        is_over = self.step >= self._plan.until
        if self._membership.is_leader and (is_over or time.monotonic() - self._told_s >= TOLD_EVERY_S):
            self._told_s = time.monotonic()
            (Path(self._plan.folder) / "at").write_text(f"{self.step}")
        if self.step >= self._plan.first:
            self._comparing.measure()  # a row of its own, check or not
            self._note(is_saved=True)

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {f"{part}.{name}".rstrip("."): module for part, own in self._parts.modules.items()
                for name, module in own.named_modules()}  # fmt: skip

    def _write(self, recorder: OpRecorder) -> None:
        self._plan.write(recorder.ops, recorder.step, self._membership.rank)
