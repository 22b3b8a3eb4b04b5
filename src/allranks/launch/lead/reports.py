"""What agents tell the leader, what it knows of the job by that, and what it tells all of them. Pure.

The phases, and the decisions, are in launch.lead.leader, which extends this class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.attendance import Attendance
from allranks.launch.lead.course import (
    STAGES,
    Phase,
    Reason,
    Terms,
)
from allranks.launch.lead.forming import Forming
from allranks.launch.lead.generation import Generation
from allranks.launch.lead.members import Members, Node, State
from allranks.launch.lead.outcome import (
    as_event,
)
from allranks.launch.lead.progress import Progress
from allranks.launch.lead.signals import Signals
from allranks.model.finding import Finding, Verdict
from allranks.model.past import Past
from allranks.wire import protocol
from allranks.wire.protocol import Goodbye, Message, Order, Plan, WorkerEnd


class Reports:
    """A leader's knowledge of its job.

    Args:
        terms: the terms of the job.
        guard: decides what is wrong.
        past: the faults so far, and the restarts that are left.
        nodes: whose agents are connected, by their index in the job.
        plan: of the generation that runs.
        now_s: when it begins.
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
    ) -> None:
        self.phase = Phase.RUNNING
        self.verdict: Verdict | None = None
        """Set when the job is over."""
        self._goodbye: Goodbye | None = None
        """The last word to all agents; None where another leader has it."""
        self.is_said = False
        """Whether its findings have been printed."""
        self.culprits: tuple[str, ...] = ()
        """Nodes at fault, in the last verdict."""
        self.is_to_requeue = False
        """Whether all ranks saved before the time limit and ended."""
        self.has_resigned = False
        """Whether another node's agent leads from now on."""
        self._unresponsive: set[int] = set()
        self.progress = Progress()
        self.signals = Signals()
        self._terms, self._guard = terms, guard
        self._history, self._survived = past.history, [*past.survived]
        self._effects: list[Effect] = []
        self._members = Members(terms.num_nodes, excluded=set(past.excluded))
        self._attendance = Attendance(self._members, guard, can_restart=terms.max_restarts > 0)
        for index, node in nodes.items():
            self._members.add(index, node)
        self._deadline_s = self._turned_s = now_s
        self._next_ping_s = self._next_look_s = 0.0
        self._confirmed = -1
        self._forming = Forming(terms, self._members)
        self._begin(plan, now_s)

    @property
    def interrupted_by(self) -> int | None:
        """The first stop signal that any agent has got."""
        return self.signals.interrupted_by

    @property
    def unresponsive(self) -> frozenset[int]:
        """Nodes whose agents were disconnected because they did not answer; their processes may still be there."""
        return frozenset(self._unresponsive - set(self._members))

    @property
    def is_finished(self) -> bool:
        """Whether the workers have completed all their steps."""
        return self._generation.is_finished

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks were told to save and leave; after a fault in between, the last checkpoint counts."""
        was_asked = self._generation.asked in (Reason.REQUEUE, Reason.LEAVE)
        return was_asked and bool(self.progress.steps) and not self.is_finished

    @property
    def _past(self) -> Past:
        excluded = tuple(sorted(self._members.excluded))
        return Past(history=self._history, survived=tuple(self._survived), excluded=excluded)

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _record(self, event: str, **fields: object) -> None:
        self._do(events.Record(event=event, fields=fields))

    def _send_all(self, message: Message) -> None:
        self._do(*(events.Send(node=index, message=message) for index in self._members.here))

    def _enter(self, phase: Phase) -> None:
        assert phase in STAGES[self.phase].moves, f"{self.phase} -> {phase}"
        self.phase = phase

    @property
    def _is_running(self) -> bool:
        return self.phase is Phase.RUNNING

    def _begin(self, plan: Plan, now_s: float) -> None:
        """A generation begins; every agent has its Plan, or gets it now."""
        self._members.begin(plan)
        self._generation = Generation(plan, now_s)
        position = {index: at for at, index in enumerate(plan.nodes)}
        addresses = {
            position[each.node]: {"control": each.control_address, "data": each.data_address or each.control_address}
            for each in plan.successors
        }
        addresses |= {position[index]: node.addresses for index, node in self._members.here.items()}
        ports = {position[each.node]: each.port for each in plan.successors}
        self._guard.begin(plan, now_s, addresses=addresses, leader=position[self._terms.own], ports=ports)
        self._forming.capacity_until_s = None
        self.progress.steps.clear()

    def _hear(self, index: int, message: Message, now_s: float) -> None:
        name = self._members[index].name
        match message:
            case protocol.Beat():
                if message.node.generation == self._generation.number and self._members.takes_part(index):
                    self._guard.hear(message, now_s)
                    self.progress.hear(message)
                    if self._members.note_begun(index):
                        self._confirmed = self._generation.number
            case protocol.Failed() | protocol.Exited() if message.generation != self._generation.number:
                self._record("worker_ended_late", node=name, generation=message.generation)
            case protocol.Failed(end=end, age_s=age_s):
                # Failures of one node keep their order, however late each of its messages is heard.
                ahead_s = self._generation.ahead_s.setdefault(index, now_s - age_s - end.time_s)
                self._hear_end(msgspec.structs.replace(end, time_s=min(now_s, end.time_s + ahead_s)), now_s)
            case protocol.Exited(rank=rank):
                self._generation.is_finished |= message.is_finished
                self._hear_end(WorkerEnd(rank=rank, local_rank=0, node=name, exit_code=0, time_s=now_s), now_s)
            case protocol.Interrupted(signum=signum):
                self._record("interrupted", signum=signum, node=name)
                save_s = None if self.progress.steps else 0.0
                if (question := self.signals.take(signum, STAGES[self.phase], now_s, save_s=save_s)) is not None:
                    self._do(question)
            case protocol.Stopped():
                is_member = self._members.position(index) is not None and self._members.takes_part(index)
                if is_member and message.generation == self._generation.number:
                    self._members.set(index, State.STOPPED)
            case _:
                reason = f"it sent {type(message).__name__}, which is not a message of an agent"
                self._do(events.Disconnect(node=index))
                self._lose(index, reason, now_s)

    def _hear_end(self, end: WorkerEnd, now_s: float) -> None:
        self._record("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=end.ended_by_us)
        self._guard.ended(end, now_s)
        self._next_look_s = now_s
        self._generation.is_cut_short |= end.ended_by_us and self.phase is Phase.RUNNING

    def _lose(self, index: int, reason: str, now_s: float) -> None:
        self._do(*self._attendance.lose(index, reason, now_s, is_running=self._is_running))

    def _lose_away(self, now_s: float, *, nodes: Collection[int] | None = None) -> None:
        """Give up the members that are away: these ones, or all that are overdue."""
        self._do(*self._attendance.lose_away(now_s, is_running=self._is_running, nodes=nodes))

    def _pronounce(self, findings: tuple[Finding, ...]) -> None:
        """Print the findings and write them to events.jsonl."""
        for finding in findings:
            self._record("verdict", generation=self._generation.number, **as_event(finding))
        self._do(events.Show(findings=findings))
        self.is_said = True

    def _ask(self, reason: Reason, why: str, *, signum: int = 0, until_s: float | None = None) -> None:
        """Order all ranks to save at the same step boundary, and leave."""
        self._generation.asked, self._generation.asked_until_s = reason, until_s
        step = self.progress.step
        self._record("save_asked", why=why, step=step)
        self._do(events.Say(text=why))
        self._generation.order = Order(at_step=(step or 0) + 1, why=why, signum=signum)
        self._send_all(self._generation.order)
