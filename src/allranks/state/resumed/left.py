"""How much is left of a training that was resumed? Said once: when its loop begins, or when the session is left."""

from __future__ import annotations

from allranks.report.text import say
from allranks.state.resumed.experiment import Named
from allranks.state.resumed.steps import describe_left


class StepsLeft:
    """What rank 0 says; all others say nothing."""

    def __init__(self) -> None:
        self._resumed: Named | None = None
        """From the load until it is said."""
        self._text = ""
        """For the end of the session, if no loop had a step to make."""

    def resumed(self, named: Named) -> None:
        """A checkpoint was loaded, from a directory that the user named so."""
        self._resumed = named

    def note(self, step: int, epochs_done: int, *, total: int | None, epochs: int | None) -> None:
        """A loop begins. One over epochs begins with loops that have nothing left."""
        if self._resumed is None or (total is None and epochs is None):
            return
        is_over, self._text = describe_left(step, epochs_done, total=total, epochs=epochs)
        if is_over:
            self._text += ": the body of the loop does not run"
            if not self._resumed.is_below_agent:
                self._text += f"; to begin anew, {self._resumed.how('NEW_DIRECTORY')}"
        if total is not None or not is_over:
            self.say()

    def say(self) -> None:
        """Say it, if it was not said yet."""
        if self._text:
            say(self._text)
            self._text, self._resumed = "", None
