"""The leader as a reducer: it hears all agents, asks the guard, and decides the next step. Pure.

    leader.step(Heard(now_s=..., node=2, message=...))   -> [Send(...), Say(...), ...]     see launch.events
    leader.step(Due(now_s=...))                          what is due; at least once a second

Read launch.lead.course first: the life of a job as one table. The leader runs in the process of one agent, where
launch.lead.driver has its connections, and treats all nodes alike, its own included. guard.verdict decides what is
wrong, launch.lead.recovery what to do about it, launch.lead.group who is which rank, launch.lead.summary how to say it,
launch.lead.members whether it may go on. One state machine, whole.
"""

from __future__ import annotations

import copy
import math
import signal

import msgspec

from allranks.guard import disk
from allranks.guard.guard_verdict import GuardVerdict, name_fault
from allranks.guard.presence import NOT_COME
from allranks.launch import events
from allranks.launch.events import ASLEEP_S, GRACE_S, SAVE_SIGNAL, Effect, Event
from allranks.launch.lead import course, summary
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Phase
from allranks.launch.lead.recovery import Decision, decide
from allranks.launch.lead.reports import Reports
from allranks.launch.queue import ending
from allranks.launch.queue.ending import Ending
from allranks.model.errors import AllranksError, Exit, exit_for_signal
from allranks.model.finding import Finding, Severity, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.wire.protocol import Goodbye, Ping, Plan, Resign, Stop

BUSY_S = 0.3
"""A longer time between two events means that this process was busy: it keeps evidence of its own node's workers."""
_LEFT_OUT = Goodbye(exit_code=Exit.OK, summary="the job continues without this node")
"""Its agent exits with 0: SLURM takes the highest exit code of all agents, so the others decide the job's."""


