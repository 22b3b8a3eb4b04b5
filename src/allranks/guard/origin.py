"""Did a worker break by itself, or did it only lose another one? From the end of one worker alone. Pure.

    origin_of(end)      -> FailureOrigin.OWN, LOST, or OPEN where it cannot be told

A victim says so in many ways: torch's exception ends it, or the script catches that exception and raises another one
(`raise TrainError(...) from exc`, also `from None`), or calls `sys.exit(1)`, or torch aborts the process while it is
torn down. So the oldest exception decides (`WorkerEnd.before`): whatever came after a lost connection came of it.
The causes know the words (signs with `end` in `where`).
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from allranks.causes.book import find_loss
from allranks.model.errors import UsageError
from allranks.model.hostlist import expand_hosts
from allranks.wire.protocol import WorkerEnd

_SIZE = re.compile(r"EnforceNotMet|Received data size doesn't match expected size")
"""Gloo's words when more bytes came than were asked for, before it aborts: whoever was wrong, this rank only noticed.
Source: gloo/transport/tcp/pair.cc as in torch 2.13; measured."""

_TORN_DOWN = re.compile(r"terminate called without an active exception\s*\Z")
"""The last words of a process that ends while a thread of torch still runs (join.group, LAST_WORK_S)."""

_RETRIED = re.compile(r"^.*\[W\d.*(?:Connection refused|Connection timed out).*$", re.MULTILINE)
"""torch's warnings before it tries again."""

_NEXT = re.compile(
    r"^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$",
    re.MULTILINE,
)
"""Between two exceptions of one traceback."""

CRASHES = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGABRT),
}
"""Signals that a process gets for what it does itself; all others, somebody sent."""


class FailureOrigin(StrEnum):
    """Where the failure of a worker comes from."""

    OWN = "own"
    """It broke by itself."""
    LOST = "lost"
    """It only lost another one."""
    OPEN = "open"
    """It lost another one, and something of its own may have happened before or after that."""


def origin_of(end: WorkerEnd, *, was_in_collective: bool = False) -> FailureOrigin:
    """Return where the failure of a worker comes from.

    Args:
        was_in_collective: its script was through while a collective of it was not.
    """
    signum = -end.exit_code if end.exit_code < 0 else 0
    if end.could_not_start or (signum and signum not in CRASHES):
        return FailureOrigin.OWN
    if is_abort_for_size(end):
        return FailureOrigin.LOST
    losses = _losses(end)
    if any(losses):
        is_crash = signum not in (0, signal.SIGABRT)
        return FailureOrigin.LOST if losses[0] and not is_crash else FailureOrigin.OPEN
    if end.message:
        return FailureOrigin.OWN
    is_torn_down = signum == signal.SIGABRT and bool(_TORN_DOWN.search(end.stderr_tail or ""))
    return FailureOrigin.OPEN if is_torn_down or (was_in_collective and not signum) else FailureOrigin.OWN


def killed_by(end: WorkerEnd) -> int:
    """Return the signal that ended a worker; 0: none did, or an error of its own had come before."""
    is_error_first = end.message and not any(_losses(end))
    return 0 if end.exit_code >= 0 or is_error_first else -end.exit_code


def is_crash(end: WorkerEnd) -> bool:
    """Whether a signal ended a worker for what it did, but no abort, as torch's while it is torn down."""
    return -end.exit_code in CRASHES - {signal.SIGABRT}


def is_abort_for_size(end: WorkerEnd) -> bool:
    """Whether Gloo aborted a worker because ranks are in different collectives; it may be an innocent one."""
    return end.exit_code == -signal.SIGABRT and bool(_SIZE.search(end.stderr_tail or end.message or ""))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of a folded list; none where it is no such list.

    >>> parse_ranks("3"), parse_ranks("0-2,5"), parse_ranks("")
    ((3,), (0, 1, 2, 5), ())
    """
    with contextlib.suppress(UsageError):
        return tuple(int(name[1:]) for name in expand_hosts(f"r[{text}]"))
    return ()


@lru_cache(maxsize=4096)
def _losses(end: WorkerEnd) -> tuple[bool, ...]:
    """For each exception that is known, the oldest first: whether it only says that another rank was lost."""
    if end.message:
        texts = [*end.before, *_sections(end.traceback or ""), end.message]
    else:
        texts = [*end.before, _RETRIED.sub("", end.stderr_tail or "")]
    return tuple(find_loss(text) is not None for text in texts)


def _sections(traceback: str) -> Iterable[str]:
    """What each exception of a traceback but the last one says, the oldest first."""
    for section in _NEXT.split(traceback)[:-1]:
        lines = [line for line in section.splitlines() if not line.startswith(("  ", "Traceback ("))]
        yield "\n".join(lines)
