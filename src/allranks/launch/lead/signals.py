"""The signals that a job has got, and what the scheduler has said about them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.launch import events
from allranks.launch.events import SAVE_SIGNAL
from allranks.launch.lead.course import ANSWER_S, Reaction, Stage


@dataclass(slots=True)
class Signals:
    """Of one job, whichever agents got them."""

    interrupted_by: int | None = None
    """The first stop signal. A job that got one is never requeued."""
    _taken: set[int] = field(default_factory=set)
    _unanswered: dict[int, float] = field(default_factory=dict)
    """Signals that the scheduler was asked about, and until when its answer counts."""

    def take(self, signum: int, stage: Stage, now_s: float, *, save_s: float | None) -> events.AskScheduler | None:
        """Take in a signal; return the question for the scheduler, if it is a new one.

        Args:
            signum: the signal; SLURM sends it to all agents.
            stage: where the job is.
            now_s: the time.
            save_s: how long a checkpoint takes; 0: there is nothing to save; None: unknown.
        """
        is_warning = signum == SAVE_SIGNAL
        reaction = stage.warning if is_warning else stage.stop
        was_interrupted = self.interrupted_by is not None
        if not is_warning:
            self.interrupted_by = self.interrupted_by or signum
        if reaction in (Reaction.END, Reaction.NOTHING) or signum in self._taken or (is_warning and was_interrupted):
            return None
        self._taken.add(signum)
        self._unanswered[signum] = now_s + ANSWER_S
        return events.AskScheduler(signum=signum, save_s=save_s)

    def answer(self, signum: int) -> bool:
        """The scheduler has answered; returns whether that still counts."""
        return self._unanswered.pop(signum, None) is not None

    def turn(self, now_s: float) -> None:
        """Give up answers that are overdue."""
        self._unanswered = {signum: until_s for signum, until_s in self._unanswered.items() if now_s < until_s}

    @property
    def are_unanswered(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._unanswered)
