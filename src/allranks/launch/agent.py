"""The agent as a reducer: it starts the node's workers, reports on them, and obeys the leader. Pure.

    agent.step(Heard(now_s=..., message=Stop(...)))      -> [Signal(...), ...]     see launch.events
    agent.step(Due(now_s=...))                           what is due; several times a second

Only launch.lead decides what a failure means for the others; every agent, the leader's own included, reports (Beat,
Failed, Exited, Interrupted, Stopped) and obeys (Order, Try, Stop, Plan, Goodbye). launch.loop is its driver.

phase      ends when                                     at the latest after                           then
starting   the workers have been started                 -                                             watching, ending
watching   Stop or Goodbye comes, the leader is lost,    the leader's deadlines; LEADER_SILENT_S       ending
           or a signal ends the workers
ending     the workers and what they left have ended     the grace, then SIGKILL; REAP_S for state D;  waiting
                                                         SWEEP_S for what they left
waiting    Plan comes; Goodbye, or the leader is lost    PEERS_S after a signal; LEADER_SILENT_S       starting, gone
gone       at once: this process ends

signal     in every phase but gone
SIGUSR1    the leader is told, once (sbatch --signal: the time limit is near)
SIGTERM    the leader is told; workers that can save are left to it until a second one, all others are ended
others     the leader is told, and the workers are ended; a second SIGINT kills at once (launch.loop)
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from allranks.launch import events
from allranks.launch.events import ASLEEP_S, GRACE_S, SAVE_SIGNAL, Effect, Event
from allranks.model.errors import Exit, exit_for_signal
from allranks.wire import protocol
from allranks.wire.protocol import Goodbye, Message, Order, Plan

REAP_S = 1.0
"""Seconds after SIGKILL; a worker that still exists then is unkillable (state D)."""
SWEEP_S = 5.0
"""Seconds to end what the workers left running."""
PEERS_S = 5.0
"""Seconds after a signal in which a silent leader must send its verdict."""
VERDICT_S = 20.0
"""The same for a leader that is heard: its own deadlines for the other agents are shorter."""
LEADER_SILENT_S = 60.0
"""Seconds without a message from the leader, while its kernel keeps the connection, until it is given up. Long, since
it may wait for a file server between two messages."""
STANDBY_AFTER_S = 3.0
"""After the workers began: until then, the cores are theirs."""
MOST_BETWEEN_LOOKS_S = 0.5
"""The agent looks at ending workers 20 times a second; a longer pause means that the agent itself did not run."""


class Phase(StrEnum):
    """What an agent does; see the table at the top."""

    STARTING = "starting"
    WATCHING = "watching"
    ENDING = "ending"
    WAITING = "waiting"
    GONE = "gone"


MOVES = {
    Phase.STARTING: {Phase.WATCHING, Phase.ENDING},
    Phase.WATCHING: {Phase.ENDING},
    Phase.ENDING: {Phase.WAITING},
    Phase.WAITING: {Phase.STARTING, Phase.GONE},
    Phase.GONE: set[Phase](),
}


@dataclass(slots=True, kw_only=True)
class _Ending:
    """Workers are being ended."""

    signum: int
    grace_s: float
    looked_s: float
    waited_s: float = 0.0
    """Measured while the agent runs: on a suspended or overloaded machine, workers cannot end either."""
    has_told: bool = False
    has_killed: bool = False
    swept_by_s: float | None = None
    """Set once all have ended."""


class Agent:
    """One node's part of a job, generation after generation, until the job is over.

    Args:
        plan: of the first generation.
        now_s: when it begins.
    """

    def __init__(self, plan: Plan, *, now_s: float) -> None:
        self.phase = Phase.WAITING
        self.plan = plan
        """Of this generation."""
        self.goodbye: Goodbye | None = None
        """The leader's last word, or what stands in for it."""
        self.is_leader_lost = False
        self.interrupted_by: int | None = None
        self._interrupted_s = self._stopped_s = self._heard_s = self._turned_s = now_s
        self._signals: list[int] = []
        self._pids: dict[int, int] = {}
        """Of the workers that run, by rank."""
        self._savers: set[int] = set()
        """Ranks that report steps, and therefore read orders."""
        self._failed: set[int] = set()
        self._ending: _Ending | None = None
        self._ping = (0, now_s)
        self._standby_at_s: float | None = None
        self._effects: list[Effect] = []

    @property
    def is_ending(self) -> bool:
        """Whether it ends its workers, or will as soon as they have been started."""
        return self._ending is not None

    def begin(self) -> list[Effect]:
        """Return what starts the first generation."""
        self._start(self.plan)
        return self._take()

    def step(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in this order."""
        now_s = event.now_s
        match event:
            case _ if self.phase is Phase.GONE:
                return []
            case events.Due():
                self._turn(now_s)
            case events.Heard(message=message):
                self._heard_s = now_s
                self._obey(message, now_s)
            case events.Lost(reason=reason):
                self._lose(reason, now_s)
            case events.Started():
                self._watch(event, now_s)
            case events.Observed(beat=beat):
                self._savers |= {rank.rank for rank in beat.ranks if rank.step is not None}
                ping_ns, came_s = self._ping
                held_ns = round((now_s - came_s) * 1e9) if ping_ns else 0
                self._send(protocol.Beat(node=beat, ping_ns=ping_ns, held_ns=held_ns))
            case events.WorkerEnded():
                self._report(event)
            case events.Signalled(signum=signum):
                self._take_signal(signum, now_s)
            case events.Swept(left=left):
                self._settle(left, now_s)
        return self._take()

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _send(self, message: Message) -> None:
        self._do(events.Send(message=message))

    def _enter(self, phase: Phase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    # Workers

    def _start(self, plan: Plan) -> None:
        self._enter(Phase.STARTING)
        self.plan, self._ending = plan, None
        self._pids, self._savers, self._failed = {}, set(), set()
        self._do(events.Start(plan=plan))

    def _watch(self, started: events.Started, now_s: float) -> None:
        if started.generation != self.plan.generation:
            return
        self._pids = dict(started.pids)
        self._standby_at_s = now_s + STANDBY_AFTER_S if started.generation < self.plan.max_restarts else None
        if self._ending is None:
            self._enter(Phase.WATCHING)
        else:  # it was told to end them while they were started
            self._enter(Phase.ENDING)
            self._signal(self._ending.signum)

    def _report(self, ended: events.WorkerEnded) -> None:
        end, generation = ended.end, ended.generation
        if generation == self.plan.generation:
            self._pids.pop(end.rank, None)
            if end.exit_code:
                self._failed.add(end.rank)
        if end.exit_code:
            self._send(protocol.Failed(end=end, age_s=ended.age_s, generation=generation))
        else:
            self._send(protocol.Exited(rank=end.rank, is_finished=ended.is_finished, generation=generation))

    def _signal(self, signum: int) -> None:
        if self._pids:
            self._do(events.Signal(signum=signum, ranks=tuple(self._pids)))

    def _end(self, signum: int, now_s: float, *, grace_s: float = GRACE_S, at_once: tuple[int, ...] = ()) -> None:
        """Tell all workers to end; a second call only adds workers to kill at once."""
        if self.phase in (Phase.WAITING, Phase.GONE):
            return
        if doomed := tuple(rank for rank in self._pids if rank in at_once):
            self._do(events.Signal(signum=signal.SIGKILL, ranks=doomed))
        if self._ending is not None:
            return
        self._ending = _Ending(signum=signum, grace_s=grace_s, looked_s=now_s)
        if self.phase is Phase.WATCHING:
            self._enter(Phase.ENDING)
            if told := tuple(rank for rank in self._pids if rank not in at_once):
                self._do(events.Signal(signum=signum, ranks=told))

    def _advance(self, ending: _Ending, now_s: float) -> None:
        """Do what is due while the workers end."""
        if ending.swept_by_s is not None:
            if now_s >= ending.swept_by_s:
                self._settle((), now_s)
            return
        ending.waited_s += min(max(now_s - ending.looked_s, 0.0), MOST_BETWEEN_LOOKS_S)
        ending.looked_s = now_s
        waited_s = ending.waited_s
        if self._pids and waited_s >= 1.0 and not ending.has_told and not ending.has_killed:
            ending.has_told = True
            self._do(events.Say(text=self._describe_stubborn(ending)))
        if self._pids and waited_s >= ending.grace_s and not ending.has_killed:
            ending.has_killed = True
            self._signal(signal.SIGKILL)
        if self._pids and waited_s < ending.grace_s + REAP_S:
            return
        for rank, pid in self._pids.items():
            self._do(events.Say(text=f"rank {rank} (pid {pid}) is unkillable: it hangs in the kernel (state D in ps)"))
        ending.swept_by_s = now_s + SWEEP_S
        self._do(events.Sweep())

    def _describe_stubborn(self, ending: _Ending) -> str:
        noun, has = ("rank", "has") if len(self._pids) == 1 else ("ranks", "have")
        ranks, name = ", ".join(map(str, self._pids)), signal.Signals(ending.signum).name
        left_s = max(0.0, ending.grace_s - ending.waited_s)
        at_once = ", or at once with another Ctrl-C" if ending.signum == signal.SIGINT else ""
        return f"{noun} {ranks} {has} not ended after {name} yet; SIGKILL in {left_s:.0f} s{at_once}"

    def _settle(self, left: tuple[str, ...], now_s: float) -> None:
        """All workers have ended, and what they left: say so."""
        if self.phase is not Phase.ENDING or self._ending is None or self._ending.swept_by_s is None:
            return
        if left and self.interrupted_by is None and not self._pids and not self._failed:
            self._do(events.Say(text=f"ended processes that the workers left running: {', '.join(left)}"))
        self._enter(Phase.WAITING)
        self._stopped_s = now_s
        self._send(protocol.Stopped(generation=self.plan.generation))

    # Signals

    def _take_signal(self, signum: int, now_s: float) -> None:
        if signum == SAVE_SIGNAL:
            if SAVE_SIGNAL not in self._signals:
                self._send(protocol.Interrupted(signum=SAVE_SIGNAL))
        elif self.interrupted_by is None:
            self.interrupted_by, self._interrupted_s = signum, now_s
            self._send(protocol.Interrupted(signum=signum))
        self._signals.append(signum)
        self._heed(now_s)

    def _heed(self, now_s: float) -> None:
        """After a signal: end the workers, unless they can save; then the leader says when."""
        if self.interrupted_by is None or self._ending is not None:
            return
        is_patient = [each for each in self._signals if each != SAVE_SIGNAL] == [signal.SIGTERM]
        if not (is_patient and self._savers & self._pids.keys()):
            self._do(events.Mute())  # of a hundred KeyboardInterrupts none tells anything
            self._end(self.interrupted_by, now_s)

    # The leader

    def _turn(self, now_s: float) -> None:
        self._heard_s += max(0.0, now_s - self._turned_s - ASLEEP_S)
        self._turned_s = now_s
        self._heed(now_s)
        if self.phase is Phase.ENDING and self._ending is not None:
            self._advance(self._ending, now_s)
        if self.phase is Phase.WATCHING and self._standby_at_s is not None and now_s >= self._standby_at_s:
            self._standby_at_s = now_s + STANDBY_AFTER_S
            self._do(events.PrepareStandby())
        if self.goodbye is None and now_s - self._heard_s > LEADER_SILENT_S:
            self._do(events.Disconnect(node=0))
            self._lose(f"it has sent nothing for {LEADER_SILENT_S:.0f} s, although its machine answers", now_s)
        if self.phase is Phase.WAITING and (self.goodbye is not None or self._has_waited(now_s)):
            self._enter(Phase.GONE)

    def _has_waited(self, now_s: float) -> bool:
        """Whether an agent that was told to end has waited long enough for the leader's verdict."""
        if self.interrupted_by is None:
            return False
        waited_s = now_s - max(self._stopped_s, self._interrupted_s)
        if waited_s <= (VERDICT_S if now_s - self._heard_s <= PEERS_S else PEERS_S):
            return False
        self._give_up("the leader's agent sent no final verdict")
        return True

    def _obey(self, message: Message, now_s: float) -> None:
        match message:
            case protocol.Ping(sent_ns=sent_ns):
                self._ping = (sent_ns, now_s)
            case protocol.Try():
                self._do(events.MakeTries(order=message))
            case Order():
                self._do(events.GiveOrder(order=message))
            case protocol.Stop(signum=signum, at_once=at_once, grace_s=grace_s):
                if at_once or grace_s is not None:  # there was a fault: whoever comes later wants to know
                    self._do(events.KeepEvidence())
                self._end(signum, now_s, grace_s=GRACE_S if grace_s is None else grace_s, at_once=at_once)
            case Plan() if self.phase is Phase.WAITING and self.goodbye is None:
                self._start(message)
            case Goodbye():
                self.goodbye = message
                self._end(signal.SIGTERM, now_s)
            case _:
                self._do(events.Disconnect(node=0))
                self._lose(f"it sent {type(message).__name__}, which a leader does not send now", now_s)

    def _lose(self, reason: str, now_s: float) -> None:
        """End the workers and leave, because the connection to the leader ended; after its Goodbye that is no loss."""
        if self.goodbye is None:
            self._give_up(f"the leader's agent on {self.plan.members[0].name} is gone ({reason})")
            self.is_leader_lost = True
        self._end(signal.SIGTERM, now_s)

    def _give_up(self, summary: str) -> None:
        by = self.interrupted_by
        self.goodbye = Goodbye(exit_code=Exit.NODE_FAULT if by is None else exit_for_signal(by), summary=summary)
