"""The leader, which runs in the first node's process: it hears all agents, asks the guard, and decides the next step.

    running --fault--> stopping --all have stopped--> running        the next generation, without the faulty node
       |                  |      `--too few nodes---> paused --enough are here--> running
       `--all ended-------+-----------------------------------------> over        a Goodbye to everybody

It treats all nodes alike, its own included. guard.verdict decides what is wrong, launch.lead.recovery what to do about
it, launch.lead.group who is which rank, launch.lead.outcome how to say it: all pure.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from allranks.guard.judged import Judged
from allranks.guard.verdict import Guard
from allranks.launch.lead.course import ASLEEP_S, GRACE_S, Phase, Reason, Terms
from allranks.launch.lead.group import make_group
from allranks.launch.lead.newcomers import Newcomers
from allranks.launch.lead.outcome import (
    as_event,
    as_survived,
    below_minimum,
    crash_loop,
    describe_pause,
    describe_restart,
    summarize,
)
from allranks.launch.lead.progress import Progress
from allranks.launch.lead.recovery import Crash, Decision, History, Move, decide
from allranks.launch.lead.seats import Seat, Seats
from allranks.launch.queue import ending
from allranks.model.errors import AllranksError, Exit, exit_for_signal
from allranks.model.finding import Finding, Verdict
from allranks.model.hostlist import fold_hosts
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

RESTART_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL before a restart; ranks that cannot handle SIGTERM get SIGKILL at once."""
STOPPED_S = 3.0
"""Seconds after the grace period in which an agent must report that its workers have ended."""
SPARE_S = 4.0
"""Seconds of the grace period reserved for shutdown."""
NOTICE_S = 10.0
"""Seconds between two lines of a paused job."""
_LEFT_OUT = Goodbye(exit_code=Exit.OK, summary="the job continues without this node")
"""Its agent exits with 0: SLURM takes the highest exit code of all agents, so the others decide the job's."""


