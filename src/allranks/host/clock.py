"""Whether this machine's clock is synchronized (NTP, PTP, chrony), according to the kernel.

The offset itself cannot be read here: two nodes measure it between them.
"""

from __future__ import annotations

import ctypes
import os

_TIME_ERROR = 5
_STA_UNSYNC = 0x0040


class _Timex(ctypes.Structure):
    """The head of `struct timex`, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock_state() -> tuple[int, int]:
    """Return adjtimex's clock state and status bits; nothing is adjusted (modes = 0), so no privilege is needed.

    Raises:
        OSError: the kernel or a sandbox refuses.
        AttributeError: the C library has no adjtimex.
    """
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(state), int(timex.status)


def is_synchronised(state: int, status: int) -> bool:
    """Whether a clock in this state is kept.

    Args:
        state: what adjtimex returned, 0 to 5.
        status: bits of `struct timex`.
    Source: adjtimex(2), TIME_ERROR and STA_UNSYNC.
    """
    return state != _TIME_ERROR and not status & _STA_UNSYNC
