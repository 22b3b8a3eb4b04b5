"""Which signals does the script of a worker handle, and has one of its handlers begun? Told to the agent in the cell.

    begin(fd)     this process is a worker: from now on signal.signal tells the agent what the script installs

Two things happen only where SLURM sends its signals to every process of a job. A script that handles SIGTERM only gets
Ctrl-C as SIGTERM, as its agent would send it. And a handler is not entered again while it runs: at a time limit
SLURM 22.05 sends SIGTERM twice in a second, and at the end of a preemption's grace period again.

From outside nobody can tell: Python itself catches SIGINT, and SLURM may have sent a rank the signal that its agent is
about to send. The handlers of Python and of allranks count as none. `signal.getsignal` returns what the script has
installed. The numbers stand in the head of the cell (guard.inside.cell), each one store of eight bytes, so that a
signal may come between any two of them. Standard library only; runs in the worker's Python.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import sys
import time
from typing import Any

HANDLES, OWN, PID, BEGUN = 7, 8, 9, 10
"""Words of the cell: bits of the signals that the script handles, and of those that allranks handles in the worker; the
process that tells it; from there on, by signal, when a handler has begun last: nanoseconds by CLOCK_MONOTONIC."""
TOLD = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGTERM)
"""Signals that an agent may pass on."""
AGAIN_NS = 2_000_000_000
"""Within which two signals of SLURM are one."""
OURS = "is_allranks_handler"
"""A handler with this attribute is allranks' own."""

_PYTHON_S = _signal.default_int_handler
_set, _get = _signal.signal, _signal.getsignal
_told_as: tuple[int, int] = (0, -1)
"""This process, as which it tells, and the descriptor of its cell."""
_words = {HANDLES: 0, OWN: 0}


class _Noted:
    """A handler of the script that notes when it begins; under SLURM two signals in a row are one."""

    __slots__ = ("_begun_ns", "_is_running", "handler")

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self._begun_ns, self._is_running = -AGAIN_NS, False

    def __call__(self, signum: int, frame: Any) -> Any:
        now_ns = time.monotonic_ns()
        is_again = self._is_running or now_ns - self._begun_ns < AGAIN_NS
        if is_again and "SLURM_JOB_ID" in os.environ and _told_as[0] == os.getpid():
            return None
        self._begun_ns, self._is_running = now_ns, True
        _tell(BEGUN + signum, now_ns)
        try:
            return self.handler(signum, frame)
        except BaseException as exc:
            if exc.__traceback__ is not None:
                exc.__traceback__ = exc.__traceback__.tb_next  # users' tracebacks show their own frames
            raise
        finally:
            self._is_running = False


def _interrupt(signum: int, frame: Any) -> Any:
    """Ctrl-C that SLURM has sent to this rank: what Python does with it, or what the script does with SIGTERM."""
    handler = _get(_signal.SIGTERM)
    if _told_as[0] == os.getpid() and isinstance(handler, _Noted):
        return handler(_signal.SIGTERM, frame)
    try:
        return _PYTHON_S(signum, frame)
    except KeyboardInterrupt as exc:
        exc.__traceback__ = None
        raise


def begin(fd: int) -> None:
    """Tell what this process handles, and will handle, in the cell behind this descriptor.

    Nothing is told where another process that lives does so: this one was started by the worker.
    """
    global _told_as
    teller = int.from_bytes(os.pread(fd, 8, 8 * PID), sys.byteorder)
    if teller not in (0, os.getpid()) and os.path.exists(f"/proc/{teller}"):
        return
    _told_as = os.getpid(), fd
    _signal.signal, _signal.getsignal = _set_and_note, _get_as_set
    if _get(_signal.SIGINT) is _PYTHON_S:
        _set_and_note(_signal.SIGINT, _PYTHON_S)
    for word, bits in _words.items():
        _tell(word, bits)
    _tell(PID, os.getpid())


def _set_and_note(signalnum: int, handler: Any) -> Any:
    is_noted = callable(handler) and signalnum in TOLD
    is_ours = is_noted and getattr(handler, OURS, False)
    is_script_s = is_noted and not is_ours and not _is_pythons(handler)
    is_diverted = handler is _PYTHON_S and signalnum == _signal.SIGINT and "SLURM_JOB_ID" in os.environ
    before = _set(signalnum, _interrupt if is_diverted else _Noted(handler) if is_script_s else handler)
    if signalnum in TOLD:
        _note(HANDLES, signalnum, is_set=is_script_s)
        _note(OWN, signalnum, is_set=is_ours)
    return _as_set(before)


def _is_pythons(handler: Any) -> bool:
    """Whether this is what raises KeyboardInterrupt: the interpreter's own handler, or that of asyncio.run."""
    function = getattr(handler, "func", handler)
    return function is _PYTHON_S or getattr(function, "__module__", "") == "asyncio.runners"


def _get_as_set(signalnum: int) -> Any:
    return _as_set(_get(signalnum))


def _as_set(handler: Any) -> Any:
    """Return what the script has installed where this handler stands."""
    return handler.handler if isinstance(handler, _Noted) else _PYTHON_S if handler is _interrupt else handler


def _note(word: int, signum: int, *, is_set: bool) -> None:
    bit = 1 << signum
    _words[word] = _words[word] | bit if is_set else _words[word] & ~bit
    _tell(word, _words[word])


def _tell(word: int, number: int) -> None:
    pid, fd = _told_as
    if pid == os.getpid():  # not in a fork, as of a DataLoader
        with contextlib.suppress(OSError):  # the script has closed it
            os.pwrite(fd, number.to_bytes(8, sys.byteorder), 8 * word)
