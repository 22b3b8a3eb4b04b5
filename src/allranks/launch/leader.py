"""The leader's half of the first node's process: hears all agents, asks the guard, and says what happens next.

    running --fault--> stopping --all have stopped--> running        the next generation, without the faulty node
       |                  |      `--too few nodes---> paused --enough are here--> running
       `--all ended-------+-----------------------------------------> over        a Goodbye to everybody

A line to every agent, the one of its own process included, so that all nodes are treated alike. Seats are the places
of nodes in the job (0 is the first); a node keeps its seat, whatever its index in the group of a generation is. Pure
parts: guard.verdict (what is wrong), launch.recovery (what to do about it), launch.group (who is which rank).
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from allranks.causes.catalogue import find_cause
from allranks.causes.cause import failed
from allranks.guard.judged import Judged
from allranks.guard.verdict import Guard
from allranks.launch.group import make_group
from allranks.launch.newcomers import Newcomers
from allranks.launch.recovery import Crash, Decision, History, Move, decide
from allranks.model.card import Card
from allranks.model.errors import AllranksError, Exit, WireError, exit_for_signal
from allranks.model.finding import Finding, Severity, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.wire.connection import Connection
from allranks.wire.protocol import (
    Beat,
    Exited,
    Failed,
    Goodbye,
    Interrupted,
    Message,
    Order,
    Ping,
    Plan,
    Stop,
    Stopped,
    WorkerEnd,
)

GRACE_S = 3.0
"""Between SIGTERM and SIGKILL where the job ends."""
RESTART_GRACE_S = 5.0
"""The same before a restart; ranks that no SIGTERM reaches get SIGKILL at once."""
STOPPED_S = 3.0
"""After the grace: how long an agent may take to say that its workers have ended."""
SAVE_S = 20.0
"""How long a checkpoint may take after SIGTERM: SLURM's KillWait is 30 s by default."""
NOTICE_S = 10.0
"""How often a paused job says so."""
FAREWELL_S = 2.0
_LEFT_OUT = Goodbye(exit_code=Exit.NODE_FAULT, summary="the job goes on without this node")


class Phase(StrEnum):
    """Where the job is."""

    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    OVER = "over"


class Reason(StrEnum):
    """Why workers were asked to save and leave."""

    SAVE = "save"
    """The time limit is near: save, requeue."""
    LEAVE = "leave"
    """SIGTERM: save, end."""
    GROW = "grow"
    """A node has come: save, start again with it."""


