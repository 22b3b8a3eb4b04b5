"""What the leader and the agents are told (events), and what they order (effects). Frozen data.

Both are reducers: `step(event)` returns effects. They read no clock, no file and no socket: every event has `now_s`,
one clock of its process that never steps back. What may take long, the driver does, and tells the result as an event.
A node is meant by its index in the job (0: the leader's), which never changes, unlike its index in a Plan.

    who       events                                            effects
    both      Due, Heard, Lost, Joined                          Send, Say, Disconnect, Reject
    leader    Meant, KillWaitFound, EligibleFound,              Accept, Show, Record, WriteStatus, WriteLedger,
              CheckpointFound                                   ExpectBack, AskScheduler, FindKillWait, FindCheckpoint
    agent     Started, Observed, Sensed, WorkerEnded,           Start, Signal, Forward, PassOn, KeepEvidence,
              WorkerFailed, Signalled, Swept                    PrepareStandby, Sweep, Mute, WriteBook
              Found, NotFound, Knocked, Withdrew                Seek, Lead
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from allranks.launch.queue.ending import EndingDecision
from allranks.model.beat import NodeBeat
from allranks.model.card import Card
from allranks.model.finding import Finding
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.wire.protocol import Contact, Ended, Message, Order, Plan, Try

GRACE_S = 3.0
"""Seconds between the first signal and SIGKILL when the job ends: with reaping, all processes are gone within 5 s.
Ranks that handle the signal, or that save, have longer (launch.grace)."""
ASLEEP_S = 2.0
"""A longer time between two events means that this process itself was stopped (Ctrl-Z, a suspended virtual machine);
deadlines move by that time, since nobody else was late."""

SAVE_SIGNAL = signal.SIGUSR1
"""What `sbatch --signal` sends before the time limit: save, and come again."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They end the job."""
FORWARDED = signal.SIGUSR2
"""It means nothing to allranks; ranks that handle it get it."""
RELAYED_S = 5.0
"""Seconds within which all agents get a signal that SLURM sends to all of them."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something has happened."""

    now_s: float


class Due(Event, frozen=True):
    """Time has passed; at least once a second."""


class Heard(Event, frozen=True):
    """A message has arrived; an agent hears only its leader."""

    message: Message
    node: int = 0


class Lost(Event, frozen=True):
    """A connection has ended; an agent has only that to its leader."""

    reason: str
    node: int = 0


class Joined(Event, frozen=True):
    """An agent has proven, while the job runs, that it belongs to it; or that it has lost its leader, too."""

    connection: int
    """The driver's number; Accept, Reject or Lead names it."""
    card: Card
    address: str
    """Where its agent comes from."""


class LeaderFound(Event, frozen=True):
    """The answer to Seek: this agent is connected to its leader again, or to another one."""

    leader: int


class NotFound(Event, frozen=True):
    """The other answer to Seek: the leader rejects this agent, or nobody accepts it."""

    reason: str


class Knocked(Event, frozen=True):
    """What the lost leader's machine answers, where srun runs there; comes again and again after Seek."""

    listens: bool | None
    """Whether the leader's agent listens; None: the machine does not answer."""


class Withdrew(Event, frozen=True):
    """An agent that had joined is gone, before this one leads."""

    connection: int


class Meant(Event, frozen=True):
    """The answer to AskScheduler."""

    signum: int
    decision: EndingDecision


class KillWaitFound(Event, frozen=True):
    """The answer to FindKillWait; None: SLURM does not say."""

    kill_wait_s: float | None


class EligibleFound(Event, frozen=True):
    """Since when SLURM could have begun the job, since the epoch; None: it does not say."""

    eligible_s: float | None


class CheckpointFound(Event, frozen=True):
    """The answer to FindCheckpoint; None: there is none."""

    step: int | None


class Started(Event, frozen=True):
    """The workers of a generation were started."""

    generation: int
    pids: Mapping[int, int]
    """By rank. Of a rank that could not be started, WorkerEnded follows."""


class Observed(Event, frozen=True):
    """How this node's workers are."""

    beat: NodeBeat


class EndingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What of a rank says how it is to be ended."""

    handles: frozenset[int] = frozenset()
    """Signals that its script handles."""
    begun_s: Mapping[int, float] = {}
    """By signal, when a handler of the script began last, by this clock: the rank has got that signal."""
    is_saving: bool = False
    """It writes a checkpoint."""


class Sensed(Event, frozen=True):
    """How this node's workers are to be ended, where that has changed; at once, unlike Observed."""

    ranks: Mapping[int, EndingFacts]


