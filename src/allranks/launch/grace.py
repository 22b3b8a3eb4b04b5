"""How does an agent end its workers: who gets which signal, and when does SIGKILL follow? Pure.

a rank that                 gets                                           SIGKILL follows after
does nothing of this        the signal                                     the grace (GRACE_S; RESTART_GRACE_S)
handles the signal          the signal, where nobody else has sent it      --shutdown-timeout, or what SLURM leaves;
                            already                                        after a fault the grace
handles SIGTERM only        SIGTERM instead of SIGINT or SIGHUP            the same
saves                       the signal, when it has saved                  the grace after that, but at the latest as
                                                                           one that handles the signal
is blocked, says the guard  -                                              nothing

"Handles" means: its script has installed a handler (guard.inside.handlers). SLURM sends its signals to every process of
a job on some sites. A second signal would enter a handler that saves again, so the agent waits for RECEIPT_S whether
the handler begins by itself. A handler of Python cannot begin while its rank is in C++, but then two signals are one.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from allranks.launch.events import Effect, EndingFacts, Forward, Say, Signal

REAP_S = 1.0
"""Seconds after SIGKILL; a worker that still exists then is unkillable (state D)."""
MOST_BETWEEN_LOOKS_S = 0.5
"""The agent looks at ending workers 20 times a second; a longer pause means that the agent itself did not run."""
RECEIPT_S = 0.5
"""Seconds in which a signal that SLURM has sent to an agent reaches its ranks, too."""
BEFORE_S = 0.3
"""How much earlier than its agent a rank may have got it."""
NOTICE_S = 1.0
"""When the agent says for whom it waits."""


def has_begun(hold: EndingFacts, signum: int, since_s: float) -> bool:
    """Whether a handler of the rank has begun because of a signal that came then."""
    return hold.begun_s.get(signum, float("-inf")) >= since_s - BEFORE_S


@dataclass(slots=True)
class _Turn:
    """What one rank has got so far, by the clock of the grace."""

    told_s: float | None = None
    answer: int | None = None
    """The signal that it handles, in answer to which it ends."""
    is_saving: bool = False
    kill_s: float = 0.0
    killed_s: float | None = None
    """From when on REAP_S counts, once it has got SIGKILL."""


@dataclass(slots=True, kw_only=True)
class Grace:
    """The time between the first signal to workers that are to end, and SIGKILL."""

    signum: int
    grace_s: float
    saving_s: float
    """For ranks that handle the signal, and for those that save."""
    is_fault: bool
    """Nobody told the job to stop: only who saves may take its time."""
    since_s: float
    """When the agent got the signal, or the order to end."""
    looked_s: float
    at_once: frozenset[int] = frozenset()
    """Ranks that are blocked."""
    waited_s: float = 0.0
    """Measured while the agent runs: on a suspended or overloaded machine, workers cannot end either."""
    swept_by_s: float | None = None
    """Set once all have ended."""
    _turns: dict[int, _Turn] = field(default_factory=dict)

    def hasten(self, saving_s: float) -> None:
        """From now on there is only so much time."""
        self.saving_s = min(self.saving_s, self.waited_s + saving_s)

    def look(self, now_s: float, ranks: Iterable[int], holds: Mapping[int, EndingFacts]) -> list[Effect]:
        """Return what is due, while workers run.

        Args:
            ranks: workers that have not ended.
            holds: what is known of them.
        """
        before_s = self.waited_s
        self.waited_s += min(max(now_s - self.looked_s, 0.0), MOST_BETWEEN_LOOKS_S)
        self.looked_s = now_s
        turns = {rank: self._turns.setdefault(rank, _Turn()) for rank in ranks}
        told: dict[tuple[int, bool], list[int]] = {}
        for rank, turn in turns.items():
            if rank in self.at_once and turn.killed_s is None:
                turn.killed_s = max(self.waited_s, self.grace_s)  # much memory takes the kernel seconds to free
                told.setdefault((signal.SIGKILL, False), []).append(rank)
            elif (due := self._advance(turn, holds.get(rank, EndingFacts()))) is not None:
                told.setdefault(due, []).append(rank)
        effects: list[Effect] = [
            Forward(signum=signum, ranks=tuple(which), ends=True)
            if is_handled
            else Signal(signum=signum, ranks=tuple(which))
            for (signum, is_handled), which in sorted(told.items(), key=lambda item: item[0][0] != signal.SIGKILL)
        ]
        late = [rank for rank in told.get((signal.SIGKILL, False), ()) if turns[rank].answer and not self.is_fault]
        if late:
            name = _names({turns[rank].answer for rank in late})
            effects.append(
                Say(text=f"{_who(late)} {_have(late)} not ended {self.waited_s:.0f} s after {name}: SIGKILL")
            )
        if before_s < NOTICE_S <= self.waited_s:
            effects += [Say(text=text) for text in self._describe(turns)]
        return effects

    def is_over(self, ranks: Collection[int]) -> bool:
        """Whether nobody is waited for: these workers were killed some time ago, and are still there."""
        killed_s = [self._turns[rank].killed_s if rank in self._turns else None for rank in ranks]
        return all(time_s is not None and self.waited_s >= time_s + REAP_S for time_s in killed_s)

    def _advance(self, turn: _Turn, hold: EndingFacts) -> tuple[int, bool] | None:
        """Return which signal a rank gets now, and whether only its handler does; None: it gets none."""
        if turn.killed_s is not None:
            return None
        # One that has got it keeps its time when it takes its handler back, as Trainers do when they have saved.
        now_s, answer = self.waited_s, (turn.told_s is not None and turn.answer) or self._answer(hold)
        turn.answer, turn.is_saving = answer, hold.is_saving and now_s < self.saving_s
        has_time = answer is not None and not self.is_fault
        if turn.told_s is None:
            has_it = answer is not None and has_begun(hold, answer, self.since_s)
            if not has_it and (turn.is_saving or (has_time and now_s < RECEIPT_S)):
                return None
            turn.told_s, turn.kill_s = now_s, now_s + self.grace_s
            return (0, False) if has_it else (answer or self.signum, answer is not None)
        if turn.is_saving:
            turn.kill_s = max(turn.kill_s, min(now_s, self.saving_s) + self.grace_s)
        elif now_s >= (limit_s := max(turn.kill_s, self.saving_s if has_time else 0.0)):
            turn.killed_s = limit_s
            return signal.SIGKILL, False
        return None

    def _answer(self, hold: EndingFacts) -> int | None:
        """Return the signal that a rank handles, of those that can mean this one."""
        instead = (signal.SIGTERM,) if self.signum in (signal.SIGINT, signal.SIGHUP) else ()
        return next((signum for signum in (self.signum, *instead) if signum in hold.handles), None)

    def _describe(self, turns: Mapping[int, _Turn]) -> list[str]:
        """`ranks 2, 3 have not ended after SIGTERM yet; SIGKILL in 2 s`."""
        kinds: dict[str, list[int]] = {"saves": [], "handles": [], "": []}
        for rank, turn in turns.items():
            if turn.killed_s is None:
                is_handled = turn.answer is not None and not self.is_fault
                kinds["saves" if turn.is_saving else "handles" if is_handled else ""].append(rank)
        at_once = ", or at once with another Ctrl-C" if self.signum == signal.SIGINT else ""
        lines = []
        for kind, ranks in kinds.items():
            limit_s = max((turns[rank].kill_s for rank in ranks), default=0.0)
            said = f"{_have(ranks)} not ended after {signal.Signals(self.signum).name} yet"
            if kind == "handles":
                limit_s = max(limit_s, self.saving_s)
                name = _names({turns[rank].answer for rank in ranks})
                said = f"{'handle' if len(ranks) > 1 else 'handles'} {name} and {_have(ranks)} not ended yet"
            elif kind == "saves":
                limit_s = self.saving_s + self.grace_s
                said = f"{'save' if len(ranks) > 1 else 'saves'}, and will be ended then"
            if ranks:
                lines.append(f"{_who(ranks)} {said}; SIGKILL in {max(0.0, limit_s - self.waited_s):.0f} s{at_once}")
        return lines


def _who(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _have(ranks: Collection[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _names(signums: Iterable[int | None]) -> str:
    return ", ".join(signal.Signals(signum).name for signum in sorted(filter(None, signums)))
