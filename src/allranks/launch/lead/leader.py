"""The leader as a reducer: it hears all agents, asks the guard, and decides the next step. Pure.

    leader.step(Heard(now_s=..., node=2, message=...))   -> [Send(...), Say(...), ...]     see launch.events
    leader.step(Due(now_s=...))                          what is due; at least once a second

Read launch.lead.course first: the life of a job as one table. The leader runs in the first node's process, where
launch.lead.driver has its connections, and treats all nodes alike, its own included. guard.verdict decides what is
wrong, launch.lead.recovery what to do about it, launch.lead.group who is which rank, launch.lead.outcome how to say it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence

import msgspec

from allranks.guard.judged import Judged
from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.events import ASLEEP_S, GRACE_S, SAVE_SIGNAL, Effect, Event
from allranks.launch.lead.course import (
    ANSWER_S,
    LOOK_S,
    NOTICE_S,
    OFTEN_UP_TO,
    OWN_STOPPED_S,
    RESTART_GRACE_S,
    SPARE_S,
    STAGES,
    STOPPED_S,
    Phase,
    Reaction,
    Reason,
    Terms,
)
from allranks.launch.lead.group import make_group
from allranks.launch.lead.members import Members, Node, State
from allranks.launch.lead.outcome import (
    as_event,
    as_survived,
    below_minimum,
    describe_pause,
    describe_restart,
    loop_of,
    outcome_of,
    summarize,
)
from allranks.launch.lead.progress import Progress
from allranks.launch.lead.recovery import Crash, Decision, History, Move, decide
from allranks.launch.queue import ending
from allranks.model.errors import AllranksError, Exit
from allranks.model.finding import Finding, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.wire import protocol
from allranks.wire.protocol import Goodbye, Message, Order, Plan, WorkerEnd

_LEADER = 0
_LEFT_OUT = Goodbye(exit_code=Exit.OK, summary="the job continues without this node")
"""Its agent exits with 0: SLURM takes the highest exit code of all agents, so the others decide the job's."""