@dataclass(slots=True)
class Seat:
    """One node of the job, as long as its agent is connected."""

    card: Card
    line: Connection
    name: str
    has_stopped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the job is about, beyond the plan of one generation."""

    job: str
    attempt: int
    wanted_backend: str
    store_address: str
    store_port: int
    num_nodes: int
    min_nodes: int
    max_restarts: int
    capacity_s: float
    """How long to wait for nodes below the minimum."""
    beat_s: float


@dataclass(slots=True, kw_only=True)
class Leader:
    """Leads the job from the first Plan to the last Goodbye. Owns the lines."""

    terms: Terms
    guard: Guard
    seats: dict[int, Seat]
    newcomers: Newcomers | None
    history: History
    say: Callable[[str], None]
    show: Callable[[Sequence[Finding]], None]
    """Prints findings at once."""
    on_event: Callable[..., None]
    on_save: Callable[[], str] = lambda: ""
    """Has the job start again after a save that was asked for; returns a line about it."""
    phase: Phase = Phase.RUNNING
    verdict: Verdict | None = None
    is_said: bool = False
    """The verdict's findings have been printed."""
    interrupted_by: int | None = None
    _selector: selectors.BaseSelector | None = None
    _plan: Plan | None = None
    _order_of_seats: list[int] = field(default_factory=list)
    _generation: int = 0
    _judged: Judged | None = None
    _decision: Decision | None = None
    _deadline_s: float = 0.0
    _next_ping_s: float = 0.0
    _next_notice_s: float = 0.0
    _asked: Reason | None = None
    _asked_at_s: float = 0.0
    _steps: dict[int, int] = field(default_factory=dict)
    _checkpoint: int | None = None
    _survived: list[Finding] = field(default_factory=list)

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have the agent's selector watch all lines; it calls `key.data(fileobj)`."""
        self._selector = selector
        for index in self.seats:
            self._watch_line(index)
        if self.newcomers is not None:
            self.newcomers.attach(selector)

    def begin(self, plans: Mapping[int, Plan], now_s: float) -> None:
        """The first generation starts; everybody has its Plan.

        Args:
            plans: by seat.
            now_s: monotonic, as everywhere here.
        """
        self._order_of_seats = sorted(plans, key=lambda seat: plans[seat].node_index)
        self._plan = plans[self._order_of_seats[0]]
        self._generation = self._plan.generation
        for position, index in enumerate(self._order_of_seats):
            self.seats[index].name = self._plan.members[position].name
            self.seats[index].has_stopped = False
        self.guard.begin(self._plan, now_s)
        self.phase = Phase.RUNNING
        self._judged = self._decision = self._asked = None
        self._steps.clear()

    def turn(self, now_s: float) -> None:
        """Do what is due; called between two waits of the agent's loop."""
        if self.phase is Phase.OVER:
            return
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.terms.beat_s
            for index, seat in list(self.seats.items()):
                self._send(index, seat, Ping(sent_ns=round(now_s * 1e9)))
        if self.newcomers is not None:
            self.newcomers.turn(now_s)
        match self.phase:
            case Phase.RUNNING:
                self._judge(now_s)
            case Phase.STOPPING:
                self._await_stopped(now_s)
            case Phase.PAUSED:
                self._await_capacity(now_s)

    def finish(self) -> None:
        """Give slow agents a moment to take their Goodbye."""
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s and any(seat.line.has_unsent for seat in self.seats.values()):
            for seat in self.seats.values():
                with contextlib.suppress(ConnectionError):
                    seat.line.flush()
            time.sleep(0.01)

    def close(self) -> None:
        """Close all lines."""
        for seat in self.seats.values():
            seat.line.close()
        if self.newcomers is not None:
            self.newcomers.close()

    # Hearing

    def _watch_line(self, index: int) -> None:
        assert self._selector is not None
        line = self.seats[index].line
        self._selector.register(line, selectors.EVENT_READ, lambda _: self._listen(index, line))
        if line.has_unread:
            self._listen(index, line)

    def _listen(self, index: int, line: Connection) -> None:
        seat = self.seats.get(index)
        if seat is None or seat.line is not line:
            return
        try:
            messages = line.receive()
            line.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(index, str(exc))
            return
        for message in messages:
            self._hear(index, seat, message)

    def _hear(self, index: int, seat: Seat, message: Message) -> None:
        now_s = time.monotonic()
        match message:
            case Beat(node=node) if node.generation == self._generation:
                self.guard.hear(message, now_s)
                for rank in node.ranks:
                    if rank.step is not None:
                        self._steps[rank.rank] = rank.step
                    if rank.checkpoint is not None:
                        self._checkpoint = max(rank.checkpoint, self._checkpoint or 0)
            case Beat():
                pass
            case Failed(end=end, age_s=age_s):
                self._record(msgspec.structs.replace(end, time_s=now_s - age_s), now_s)
            case Exited(rank=rank):
                end = WorkerEnd(rank=rank, local_rank=0, node=seat.name, exit_code=0, time_s=now_s)
                self._record(end, now_s)
            case Interrupted(signum=signum):
                self.on_event("interrupted", signum=signum, node=seat.name)
                self._interrupt(signum, now_s)
            case Stopped():
                seat.has_stopped = True
            case _:
                self._lose(index, f"it said {type(message).__name__}, which an agent never does")

    def _record(self, end: WorkerEnd, now_s: float) -> None:
        told = end.ended_by_us
        self.on_event("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=told)
        self.guard.ended(end, now_s)

    def _send(self, index: int, seat: Seat, message: Message) -> None:
        try:
            seat.line.send(message)
        except ConnectionError as exc:
            self._lose(index, str(exc))

    def _lose(self, index: int, reason: str) -> None:
        seat = self.seats.pop(index, None)
        if seat is None:
            return
        if self._selector is not None:
            self._selector.unregister(seat.line)
        seat.line.close()
        if self.phase is Phase.OVER:
            return
        self.on_event("node_lost", node=seat.name, reason=reason)
        if self.phase is Phase.RUNNING and index in self._order_of_seats and not seat.has_stopped:
            self.guard.lost(self._order_of_seats.index(index), reason, time.monotonic())
        if self.newcomers is not None:
            self.newcomers.expect(index, seat.name)

    # Running

    def _judge(self, now_s: float) -> None:
        if self.interrupted_by is not None and self._asked is None:
            self._stop(Decision(move=Move.END), now_s, signum=self.interrupted_by)
            return
        if self.guard.is_all_well:
            self._all_ended_well(now_s)
            return
        if self._asked is Reason.LEAVE and now_s - self._asked_at_s > SAVE_S:
            self.say(f"no checkpoint within {SAVE_S:.0f} s of SIGTERM; ending all ranks")
            self._stop(Decision(move=Move.END), now_s)
            return
        for line in self.guard.lines(now_s):
            self.say(line)
        for position, order in self.guard.wants(now_s).items():
            index = self._order_of_seats[position]
            if index in self.seats:
                self._send(index, self.seats[index], order)
        judged = self.guard.judge(now_s)
        if judged is not None:
            self._decide(judged, now_s)
        elif self._asked is None and self.newcomers is not None and self.newcomers.ready and self._steps:
            names = fold_hosts([card.host for card in self.newcomers.cards.values()])
            self._ask(Reason.GROW, f"{names} is here: going on with it after a checkpoint", now_s)

    def _decide(self, judged: Judged, now_s: float) -> None:
        finding = judged.findings[0] if judged.findings else None
        crash = Crash(
            cause=finding.cause if finding else "",
            ranks=judged.ranks,
            step=min((self._steps[rank] for rank in judged.ranks if rank in self._steps), default=None),
            what=finding.message if finding else "",
        )
        names = {index: seat.name for index, seat in self.seats.items()}
        culprits = {self._order_of_seats[position] for position in judged.nodes}
        for index in culprits - names.keys():
            names[index] = self._name_of(index)
        present = {index: name for index, name in names.items() if index in self.seats or index in culprits}
        decision = decide(
            judged,
            crash,
            history=self.history,
            seats=present,
            culprits=culprits,
            leader_seat=0,
            min_nodes=self.terms.min_nodes,
        )
        self._judged = judged
        if judged.is_final:
            self._pronounce(judged.findings)
        grace_s = GRACE_S if decision.move is Move.END else RESTART_GRACE_S
        self._stop(decision, now_s, at_once=judged.blocked, grace_s=grace_s)

    def _name_of(self, index: int) -> str:
        assert self._plan is not None
        return self._plan.members[self._order_of_seats.index(index)].name

    def _pronounce(self, findings: Sequence[Finding]) -> None:
        """Say it now, and write it down."""
        for finding in findings:
            self.on_event(
                "verdict",
                generation=self._generation,
                cause=finding.cause,
                node=finding.node,
                ranks=finding.ranks,
                confidence=finding.confidence,
                message=finding.message,
            )
        self.show(findings)
        self.is_said = True

    def _all_ended_well(self, now_s: float) -> None:
        if self._asked is Reason.GROW:
            self._stop(Decision(move=Move.RESTART), now_s)
            return
        if self._asked is Reason.SAVE and (line := self.on_save()):
            self.say(line)
        self._stop(Decision(move=Move.END), now_s)

    def _interrupt(self, signum: int, now_s: float) -> None:
        if signum == signal.SIGUSR1:
            self._ask(Reason.SAVE, "SIGUSR1: the time limit is near", now_s, signum=signum)
            return
        self.interrupted_by = self.interrupted_by or signum
        if signum == signal.SIGTERM and self._steps and self._asked is None and self.phase is Phase.RUNNING:
            self._ask(Reason.LEAVE, "SIGTERM: the job is to end", now_s)
        elif self._asked is not Reason.LEAVE:
            self._asked = None

    def _ask(self, reason: Reason, why: str, now_s: float, *, signum: int = 0) -> None:
        """Have all ranks save at the same step boundary, and leave."""
        self._asked, self._asked_at_s = reason, now_s
        self.on_event("save_asked", why=why, step=max(self._steps.values(), default=None))
        self.say(f"{why}; " + ("saving a checkpoint" if self._steps else "telling the workers"))
        order = Order(at_step=max(self._steps.values(), default=0) + 1, why=why, signum=signum)
        for index, seat in list(self.seats.items()):
            self._send(index, seat, order)

    # Stopping, and what comes after

    def _stop(
        self,
        decision: Decision,
        now_s: float,
        *,
        signum: int = signal.SIGTERM,
        at_once: Sequence[int] = (),
        grace_s: float | None = None,
    ) -> None:
        self.phase, self._decision = Phase.STOPPING, decision
        self._deadline_s = now_s + (grace_s or GRACE_S) + STOPPED_S
        for index, seat in list(self.seats.items()):
            self._send(index, seat, Stop(signum=signum, at_once=tuple(at_once), grace_s=grace_s))

    def _await_stopped(self, now_s: float) -> None:
        running = [index for index, seat in self.seats.items() if not seat.has_stopped]
        if running and now_s < self._deadline_s:
            return
        for index in running:
            self._lose(index, f"its workers had not ended {STOPPED_S:.0f} s after the grace")
        assert self._decision is not None
        if self._judged is not None and not self._judged.is_final:
            self._judged = self.guard.judge(now_s) or self._judged  # ends that came late may name the culprit
            self._pronounce(self._judged.findings)
        if self._decision.note:
            self.say(self._decision.note)
        if self.interrupted_by is not None or self._decision.move is Move.END:
            self._conclude(now_s)
        else:
            self._survived += self._judged.findings if self._judged else ()
            for index in self._decision.without:
                if (seat := self.seats.get(index)) is not None:
                    self._send(index, seat, _LEFT_OUT)
                    self._forget(index)
                if self.newcomers is not None:
                    self.newcomers.bar(index)
            self._go_on(now_s)

    def _forget(self, index: int) -> None:
        seat = self.seats.pop(index, None)
        if seat is not None and self._selector is not None:
            self._selector.unregister(seat.line)
            seat.line.close()

    def _go_on(self, now_s: float) -> None:
        """Start the next generation with everybody who is here, or wait for more."""
        if self.newcomers is not None:
            for index, (card, line) in self.newcomers.take().items():
                self.seats[index] = Seat(card=card, line=line, name=card.host)
                self._watch_line(index)
        if len(self.seats) < self.terms.min_nodes:
            if self.phase is not Phase.PAUSED:
                self.phase = Phase.PAUSED
                self._deadline_s = now_s + self.terms.capacity_s
                self._next_notice_s = now_s
                self.on_event("paused", nodes=len(self.seats), at_least=self.terms.min_nodes)
            return
        generation = self._generation + 1
        try:
            plans = make_group(
                {index: seat.card for index, seat in self.seats.items()},
                wanted_backend=self.terms.wanted_backend,
                attempt=self.terms.attempt,
                store_address=self.terms.store_address,
                store_port=self.terms.store_port,
                generation=generation,
                max_restarts=self.terms.max_restarts,
            )
        except AllranksError as exc:
            self._judged = Judged(findings=(exc.finding,) if exc.finding else (), exit_code=exc.exit_code)
            self.say(str(exc))
            self._conclude(now_s)
            return
        self._announce_restart(plans, generation)
        self.begin(plans, now_s)
        for index, plan in plans.items():
            if (seat := self.seats.get(index)) is not None:
                self._send(index, seat, plan)

    def _announce_restart(self, plans: Mapping[int, Plan], generation: int) -> None:
        members = [member.name for member in next(iter(plans.values())).members]
        gone = sorted(set(self._order_of_seats) - plans.keys())
        without = f" without {fold_hosts([self._name_of(index) for index in gone])}" if gone and self._plan else ""
        where = "from the beginning" if self._checkpoint is None else f"from the checkpoint of step {self._checkpoint}"
        self.on_event("restarting", generation=generation, members=members, checkpoint=self._checkpoint)
        left = self.history.restarts_left
        self.say(
            f"restart {generation} on {len(members)} node{'s' if len(members) > 1 else ''}{without}, {where}; "
            f"{left} more restart{'' if left == 1 else 's'} left"
        )

    def _await_capacity(self, now_s: float) -> None:
        if self.interrupted_by is not None:
            self._conclude(now_s)
            return
        newcomers = len(self.newcomers.cards) if self.newcomers else 0
        if len(self.seats) + newcomers >= self.terms.min_nodes:
            self._go_on(now_s)
            return
        left_s = self._deadline_s - now_s
        if left_s <= 0:
            self._give_up(now_s)
        elif now_s >= self._next_notice_s:
            self._next_notice_s = now_s + NOTICE_S
            here = f"{len(self.seats) + newcomers} of at least {self.terms.min_nodes} nodes"
            left = f"{int(left_s) // 60}:{int(left_s) % 60:02d}"
            patience = f"--capacity-timeout {self.terms.capacity_s:.0f}"
            self.say(f"paused: {here}; waiting for capacity, {left} left ({patience})")

    def _give_up(self, now_s: float) -> None:
        last = "no checkpoint" if self._checkpoint is None else f"the last checkpoint is of step {self._checkpoint}"
        what = f"{len(self.seats)} of at least {self.terms.min_nodes} nodes for {self.terms.capacity_s:.0f} s; {last}"
        below = find_cause("AR608").find(failed(what=what), node=None)
        self._pronounce((below,))
        earlier = self._judged.findings if self._judged else ()
        self._judged = Judged(findings=(below, *earlier), exit_code=Exit.NODE_FAULT)
        self._decision = None
        self._conclude(now_s)

    def _conclude(self, now_s: float) -> None:
        self.phase = Phase.OVER
        self.verdict = self._make_verdict()
        goodbye = Goodbye(exit_code=self.verdict.exit_code, summary=_summary(self.verdict))
        for index, seat in list(self.seats.items()):
            self._send(index, seat, goodbye)
        if self.newcomers is not None:
            self.newcomers.dismiss(goodbye)

    def _make_verdict(self) -> Verdict:
        terms = self.terms
        survived = tuple(msgspec.structs.replace(each, severity=Severity.WARN) for each in self._survived)
        if self.interrupted_by is not None:
            exit_code: int = exit_for_signal(self.interrupted_by)
            return Verdict(job=terms.job, attempt=terms.attempt, exit_code=exit_code, findings=survived)
        if self._judged is not None and self._decision is not None and self._decision.move is not Move.END:
            findings: tuple[Finding, ...] = self._judged.findings
            exit_code = self._judged.exit_code
        elif self._judged is not None:
            findings = self._judged.findings
            exit_code = self._decision.exit_code if self._decision else self._judged.exit_code
            if self._decision is not None and self._decision.is_crash_loop:
                findings = (self._crash_loop(findings), *findings)
        else:
            findings, exit_code = (), Exit.OK if self.guard.is_all_well else Exit.UNKNOWN
        return Verdict(job=terms.job, attempt=terms.attempt, exit_code=exit_code, findings=(*findings, *survived))

    def _crash_loop(self, findings: Sequence[Finding]) -> Finding:
        first = findings[0]
        step = self.history.crashes[-1].step
        what = f"the same crash again at step {step}: {first.cause}: {first.message}"
        loop = find_cause("AR509").find(failed(what=what), node=first.node, ranks=first.ranks)
        self._pronounce((loop,))
        return loop


def _summary(verdict: Verdict) -> str:
    if not verdict.exit_code or not verdict.findings:
        return ""
    culprit = verdict.findings[0]
    ranks = ",".join(map(str, culprit.ranks))
    return f"{culprit.cause}: {f'rank {ranks} on ' if ranks else ''}{culprit.node}: {culprit.message}"
