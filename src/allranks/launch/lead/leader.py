"""The leader as a reducer: it hears all agents, asks the guard, and decides the next step. Pure.

    leader.step(Heard(now_s=..., node=2, message=...))   -> [Send(...), Say(...), ...]     see launch.events
    leader.step(Due(now_s=...))                          what is due; at least once a second

Read launch.lead.course first: the life of a job as one table. The leader runs in the process of one agent, where
launch.lead.driver has its connections, and treats all nodes alike, its own included. guard.verdict decides what is
wrong, launch.lead.recovery what to do about it, launch.lead.group who is which rank, launch.lead.outcome how to say it,
launch.lead.quorum whether it may go on.
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
    GATHER_S,
    MINORITY_FACTOR,
    NOTICE_S,
    OWN_STOPPED_S,
    RESTART_GRACE_S,
    RETURN_S,
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
    cut_off,
    describe_pause,
    describe_restart,
    loop_of,
    outcome_of,
    summarize,
)
from allranks.launch.lead.progress import Progress
from allranks.launch.lead.recovery import Decision, Move, crash_of, decide
from allranks.launch.lead.signals import Signals
from allranks.launch.queue import ending
from allranks.model.errors import AllranksError, Exit
from allranks.model.finding import Finding, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.model.past import Past
from allranks.wire import protocol
from allranks.wire.protocol import Goodbye, Message, Order, Plan, Resign, WorkerEnd

_LEFT_OUT = Goodbye(exit_code=Exit.OK, summary="the job continues without this node")
"""Its agent exits with 0: SLURM takes the highest exit code of all agents, so the others decide the job's."""


