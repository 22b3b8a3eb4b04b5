"""Signals to this process, as something that a selector can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from allranks.launch.events import SAVE_SIGNAL
from allranks.model.errors import StoppedBySignal, exit_for_signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalInbox:
    """What this process was told. The second SIGINT calls `kill_now` and leaves at once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.received: list[int] = []
        """Stop signals, in their order."""
        self._untaken: list[int] = []
        self.kill_now: Callable[[], None] = lambda: None
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, SAVE_SIGNAL):
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if signum == signal.SIGINT and signal.SIGINT in self.received:
            self.kill_now()
            os._exit(exit_for_signal(signum))
        self._untaken.append(signum)
        if signum != SAVE_SIGNAL:
            self.received.append(signum)

    def fileno(self) -> int:
        """For a selector."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the signals since the last call; the selector waits for the next one."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        taken, self._untaken = self._untaken, []
        return taken

    def check(self) -> None:
        """Between two steps of a longer wait.

        Raises:
            StoppedBySignal: somebody told this process to stop.
        """
        if self.received:
            raise StoppedBySignal(self.received[0])
