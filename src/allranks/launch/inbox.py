"""Signals to this process, as something that a selector can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from allranks.launch.events import STOP_SIGNALS
from allranks.model.errors import StoppedBySignal, exit_for_signal

LEFT_ALONE = {
    *(signal.SIGKILL, signal.SIGSTOP),  # cannot be caught
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT),  # Ctrl-Z (launch.live) and fg; the workers go on
    *(signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG, signal.SIGPIPE, signal.SIGXFSZ),  # they end no Python process
}
"""All other signals would end this process, and the job without a report."""

MAX_RECEIVED = 1000
"""Stop signals that are kept. More than two say nothing new; the pipe drops what does not fit into its 64 KiB."""


class SignalInbox:
    """What this process was told. The second SIGINT calls `kill_now` and leaves at once."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.received: list[int] = []
        """Stop signals, in their order."""
        self.kill_now: Callable[[], None] = lambda: None
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in signal.valid_signals() - LEFT_ALONE:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if signum == signal.SIGINT and signal.SIGINT in self.received:
            self.kill_now()
            os._exit(exit_for_signal(signum))
        if signum in STOP_SIGNALS and len(self.received) < MAX_RECEIVED:
            self.received.append(signum)

    def fileno(self) -> int:
        """For a selector."""
        return self._reader

    def take(self) -> bytes:
        """Return the signals since the last call, one a byte; the selector waits for the next one."""
        with contextlib.suppress(BlockingIOError):
            return bytes(signum for signum in os.read(self._reader, 64) if signum not in LEFT_ALONE)
        return b""

    def check(self) -> None:
        """Between two steps of a longer wait.

        Raises:
            StoppedBySignal: somebody told this process to stop.
        """
        if self.received:
            raise StoppedBySignal(self.received[0])
