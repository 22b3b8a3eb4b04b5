"""One value over the steps of a run, as `step.log` has told it: the lines of `curves.jsonl` in an attempt's directory.

    {"step": 120, "time_s": 1795894787.5, "values": {"loss": 0.31, "lr": 0.001}}

Written by rank 0 (state.resumed.step_values), in the order of the steps; at most MAX_POINTS of each name.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec

from allranks.model.foreign import Unreadable, decode_json

FILE = "curves.jsonl"
MAX_POINTS = 10_000
MAX_NAMES = 64
MAX_NAME = 80
"""Characters of a name."""


class CurvePoint(msgspec.Struct, frozen=True):
    """One line of the file."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """So many steps are done."""
    time_s: Annotated[float, msgspec.Meta(ge=0, le=4e9)]
    """Since the epoch."""
    values: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=MAX_NAME)], float | None], msgspec.Meta(max_length=MAX_NAMES)
    ]
    """None: it was no finite number."""


def read_curves(data: bytes) -> list[CurvePoint]:
    """Return the points in a file, in their order; lines that are none are left out.

    >>> read_curves(b'{"step": 1, "time_s": 9.5, "values": {"loss": null}}' + bytes([10]) + b'{"step"')
    [CurvePoint(step=1, time_s=9.5, values={'loss': None})]
    """
    points = []
    for line in data.splitlines():
        with contextlib.suppress(Unreadable):
            points.append(decode_json(line, CurvePoint))
    return points
