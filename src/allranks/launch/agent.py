"""The agent as a reducer: it starts the node's workers, reports on them, and obeys the leader. Pure.

    agent.step(Heard(now_s=..., message=Stop(...)))      -> [Signal(...), ...]     see launch.events
    agent.step(Due(now_s=...))                           what is due; several times a second

Only launch.lead decides what a failure means for the others; every agent, the leader's own included, reports (Beat,
Ended, Interrupted, Stopped) and obeys (Order, Try, Stop, Plan, Goodbye). launch.loop is its driver.
One state machine, whole.

phase      ends when                                     at the latest after                           then
starting   the workers have been started                 -                                             watching, ending
watching   Stop, Plan or Goodbye comes, no leader is     the leader's deadlines; LEADER_SILENT_S;      ending
           found, or a signal ends the workers           without a leader: SEEK_S (launch.succession)
ending     the workers and what they left have ended     the grace, then SIGKILL; REAP_S for state D;  waiting
                                                         SWEEP_S for what they left
waiting    Plan comes; Goodbye, or no leader is found    PEERS_S after a signal; LEADER_SILENT_S       starting, gone
gone       at once: this process ends

In every phase the leader may be lost. The agent then looks for it, or for another one, or leads itself
(launch.succession), while its workers go on; whom it finds, it tells again what it has told of this generation.

signal     in every phase but gone
SIGUSR1    the leader is told, once (sbatch --signal: the time limit is near)
SIGTERM    the leader is told; workers that can save are left to it until a second one, all others are ended
others     the leader is told, and the workers are ended; a second SIGINT kills at once (launch.inbox)
SIGUSR2    and all that mean nothing to a job: the leader is told
How long workers have when they are ended: launch.grace.

The book of what the workers spend their time on is written every BOOK_S, and when those of a generation have ended.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from allranks.launch import events
from allranks.launch.events import ASLEEP_S, GRACE_S, SAVE_SIGNAL, STOP_SIGNALS, Effect, EndingFacts, Event
from allranks.launch.grace import Grace
from allranks.launch.lead.course import RETURN_S, SHUTDOWN_S
from allranks.launch.relays import Relays
from allranks.launch.succession import Succession
from allranks.model.errors import Exit, exit_for_signal
from allranks.wire import protocol
from allranks.wire.protocol import Ended, Goodbye, Message, Order, Plan

SWEEP_S = 2.5
"""Seconds to end what the workers left running; with REAP_S, less than a leader waits (STOPPED_S)."""
PEERS_S = 5.0
"""Seconds after a signal in which a silent leader must send its verdict. One that is heard has deadlines of its own
(launch.lead.course): another node may still save."""
LEADER_SILENT_S = 60.0
"""Seconds without a message from a leader whose kernel answers; it may wait for a file server between two."""
MANY = 2
"""Signals of one kind that count: a second SIGTERM means something else than the first."""
BOOK_S = 60.0
"""Between two writings of the book: a killed agent loses so much of it."""
STANDBY_AFTER_S = 3.0
"""After the workers began: until then, the cores are theirs."""


class AgentPhase(StrEnum):
    """What an agent does; see the table at the top."""

    STARTING = "starting"
    WATCHING = "watching"
    ENDING = "ending"
    WAITING = "waiting"
    GONE = "gone"


MOVES = {
    AgentPhase.STARTING: {AgentPhase.WATCHING, AgentPhase.ENDING},
    AgentPhase.WATCHING: {AgentPhase.ENDING},
    AgentPhase.ENDING: {AgentPhase.WAITING},
    AgentPhase.WAITING: {AgentPhase.STARTING, AgentPhase.GONE},
}


class Agent:
    """One node's part of a job, generation after generation, until the job is over.

    Args:
        plan: of the generation that begins.
        now_s: when it does.
        shutdown_s: for ranks that handle the signal which ends them, and for those that save.
        is_slurm: SLURM ends the job: a second SIGTERM is its own, at the end of a preemption's grace period.
    """

    def __init__(self, plan: Plan, *, now_s: float, shutdown_s: float = SHUTDOWN_S, is_slurm: bool = False) -> None:
        self.phase = AgentPhase.WAITING
        self._shutdown_s, self._is_slurm = shutdown_s, is_slurm
        self.plan = plan
        """Of this generation."""
        self.goodbye: Goodbye | None = None
        """The leader's last word, or what stands in for it."""
        self.is_leader_lost = False
        """Whether it left because it found no leader."""
        self.leader = plan.nodes[0] if plan.nodes else 0
        """Index of the leader's node in the job."""
        self.succession: Succession | None = None
        """While the leader is lost."""
        self._search: Succession | None = None  # the last one, until whoever was found has spoken: it may not lead
        self._succeeded: set[int] = set()
        """Former leaders of this generation."""
        self.interrupted_by: int | None = None
        self._waits_s = self._heard_s = self._stepped_s = now_s
        self._signals: list[int] = []
        self._pids: dict[int, int] = {}
        """Of the workers that run, by rank."""
        self._savers: set[int] = set()
        """Ranks that report steps, and therefore read orders."""
        self._holds: Mapping[int, EndingFacts] = {}
        """How the ranks are to be ended."""
        self._relays = Relays()
        self._has_failed = False
        self.ending: Grace | None = None
        """While it ends its workers, or will as soon as they have been started."""
        self._ping = (0, now_s)
        self._confirmed = -1
        self._told: list[tuple[float, Ended]] = []
        """Ends of workers of this generation, and when they were told."""
        self._next_plan: Plan | None = None
        """It came while the workers of the last generation had not ended."""
        self._is_next_stopped = False  # and then a Stop of that generation
        self._standby_at_s: float | None = None
        self._book_at_s = now_s + BOOK_S
        self._effects: list[Effect] = []
        self._start(plan)

    @property
    def left_s(self) -> float:
        """How much is left of the time in which its workers could save; for processes that still write."""
        return self.ending.saving_s - self.ending.waited_s if self.ending is not None else 0.0

    @property
    def node(self) -> int:
        """Index of this node in the job, which is not its index in the Plan."""
        return self.plan.nodes[self.plan.node_index] if self.plan.nodes else self.plan.node_index

    @property
    def leader_name(self) -> str:
        """The node whose agent leads."""
        return self.plan.members[self.plan.nodes.index(self.leader) if self.leader in self.plan.nodes else 0].name

    def refuses(self, now_s: float) -> str:
        """Return why other agents that have lost their leader cannot join this one; empty: they can."""
        if self.goodbye is not None or self.succession is None:
            return "it follows a leader"
        return "" if self.succession.is_open(now_s) and self.interrupted_by is None else "it does not lead yet"

    def step(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in this order. The first event starts the workers."""
        now_s = event.now_s
        slept_s = max(0.0, now_s - self._stepped_s - ASLEEP_S)
        self._waits_s, self._heard_s, self._stepped_s = self._waits_s + slept_s, self._heard_s + slept_s, now_s
        match event:
            case _ if self.phase is AgentPhase.GONE:
                return []
            case events.Due():
                self._turn(now_s)
            case events.Heard(message=message):
                if self._search is not None:
                    self._succeeded.add(self._search.leader)
                self._heard_s, self._search = now_s, None
                self._obey(message, now_s)
            case events.Lost(reason=reason):
                self._miss_leader(reason, now_s)
            case events.LeaderFound(leader=leader):
                self._follow(leader, now_s)
            case events.Joined(connection=connection) if why := self.refuses(now_s):
                self._do(events.Reject(connection=connection, reason=why))
            case events.Started():
                self._watch(event, now_s)
            case events.Observed(beat=beat):
                self._savers |= {rank.rank for rank in beat.ranks if rank.step is not None}
                ping_ns, came_s = self._ping
                held_ns = round((now_s - came_s) * 1e9) if ping_ns else 0
                self._send(protocol.Beat(node=beat, ping_ns=ping_ns, held_ns=held_ns))
            case events.Sensed(ranks=ranks):
                self._holds = ranks
            case events.WorkerEnded(ended=ended):
                self._report(ended, now_s)
            case events.WorkerFailed(ended=ended):
                self._tell_end(ended, now_s)
            case events.Signalled(signum=signum):
                self._take_signal(signum, now_s)
            case events.Swept(left=left):
                self._settle(left, now_s)
            case _ if self.succession is None:
                pass
            case events.NotFound(reason=reason):
                self.succession.reason += f"; {reason}"
                self._lose(now_s)
            case events.Knocked():
                self.succession.weigh(event)
            case events.Joined():
                self._do(*self.succession.join(event))
            case events.Withdrew(connection=connection):
                self.succession.withdraw(connection)
        effects, self._effects = self._effects, []
        return effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _send(self, message: Message) -> None:
        self._do(events.Send(message=message))

    def _enter(self, phase: AgentPhase) -> None:
        assert phase in MOVES.get(self.phase, ()), f"{self.phase} -> {phase}"
        self.phase = phase

    # Workers

    def _start(self, plan: Plan) -> None:
        self._enter(AgentPhase.STARTING)
        self.plan, self.ending, self._next_plan, self._succeeded = plan, None, None, set()
        self._told, self._pids, self._savers, self._has_failed, self._holds = [], {}, set(), False, {}
        self._do(events.Start(plan=plan))

    def _watch(self, started: events.Started, now_s: float) -> None:
        if started.generation != self.plan.generation:
            return
        self._pids = dict(started.pids)
        self._standby_at_s = now_s + STANDBY_AFTER_S if started.generation < self.plan.max_restarts else None
        if self.ending is None:
            self._enter(AgentPhase.WATCHING)
        else:  # it was told to end them while they were started
            self._enter(AgentPhase.ENDING)
            self.ending.looked_s = now_s
            self._do(*self.ending.look(now_s, self._pids, self._holds))

    def _report(self, ended: Ended, now_s: float) -> None:
        if ended.generation == self.plan.generation:
            self._pids.pop(ended.end.rank, None)
            self._has_failed |= ended.end.exit_code != 0
        self._tell_end(ended, now_s)

    def _tell_end(self, ended: Ended, now_s: float) -> None:
        """Tell the leader of the end of a worker, once, the first word."""
        known = ((told.generation, told.end.rank) for _, told in self._told)
        if (ended.generation, ended.end.rank) not in known:
            self._told.append((now_s, ended))
            self._send(ended)

    def _end(self, signum: int, now_s: float, stop: protocol.Stop | None = None) -> None:
        """Tell all workers to end; a second call only adds workers to kill at once, and may hasten the others."""
        if self.phase in (AgentPhase.WAITING, AgentPhase.GONE):
            return
        grace_s, saving_s = (stop.grace_s, stop.saving_s) if stop is not None else (None, None)
        if self.ending is None:
            self.ending = Grace(
                signum=signum,
                grace_s=GRACE_S if grace_s is None else grace_s,
                saving_s=self._shutdown_s if saving_s is None else saving_s,
                is_fault=self.interrupted_by is None and not (stop is not None and stop.is_wanted),
                since_s=min(now_s, self._relays.came_s(signum, now_s)),
                looked_s=now_s,
            )
        elif saving_s is not None:
            self.ending.hasten(saving_s)
        self.ending.at_once |= frozenset(stop.at_once if stop is not None else ())
        if self.phase is AgentPhase.WATCHING:
            self._enter(AgentPhase.ENDING)
        if self.phase is AgentPhase.ENDING and self.ending.swept_by_s is None:
            self._do(*self.ending.look(now_s, self._pids, self._holds))

    def _advance(self, ending: Grace, now_s: float) -> None:
        """Do what is due while the workers end."""
        if ending.swept_by_s is not None:
            if now_s >= ending.swept_by_s:
                self._settle((), now_s)
            return
        self._do(*ending.look(now_s, self._pids, self._holds))
        if not ending.is_over(self._pids):
            return
        for rank, pid in self._pids.items():
            self._do(events.Say(text=f"rank {rank} (pid {pid}) is unkillable: it hangs in the kernel (state D in ps)"))
        ending.swept_by_s = now_s + SWEEP_S
        self._do(events.Sweep())

    def _settle(self, left: tuple[str, ...], now_s: float) -> None:
        """All workers have ended, and what they left: say so."""
        if self.phase is not AgentPhase.ENDING or self.ending is None or self.ending.swept_by_s is None:
            return
        if left and self.interrupted_by is None and not self._pids and not self._has_failed:
            self._do(events.Say(text=f"ended processes that the workers left running: {', '.join(left)}"))
        self._enter(AgentPhase.WAITING)
        self._waits_s = now_s
        self._do(events.WriteBook())
        if self._next_plan is not None and self.goodbye is None:
            if not self._is_next_stopped:
                self._start(self._next_plan)
                return
            self.plan, self._next_plan = self._next_plan, None
        self._send(protocol.Stopped(generation=self.plan.generation))

    # Signals

    def _take_signal(self, signum: int, now_s: float) -> None:
        self._relays.note(signum, now_s)
        if signum not in (SAVE_SIGNAL, *STOP_SIGNALS):
            self._send(protocol.Interrupted(signum=signum))  # the leader knows whether a rank handles it
            return
        if signum == SAVE_SIGNAL:
            if SAVE_SIGNAL not in self._signals:
                self._send(protocol.Interrupted(signum=SAVE_SIGNAL))
        elif self.interrupted_by is None:
            self.interrupted_by, self._waits_s = signum, now_s
            self._send(protocol.Interrupted(signum=signum))
        if self._signals.count(signum) < MANY:
            self._signals.append(signum)
        self._heed(now_s)

    def _heed(self, now_s: float) -> None:
        """After a signal: end the workers, unless they can save; then the leader says when."""
        if self.interrupted_by is None or self.ending is not None:
            return
        stops = [signum for signum in self._signals if signum != SAVE_SIGNAL]
        is_patient = stops == [signal.SIGTERM] or (self._is_slurm and set(stops) == {signal.SIGTERM})
        if not (is_patient and self._savers & self._pids.keys()):
            if all(hold.handles.isdisjoint(STOP_SIGNALS) for hold in self._holds.values()):
                self._do(events.Mute())  # of a hundred KeyboardInterrupts none tells anything
            self._end(self.interrupted_by, now_s)

    # The leader

    def _turn(self, now_s: float) -> None:
        self._heed(now_s)
        self._do(*self._relays.due(now_s, self._pids, self._holds))
        if self.phase is AgentPhase.ENDING and self.ending is not None:
            self._advance(self.ending, now_s)
        if self.phase is AgentPhase.WATCHING and self._standby_at_s is not None and now_s >= self._standby_at_s:
            self._standby_at_s = now_s + STANDBY_AFTER_S
            self._do(events.PrepareStandby())
        if self.phase is not AgentPhase.STARTING and now_s >= self._book_at_s:
            self._book_at_s = now_s + BOOK_S
            self._do(events.WriteBook())
        if self.succession is not None:
            if now_s >= self.succession.gives_up_s or self.interrupted_by is not None:
                self._lose(now_s)
            elif self.succession.can_lead and self.succession.is_open(now_s):
                self._do(self.succession.lead(now_s))
        elif self.goodbye is None and now_s - self._heard_s > LEADER_SILENT_S:
            self._drop_leader(f"it has sent nothing for {LEADER_SILENT_S:.0f} s, although its machine answers", now_s)
        elif self._search is not None and now_s >= max(self._search.gives_up_s, self._heard_s + RETURN_S):
            self._drop_leader(f"{self.leader_name} does not lead", now_s)
        is_silent = now_s - max(self._heard_s, self._waits_s) > PEERS_S
        if self.phase is AgentPhase.WAITING and self.goodbye is None and self.interrupted_by is not None and is_silent:
            self._give_up("the leader's agent sent no final verdict")
        if self.phase is AgentPhase.WAITING and self.goodbye is not None:
            self._enter(AgentPhase.GONE)

    def _obey(self, message: Message, now_s: float) -> None:
        match message:
            case protocol.Ping(sent_ns=sent_ns, confirmed=confirmed):
                self._ping, self._confirmed = (sent_ns, now_s), max(self._confirmed, confirmed)
            case Order() | protocol.Try():
                self._do(events.PassOn(order=message))
                if isinstance(message, Order) and message.signum:
                    self._relays.ask(message.signum, now_s)
            case protocol.Relay(signum=signum):
                self._relays.ask(signum, now_s)
            case protocol.Stop(signum=signum, at_once=at_once, grace_s=grace_s):
                if at_once or grace_s is not None:  # there was a fault: whoever comes later wants to know
                    self._do(events.KeepEvidence())
                self._is_next_stopped = self._next_plan is not None
                if message.interrupted_by is not None and self.interrupted_by is None:
                    self.interrupted_by, self._waits_s = message.interrupted_by, now_s
                self._end(signum, now_s, message)
            case Plan() if message.generation > self.plan.generation and self.goodbye is None:
                if self.phase is AgentPhase.WAITING:
                    self._start(message)
                else:
                    self._next_plan, self._is_next_stopped = message, False
                    self._end(signal.SIGTERM, now_s)
            case Plan():  # this agent has begun that generation, or a later one
                pass
            case protocol.Refused(reason=reason):
                self._drop_leader(reason, now_s)
                self._lose(now_s)
            case protocol.Resign(past=past):
                self.plan = msgspec.structs.replace(self.plan, past=past)
                self._drop_leader("it has left the job", now_s, has_resigned=True)
            case Goodbye():
                self.goodbye = message
                self._end(signal.SIGTERM, now_s)
            case _:
                self._drop_leader(f"it sent {type(message).__name__}, which a leader does not send now", now_s)

    def _drop_leader(self, reason: str, now_s: float, *, has_resigned: bool = False) -> None:
        self._do(events.Disconnect(node=0))
        self._miss_leader(reason, now_s, has_resigned=has_resigned)

    def _miss_leader(self, reason: str, now_s: float, *, has_resigned: bool = False) -> None:
        """The connection to the leader has ended: look for it; after its Goodbye that is no loss."""
        if self.goodbye is not None:
            self._end(signal.SIGTERM, now_s)
        if self.goodbye is not None or self.succession is not None:
            return
        self._next_plan = None  # whoever leads next does not know that it was begun
        self.succession = self._search or Succession(
            own=self.node, leader=self.leader, plan=self.plan, confirmed=self._confirmed, reason=reason, lost_s=now_s,
            has_resigned=has_resigned, was_stopped=self.ending is not None, succeeded=frozenset(self._succeeded),
        )  # fmt: skip
        self._search, self.leader = None, self.succession.leader
        if self.succession.contacts and self.interrupted_by is None:
            self._do(events.Seek(contacts=self.succession.contacts))
        else:
            self._lose(now_s)

    def _follow(self, leader: int, now_s: float) -> None:
        """A leader was found: tell it what the last one may not have heard."""
        self.leader, self._heard_s = leader, now_s
        if self.succession is not None:
            self._do(*self.succession.let_go(f"this agent follows {self.leader_name}"))
            # Whoever is not the one that was lost may only want to lead. A search for it goes on until it speaks.
            self._search = self.succession if leader != self.succession.leader else None
            self.succession = None
        for told_s, ended in self._told:
            self._send(msgspec.structs.replace(ended, age_s=ended.age_s + now_s - told_s))
        for signum in dict.fromkeys(self._signals):
            self._send(protocol.Interrupted(signum=signum))
        if self.phase is AgentPhase.WAITING:
            self._send(protocol.Stopped(generation=self.plan.generation))

    def _lose(self, now_s: float) -> None:
        """No leader was found: end the workers, and leave."""
        if self.succession is None:
            return
        self._give_up(f"the leader's agent on {self.leader_name} is gone ({self.succession.describe()})")
        self._do(*self.succession.let_go("this agent ends"))
        self.succession, self.is_leader_lost = None, True
        self._end(signal.SIGTERM, now_s)

    def _give_up(self, summary: str) -> None:
        by = self.interrupted_by
        self.goodbye = Goodbye(exit_code=Exit.NODE_FAULT if by is None else exit_for_signal(by), summary=summary)
