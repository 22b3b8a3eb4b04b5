"""Read a file that a process of this node names: it never waits for others, and its size is bounded.

    data = read_foreign(Path(f"/proc/{pid}/root/opt/train.py"), follows_links=True)

A worker runs as the same user as its agent, so it can put a fifo, a link to /dev/zero, or 1 TB of nothing where a file
is expected. The files of a run directory are read through report.folder.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_foreign(path: Path, *, follows_links: bool = False) -> int:
    """Open a regular file, and return its descriptor.

    Args:
        path: of the file.
        follows_links: whether the last part of the path may be a link, as in /proc/PID/fd.
    Raises:
        OSError: it is not there, no regular file, or a link.
    """
    fd = os.open(path, _FLAGS | (0 if follows_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_foreign(path: Path, *, at_most: int = MAX_BYTES, follows_links: bool = False) -> bytes:
    """Return the whole of a regular file.

    Raises:
        OSError: as open_foreign; or it has more bytes.
    """
    with os.fdopen(open_foreign(path, follows_links=follows_links), "rb") as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(errno.EFBIG, f"larger than {at_most} bytes", str(path))
    return data
