"""What would a signal do to a process, and how does a child get one when its parent dies?

    catches(worker_pid, signal.SIGUSR1)      # has the script a handler of its own?
    subprocess.Popen(command, preexec_fn=die_with_parent(signal.SIGTERM))

A signal without a handler ends a process, SIGUSR1 as well as SIGTERM; /proc tells it before the signal is sent.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""
_libc = ctypes.CDLL(None, use_errno=True)


def catches(pid: int, signum: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal; False for one that is gone.

    Args:
        pid: which process.
        signum: the signal.
        proc: where /proc is.
    """
    try:
        return is_caught((proc / str(pid) / "status").read_text(), signum)
    except OSError:
        return False


def die_with_parent(signum: int) -> Callable[[], None]:
    """Return what a child runs before its program, for `preexec_fn`: it gets a signal when this process is gone.

    The kernel means the thread that forks, so that has to be the main thread.
    """
    parent = os.getpid()

    def before_exec() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(128 + signum)

    return before_exec


def is_caught(status: str, signum: int) -> bool:
    """Read `/proc/PID/status`: whether a signal has a handler.

    >>> is_caught("SigIgn:\\t0000000000000200\\nSigCgt:\\t0000000000004002\\n", 15)
    True
    """
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)
