"""Opens files that others may have made: regular files only, without blocking, up to a number of bytes.

    read_regular(Path("runs/7/attempt_0/verdict.json"), at_most=MAX_BYTES)

A pipe would hold the reader, a device never ends, and a link leads to a file of somebody else. A run of this process is
read below its held directory instead (folder.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """Open a regular file to read its bytes.

    Args:
        path: its directory may be reached through links; its last part must not be one.
        follows_links: it may be one, all the same: what a user names, or /proc/PID/fd.
    Raises:
        OSError: it is missing, cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, _FLAGS | (0 if follows_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, at_most: int, follows_links: bool = False) -> bytes:
    """Return the whole of a regular file.

    Raises:
        OSError: as open_regular; or it has more bytes.
    """
    with open_regular(path, follows_links=follows_links) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(errno.EFBIG, f"larger than {at_most} bytes", str(path))
    return data


def find_regular(path: Path, *, at_most: int) -> bytes | None:
    """Return the whole of a regular file; None if it is missing, cannot be read, or has more bytes."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a name with a null byte
        return read_regular(path, at_most=at_most)
    return None
