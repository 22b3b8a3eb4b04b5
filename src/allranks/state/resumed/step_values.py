"""Writes the values of `step.log` below `allranks run`, on rank 0, as `curves.jsonl` (model.curve).

It writes every FLUSH_S and at the end, as the script writes what it prints: a slow directory delays it no more than a
print does, and one that is full costs points, never a step. Of each name at most MAX_POINTS are kept: when there are so
many, every second one goes, and from then on every second value is taken. After a restart the file goes on at the step
of the checkpoint. A value on a GPU is fetched when it is written, not in its step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from allranks.files.folder import Folder
from allranks.model.curve import FILE, MAX_NAME, MAX_NAMES, MAX_POINTS, CurvePoint, read_curves

FLUSH_S = 10.0


class _Value:
    """A number, or a tensor with one on a GPU, until somebody needs the number."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def number(self) -> float:
        """Return it as a number; waits for the GPU the first time."""
        number = self._held = float(self._held)
        return number


_Row = tuple[int, float, dict[str, _Value]]
"""Steps that are done, time since the epoch, values by name."""


@dataclass(slots=True)
class _Curve:
    """The points of one name."""

    stride: int = 1
    """Every so many values are kept."""
    num_seen: int = 0
    points: list[tuple[int, float, _Value]] = field(default_factory=list)

    def takes(self) -> bool:
        """Whether this value is kept; counts it."""
        self.num_seen += 1
        return (self.num_seen - 1) % self.stride == 0

    def thin(self) -> None:
        """Keep every second point."""
        self.points, self.stride = self.points[::2], self.stride * 2


class Curves:
    """The curves of one run.

    Args:
        attempt: directory of the attempt.
    """

    def __init__(self, attempt: Path) -> None:
        self._attempt = attempt
        self._curves: dict[str, _Curve] = {}
        self._new: list[_Row] = []
        """Points that are not in the file."""
        self._is_file_old = False
        """The file has points that are not kept, or lacks some: it is written anew."""
        self._has_begun = False
        self._flushed_s = time.monotonic()

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Take in the values of a step; so many steps are done with it."""
        if not self._has_begun:
            self._has_begun = True
            self._resume(step)
        kept, time_s = dict[str, _Value](), round(time.time(), 3)
        for name, told in values.items():
            curve = self._curves.get(name)
            if curve is None:
                if len(self._curves) >= MAX_NAMES or len(name) > MAX_NAME:
                    continue
                curve = self._curves[name] = _Curve()
            if not curve.takes() or (value := _hold(told)) is None:
                continue
            kept[name] = value
            curve.points.append((step, time_s, value))
            if len(curve.points) > MAX_POINTS:
                curve.thin()
                self._is_file_old = True
        if kept:
            self._new.append((step, time_s, kept))
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is not in the file; what cannot be written is tried again with what comes later."""
        self._flushed_s = time.monotonic()
        if not self._new:
            return
        try:
            folder = Folder.at(self._attempt)
            if self._is_file_old:
                folder.write_whole(FILE, _as_lines(self._all()))
            else:
                with folder.append(FILE) as file:
                    file.write(_as_lines(self._new))
            self._is_file_old = False
        except (OSError, RuntimeError):  # RuntimeError: the GPU is lost
            self._is_file_old = True
        self._new.clear()

    def _resume(self, step: int) -> None:
        """Take up the points of the generations before, up to the step that comes now."""
        points = list[CurvePoint]()
        with contextlib.suppress(OSError):
            points = read_curves(Folder.at(self._attempt).read(FILE))
        for point in points:
            for name, value in point.values.items() if point.step < step else ():
                number = float("nan") if value is None else value
                curve = self._curves.setdefault(name, _Curve())
                curve.points.append((point.step, point.time_s, _Value(number)))
        self._is_file_old = any(point.step >= step for point in points)
        for curve in self._curves.values():
            curve.num_seen = len(curve.points)

    def _all(self) -> list[_Row]:
        rows: dict[tuple[int, float], dict[str, _Value]] = {}
        for name, curve in self._curves.items():
            for step, time_s, value in curve.points:
                rows.setdefault((step, time_s), {})[name] = value
        return [(*key, rows[key]) for key in sorted(rows)]


@functools.cache
def own_curves() -> Curves | None:
    """Return the curves of this process's run; None: no agent of `allranks run` has started it."""
    attempt = os.environ.get("ALLRANKS_ATTEMPT_DIR")
    if not attempt or "ALLRANKS_AGENT_PID" not in os.environ:
        return None
    curves = Curves(Path(attempt))
    atexit.register(curves.flush)
    return curves


def _hold(told: Any) -> _Value | None:
    """Return a value that no later step changes; None: it is none."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if not isinstance(told, torch.Tensor):
            return _Value(float(told))
        if told.numel() == 1:  # a copy on its device, which nobody waits for
            return _Value(float(told.detach()) if told.device.type == "cpu" else told.detach().clone())
    return None


def _as_lines(rows: list[_Row]) -> bytes:
    """Return rows as lines of the file."""
    points = (
        CurvePoint(step, time_s, {name: value.number for name, value in values.items()})
        for step, time_s, values in rows
    )
    return b"".join(msgspec.json.encode(point) + b"\n" for point in points)