class Leader:
    """Leads the job from the first Plan to the last Goodbye. Owns the connections to all agents.

    Args:
        terms: the terms of the job.
        guard: decides what is wrong.
        history: faults so far, with those of earlier attempts, and the restarts that are left.
        newcomers: agents that join while the job runs.
        say: prints one line.
        show: prints findings.
        on_event: writes to events.jsonl.
        on_signal: decides what a signal means for the job, given how long a checkpoint takes (0: nothing to save;
            None: unknown).
    """

    def __init__(
        self,
        terms: Terms,
        *,
        guard: Guard,
        history: History,
        newcomers: Newcomers,
        say: Callable[[str], None],
        show: Callable[[Sequence[Finding]], None],
        on_event: Callable[..., None],
        on_signal: Callable[[int, float | None], ending.Decision],
    ) -> None:
        self.seats = Seats(on_message=self._hear, on_lost=self._on_lost)
        self.newcomers = newcomers
        self.verdict: Verdict | None = None
        """Set when the job is over."""
        self.is_said = False
        """Whether its findings have been printed."""
        self.interrupted_by: int | None = None
        self.culprits: tuple[str, ...] = ()
        """Nodes at fault, in the last verdict."""
        self.is_to_requeue = False
        """Whether all ranks saved before the time limit and ended."""
        self._terms = terms
        self._guard = guard
        self._history = history
        self._say, self._show, self._on_event, self._on_signal = say, show, on_event, on_signal
        self._phase = Phase.RUNNING
        self._members: list[tuple[int, str]] = []
        """Seat and name of each node of this generation, in the order of the Plan."""
        self._generation = 0
        self._judged: Judged | None = None
        self._decision: Decision | None = None
        self._began_s = 0.0
        self._deadline_s = self._turned_s = 0.0
        self._next_ping_s = 0.0
        self._next_notice_s = 0.0
        self._asked: Reason | None = None
        self._asked_until_s: float | None = None
        self._is_finished = False
        """Whether the workers have completed all their steps."""
        self.progress = Progress()
        self._signals: set[int] = set()
        self._survived: list[Finding] = []

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Let the agent's selector watch all connections; it calls `key.data(fileobj)`."""
        self.seats.attach(selector)
        self.newcomers.attach(selector, taken=lambda: set(self.seats))

    def begin(self, plans: Mapping[int, Plan], now_s: float) -> None:
        """Start a generation; every agent has its Plan, or gets it now.

        Args:
            plans: by seat.
            now_s: monotonic time, as everywhere in this file.
        """
        order = sorted(plans, key=lambda seat: plans[seat].node_index)
        plan = plans[order[0]]
        self._members = [(seat, member.name) for seat, member in zip(order, plan.members, strict=True)]
        self._generation = plan.generation
        for seat, name in self._members:
            self.seats[seat].name = name
            self.seats[seat].has_stopped = False
        addresses = {position: self.seats.addresses(seat) for position, seat in enumerate(order)}
        self._began_s = now_s
        self._guard.begin(plan, now_s, addresses=addresses)
        self._phase = Phase.RUNNING
        self._judged, self._decision, self._asked, self._is_finished = None, None, None, False
        self.progress.steps.clear()

    def turn(self, now_s: float) -> None:
        """Do what is due; the agent's loop calls it between two waits."""
        if self._phase is Phase.OVER:
            return
        self._deadline_s += max(0.0, now_s - self._turned_s - ASLEEP_S)
        self._turned_s = now_s
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._terms.beat_s
            self.seats.send_all(Ping(sent_ns=round(now_s * 1e9)))
        self.newcomers.turn(now_s)
        match self._phase:
            case Phase.RUNNING:
                self._judge(now_s)
            case Phase.STOPPING:
                self._await_stopped(now_s)
            case Phase.PAUSED:
                self._await_capacity(now_s)

    def close(self) -> None:
        """Give slow agents a moment to receive their last message, and close all connections."""
        self.seats.flush()
        self.seats.close()
        self.newcomers.close()

    # Hearing

    def _hear(self, index: int, seat: Seat, message: Message) -> None:
        now_s = time.monotonic()
        match message:
            case Beat():
                if message.node.generation == self._generation:
                    self._guard.hear(message, now_s)
                    self.progress.hear(message)
            case Failed(generation=generation) | Exited(generation=generation) if generation != self._generation:
                self._on_event("worker_ended_late", node=seat.name, generation=generation)
            case Failed(end=end, age_s=age_s):
                self._record(msgspec.structs.replace(end, time_s=now_s - age_s), now_s)
            case Exited(rank=rank):
                self._is_finished |= message.is_finished
                self._record(WorkerEnd(rank=rank, local_rank=0, node=seat.name, exit_code=0, time_s=now_s), now_s)
            case Interrupted(signum=signum):
                self._on_event("interrupted", signum=signum, node=seat.name)
                self._interrupt(signum, now_s)
            case Stopped():
                seat.has_stopped |= message.generation == self._generation
            case _:
                self.seats.lose(index, f"it sent {type(message).__name__}, which is not a message of an agent")

    def _record(self, end: WorkerEnd, now_s: float) -> None:
        told = end.ended_by_us
        self._on_event("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=told)
        self._guard.ended(end, now_s)

    def _on_lost(self, index: int, seat: Seat, reason: str) -> None:
        if self._phase is Phase.OVER:
            return
        self._on_event("node_lost", node=seat.name, reason=reason)
        position = next((i for i, (member, _) in enumerate(self._members) if member == index), None)
        if self._phase is Phase.RUNNING and position is not None and not seat.has_stopped:
            self._guard.lost(position, reason, time.monotonic())
        self.newcomers.expect(index, seat.name)

    def _interrupt(self, signum: int, now_s: float) -> None:
        is_warning, is_running = signum == signal.SIGUSR1, self._phase is Phase.RUNNING
        if not is_warning:
            self.interrupted_by = self.interrupted_by or signum
        if signum in self._signals or not (is_warning or is_running):
            return  # SLURM sends it to all agents
        self._signals.add(signum)
        meant = self._on_signal(signum, None if self.progress.steps else 0.0)
        if meant.ending is ending.Ending.STOP:
            self._asked = None
            return
        reason = Reason.REQUEUE if meant.ending is ending.Ending.SAVE_AND_REQUEUE else Reason.LEAVE
        if not is_running:
            self._say(f"{meant.line}; no worker is running, so the last checkpoint is used")
            if self._decision is not None and self._decision.move is not Move.END:
                self._asked = reason
            return
        until_s = None if meant.grace_s is None else now_s + max(1.0, meant.grace_s - SPARE_S)
        self._ask(reason, meant.line, now_s, signum=signum if is_warning else 0, until_s=until_s)

    # Running

    def _judge(self, now_s: float) -> None:
        if self.interrupted_by is not None and self._asked is None:
            self._stop(Decision(move=Move.END), now_s, signum=self.interrupted_by)
        elif self._guard.is_all_well:
            grows = self._asked is Reason.GROW and not self._is_finished
            self._stop(Decision(move=Move.RESTART if grows else Move.END), now_s)
        elif self.interrupted_by is not None and self._asked_until_s is not None and now_s > self._asked_until_s:
            self._say("the checkpoint was not finished in time; ending all ranks")
            self._stop(Decision(move=Move.END), now_s)
        else:
            self._consult(now_s)

    def _consult(self, now_s: float) -> None:
        """Ask the guard."""
        for line in self._guard.lines(now_s):
            self._say(line)
        for position, order in self._guard.wants(now_s).items():
            self.seats.send(self._members[position][0], order)
        judged = self._guard.judge(now_s)
        if judged is not None:
            self._decide(judged, now_s)
        elif self._asked is None and self.newcomers.cards and self.progress.steps:
            names = fold_hosts([card.host for card in self.newcomers.cards.values()])
            self._ask(Reason.GROW, f"saving a checkpoint and restarting with {names}", now_s)

    def _decide(self, judged: Judged, now_s: float) -> None:
        culprits = [self._members[position] for position in judged.nodes]
        decision = decide(
            judged,
            Crash.of(judged, self.progress.steps),
            history=self._history,
            seats=self.seats.names | dict(culprits),
            culprits=[seat for seat, _ in culprits],
            leader_seat=0,
            min_nodes=self._terms.min_nodes,
            checkpoint=self.progress.checkpoint,
            ran_s=now_s - self._began_s,
        )
        self._judged = judged
        self.culprits = tuple(name for _, name in culprits)
        if judged.is_final:
            self._pronounce(judged.findings)
        grace_s = GRACE_S if decision.move is Move.END else RESTART_GRACE_S
        self._stop(decision, now_s, at_once=judged.blocked, grace_s=grace_s)

    def _pronounce(self, findings: Sequence[Finding]) -> None:
        """Print the findings and write them to events.jsonl."""
        for finding in findings:
            self._on_event("verdict", generation=self._generation, **as_event(finding))
        self._show(findings)
        self.is_said = True

    def _ask(self, reason: Reason, why: str, now_s: float, *, signum: int = 0, until_s: float | None = None) -> None:
        """Order all ranks to save at the same step boundary, and leave."""
        self._asked, self._asked_until_s = reason, until_s
        step = self.progress.step
        self._on_event("save_asked", why=why, step=step)
        self._say(why)
        self.seats.send_all(Order(at_step=(step or 0) + 1, why=why, signum=signum))

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
        self._phase, self._decision = Phase.STOPPING, decision
        self._deadline_s = now_s + (grace_s or GRACE_S) + STOPPED_S
        self.seats.send_all(Stop(signum=signum, at_once=tuple(at_once), grace_s=grace_s))

    def _await_stopped(self, now_s: float) -> None:
        if self.seats.running and now_s < self._deadline_s:
            return
        for index in self.seats.running:
            self.seats.lose(index, f"its workers had not ended {STOPPED_S:.0f} s after the grace period")
        assert self._decision is not None
        if self._judged is not None and not self._judged.is_final:
            self._judged = self._guard.judge(now_s) or self._judged  # ends that came late may name the culprit
            self._pronounce(self._judged.findings)
        if self._decision.note:
            self._say(self._decision.note)
        if self.interrupted_by is not None or self.is_leaving or self._decision.move is Move.END:
            self._conclude()
            return
        self._survived += self._judged.findings if self._judged else ()
        # A node whose agent is gone already may come back; one that is here, and at fault, may not.
        for index in self._decision.without & set(self.seats):
            self.seats.send(index, _LEFT_OUT)
            self.seats.dismiss(index)
            self.newcomers.bar(index)
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        """Start the next generation with all connected nodes, or wait for more."""
        self.progress.look(self._terms.checkpoints)
        for index, (card, line) in self.newcomers.take().items():
            self.seats.take(index, card, line, name=card.host)
        terms = self._terms
        if len(self.seats) < terms.min_nodes:
            self._phase, self._deadline_s, self._next_notice_s = Phase.PAUSED, now_s + terms.capacity_s, now_s
            self._on_event("paused", nodes=len(self.seats), at_least=terms.min_nodes)
            return
        try:
            plans = make_group(
                self.seats.cards,
                wanted_backend=terms.wanted_backend,
                attempt=terms.attempt,
                store_address=terms.store_address,
                store_port=terms.store_port,
                generation=self._generation + 1,
                max_restarts=terms.max_restarts,
            )
        except AllranksError as exc:
            self._say(str(exc))
            self._give_up((exc.finding,) if exc.finding else (), exc.exit_code)
            return
        self._announce(plans)
        self.begin(plans, now_s)
        for index, plan in plans.items():
            self.seats.send(index, plan)

    def _announce(self, plans: Mapping[int, Plan]) -> None:
        plan = next(iter(plans.values()))
        names = [member.name for member in plan.members]
        gone = [name for seat, name in self._members if seat not in plans]
        left, checkpoint = self._history.restarts_left, self.progress.checkpoint
        self._on_event("restarting", generation=plan.generation, members=names, checkpoint=checkpoint)
        is_tracked = bool(self.progress.steps)
        self._say(describe_restart(plan.generation, names, gone, checkpoint, num_left=left, is_tracked=is_tracked))

    def _await_capacity(self, now_s: float) -> None:
        terms, num_nodes = self._terms, len(self.seats)
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        elif num_nodes + len(self.newcomers.cards) >= terms.min_nodes:
            self._go_on(now_s)
        elif now_s >= self._deadline_s:
            below = below_minimum(num_nodes, terms.min_nodes, terms.capacity_s, self.progress.checkpoint)
            self._give_up((below,), Exit.NODE_FAULT)
        elif now_s >= self._next_notice_s:
            self._next_notice_s = now_s + NOTICE_S
            self._say(describe_pause(num_nodes, terms.min_nodes, self._deadline_s - now_s, terms.capacity_s))

    def _give_up(self, findings: tuple[Finding, ...], exit_code: int) -> None:
        self._pronounce(findings)
        self._judged, self._decision = Judged(findings=findings, exit_code=exit_code), None
        self._conclude()

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks were told to save and leave; after a fault in between, the last checkpoint counts."""
        return self._asked in (Reason.REQUEUE, Reason.LEAVE) and bool(self.progress.steps) and not self._is_finished

    def _conclude(self) -> None:
        self._phase = Phase.OVER
        self.is_to_requeue = self.is_leaving and self._asked is Reason.REQUEUE
        self.verdict = self._make_verdict()
        goodbye = Goodbye(exit_code=self.verdict.exit_code, summary=summarize(self.verdict))
        self.seats.send_all(goodbye)
        self.newcomers.dismiss(goodbye)

    def _make_verdict(self) -> Verdict:
        judged, decision = self._judged, self._decision
        findings: tuple[Finding, ...] = ()
        exit_code = int(Exit.OK if self._guard.is_all_well else Exit.UNKNOWN)
        if self.interrupted_by is not None:
            exit_code = exit_for_signal(self.interrupted_by)
        elif judged is not None:
            findings, exit_code = judged.findings, judged.exit_code
            if decision is not None and (decision.move is Move.END or self.is_to_requeue):
                exit_code = decision.exit_code
            if decision is not None and decision.is_crash_loop:
                loop = crash_loop(findings[0], self._history.crashes[-1].step)
                self._pronounce((loop,))
                findings = (loop, *findings)
        findings += (*as_survived(self._survived), *self._guard.warnings)
        return Verdict(job=self._terms.job, attempt=self._terms.attempt, exit_code=exit_code, findings=findings)
