"""What do the standard streams do where one is closed (`2>&-`), its reader has left (`| head`), or its disk is full?

They never decide how a job ends. A closed stream is opened on /dev/null: else the next file or socket that is opened
gets its number, and what this process or a worker prints goes into it. What cannot be written to standard error is
dropped. Standard output of the verbs that print results keeps its errors.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import sys
import termios
from typing import Any


class _Patient(io.FileIO):
    """A file descriptor that takes everything, also what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def secure_streams() -> None:
    """Have standard streams that can be used, whatever this process was started with."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is fd
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is sys.__stderr__:  # nobody has put another one in its place
        encoding = sys.stderr.encoding if sys.stderr else "utf-8"
        raw = _Patient(2, "wb", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, encoding, errors="backslashreplace", write_through=True)


def has_input() -> bool:
    """Whether standard input is a pipe or a file that has something to read now."""
    try:
        return not os.isatty(0) and fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


def has_reader(fd: int) -> bool:
    """Whether what is written to a pipe or terminal can still be read by anybody."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))
