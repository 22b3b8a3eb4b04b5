"""What a training reports to its agent, and what the agent requests of it. Without an agent, neither.

SIGTERM is the agent's, too: at a time limit or a preemption SLURM may signal every process of a job at once, the
workers included. The agent gets the signal as well and knows better: whether there is time for a checkpoint, and when
the worker shall go. Only then does SIGTERM end the worker, as it would have without this. Without an agent the training
itself saves at its next step boundary, and leaves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from allranks.files.folder import Folder
from allranks.model.errors import UsageError
from allranks.report.last_files import EVENTS
from allranks.report.rundir import event_line
from allranks.state.resumed.trackers import Trackers


class Telling:
    """One rank's talk with its agent, and with whatever the training logs to.

    Args:
        cell: memory that it shares with its agent (guard.inside.cell.Cell); None: there is none.
        log: as for `Session.track`.
        is_leader: whether this rank logs.
    """

    def __init__(self, cell: Any, *, log: Any = None, is_leader: bool = False) -> None:
        self._cell = cell
        self._trackers = Trackers(log) if is_leader else None
        self._step = 0
        self._is_beginning = self._is_finished = self._is_over = False
        self._total: int | None = None
        self._told_saved: int | None = None
        self._carried_out: Any = None

    def reach(self, step: int) -> Any:
        """Say that so many steps are done; return the order (CellOrder) that is due and was not carried out yet."""
        self._step = step
        if self._is_beginning:
            self._is_beginning = False
            self._track("running")
        if self._cell is None:
            return None
        self._cell.step(step, self._total)
        order = self._cell.order()
        is_due = order is not None and order is not self._carried_out and order.at_step <= step
        return order if is_due else None

    def carry_out(self, order: Any) -> None:
        """Remember that this one is done."""
        self._carried_out = order or self._carried_out

    def save_done(self, step: int | None, write_s: float | None = None) -> None:
        """Say which checkpoint is complete, None: there is none; and how long writing it took, where that is known."""
        if self._cell is not None and step is not None and step != self._told_saved:
            self._cell.saved(step, None if write_s is None else round(write_s * 1e3))
            self._told_saved = step

    def begin(self, total: int | None) -> None:
        """Say that the training goes on now, and how many steps the whole run has, if that is known."""
        self._total = total
        self.phase("training")
        self._is_beginning = True

    def phase(self, name: str) -> None:
        """Say what is going on: training, saving, leaving."""
        if self._cell is not None:
            self._cell.phase(name)

    @contextlib.contextmanager
    def saving(self, then: str | None = None) -> Iterator[None]:
        """Say that this thread saves in the block; as a phase, too, where another one follows it."""
        marks = sys.modules.get("_allranks_inside.thread_marks")  # the hook's, where it is in this process
        with marks.saving() if marks else contextlib.nullcontext():
            if then:
                self.phase("saving")
            yield
            if then:
                self.phase(then)

    def finish(self, *, is_finished: bool = True) -> None:
        """Say whether all steps are made."""
        self._is_finished = is_finished
        if self._cell is not None:
            self._cell.finish(is_finished=is_finished)
        if is_finished:
            self._track("finished")

    def end(self, error: BaseException | None) -> None:
        """The session is over: say how, unless that was said when the last step was made.

        Args:
            error: what it was left by.
        """
        self._is_over = True
        if error is None:
            self._track("finished" if self._is_finished else "ended")
        else:
            is_asked = isinstance(error, SystemExit) and not error.code
            self._track("stopped" if is_asked else f"failed ({type(error).__name__})")

    def check_session(self, call: str) -> None:
        """Raise UsageError where the session is over."""
        if self._is_over:
            raise UsageError(after_session(f"state.{call}()"))

    def _track(self, outcome: str) -> None:
        if self._trackers is not None:
            self._trackers.tell(outcome, self._step)


def after_session(call: str) -> str:
    """Say that this call comes too late."""
    return f"{call} comes after the end of the session: move it into the `with allranks.session()` block (indent it)"


def add_event(event: str, **fields: object) -> None:
    """Append one line to events.jsonl of the run that started this process, if one did; called on rank 0."""
    attempt = os.environ.get("ALLRANKS_ATTEMPT_DIR")
    if attempt and "ALLRANKS_AGENT_PID" in os.environ:
        with contextlib.suppress(OSError), Folder.at(Path(attempt)).append(EVENTS) as file:
            file.write(event_line(event, **fields).encode())


def leave_to_agent(is_meant: Callable[[], bool]) -> bool:
    """Let SIGTERM end this process only when the agent means it; returns whether that holds now.

    A script with a handler of its own keeps it. Children that are forked later die of SIGTERM as ever.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False
    own = os.getpid()

    def obey(signum: int, frame: object) -> None:
        if os.getpid() != own or is_meant():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    obey.is_allranks_handler = True  # type: ignore[attr-defined]  # it is no handler of the script (guard.inside)
    signal.signal(signal.SIGTERM, obey)
    return True


def leave_by_itself(ask: Callable[[], bool]) -> Callable[[], None]:
    """Have the first SIGTERM ask the training to save and leave, where there is no agent; return what undoes this.

    The second one ends the process, and so does the first where `ask` says that no training runs. A script with a
    handler of its own keeps it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None
    own = os.getpid()

    def obey(signum: int, frame: object) -> None:
        signal.signal(signum, signal.SIG_DFL)
        if os.getpid() != own or not ask():
            os.kill(os.getpid(), signum)

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is obey:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, obey)
    return undo
