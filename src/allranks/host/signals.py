"""What would a signal do to a process? Read from /proc, so it is known before the signal is sent.

    catches(worker_pid, signal.SIGUSR1)      # has the script a handler of its own?

A signal without a handler ends a process, SIGUSR1 as well as SIGTERM.
"""

from __future__ import annotations

import re
from pathlib import Path

_MASKS = {"caught": "SigCgt", "ignored": "SigIgn"}


def catches(pid: int, signum: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal; False for one that is gone.

    Args:
        pid: which process.
        signum: the signal.
        proc: where /proc is.
    """
    return _has(pid, signum, "caught", proc)


def ignores(pid: int, signum: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a signal would do nothing to a process; the arguments are those of `catches`."""
    return _has(pid, signum, "ignored", proc)


def has_in_mask(status: str, signum: int, what: str) -> bool:
    """Read `/proc/PID/status`: whether a signal is in its mask of what is `caught` or `ignored`.

    >>> has_in_mask("SigIgn:\\t0000000000000200\\nSigCgt:\\t0000000000004002\\n", 15, "caught")
    True
    """
    found = re.search(rf"^{_MASKS[what]}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)


def _has(pid: int, signum: int, what: str, proc: Path) -> bool:
    try:
        return has_in_mask((proc / str(pid) / "status").read_text(), signum, what)
    except OSError:
        return False