class Leader(Reports):
    """Leads the job, from a Plan that its members have, to the last Goodbye."""

    def step(self, event: Event) -> list[Effect]:
        """Take in an event; return what is to be done, in this order."""
        if (slept_s := event.now_s - self._stepped_s - ASLEEP_S) > 0:
            self._oversleep(slept_s)
        if (late_s := event.now_s - self._stepped_s) > BUSY_S and self._generation.told_by_s is not None:
            self._generation.told_by_s += late_s  # what others have told meanwhile has not been read
        self._stepped_s = event.now_s
        match event:
            case events.Joined() if self.phase is Phase.OVER:
                self._tell_end(event)
            case events.Joined():
                self._admit(event)
            case _ if self.phase is Phase.OVER:
                pass
            case events.Due(now_s=now_s):
                self._turn(now_s)
            case events.Heard(node=node, message=message, now_s=now_s):
                if node in self._members.nodes:
                    self._hear(node, message, now_s)
            case events.Lost():
                self._next_look_s = event.now_s
                self._miss(event)
            case events.Meant(signum=signum, decision=meant, now_s=now_s):
                if self._unanswered.pop(signum, None) is not None:
                    self._obey(signum, meant, now_s)
            case events.CheckpointFound(step=step):
                self._is_looking = False
                self._note_checkpoints(step)
            case events.KillWaitFound(kill_wait_s=float() as kill_wait_s):
                self._note_kill_wait(kill_wait_s)
            case events.EligibleFound(eligible_s=float() as eligible_s):
                self._guard.books.queued(eligible_s)
        self._write_status(event.now_s)
        effects, self._effects = self._effects, []
        return effects

    def take_over(self, lost: tuple[int, str], now_s: float, *, has_resigned: bool) -> None:
        """Lead a generation that another agent has led; the first step has the effects.

        Args:
            lost: index of the last leader's node, and why it is gone.
            has_resigned: it has left the job, and ended its workers, after a verdict on its own node.
        """
        leader, reason = lost
        members, own = self._members, self._own
        name = members.name_of(leader)
        why = f"{name} has left the job" if has_resigned else f"the leader's agent on {name} is gone ({reason})"
        self._say(f"{members.name_of(own)} leads now: {why}")
        self._record("took_over", leader=members.name_of(own), generation=self._generation.number, after=name)
        if has_resigned:
            members.excluded.add(leader)
        for index in [node for node in members.group if node not in members.nodes and node not in members.excluded]:
            # The others come one after another; the last leader's node is given up in this turn, and expected back.
            why, wait_s = (reason, 0.0) if index == leader else (NOT_COME, course.GATHER_S)
            members.miss(index, why, now_s + wait_s)
            if not has_resigned:
                self._suspect(index, why, now_s)
        for index, node in members.here.items():
            if index != own and node.card.generation < self._generation.number:
                self._tell_again(index, node.card.generation)
        if has_resigned:
            self._stop(Decision(restarts=True), now_s)
            self._deadline_s = now_s + course.GATHER_S

    # Signals

    def _obey(self, signum: int, meant: ending.EndingDecision, now_s: float) -> None:
        """The scheduler has said what a signal means."""
        this = self._generation
        if signum != SAVE_SIGNAL:
            self._handlers_until_s = now_s + meant.handler_s
        if meant.ending is Ending.STOP:
            this.asked = None
            if self.phase is Phase.STOPPING and this.stop is not None and this.stop.is_wanted:
                self._hasten(this.stop, meant.handler_s, now_s)  # workers have ended before SLURM answered
        elif self.phase is Phase.RUNNING:
            until_s = None if meant.save_s is None else now_s + meant.save_s
            self._ask(meant.ending, meant.line, signum=signum, until_s=until_s)
        else:
            self._say(f"{meant.line}; no worker is running, so the last checkpoint is used")
            if this.decision.restarts:
                this.asked = meant.ending

    # Running

    def _turn(self, now_s: float) -> None:
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._guard.beat_s
            self._send(Ping(sent_ns=round(now_s * 1e9), confirmed=self._confirmed), self._members.nodes)
        self._unanswered = {signum: until_s for signum, until_s in self._unanswered.items() if now_s < until_s}
        if self._own not in self._generation.decision.without:  # else they are away since its own link is at fault
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
        self._savers_deadline_s += slept_s
        if self._handlers_until_s is not None:
            self._handlers_until_s += slept_s
        if self._capacity_until_s is not None:
            self._capacity_until_s += slept_s
        for away in self._members.away.values():
            away.until_s += slept_s

    def _judge(self, now_s: float) -> None:
        signum, this = self.interrupted_by, self._generation
        if signum is not None and this.asked is None and (this.is_cut_short or signum not in self._unanswered):
            self._stop(Decision(), now_s, signum=signum)
        elif self._guard.is_all_well:
            self._stop(Decision(restarts=this.asked is Ending.SAVE_AND_GROW and not self.is_finished), now_s)
        elif signum is not None and (this.is_cut_short or now_s > (this.asked_until_s or math.inf)):
            self._say("the checkpoint was not finished in time; ending all ranks")
            self._stop(Decision(), now_s)
        else:
            self._consult(now_s)

    def _consult(self, now_s: float) -> None:
        """Ask the guard, which goes through all nodes: with thousands of them, not in every turn."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + course.LOOK_S * max(0, len(self._members.group) - course.OFTEN_UP_TO)
        for line in self._guard.lines(now_s):
            self._say(line)
        for position, order in self._guard.wants(now_s).items():
            self._send(order, [self._generation.plan.nodes[position]])
        judged = self._guard.judge(now_s)
        if judged is not None:
            self._decide(judged, now_s)
        elif self._may_grow:
            names = fold_hosts([node.name for node in self._members.waiting.values()])
            self._ask(Ending.SAVE_AND_GROW, f"saving a checkpoint and restarting with {names}")

    @property
    def _may_grow(self) -> bool:
        """Whether nodes wait to join, and ranks can save for that; a job that was told to stop takes in nobody."""
        is_free = self._generation.asked is None and self.interrupted_by is None
        return is_free and bool(self._members.waiting and self.steps)

    def _decide(self, judged: GuardVerdict, now_s: float) -> None:
        this, plan = self._generation, self._generation.plan
        this.judged, this.history = judged, copy.deepcopy(self._history)
        decision = self._choose(judged, now_s)
        self.culprits = tuple(plan.members[position].name for position in judged.nodes)
        self._lose_away(now_s, nodes=frozenset(plan.nodes[position] for position in judged.nodes))
        if not judged.is_final:
            this.told_by_s = now_s + (judged.told_within_s or math.inf)
        else:
            self._pronounce(judged.findings)
        self._stop(decision, now_s)

    def _choose(self, judged: GuardVerdict, now_s: float) -> Decision:
        """Return the next move after a fault, and write the fault into the history."""
        at_fault = frozenset(self._generation.plan.nodes[position] for position in judged.nodes)
        return decide(
            judged,
            steps=self.steps,
            history=self._history,
            culprits=at_fault,
            leader=self._own,
            leader_name=self._members.name_of(self._own),
            lost_srun=self._find_lost_srun(judged),
            can_resign=self._can_resign(at_fault),
            can_spare=len(self._members.nodes.keys() - at_fault) >= self._terms.min_nodes,
            checkpoint=self.checkpoint,
            ran_s=now_s - self._generation.began_s,
        )

    def _tell_verdict(self, now_s: float) -> None:
        """Tell what waited for the ends of all ranks: ends that came late may name the culprit, or another one."""
        this = self._generation
        if this.judged is None or this.told_by_s is None or this.history is None:
            return
        judged = self._guard.judge(now_s) or this.judged
        if judged.parts != this.judged.parts:
            self._history = this.history
            this.decision = self._choose(judged, now_s)
        this.judged, this.told_by_s = judged, None
        self._pronounce(judged.findings)

    def _can_resign(self, at_fault: frozenset[int]) -> bool:
        plan = self._generation.plan
        if len(plan.successors) < 2 or (plan.srun is not None and plan.srun.node == self._own):
            return False
        # Where the leader's own link is at fault, all others are away.
        return self._members.have_majority(without=at_fault, and_away=True)

    def _find_lost_srun(self, judged: GuardVerdict) -> str:
        """Return the name of the node that is lost, and srun with it; empty: srun is not."""
        plan = self._generation.plan
        lost = {plan.nodes[position] for position in judged.lost}
        return self._members.name_of(plan.srun.node) if plan.srun is not None and plan.srun.node in lost else ""

    # Stopping, and what comes after

    def _stop(self, decision: Decision, now_s: float, *, signum: int = signal.SIGTERM) -> None:
        self._enter(Phase.STOPPING)
        this, fault = self._generation, self._generation.judged
        this.ended_s = now_s
        at_once = fault.blocked if fault is not None else ()
        grace_s = None if fault is None else course.RESTART_GRACE_S if decision.restarts else GRACE_S
        until_s = now_s + self._terms.shutdown_s if self._handlers_until_s is None else self._handlers_until_s
        saving_s = max(0.0, until_s - now_s)
        this.decision, self._deadline_s = decision, now_s + (grace_s or GRACE_S) + course.STOPPED_S
        self._savers_deadline_s = self._deadline_s + saving_s
        this.stop = Stop(
            signum=signum, at_once=at_once, grace_s=grace_s, saving_s=saving_s, interrupted_by=self.interrupted_by
        )
        self._send(this.stop, self._members.here)

    def _hasten(self, stop: Stop, saving_s: float, now_s: float) -> None:
        """SLURM leaves less time than the agents were told."""
        if stop.saving_s is not None and saving_s < stop.saving_s:
            self._savers_deadline_s = min(self._savers_deadline_s, now_s + GRACE_S + saving_s + course.STOPPED_S)
            self._generation.stop = msgspec.structs.replace(stop, saving_s=saving_s)
            self._send(self._generation.stop, self._members.here)

    def _await_stopped(self, now_s: float) -> None:
        own, this, running = self._own, self._generation, self._members.running
        # Who is away may come back: to go on, or to hear how the job has ended.
        if (running or self._members.away) and now_s < self._deadline_s:
            if this.told_by_s is not None and now_s >= this.told_by_s:
                self._tell_verdict(now_s)
            return
        if now_s < self._savers_deadline_s and any(self._takes_its_time(index) for index in running):
            return
        self._lose_away(now_s, nodes=running)
        for index in self._members.running:
            if index != own:
                self._unresponsive.add(index)
                self._do(events.Disconnect(node=index))
                self._lose(index, f"its workers had not ended {course.STOPPED_S:.0f} s after the grace period", now_s)
        if own in self._members.running:
            if now_s < self._deadline_s + course.OWN_STOPPED_S:
                return
            this.decision = Decision(exit_code=Exit.NODE_FAULT)
        self._tell_verdict(now_s)
        if this.decision.note:
            self._say(this.decision.note)
        if self.interrupted_by is not None or self.is_leaving or not this.decision.restarts:
            self._conclude()
        elif not self._members.have_majority(without=this.decision.without):
            self._give_way()
        else:
            self._leave_out(this.decision.without)
            if own in this.decision.without:
                self._resign()
            else:
                self._look(now_s)

    def _leave_out(self, nodes: frozenset[int]) -> None:
        """Go on without these: one whose agent is gone may come back; one that is here, and at fault, may not."""
        judged = self._generation.judged
        self._survived += judged.findings if judged else ()
        for index in nodes & self._members.here.keys():
            self._members.excluded.add(index)
            self._send(_LEFT_OUT, [index])
            if index != self._own:
                self._record("node_lost", node=self._members.name_of(index), reason="it was at fault")
                self._do(events.Disconnect(node=index))
                self._members.remove(index)

    def _resign(self) -> None:
        """The leader's own node is at fault: the others go on under another leader."""
        self._enter(Phase.OVER)
        self.has_resigned = True
        self._send(Resign(past=self._past), self._members.nodes.keys() - {self._own})
        self.verdict = Verdict(job=self._terms.job, attempt=self._generation.plan.attempt, exit_code=Exit.OK)

    def _give_way(self) -> None:
        """End, since the members that are lost may go on without this leader."""
        self._generation.decision = Decision(exit_code=Exit.NODE_FAULT)
        self._conclude()

    def _look(self, now_s: float) -> None:
        """Ask for the newest checkpoint before the next generation begins."""
        self._enter(Phase.FORMING)
        self._is_looking, self._deadline_s = True, now_s + course.ANSWER_S
        self._do(events.FindCheckpoint())

    def _await_answers(self, now_s: float) -> None:
        is_awaited = self._is_looking or self._unanswered or self._members.away  # these may take up their connection
        if is_awaited and now_s < self._deadline_s:
            return
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        else:
            self._form(now_s)

    def _form(self, now_s: float) -> None:
        """Start the next generation with all connected nodes, or wait for more."""
        self._lose_away(now_s, nodes=self._members.away)
        terms, last, nodes = self._terms, self._generation.plan, self._members.nodes
        if not self._members.have_majority():
            self._give_way()
            return
        if missing := self._find_missing(now_s):
            self._enter(Phase.PAUSED)
            if self._capacity_until_s is None:  # a pause that goes on after a look for a checkpoint keeps its deadline
                self._capacity_until_s, self._next_notice_s = now_s + terms.capacity_s, now_s
                leader, at_least = self._members.name_of(self._own), terms.min_nodes
                about = {"leader": leader, "nodes": len(nodes), "at_least": at_least, "missing": missing}
                self._record("paused", generation=last.generation, **about)
            return
        if self._members.give_up_succession():
            self._record("minority", generation=last.generation, leader=self._members.name_of(self._own))
        try:
            plans = make_group(
                {index: node.card for index, node in nodes.items()},
                leader=self._own,
                can_change_leader=self._members.may_be_succeeded,
                srun=last.srun,
                addresses={index: node.address for index, node in nodes.items()},
                wanted_backend=terms.wanted_backend,
                electors=self._members.electors,
                past=self._past,
                network=last.network,
                attempt=last.attempt,
                store_address=terms.store_address,
                store_port=terms.store_port,
                generation=last.generation + 1,
                max_restarts=last.max_restarts,
            )
        except AllranksError as exc:
            self._say(str(exc))
            self._give_up(exc.exit_code, *([exc.finding] if exc.finding else []))
            return
        self._announce(plans[self._own], now_s)
        self._enter(Phase.RUNNING)
        self._begin(plans[self._own], now_s)
        for index, plan in plans.items():
            self._send(plan, [index])

    def _announce(self, plan: Plan, now_s: float) -> None:
        names = [member.name for member in plan.members]
        gone = [name for index, name in self._members.group.items() if index not in plan.nodes]
        own, left = self._members.name_of(self._own), self._history.restarts_left
        at, is_tracked, lost_s = self.checkpoint, bool(self.steps), round(now_s - self._kept_s, 1)
        about = {"leader": own, "members": names, "checkpoint": at, "lost_s": lost_s, "is_tracked": is_tracked}
        self._record("restarting", generation=plan.generation, **about)
        self._say(summary.describe_restart(plan.generation, names, gone, at, num_left=left, is_tracked=is_tracked))

    def _await_capacity(self, now_s: float) -> None:
        until_s, terms, missing = self._capacity_until_s, self._terms, self._find_missing(now_s)
        assert until_s is not None
        lacks_nodes = len(self._members.nodes) < terms.min_nodes
        if self.interrupted_by is not None or self.is_leaving:
            self._conclude()
        elif not self._members.have_majority() and not self._members.away:
            self._give_way()
        elif not missing:
            self._look(now_s)
        elif now_s >= until_s and lacks_nodes:
            at = self.checkpoint
            last = "there is no checkpoint" if at is None else f"the last checkpoint is at step {at}"
            self._give_up(Exit.NODE_FAULT, name_fault("AR608", f"{missing} for {terms.capacity_s:.0f} s; {last}"))
        elif now_s >= until_s:
            self._say(f"not restarted: {missing}, for {terms.capacity_s:.0f} s (--capacity-timeout)")
            self._end_without_room()
        elif now_s >= self._next_notice_s:
            self._next_notice_s = now_s + course.NOTICE_S
            what = "capacity" if lacks_nodes else "room"
            self._say(summary.describe_pause(missing, what, left_s=until_s - now_s, timeout_s=terms.capacity_s))

    def _end_without_room(self) -> None:
        """End with the verdict that a restart should have outlived."""
        judged = self._generation.judged
        assert judged is not None
        self._survived = [finding for finding in self._survived if finding not in judged.findings]
        self._generation.decision = Decision(exit_code=judged.exit_code)
        self._conclude()

    def _give_up(self, exit_code: int, *findings: Finding) -> None:
        self._pronounce(findings)
        self._generation.judged = GuardVerdict(findings=findings, exit_code=exit_code)
        self._generation.decision = Decision(exit_code=exit_code)
        self._conclude()

    def _conclude(self) -> None:
        self._enter(Phase.OVER)
        this, terms = self._generation, self._terms
        for line in self._guard.last_words():
            self._say(line)
        self.is_to_requeue = self.is_leaving and this.asked is Ending.SAVE_AND_REQUEUE
        if this.decision.again is not None and this.judged is not None and self.interrupted_by is None:
            this.judged = summary.loop_of(this.judged, this.decision.again)
            self._pronounce(this.judged.findings[:1])
        exit_code, findings = self._outcome()
        survived = [msgspec.structs.replace(finding, severity=Severity.WARN) for finding in self._survived]
        lost = disk.find_lost(self.lost_lines, sorted(self._lost_on))
        if self.lost_lines and not self._guard.is_all_well:  # else the job's last line says so
            self._say(disk.describe_lost(self.lost_lines))
        findings = (*findings, *survived, *self._guard.warnings, *lost)
        self.verdict = Verdict(job=terms.job, attempt=this.plan.attempt, exit_code=exit_code, findings=findings)
        is_cut_off = self._members.are_minority and not self._guard.is_all_well
        self._goodbye = Goodbye(exit_code=exit_code, summary=summary.summarize(self.verdict), is_cut_off=is_cut_off)
        self._send(self._goodbye, self._members.here)
        for index, node in self._members.waiting.items():
            self._part(index, node.card.generation)

    def _outcome(self) -> tuple[int, tuple[Finding, ...]]:
        """Return the job's exit code, and the findings that explain it."""
        judged, decision = self._generation.judged, self._generation.decision
        if self.interrupted_by is not None:
            return exit_for_signal(self.interrupted_by), ()
        if judged is None:
            return int(Exit.OK if self._guard.is_all_well else decision.exit_code or Exit.UNKNOWN), ()
        decides = not decision.restarts or self.is_to_requeue
        return decision.exit_code if decides else judged.exit_code, judged.findings

    def _tell_end(self, joined: events.Joined) -> None:
        """An agent connects when the job is over: one that had workers of it hears how it ended."""
        node, number = joined.card.node_index, joined.connection
        is_outsider = joined.card.generation < 0 or node == self._own or node in self._members.excluded
        if self._goodbye is None or node is None or is_outsider:
            self._do(events.Reject(connection=number, reason="the job is over"))
        else:
            self._do(events.Accept(connection=number, node=node))
            self._part(node, joined.card.generation)

    def _part(self, index: int, generation: int) -> None:
        """Tell a node that is no member how the job ended; where the others may go on with it, it looks for them."""
        assert self._goodbye is not None
        if self._goodbye.is_cut_off and generation >= 0 and len(self._members.group) > 2:
            self._do(events.Disconnect(node=index))
        else:
            self._send(self._goodbye, [index])