class Leader:
    """Leads the job, from a Plan that its members have, to the last Goodbye.

    Args:
        terms: the terms of the job.
        guard: decides what is wrong.
        past: the faults so far, and the restarts that are left.
        nodes: whose agents are connected, by their index in the job.
        plan: of the generation that runs.
        now_s: when it begins.
        lost: index of the last leader's node and why it is gone, where this leader takes its place.
        has_resigned: the last leader has left the job, and ended its workers, after a verdict on its own node.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        guard: Guard,
        past: Past,
        nodes: Mapping[int, Node],
        plan: Plan,
        now_s: float,
        lost: tuple[int, str] | None = None,
        has_resigned: bool = False,
    ) -> None:
        self.phase = Phase.RUNNING
        self.verdict: Verdict | None = None
        """Set when the job is over."""
        self.is_said = False
        """Whether its findings have been printed."""
        self.culprits: tuple[str, ...] = ()
        """Nodes at fault, in the last verdict."""
        self.is_to_requeue = False
        """Whether all ranks saved before the time limit and ended."""
        self.is_cut_off = False
        """Whether the job has ended here without the majority of the members: they may go on under another leader."""
        self.has_resigned = False
        """Whether another node's agent leads from now on."""
        self.unresponsive: set[int] = set()
        """Nodes whose agents were disconnected because they did not answer; their processes may still be there."""
        self.progress = Progress()
        self.signals = Signals()
        self._terms, self._guard = terms, guard
        self._history, self._survived = past.history, [*past.survived]
        self._effects: list[Effect] = []
        self._members = Members(terms.num_nodes, own=terms.own, excluded=set(past.excluded))
        for index, node in nodes.items():
            self._members.add(index, node)
        self._deadline_s = self._turned_s = now_s
        self._capacity_until_s: float | None = None
        self._minority_s: float | None = None
        """Since when the connected members are no majority."""
        self._next_ping_s = self._next_notice_s = 0.0
        self._confirmed = -1
        self._is_looking = False
        self._begin(plan, now_s)
        if lost is not None:
            self._take_over(lost, now_s, has_resigned=has_resigned)

    @property
    def interrupted_by(self) -> int | None:
        """The first stop signal that any agent has got."""
        return self.signals.interrupted_by

    @property
    def generation(self) -> int:
        """Of the workers."""
        return self._generation

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
                if node in self._members:
                    self._hear(node, message, now_s)
            case events.Lost(node=node, reason=reason, now_s=now_s):
                self._miss(node, reason, now_s)
            case events.Meant(signum=signum, decision=meant, now_s=now_s):
                if self.signals.answer(signum):
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

    def _begin(self, plan: Plan, now_s: float) -> None:
        """A generation begins; every agent has its Plan, or gets it now."""
        self._members.begin(plan)
        self._generation, self._began_s, self._plan = plan.generation, now_s, plan
        position = {index: at for at, index in enumerate(plan.nodes)}
        addresses = {position[i]: node.addresses for i, node in self._members.here.items()}
        addresses |= {
            position[each.node]: {"control": each.control_address, "data": each.data_address or each.control_address}
            for each in plan.successors
            if position[each.node] not in addresses
        }
        ports = {position[each.node]: each.port for each in plan.successors}
        self._guard.begin(plan, now_s, addresses=addresses, leader=position[self._terms.own], ports=ports)
        self._judged: Judged | None = None
        self._decision: Decision | None = None
        self._asked: Reason | None = None
        self._asked_until_s: float | None = None
        self._order: Order | None = None
        self._stop_message: protocol.Stop | None = None
        self.is_finished = False
        """Whether the workers have completed all their steps."""
        self._is_cut_short = False
        """Whether an agent that got a signal has ended its workers before anybody else did."""
        self._capacity_until_s = self._minority_s = None
        self.progress.steps.clear()

    def _take_over(self, lost: tuple[int, str], now_s: float, *, has_resigned: bool) -> None:
        """Lead a generation that another agent has led; its members come one after another."""
        index, reason = lost
        name = self._members.name_of(index)
        leads = self._members.name_of(self._terms.own)
        why = f"{name} has left the job" if has_resigned else f"the leader's agent on {name} is gone ({reason})"
        self._do(events.Say(text=f"{leads} leads now: {why}"))
        self._record("took_over", leader=leads, generation=self._generation, after=name)
        for member, _ in self._members.group:
            if member not in self._members and member != index:
                self._members.miss(member, "it has not come to the new leader", now_s + GATHER_S)
        if has_resigned:
            self._members.excluded.add(index)
            self._stop(Decision(move=Move.RESTART), now_s, grace_s=RESTART_GRACE_S)
            self._deadline_s = now_s + GATHER_S
        elif (position := self._members.position(index)) is not None:
            self._guard.lost(position, reason, now_s)
        for member, node in self._members.here.items():
            if node.card.generation < self._generation and member != self._terms.own:
                self._tell_again(member, node.card.generation)

    # What agents tell

    def _hear(self, index: int, message: Message, now_s: float) -> None:
        name = self._members[index].name
        match message:
            case protocol.Beat():
                if message.node.generation == self._generation and self._members.is_here(index):
                    self._guard.hear(message, now_s)
                    self.progress.hear(message)
                    if self._members.note_begun(index):
                        self._confirmed = self._generation
            case protocol.Failed() | protocol.Exited() if message.generation != self._generation:
                self._record("worker_ended_late", node=name, generation=message.generation)
            case protocol.Failed(end=end, age_s=age_s):
                self._hear_end(msgspec.structs.replace(end, time_s=now_s - age_s), now_s)
            case protocol.Exited(rank=rank):
                self.is_finished |= message.is_finished
                self._hear_end(WorkerEnd(rank=rank, local_rank=0, node=name, exit_code=0, time_s=now_s), now_s)
            case protocol.Interrupted(signum=signum):
                self._record("interrupted", signum=signum, node=name)
                save_s = None if self.progress.steps else 0.0
                if (question := self.signals.take(signum, STAGES[self.phase], now_s, save_s=save_s)) is not None:
                    self._do(question)
            case protocol.Stopped():
                is_member = self._members.position(index) is not None and self._members.is_here(index)
                if is_member and message.generation == self._generation:
                    self._members.set(index, State.STOPPED)
            case _:
                reason = f"it sent {type(message).__name__}, which is not a message of an agent"
                self._do(events.Disconnect(node=index))
                self._lose(index, reason, now_s)

    def _hear_end(self, end: WorkerEnd, now_s: float) -> None:
        self._record("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=end.ended_by_us)
        self._guard.ended(end, now_s)
        self._is_cut_short |= end.ended_by_us and self.phase is Phase.RUNNING

    # Who is here

    def _miss(self, index: int, reason: str, now_s: float) -> None:
        """A connection has ended: its agent may take it up again."""
        if index in self._members.waiting:
            self._do(events.Say(text=f"{self._members[index].name} joined, then disconnected"))
            self._members.remove(index)
        elif index in self._members and self._decision is not None and index in self._decision.without:
            self._lose(index, reason, now_s)
        elif index in self._members:
            self._members.miss(index, reason, now_s + RETURN_S)
            self._suspect(index, reason, now_s)

    def _suspect(self, index: int, reason: str, now_s: float) -> None:
        position = self._members.position(index)
        is_running = index in self._members.running
        if self.phase is Phase.RUNNING and position is not None and is_running:
            self._guard.lost(position, reason, now_s)

    def _lose(self, index: int, reason: str, now_s: float) -> None:
        """A node is lost."""
        if index not in self._members and index not in self._members.away:
            return
        name = self._members.name_of(index)
        self._record("node_lost", node=name, reason=reason)
        self._suspect(index, reason, now_s)
        self._members.remove(index)
        if index not in self._members.excluded:
            self._do(events.ExpectBack(node=index, name=name))

    def _lose_away(self, now_s: float, *, nodes: frozenset[int] | None = None) -> None:
        """Give up the members that are away: these ones, or all that are overdue."""
        for index, away in list(self._members.away.items()):
            if index in nodes if nodes is not None else now_s >= away.until_s:
                self._lose(index, away.reason, now_s)

    def _admit(self, joined: events.Joined) -> None:
        card = joined.card
        is_over = self.phase is Phase.OVER
        if not is_over and (index := self._members.find_returned(card, self._generation)) is not None:
            self._members.welcome_back(index, card, joined.address)
            self._do(events.Accept(connection=joined.connection, node=index))
            self._tell_again(index, card.generation)
            return
        found: int | str = "the job is over"
        if not is_over:
            found = self._members.admit(card) if self._terms.max_restarts else "the job is not started again"
        if isinstance(found, str):
            self._do(events.Reject(connection=joined.connection, reason=found))
            return
        self._members.add(found, Node(card=card, name=card.host, address=joined.address, state=State.WAITING))
        self.unresponsive.discard(found)
        self._do(events.Accept(connection=joined.connection, node=found))
        if card.generation >= 0:  # it was given up, and comes back with workers
            self._do(events.Send(node=found, message=protocol.Stop(signum=signal.SIGTERM)))
        self._do(events.Say(text=f"{card.host} has joined and waits for the next restart"))

    def _tell_again(self, index: int, generation: int) -> None:
        """Send what an agent may have missed while it was away; it ignores what it knows."""
        position = self._members.position(index)
        if generation < self._generation and position is not None:
            self._do(events.Send(node=index, message=msgspec.structs.replace(self._plan, node_index=position)))
        for message in (self._order, self._stop_message):
            if message is not None:
                self._do(events.Send(node=index, message=message))

    # Signals

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
        if slept_s:
            self._oversleep(slept_s)
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._terms.beat_s
            ping = protocol.Ping(sent_ns=round(now_s * 1e9), confirmed=self._confirmed)
            self._do(*(events.Send(node=index, message=ping) for index in self._members))
        self.signals.turn(now_s)
        self._lose_away(now_s)
        match self.phase:
            case Phase.RUNNING:
                self._judge(now_s)
            case Phase.STOPPING:
                self._await_stopped(now_s)
            case Phase.FORMING:
                self._await_answers(now_s)
            case Phase.PAUSED:
                self._await_capacity(now_s)

    def _oversleep(self, slept_s: float) -> None:
        """This process did not run for a while: nobody else was late."""
        self._deadline_s += slept_s
        if self._capacity_until_s is not None:
            self._capacity_until_s += slept_s
        if self._minority_s is not None:
            self._minority_s += slept_s
        self._members.wait_longer(slept_s)

    def _judge(self, now_s: float) -> None:
        signum, are_unanswered = self.signals.interrupted_by, self.signals.are_unanswered
        if signum is not None and self._asked is None and (self._is_cut_short or not are_unanswered):
            self._stop(Decision(move=Move.END), now_s, signum=signum)
        elif self._guard.is_all_well:
            grows = self._asked is Reason.GROW and not self.is_finished
            self._stop(Decision(move=Move.RESTART if grows else Move.END), now_s)
        elif signum is not None and (self._is_cut_short or now_s > (self._asked_until_s or math.inf)):
            self._do(events.Say(text="the checkpoint was not finished in time; ending all ranks"))
            self._stop(Decision(move=Move.END), now_s)
        elif self._has_been_minority(now_s):
            absent = [self._members.group[position][1] for position in self._members.absent]
            finding = cut_off(self._members.name_of(self._terms.own), absent)
            self._judged = Judged(findings=(finding,), exit_code=Exit.NODE_FAULT)
            self._pronounce(self._judged.findings)
            self._stop(Decision(move=Move.END, exit_code=Exit.NODE_FAULT), now_s)
        else:
            self._consult(now_s)

    def _has_been_minority(self, now_s: float) -> bool:
        """Whether the connected members are no majority, for so long that the others may have another leader."""
        if self._members.have_majority or self._guard.has_left(self._members.absent):
            self._minority_s = None
            return False
        self._minority_s = now_s if self._minority_s is None else self._minority_s
        return now_s - self._minority_s > MINORITY_FACTOR * self._terms.gone_s

    def _consult(self, now_s: float) -> None:
        """Ask the guard."""
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
        at_fault = frozenset(index for index, _ in culprits)
        decision = decide(
            judged,
            crash_of(judged, self.progress.steps),
            history=self._history,
            seats={index: node.name for index, node in self._members.here.items()} | dict(culprits),
            culprits=at_fault,
            leader_seat=self._terms.own,
            can_resign=self._members.can_spare(at_fault),
            min_nodes=self._terms.min_nodes,
            checkpoint=self.progress.checkpoint,
            ran_s=now_s - self._began_s,
        )
        self._judged = judged
        self.culprits = tuple(name for _, name in culprits)
        self._lose_away(now_s, nodes=at_fault)
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
        self._order = Order(at_step=(step or 0) + 1, why=why, signum=signum)
        self._send_all(self._order)

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
        self._stop_message = protocol.Stop(signum=signum, at_once=tuple(at_once), grace_s=grace_s)
        self._send_all(self._stop_message)

    def _await_stopped(self, now_s: float) -> None:
        own, running = self._terms.own, self._members.running
        if running and now_s < self._deadline_s:
            return
        self._lose_away(now_s, nodes=frozenset(running))
        for index in self._members.running:
            if index != own:
                self.unresponsive.add(index)
                self._do(events.Disconnect(node=index))
                self._lose(index, f"its workers had not ended {STOPPED_S:.0f} s after the grace period", now_s)
        if own in self._members.running:
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
        elif not self._members.can_spare(self._decision.without):
            self._give_way()
        else:
            self._leave_out(self._decision.without)
            if own in self._decision.without:
                self._resign()
            else:
                self._look(now_s)

    def _leave_out(self, nodes: frozenset[int]) -> None:
        """Go on without these: one whose agent is gone may come back; one that is here, and at fault, may not."""
        self._survived += self._judged.findings if self._judged else ()
        for index in nodes & self._members.here.keys():
            self._members.excluded.add(index)
            self._do(events.Send(node=index, message=_LEFT_OUT))
            if index != self._terms.own:
                self._do(events.Disconnect(node=index))
                self._members.remove(index)

    @property
    def _past(self) -> Past:
        excluded = tuple(sorted(self._members.excluded))
        return Past(history=self._history, survived=tuple(self._survived), excluded=excluded)

    def _resign(self) -> None:
        """The leader's own node is at fault: the others go on under another leader."""
        self._enter(Phase.OVER)
        self.has_resigned = True
        message = Resign(past=self._past)
        self._do(*(events.Send(node=index, message=message) for index in self._members if index != self._terms.own))
        self.verdict = Verdict(job=self._terms.job, attempt=self._terms.attempt, exit_code=Exit.OK)
        self._do(events.Over(verdict=self.verdict))

    def _give_way(self) -> None:
        """End, since the members that are lost may go on without this leader."""
        self._decision = Decision(move=Move.END, exit_code=Exit.NODE_FAULT)
        self._conclude()

    def _look(self, now_s: float) -> None:
        self._enter(Phase.FORMING)
        self._is_looking, self._deadline_s = True, now_s + ANSWER_S
        self._do(events.FindCheckpoint())

    def _await_answers(self, now_s: float) -> None:
        if (self._is_looking or self.signals.are_unanswered) and now_s < self._deadline_s:
            return
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        else:
            self._form(now_s)

    def _form(self, now_s: float) -> None:
        """Start the next generation with all connected nodes, or wait for more."""
        self._lose_away(now_s, nodes=frozenset(self._members.away))
        if not self._members.have_majority:
            self._give_way()
            return
        terms, nodes = self._terms, self._members.here | self._members.waiting
        if len(nodes) < terms.min_nodes:
            self._enter(Phase.PAUSED)
            if self._capacity_until_s is None:
                self._capacity_until_s, self._next_notice_s = now_s + terms.capacity_s, now_s
                self._record("paused", nodes=len(nodes), at_least=terms.min_nodes)
            return
        try:
            plans = make_group(
                {index: node.card for index, node in nodes.items()},
                leader=terms.own,
                addresses={index: node.address for index, node in nodes.items()},
                electors=self._members.electors,
                past=self._past,
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
        self._begin(plans[terms.own], now_s)
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
        elif not self._members.have_majority and not self._members.away:
            self._give_way()
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
        self.is_cut_off = not (self._guard.is_all_well or self._members.have_majority)
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
