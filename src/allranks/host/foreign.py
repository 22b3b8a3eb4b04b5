"""Read a file that others write, as the workers of this node: it never waits for them, and its size is bounded.

    data = read_foreign(folder / "rank_3.error.json")
    tail = read_tail(folder / "rank_3.err", num_bytes=4096)

A worker runs as the same user as its agent, so it can put a fifo, a link to /dev/zero, or 1 TB of nothing where a file
is expected.
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


def read_tail(path: Path, *, start: int = 0, num_bytes: int) -> bytes:
    """Return the end of a regular file, as far as it is behind `start`.

    Raises:
        OSError: as open_foreign.
    """
    with os.fdopen(open_foreign(path), "rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(num_bytes)
