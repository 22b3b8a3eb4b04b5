"""How did a worker end: by itself, or because its agent told it to? From its status, and from what it left behind.

    left = read_left(folder / "rank_3.error.json", folder / "rank_3.exit.json", cell)
    explain_end(-15, left, told_s={15: 1795848266.1}, handles_end=False, now_s=time.time())    -> fields of WorkerEnd

An end is the agent's doing only if it is a signal that the agent sent, an exit after it, or a crash of torch while the
process is torn down after it; and only if the worker had not failed before. A worker that raises, or calls
`sys.exit(3)`, takes its time to leave: a signal that comes meanwhile changes its status, but not why it ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.guard.inside.cell import Cell
from allranks.guard.origin import CRASHES
from allranks.model.text import as_utf8

TRACEBACK_LIMIT = 32_000
EXCEPTION_LIMIT = 2_000
"""Characters of an exception that others came after."""
MOST_BEFORE = 16
"""Such exceptions."""
LEAVES_S = 5.0
"""How long before the end of a worker its call of sys.exit may have been the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A call of sys.exit or os._exit, other than with 0."""

    exit_code: int
    time_s: float
    before: tuple[str, ...] = ()
    """The exceptions in whose handling it was called, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a worker left behind."""

    error: Mapping[str, Any] = field(default_factory=dict)
    """An uncaught exception, as fields of WorkerEnd; empty: none."""
    exit: Exit | None = None
    """Its last such call."""
    failed_call: str = ""
    """The exception of its last collective; empty: that came back well, or there was none."""


def explain_end(
    exit_code: int, left: Left, *, told_s: Mapping[int, float], handles_end: bool, now_s: float
) -> dict[str, Any]:
    """Return how a worker ended, as fields of WorkerEnd. Pure.

    Args:
        exit_code: its status, as subprocess has it; not 0.
        told_s: the signals that its agent sent to end it, and when first.
        handles_end: whether it has a handler for one of them.
        now_s: when the end was seen; all times are seconds since the epoch.
    """
    first_s = min(told_s.values(), default=math.inf)
    is_signalled, is_crash, own_exit = -exit_code in told_s, -exit_code in CRASHES, left.exit
    if own_exit is not None:
        is_late = (is_signalled or is_crash) and min(first_s, now_s) - LEAVES_S < own_exit.time_s
        own_exit = own_exit if not left.error and (exit_code == own_exit.exit_code or is_late) else None
    found = dict(left.error)
    if own_exit is not None:
        found = {"before": own_exit.before, "time_s": own_exit.time_s}
    has_failed_before = found.get("time_s", math.inf) < first_s
    if has_failed_before and own_exit is not None:
        exit_code = own_exit.exit_code
    elif has_failed_before and is_signalled:
        exit_code = 1  # what Python ends with after an uncaught exception
    if left.failed_call:
        found["before"] = (left.failed_call, *found.get("before", ()))
    is_torn_down = is_crash and (handles_end or exit_code == -signal.SIGABRT)
    is_ours = bool(told_s) and not has_failed_before and (exit_code > 0 or is_signalled or is_torn_down)
    return found | {"exit_code": exit_code, "ended_by_us": is_ours}


def will_end_with(left: Left, *, now_s: float) -> int | None:
    """Return the exit code of a worker that still runs and is on its way out; None: it is not, as far as is known."""
    if left.error:
        return 1
    return left.exit.exit_code if left.exit is not None and left.exit.time_s > now_s - LEAVES_S else None


def read_left(error_path: Path, exit_path: Path, cell: Cell) -> Left:
    """Return what a worker left behind: in the files that the hook writes, or `@record`, and in its cell."""
    return Left(error=_read_error(error_path), exit=_read_exit(exit_path), failed_call=_read_failed_call(cell))


def _read_error(path: Path) -> dict[str, Any]:
    try:
        record, written_s = json.loads(path.read_bytes())["message"], path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(record, dict):
        record = {"message": record} if isinstance(record, str) else {}
    extra = record.get("extraInfo") or {}
    message, trace, time_s, python = record.get("message"), *map(extra.get, ("py_callstack", "time_s", "python"))
    if not message:
        return {}
    return {
        "message": as_utf8(str(message)[:TRACEBACK_LIMIT]),
        "traceback": as_utf8(str(trace)[-TRACEBACK_LIMIT:]) if trace else None,
        "before": _read_before(extra.get("before")),
        "python": as_utf8(python) if isinstance(python, str) else None,
        "time_s": float(time_s) if isinstance(time_s, int | float) else written_s,
    }


def _read_exit(path: Path) -> Exit | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        note = json.loads(path.read_bytes())
        before = _read_before(note.get("before"))
        return Exit(exit_code=int(note["exit_code"]), time_s=float(note["time_s"]), before=before)
    return None


def _read_before(told: object) -> tuple[str, ...]:
    texts = told[:MOST_BEFORE] if isinstance(told, list) else []
    return tuple(as_utf8(str(text)[:EXCEPTION_LIMIT]) for text in texts)


def _read_failed_call(cell: Cell) -> str:
    read = cell.read()
    if read.words is None or (read.call is not None and read.call.written_ns > read.words.written_ns):
        return ""
    with contextlib.suppress(ValueError, AttributeError):
        return as_utf8(str(json.loads(read.words.data).get("failed") or "")[:EXCEPTION_LIMIT])
    return ""
