"""Read files that others may have put there: regular ones only, without waiting, and no more than so many bytes.

    read_regular(Path("runs/7/attempt_0/verdict.json"), at_most=MAX_BYTES)    # None: missing, a pipe, a link, a device

A pipe would hold the reader, a device never ends, and a link leads to a file of somebody else. A run of this process is
read below its held directory instead (folder.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """Open a regular file to read its bytes.

    Args:
        path: its directory may be reached through links; its last part must not be one.
        follows_links: it may be one, all the same: what a user names.
    Raises:
        OSError: it is missing, cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, at_most: int) -> bytes | None:
    """Return what is in a regular file, its first `at_most` bytes; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:  # ValueError: a name with a null byte
        return file.read(at_most)
    return None
