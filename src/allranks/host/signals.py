"""Which signals does a process handle itself?"""

from __future__ import annotations

import re
from pathlib import Path


def catches(pid: int, signum: int, *, root: Path = Path("/")) -> bool:
    """Return whether a process has a handler of its own for a signal; False where the process is gone.

    Source: SigCgt in proc(5), a mask in which bit n - 1 stands for signal n.

    Args:
        pid: of the process.
        signum: the signal.
        root: where /proc is.
    """
    try:
        status = (root / f"proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (signum - 1) & 1)