class Leader:
    """Leads the job from the first Plan, which every agent has, to the last Goodbye.

    Args:
        terms: the terms of the job.
        guard: decides what is wrong.
        history: faults so far, with those of earlier attempts, and the restarts that are left.
        nodes: whose agents are connected, by their index in the job.
        plans: of the first generation, by the same index.
        now_s: when it begins.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        guard: Guard,
        history: History,
        nodes: Mapping[int, Node],
        plans: Mapping[int, Plan],
        now_s: float,
    ) -> None:
        self.phase = Phase.RUNNING
        self.verdict: Verdict | None = None
        """Set when the job is over."""
        self.is_said = False
        """Whether its findings have been printed."""
        self.interrupted_by: int | None = None
        self.culprits: tuple[str, ...] = ()
        """Nodes at fault, in the last verdict."""
        self.is_to_requeue = False
        """Whether all ranks saved before the time limit and ended."""
        self.unresponsive: set[int] = set()
        """Nodes whose agents were disconnected because they did not answer; their processes may still be there."""
        self.progress = Progress()
        self._terms, self._guard, self._history = terms, guard, history
        self._effects: list[Effect] = []
        self._members = Members(terms.num_nodes)
        for index, node in nodes.items():
            self._members.add(index, node)
        self._deadline_s = self._turned_s = now_s
        self._capacity_until_s: float | None = None
        self._next_ping_s = self._next_notice_s = self._next_look_s = 0.0
        self._signals: set[int] = set()
        self._unanswered: dict[int, float] = {}
        """Signals that the scheduler was asked about, and until when its answer counts."""
        self._is_looking = False
        self._survived: list[Finding] = []
        self._begin(plans, now_s)

    def step(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in this order."""
        match event:
            case events.Joined():
                self._admit(event)
            case _ if self.phase is Phase.OVER:
                pass
            case events.Due(now_s=now_s):
                self._turn(now_s)
            case events.Heard(node=node, message=message, now_s=now_s):
                if self._members.takes_part(node):
                    self._hear(node, message, now_s)
            case events.Lost(node=node, reason=reason, now_s=now_s):
                self._lose(node, reason, now_s)
            case events.Meant(signum=signum, decision=meant, now_s=now_s):
                if self._unanswered.pop(signum, None) is not None:
                    self._obey(signum, meant, now_s)
            case events.CheckpointFound(step=step):
                self._is_looking = False
                if step is not None:
                    self.progress.find(step)
        effects, self._effects = self._effects, []
        return effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _record(self, event: str, **fields: object) -> None:
        self._do(events.Record(event=event, fields=fields))

    def _send_all(self, message: Message) -> None:
        self._do(*(events.Send(node=index, message=message) for index in self._members.here))

    def _enter(self, phase: Phase) -> None:
        assert phase in STAGES[self.phase].moves, f"{self.phase} -> {phase}"
        self.phase = phase

    def _begin(self, plans: Mapping[int, Plan], now_s: float) -> None:
        """Start a generation; every agent has its Plan, or gets it now."""
        order = sorted(plans, key=lambda index: plans[index].node_index)
        plan = plans[order[0]]
        self._members.begin(order, plan.members)
        addresses = {position: self._members[index].addresses for position, index in enumerate(order)}
        self._generation, self._began_s = plan.generation, now_s
        self._guard.begin(plan, now_s, addresses=addresses)
        self._judged: Judged | None = None
        self._decision: Decision | None = None
        self._asked: Reason | None = None
        self._asked_until_s: float | None = None
        self.is_finished = False
        """Whether the workers have completed all their steps."""
        self._is_cut_short = False
        """Whether an agent that got a signal has ended its workers before anybody else did."""
        self._capacity_until_s = None
        self.progress.steps.clear()

    # What agents tell

    def _hear(self, index: int, message: Message, now_s: float) -> None:
        name = self._members[index].name
        match message:
            case protocol.Beat():
                if message.node.generation == self._generation:
                    self._guard.hear(message, now_s)
                    self.progress.hear(message)
            case protocol.Failed() | protocol.Exited() if message.generation != self._generation:
                self._record("worker_ended_late", node=name, generation=message.generation)
            case protocol.Failed(end=end, age_s=age_s):
                self._hear_end(msgspec.structs.replace(end, time_s=now_s - age_s), now_s)
            case protocol.Exited(rank=rank):
                self.is_finished |= message.is_finished
                self._hear_end(WorkerEnd(rank=rank, local_rank=0, node=name, exit_code=0, time_s=now_s), now_s)
            case protocol.Interrupted(signum=signum):
                self._record("interrupted", signum=signum, node=name)
                self._interrupt(signum, now_s)
            case protocol.Stopped():
                if message.generation == self._generation:
                    self._members.set(index, State.STOPPED)
            case _:
                reason = f"it sent {type(message).__name__}, which is not a message of an agent"
                self._do(events.Disconnect(node=index))
                self._lose(index, reason, now_s)

    def _hear_end(self, end: WorkerEnd, now_s: float) -> None:
        self._record("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=end.ended_by_us)
        self._guard.ended(end, now_s)
        self._next_look_s = now_s
        self._is_cut_short |= end.ended_by_us and self.phase is Phase.RUNNING

    def _lose(self, index: int, reason: str, now_s: float) -> None:
        node, position = self._members.remove(index), self._members.position(index)
        if node is None:
            return
        if node.state is State.WAITING:
            self._do(events.Say(text=f"{node.name} joined, then disconnected"))
            return
        self._record("node_lost", node=node.name, reason=reason)
        if self.phase is Phase.RUNNING and position is not None and node.state is State.RUNNING:
            self._guard.lost(position, reason, now_s)
            self._next_look_s = now_s
        if index not in self._members.excluded:
            self._do(events.ExpectBack(node=index, name=node.name))

    def _admit(self, joined: events.Joined) -> None:
        found = "the job is over" if self.phase is Phase.OVER else self._members.admit(joined.card)
        if isinstance(found, str):
            self._do(events.Reject(connection=joined.connection, reason=found))
            return
        card = joined.card
        self._members.add(found, Node(card=card, name=card.host, address=joined.address, state=State.WAITING))
        self.unresponsive.discard(found)
        self._do(events.Accept(connection=joined.connection, node=found))
        self._do(events.Say(text=f"{card.host} has joined and waits for the next restart"))

    # Signals

    def _interrupt(self, signum: int, now_s: float) -> None:
        is_warning = signum == SAVE_SIGNAL
        reaction = STAGES[self.phase].warning if is_warning else STAGES[self.phase].stop
        if not is_warning:
            self.interrupted_by = self.interrupted_by or signum
        if reaction in (Reaction.END, Reaction.NOTHING) or signum in self._signals:
            return  # SLURM sends it to all agents
        if is_warning and self.interrupted_by is not None:
            return
        self._signals.add(signum)
        self._unanswered[signum] = now_s + ANSWER_S
        self._do(events.AskScheduler(signum=signum, save_s=None if self.progress.steps else 0.0))

    def _obey(self, signum: int, meant: ending.Decision, now_s: float) -> None:
        """The scheduler has said what a signal means."""
        is_warning = signum == SAVE_SIGNAL
        if meant.ending is ending.Ending.STOP:
            self._asked = None
            return
        reason = Reason.REQUEUE if meant.ending is ending.Ending.SAVE_AND_REQUEUE else Reason.LEAVE
        if STAGES[self.phase].warning is Reaction.LEAVE:
            self._do(events.Say(text=f"{meant.line}; no worker is running, so the last checkpoint is used"))
            if self._decision is not None and self._decision.move is not Move.END:
                self._asked = reason
            return
        until_s = None if meant.grace_s is None else now_s + max(1.0, meant.grace_s - SPARE_S)
        self._ask(reason, meant.line, signum=signum if is_warning else 0, until_s=until_s)

    # Running

    def _turn(self, now_s: float) -> None:
        slept_s = max(0.0, now_s - self._turned_s - ASLEEP_S)
        self._turned_s = now_s
        self._deadline_s += slept_s
        if self._capacity_until_s is not None:
            self._capacity_until_s += slept_s
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._guard.beat_s
            ping = protocol.Ping(sent_ns=round(now_s * 1e9))
            self._do(*(events.Send(node=index, message=ping) for index in self._members))
        self._unanswered = {signum: until_s for signum, until_s in self._unanswered.items() if now_s < until_s}
        match self.phase:
            case Phase.RUNNING:
                self._judge(now_s)
            case Phase.STOPPING:
                self._await_stopped(now_s)
            case Phase.FORMING:
                self._await_answers(now_s)
            case Phase.PAUSED:
                self._await_capacity(now_s)

    def _judge(self, now_s: float) -> None:
        if self.interrupted_by is not None and self._asked is None and (self._is_cut_short or not self._unanswered):
            self._stop(Decision(move=Move.END), now_s, signum=self.interrupted_by)
        elif self._guard.is_all_well:
            grows = self._asked is Reason.GROW and not self.is_finished
            self._stop(Decision(move=Move.RESTART if grows else Move.END), now_s)
        elif self.interrupted_by is not None and (self._is_cut_short or now_s > (self._asked_until_s or math.inf)):
            self._do(events.Say(text="the checkpoint was not finished in time; ending all ranks"))
            self._stop(Decision(move=Move.END), now_s)
        else:
            self._consult(now_s)

    def _consult(self, now_s: float) -> None:
        """Ask the guard, which goes through all nodes: with thousands of them, not in every turn."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S * max(0, len(self._members.group) - OFTEN_UP_TO)
        self._do(*(events.Say(text=line) for line in self._guard.lines(now_s)))
        for position, order in self._guard.wants(now_s).items():
            self._do(events.Send(node=self._members.group[position][0], message=order))
        judged = self._guard.judge(now_s)
        if judged is not None:
            self._decide(judged, now_s)
        elif self._asked is None and self.progress.steps and self._members.waiting:
            names = fold_hosts([node.name for node in self._members.waiting.values()])
            self._ask(Reason.GROW, f"saving a checkpoint and restarting with {names}")

    def _decide(self, judged: Judged, now_s: float) -> None:
        culprits = [self._members.group[position] for position in judged.nodes]
        decision = decide(
            judged,
            Crash.of(judged, self.progress.steps),
            history=self._history,
            seats={index: node.name for index, node in self._members.here.items()} | dict(culprits),
            culprits=[index for index, _ in culprits],
            leader_seat=_LEADER,
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

    def _pronounce(self, findings: tuple[Finding, ...]) -> None:
        """Print the findings and write them to events.jsonl."""
        for finding in findings:
            self._record("verdict", generation=self._generation, **as_event(finding))
        self._do(events.Show(findings=findings))
        self.is_said = True

    def _ask(self, reason: Reason, why: str, *, signum: int = 0, until_s: float | None = None) -> None:
        """Order all ranks to save at the same step boundary, and leave."""
        self._asked, self._asked_until_s = reason, until_s
        step = self.progress.step
        self._record("save_asked", why=why, step=step)
        self._do(events.Say(text=why))
        self._send_all(Order(at_step=(step or 0) + 1, why=why, signum=signum))

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
        self._enter(Phase.STOPPING)
        self._decision = decision
        self._deadline_s = now_s + (grace_s or GRACE_S) + STOPPED_S
        self._send_all(protocol.Stop(signum=signum, at_once=tuple(at_once), grace_s=grace_s))

    def _await_stopped(self, now_s: float) -> None:
        running = self._members.running
        if running and now_s < self._deadline_s:
            return
        for index in running:
            if index != _LEADER:
                self.unresponsive.add(index)
                self._do(events.Disconnect(node=index))
                self._lose(index, f"its workers had not ended {STOPPED_S:.0f} s after the grace period", now_s)
        if _LEADER in running:
            if now_s < self._deadline_s + OWN_STOPPED_S:
                return
            self._decision = Decision(move=Move.END, exit_code=Exit.NODE_FAULT)
        assert self._decision is not None
        if self._judged is not None and not self._judged.is_final:
            self._judged = self._guard.judge(now_s) or self._judged  # ends that came late may name the culprit
            self._pronounce(self._judged.findings)
        if self._decision.note:
            self._do(events.Say(text=self._decision.note))
        if self.interrupted_by is not None or self.is_leaving or self._decision.move is Move.END:
            self._conclude()
            return
        self._survived += self._judged.findings if self._judged else ()
        # A node whose agent is gone already may come back; one that is here, and at fault, may not.
        for index in self._decision.without & self._members.here.keys():
            self._do(events.Send(node=index, message=_LEFT_OUT), events.Disconnect(node=index))
            self._members.remove(index)
            self._members.excluded.add(index)
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        self._enter(Phase.FORMING)
        self._is_looking, self._deadline_s = True, now_s + ANSWER_S
        self._do(events.FindCheckpoint())

    def _await_answers(self, now_s: float) -> None:
        if (self._is_looking or self._unanswered) and now_s < self._deadline_s:
            return
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        else:
            self._form(now_s)

    def _form(self, now_s: float) -> None:
        """Start the next generation with all connected nodes, or wait for more."""
        for index in self._members.waiting:
            self._members.set(index, State.STOPPED)
        terms, here = self._terms, self._members.here
        if len(here) < terms.min_nodes:
            self._enter(Phase.PAUSED)
            if self._capacity_until_s is None:
                self._capacity_until_s, self._next_notice_s = now_s + terms.capacity_s, now_s
                self._record("paused", nodes=len(here), at_least=terms.min_nodes)
            return
        try:
            plans = make_group(
                {index: node.card for index, node in here.items()},
                wanted_backend=terms.wanted_backend,
                attempt=terms.attempt,
                store_address=terms.store_address,
                store_port=terms.store_port,
                generation=self._generation + 1,
                max_restarts=terms.max_restarts,
            )
        except AllranksError as exc:
            self._do(events.Say(text=str(exc)))
            self._give_up((exc.finding,) if exc.finding else (), exc.exit_code)
            return
        self._announce(plans)
        self._enter(Phase.RUNNING)
        self._begin(plans, now_s)
        self._do(*(events.Send(node=index, message=plan) for index, plan in plans.items()))

    def _announce(self, plans: Mapping[int, Plan]) -> None:
        plan = next(iter(plans.values()))
        names = [member.name for member in plan.members]
        gone = [name for index, name in self._members.group if index not in plans]
        left, checkpoint = self._history.restarts_left, self.progress.checkpoint
        self._record("restarting", generation=plan.generation, members=names, checkpoint=checkpoint)
        is_tracked = bool(self.progress.steps)
        text = describe_restart(plan.generation, names, gone, checkpoint, num_left=left, is_tracked=is_tracked)
        self._do(events.Say(text=text))

    def _await_capacity(self, now_s: float) -> None:
        terms, num_nodes, until_s = self._terms, len(self._members.here), self._capacity_until_s
        assert until_s is not None
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        elif num_nodes + len(self._members.waiting) >= terms.min_nodes:
            self._look(now_s)
        elif now_s >= until_s:
            below = below_minimum(num_nodes, terms.min_nodes, terms.capacity_s, self.progress.checkpoint)
            self._give_up((below,), Exit.NODE_FAULT)
        elif now_s >= self._next_notice_s:
            self._next_notice_s = now_s + NOTICE_S
            self._do(events.Say(text=describe_pause(num_nodes, terms.min_nodes, until_s - now_s, terms.capacity_s)))

    def _give_up(self, findings: tuple[Finding, ...], exit_code: int) -> None:
        self._pronounce(findings)
        self._judged, self._decision = Judged(findings=findings, exit_code=exit_code), None
        self._conclude()

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks were told to save and leave; after a fault in between, the last checkpoint counts."""
        return self._asked in (Reason.REQUEUE, Reason.LEAVE) and bool(self.progress.steps) and not self.is_finished

    def _conclude(self) -> None:
        self._enter(Phase.OVER)
        self.is_to_requeue = self.is_leaving and self._asked is Reason.REQUEUE
        is_loop = self._decision is not None and self._decision.is_crash_loop and self.interrupted_by is None
        if is_loop and self._judged is not None:
            self._judged = loop_of(self._judged, self._history.crashes[-1].step)
            self._pronounce(self._judged.findings[:1])
        exit_code, findings = outcome_of(
            self._judged,
            self._decision,
            interrupted_by=self.interrupted_by,
            is_to_requeue=self.is_to_requeue,
            is_all_well=self._guard.is_all_well,
        )
        findings += (*as_survived(self._survived), *self._guard.warnings)
        terms = self._terms
        self.verdict = Verdict(job=terms.job, attempt=terms.attempt, exit_code=exit_code, findings=findings)
        goodbye = Goodbye(exit_code=self.verdict.exit_code, summary=summarize(self.verdict))
        self._do(*(events.Send(node=index, message=goodbye) for index in self._members))
        self._do(events.Over(verdict=self.verdict))
