"""What `allranks run` shows of a job while it runs: a row below the output, or a line at most once a minute.

    live.tell(status)            the newest one of the leader, or of the roll call
    live.hear(now_s)             the ranks have printed something
    live.turn(now_s)             the agent's loop: says the line, where there is no row and one is due

Only the leader's agent is told a status, so only its terminal shows one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Hashable
from typing import Literal

from allranks.launch.console import Console
from allranks.launch.pulse import Pulse
from allranks.model.job_status import JobStatus
from allranks.report.status_line import RUNNING, short_time, status_line
from allranks.report.text import Style, say

Shows = Literal["row", "plain", "off"]
"""The values of `--status`."""


class Live:
    """The row of one terminal, or the lines of one log.

    Args:
        wanted: None: a row on a terminal, else lines.
        style: of standard error.
        job: what `allranks stack` is to be asked for.
    """

    def __init__(self, console: Console, wanted: Shows | None, style: Style, *, job: str = "latest") -> None:
        self._console, self._style, self._job = console, style, job
        has_row = console.screen["err"].paint is not None and (wanted == "row" or not _is_pipe(1))
        self.shows: Shows = wanted if wanted == "off" else "row" if has_row and wanted != "plain" else "plain"
        self.status: JobStatus | None = None
        """What the leader has told last."""
        self._pulse: Pulse | None = None
        self._silence = ""
        self._is_stop_wanted = False
        if self.shows == "row":
            console.headline = self._headline

    def begin(self, now_s: float) -> None:
        """The ranks of a generation have been started."""
        self._pulse = Pulse(now_s)

    def tell(self, status: JobStatus | None) -> None:
        """The leader, or who holds the roll call, says what the job does now; None: this agent is neither."""
        self.status = status

    def hear(self, now_s: float) -> None:
        """The ranks have printed something."""
        if self._pulse is not None:
            self._pulse.hear(now_s)

    def turn(self, now_s: float) -> None:
        """Say the line, if one is due and there is no row."""
        if self._pulse is None or self.status is None or self.status.phase != RUNNING:
            return
        self._silence = describe_silence(self._pulse.find_silence(now_s))
        if self.shows == "plain" and self._pulse.is_due(now_s, state_of(self.status)):
            plain = Style(is_unicode=self._style.is_unicode, has_colour=False, width=self._style.width)
            line = status_line(self.status, plain, job=self._job, silence=self._silence)
            say(line[2:])  # without the mark: `allranks:` stands there

    def stop_tidily(self) -> None:
        """At Ctrl-Z, leave the shell a line without a row; the row comes back with `fg`."""
        if self.shows == "row" and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._console.before_draw = self._stop_if_wanted
            signal.signal(signal.SIGTSTP, self._note_stop)

    def end(self) -> None:
        """Take the row away for good."""
        self._console.headline = None
        self._console.draw(is_end=True)
        if signal.getsignal(signal.SIGTSTP) == self._note_stop:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _note_stop(self, signum: int, frame: object) -> None:
        """Have the agent's loop stop soon: it may be drawing now; the second Ctrl-Z does not wait for that."""
        is_second, self._is_stop_wanted = self._is_stop_wanted, True
        if is_second:
            self._stop()

    def _stop_if_wanted(self) -> None:
        if self._is_stop_wanted:
            self._console.clear_row()
            self._stop()

    def _stop(self) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # it stops here, until SIGCONT
        self._is_stop_wanted = False
        signal.signal(signal.SIGTSTP, self._note_stop)

    def _headline(self, columns: int, spare: int) -> str:
        if self.status is None:
            return ""
        return status_line(self.status, self._style, columns=columns, spare=spare, job=self._job, silence=self._silence)


def state_of(status: JobStatus) -> Hashable:
    """Return what of a status is news, without what only time changes."""
    stuck = status.stuck and (status.stuck.op, status.stuck.ranks)
    return status.phase, status.num_up, status.step, stuck, status.checkpoint, status.num_restarts


def describe_silence(silence: tuple[float, bool] | None) -> str:
    """`no output for 5m`, `no output yet`; empty where that is no news."""
    if silence is None:
        return ""
    silent_s, has_spoken = silence
    return f"no output for {short_time(silent_s)}" if has_spoken else "no output yet"


def _is_pipe(fd: int) -> bool:
    """Whether this goes to another program, as to `| tee log`: its output may come to the same terminal, into a row."""
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False
