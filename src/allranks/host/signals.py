"""What would a signal do to a process, and how does a child get one when its parent dies?

    catches(worker_pid, signal.SIGUSR1)      # has the script a handler of its own?
    subprocess.Popen(command, preexec_fn=die_with_parent(signal.SIGTERM))

A signal without a handler ends a process, SIGUSR1 as well as SIGTERM; /proc tells it before the signal is sent.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals that an agent passes on to ranks that handle them."""
_libc = ctypes.CDLL(None, use_errno=True)


def catches(pid: int, signum: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal; False for one that is gone.

    Args:
        pid: which process.
        signum: the signal.
        proc: where /proc is.
    """
    return bool(read_caught(pid, proc=proc) >> signum & 1)


def read_caught(pid: int, *, proc: Path = Path("/proc")) -> int:
    """Return the signals for which a process has a handler, bit n for signal n; 0 for one that is gone."""
    try:
        return parse_caught((proc / str(pid) / "status").read_text(errors="replace"))
    except OSError:
        return 0


def handled(caught: int, *, script: int = 0, own: int = 0) -> frozenset[int]:
    """Return the signals that a worker's script handles, of those that an agent passes on.

    Args:
        caught: by the process, as the kernel has it. A handler that a C library has installed is only there.
        script: by the script, as the worker tells it (guard.inside.handlers).
        own: by allranks, in the worker.

    >>> handled(1 << signal.SIGINT), handled(1 << signal.SIGTERM, own=1 << signal.SIGTERM)
    (frozenset(), frozenset())
    """
    bits = script | (caught & ~own & ~(1 << signal.SIGINT))  # Python itself catches SIGINT
    return frozenset(signum for signum in PASSED_ON if bits >> signum & 1)


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


def parse_caught(status: str) -> int:
    """Read `/proc/PID/status`: which signals have a handler, bit n for signal n.

    >>> parse_caught("SigIgn:\\t0000000000000200\\nSigCgt:\\t0000000000004002\\n") >> signal.SIGTERM & 1
    1
    """
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) << 1 if found else 0