class WorkerEnded(Event, frozen=True):
    """A worker has ended."""

    ended: Ended


class WorkerFailed(Event, frozen=True):
    """A worker that still exists has raised, or called sys.exit, before it was told to end; WorkerEnded follows."""

    ended: Ended


class Signalled(Event, frozen=True):
    """This agent has got a signal."""

    signum: int


class Swept(Event, frozen=True):
    """The answer to Sweep: names and pids of the processes that were ended."""

    left: tuple[str, ...] = ()


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be done."""


class Send(Effect, frozen=True):
    """Send a message; where that fails, Lost follows."""

    message: Message
    node: int = 0


class Say(Effect, frozen=True):
    """Print one line."""

    text: str


class Disconnect(Effect, frozen=True):
    """Close the connection to a node's agent; no Lost follows."""

    node: int


class Accept(Effect, frozen=True):
    """A connection is that of this node's agent from now on."""

    connection: int
    node: int


class Reject(Effect, frozen=True):
    """Close a connection; a leader sends the reason before, and its agent then ends."""

    connection: int
    reason: str


class Show(Effect, frozen=True):
    """Print findings."""

    findings: tuple[Finding, ...]


class Record(Effect, frozen=True):
    """Write a line to events.jsonl."""

    event: str
    fields: Mapping[str, Any]


class WriteStatus(Effect, frozen=True):
    """Write down what the job does now, instead of what was written before; its times are by the leader's clock."""

    status: JobStatus
    ledger: Ledger | None = None
    """That of the status, with its rows of ranks."""


class WriteLedger(Effect, frozen=True):
    """Write down where the time of the job went, instead of what was written before."""

    ledger: Ledger


class ExpectBack(Effect, frozen=True):
    """A node's agent is gone: try to start it again."""

    node: int
    name: str


class AskScheduler(Effect, frozen=True):
    """Ask what a signal means for this job; Meant follows."""

    signum: int
    can_save: bool
    """Whether there is something to save."""


class FindKillWait(Effect, frozen=True):
    """Look how long SLURM waits between SIGTERM and SIGKILL; KillWaitFound follows, under SLURM."""


class FindCheckpoint(Effect, frozen=True):
    """Look for the newest complete checkpoint; CheckpointFound follows."""


class Start(Effect, frozen=True):
    """Start this node's workers; Started follows."""

    plan: Plan


class Signal(Effect, frozen=True):
    """Send a signal, meant to end them, to the process groups of these workers."""

    signum: int
    """0: they have got it from somebody else."""
    ranks: tuple[int, ...]


class Forward(Effect, frozen=True):
    """Send a signal to the processes that handle it, of these workers, and to no other of their process groups."""

    signum: int
    ranks: tuple[int, ...]
    ends: bool = False
    """Whether it is meant to end them."""


class PassOn(Effect, frozen=True):
    """Hand an order to all workers, or try to reach other machines."""

    order: Order | Try


class KeepEvidence(Effect, frozen=True):
    """Write down what the workers do now: they are ended next."""


class WriteBook(Effect, frozen=True):
    """Write down what the workers have spent their time on."""


class PrepareStandby(Effect, frozen=True):
    """Have a process ready that forks the next generation."""


class Sweep(Effect, frozen=True):
    """End the processes that the workers left running; Swept follows."""


class Seek(Effect, frozen=True):
    """Look for a leader at these agents, until LeaderFound, or Lead, or the end of this process."""

    contacts: tuple[Contact, ...]


class Lead(Effect, frozen=True):
    """Be the leader from now on, of these agents and this one; Found follows."""

    joined: Mapping[int, Joined]
    """By node."""
    plan: Plan
    """Of the generation that runs."""
    lost: tuple[int, str]
    """The last leader's node, and why it is gone."""
    has_resigned: bool


class Mute(Effect, frozen=True):
    """Print no more of the workers' stderr."""


class Driver:
    """Gives a reducer one event after the other: events that an effect causes come after its other effects."""

    def __init__(self, step: Callable[[Event], Sequence[Effect]], do: Callable[[Effect], None]) -> None:
        self._step, self._do = step, do
        self._events: deque[Event] = deque()

    def feed(self, event: Event) -> None:
        """Step, and do what comes out."""
        self._events.append(event)
        if len(self._events) > 1:  # an effect of the first one has caused it
            return
        while self._events:
            for effect in self._step(self._events[0]):
                self._do(effect)
            self._events.popleft()
