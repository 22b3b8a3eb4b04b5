"""How many lines did a worker print that could not be written, since its disk was full? Told to the agent in the cell.

    begin(fd)     from now on, writes of stdout and stderr that fail are counted

Python keeps what a failed write could not take only as long as there is room in its buffer (8 KiB; none with
PYTHONUNBUFFERED), and many scripts catch the exception, as `logging` does by itself. So lines are lost, and nothing
says so. The count costs 0.1 us for each write, and nothing for what the buffer takes. At the end of the process the
buffer is flushed once more; what remains in it then is lost, too, and Python ends with FLUSH_FAILED.

Limits: what native code and other programs write to the same files is not counted. Standard library only; runs in the
worker's Python.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs every Python process some milliseconds
    from collections.abc import Callable
    from typing import Any

LINES, ERRNO = 30, 31
"""Words of the cell: how many lines, and the errno of the last write that failed."""
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}

_fd = -1
_lock = RLock()
"""A signal handler may print, too."""


def begin(fd: int) -> None:
    """Count in the cell behind this descriptor; in forks of this process, too."""
    global _fd
    if _fd < 0:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # closed, or replaced
                stream.buffer.write = _counted(stream.buffer.write)  # type: ignore[method-assign]
        atexit.register(_flush)  # the first that is registered is the last that is called
    _fd = fd


def _counted(write: Callable[[Any], int]) -> Callable[[Any], int]:
    def counted(data: Any) -> int:
        try:
            return write(data)
        except OSError as exc:
            if exc.errno in _OF_DISK:
                _count(bytes(data), exc.errno)
            if exc.__traceback__ is not None:
                exc.__traceback__ = exc.__traceback__.tb_next  # users' tracebacks show their own frames
            raise

    return counted


def _flush() -> None:
    """Count what stays in the buffers: nothing is written after this."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            raw: Any = getattr(stream.buffer, "raw")  # noqa: B009  (unbuffered, there is none)
            rest: list[bytes] = []
            write = raw.write

            def keep(data: Any, write: Callable[[Any], int] = write, rest: list[bytes] = rest) -> int:
                rest[:] = [bytes(data)]
                return write(data)

            raw.write = keep
            try:
                stream.flush()
            except OSError as exc:
                if rest and exc.errno in _OF_DISK:
                    _count(rest[0], exc.errno)
            finally:
                raw.write = write


def _count(data: bytes, code: int) -> None:
    lines = max(1, data.count(b"\n"))
    with contextlib.suppress(OSError), _lock:  # the script has closed the cell
        before = int.from_bytes(os.pread(_fd, 8, 8 * LINES), sys.byteorder)
        os.pwrite(_fd, (before + lines).to_bytes(8, sys.byteorder) + code.to_bytes(8, sys.byteorder), 8 * LINES)
