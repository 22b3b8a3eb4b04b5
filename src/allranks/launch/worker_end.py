"""How did a worker end: by itself, or because its agent told it to? From its status, and from what it left behind.

    left = read_left(folder, "rank_3.error.json", "rank_3.exit.json", cell)    (launch.last_words)
    explain_end(-15, left, told_s={15: 1795848266.1}, handles_end=False, now_s=time.time())    -> fields of WorkerEnd

An end is the agent's doing only if it is a signal that the agent sent, an exit after it, or a crash of torch while the
process is torn down after it; and only if the worker had not failed before. A worker that raises, or calls
`sys.exit(3)`, takes its time to leave: a signal that comes meanwhile changes its status, but not why it ended.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.guard.origin import CRASHES

LEAVES_S = 5.0
"""How long before the end of a worker its call of sys.exit may have been the reason."""
FLUSH_FAILED = 120
"""What Python ends with where it could not write the rest of stdout or stderr. Source: CPython, Py_RunMain."""
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that SLURM may have sent to a worker as well as to its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCall:
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
    exit: ExitCall | None = None
    """Its last such call."""
    failed_call: str = ""
    """The exception of its last collective; empty: that came back well, or there was none."""
    lost_lines: int = 0
    """Of its output, that could not be written."""
    lost_why: str = ""
    """Why the last of them could not, as the kernel says it: `No space left on device`."""
    threads: tuple[str, ...] = ()
    """Names of threads that kept it from ending after an uncaught exception."""


def explain_end(
    exit_code: int, left: Left, *, told_s: Mapping[int, float], handles_end: bool, now_s: float
) -> dict[str, Any]:
    """Return how a worker ended, as fields of WorkerEnd. Pure.

    Args:
        exit_code: its status, as subprocess has it; not 0.
        told_s: the signals that its agent sent to end it, and when first; 0: one that SLURM had sent.
        handles_end: whether it has a handler for one of them.
        now_s: when the end was seen; all times are seconds since the epoch.
    """
    first_s = min(told_s.values(), default=math.inf)
    is_signalled = -exit_code in told_s or (0 in told_s and -exit_code in STOPS)
    is_crash, own_exit = -exit_code in CRASHES, left.exit
    if own_exit is not None:
        is_late = (is_signalled or is_crash) and min(first_s, now_s) - LEAVES_S < own_exit.time_s
        is_late |= exit_code == FLUSH_FAILED
        own_exit = own_exit if not left.error and (exit_code == own_exit.exit_code or is_late) else None
    found = dict(left.error)
    if own_exit is not None:
        found = {"before": own_exit.before, "time_s": own_exit.time_s}
    has_failed_before = found.get("time_s", math.inf) < first_s
    if exit_code == FLUSH_FAILED and left.lost_lines and not found:
        exit_code = 0  # its script was through: only its last lines are missing, and that is told
    elif has_failed_before and own_exit is not None:
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
