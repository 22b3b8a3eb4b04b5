"""What agents report to the leader, what it concludes about its members, and what it tells all of them. Pure.

A member whose connection has ended is away, and has RETURN_S to take it up again; the guard suspects it from then on. A
node that is lost, and comes back, waits for the next generation.

The phases, and the decisions, are in launch.lead.leader, which extends this class.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping

import msgspec

from allranks.guard import disk
from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.events import FORWARDED, SAVE_SIGNAL, STOP_SIGNALS, Effect
from allranks.launch.lead.course import ANSWER_S, MOVES, RETURN_S, SPARE_S, Phase, Terms
from allranks.launch.lead.generation import Generation
from allranks.launch.lead.members import ConnectedNode, Members, State
from allranks.launch.lead.status import Known, StatusKeeper
from allranks.launch.lead.summary import describe_kill_wait
from allranks.launch.queue.ending import Ending
from allranks.launch.relays import SignalCopies
from allranks.model.beat import NodeBeat, ProcessState
from allranks.model.errors import name_signal
from allranks.model.finding import Finding, Verdict
from allranks.model.past import Past
from allranks.wire import protocol
from allranks.wire.protocol import Goodbye, Message, Order, Plan, Relay, Stop

FIRST_TRAFFIC_S, TRAFFIC_EVERY_S = 12.0, 300.0
"""From the start of a generation to its first event `network`, and between two of them: some 0.5 MB a day."""
TRAFFIC_LOOK_S, SHARE_CHANGE = 4.0, 0.1
"""Between two looks whether it is known how long ranks wait, or better by as much: then an event comes at once."""


class Reports:
    """A leader's knowledge of its job.

    Args:
        nodes: whose agents are connected, by their index in the job.
        plan: of the generation that runs.
        now_s: when it begins.
    """

    def __init__(
        self, terms: Terms, *, guard: Guard, past: Past, nodes: Mapping[int, ConnectedNode], plan: Plan, now_s: float
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
        self.interrupted_by: int | None = None
        """The first stop signal that any agent has got. A job that got one is never requeued."""
        self._signals: set[int] = set()
        """All that the scheduler was asked about."""
        self._unanswered: dict[int, float] = {}
        """Those whose answer is waited for, and until when."""
        self.steps: dict[int, int] = {}
        """By rank, of this generation; empty where the script does not report steps."""
        self.checkpoint: int | None = None
        """Step of the newest complete one."""
        self._kept_s = now_s
        """When that was complete, or the generation began, whichever is later: since then, steps may be lost."""
        self._complete: tuple[int | None, float] = None, now_s
        """Step of the newest one that was written while this leader led, and when it was complete."""
        self.total_steps: int | None = None
        """That the run will have, where the script says it."""
        self.is_finished = False
        """Whether the workers have completed all their steps."""
        self.lost_lines: dict[int, tuple[int, str]] = {}
        """By rank, over all generations: lines of its output that could not be written, and why."""
        self._lost_on: set[str] = set()
        """The nodes of those ranks."""
        self._unresponsive: set[int] = set()
        self._terms, self._guard, self._own = terms, guard, plan.nodes[plan.node_index]
        self._history, self._survived = past.history, [*past.survived]
        self._effects: list[Effect] = []
        self._status = StatusKeeper(guard.books)
        is_beside_srun = plan.srun is not None and plan.srun.node == self._own
        self._members = Members(
            terms.num_nodes, nodes=dict(nodes), excluded=set(past.excluded), needs_majority=not is_beside_srun
        )
        self._deadline_s = self._savers_deadline_s = self._stepped_s = now_s
        """The first one: of the phases stopping and forming; the second one: of nodes with ranks that save."""
        self._handlers_until_s: float | None = None
        """Until when ranks may take that handle the stop signal; None: SLURM has not answered, or was not asked."""
        self._handled: dict[int, frozenset[int]] = {}
        """By node: signals that its ranks handle, of this generation."""
        self._saving: set[int] = set()
        """Nodes with ranks that save."""
        self._has_asked_kill_wait = False
        self._relayed = SignalCopies()
        self._capacity_until_s: float | None = None
        """Nodes are waited for until then; None: they are not, or the generation has begun."""
        self._next_ping_s = self._next_look_s = self._next_notice_s = 0.0
        self._is_looking = False
        """Whether the driver has not told yet which checkpoint is there."""
        self._confirmed = -1
        self._begin(plan, now_s)

    @property
    def furthest(self) -> int | None:
        """Step of the rank that is furthest."""
        return max(self.steps.values(), default=None)

    @property
    def unresponsive(self) -> frozenset[int]:
        """Nodes whose agents were disconnected because they did not answer; their processes may still be there."""
        return frozenset(self._unresponsive - self._members.nodes.keys())

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks were told to save and leave; after a fault in between, the last checkpoint counts."""
        was_asked = self._generation.asked in (Ending.SAVE_AND_REQUEUE, Ending.SAVE_AND_LEAVE)
        return was_asked and bool(self.steps) and not self.is_finished

    @property
    def _past(self) -> Past:
        excluded = tuple(sorted(self._members.excluded))
        return Past(history=self._history, survived=tuple(self._survived), excluded=excluded)

    @property
    def _is_own_fault(self) -> bool:
        """Whether the verdict on this generation is on the leader's own node."""
        judged, plan = self._generation.judged, self._generation.plan
        return judged is not None and judged.cures and plan.node_index in judged.nodes

    def _known(self, now_s: float) -> Known:
        """What a status says of the job, beyond what the guard knows."""
        plan, is_paused = self._generation.plan, self.phase is Phase.PAUSED
        return Known(
            job=self._terms.job,
            phase=self.phase,
            plan=plan,
            steps=self.steps,
            total_steps=self.total_steps,
            checkpoint=self.checkpoint,
            complete=self._complete,
            num_restarts=plan.max_restarts - self._history.restarts_left,
            missing=self._find_missing(now_s) if is_paused else "",
            gives_up_s=self._capacity_until_s if is_paused else None,
            exit_code=self.verdict.exit_code if self.verdict is not None else None,
        )

    def _write_status(self, now_s: float) -> None:
        """Have the status written down where it is due: not by a leader whose job others go on with."""
        is_elsewhere = self.has_resigned or (self._goodbye is not None and self._goodbye.is_cut_off)
        if not is_elsewhere and self._status.is_due(now_s, self.phase):
            self._do(*self._status.look(self._known(now_s), self._guard, now_s))

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _say(self, text: str) -> None:
        self._do(events.Say(text=text))

    def _record(self, event: str, **fields: object) -> None:
        self._do(events.Record(event=event, fields=fields))
        self._status.note(event, fields, self._stepped_s)

    def _send(self, message: Message, nodes: Iterable[int]) -> None:
        self._do(*(events.Send(node=index, message=message) for index in nodes))

    def _enter(self, phase: Phase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _begin(self, plan: Plan, now_s: float) -> None:
        """A generation begins; every agent has its Plan, or gets it now."""
        self._members.begin(plan)
        self._generation = Generation(plan, now_s)
        position = {index: at for at, index in enumerate(plan.nodes)}
        addresses = {
            position[heir.node]: {"control": heir.control_address, "data": heir.data_address or heir.control_address}
            for heir in plan.successors
        }
        addresses |= {position[index]: node.addresses for index, node in self._members.here.items()}
        ports = {position[heir.node]: heir.port for heir in plan.successors}
        ports |= {position[index]: node.card.agent_port for index, node in self._members.here.items()}
        self._guard.begin(plan, now_s, addresses=addresses, leader=position[self._own], ports=ports)
        self._capacity_until_s, self._kept_s = None, now_s
        self._next_traffic_s = self._traffic_due_s = now_s + FIRST_TRAFFIC_S
        self._told_share: float | None = None
        self._traffic_look_s = TRAFFIC_LOOK_S
        self.steps, self.total_steps, self.is_finished = {}, None, False
        self._handled, self._saving = {}, set()

    # Messages

    def _hear(self, index: int, message: Message, now_s: float) -> None:
        node, this = self._members.nodes[index], self._generation
        name, takes_part = node.name, node.state is not State.WAITING
        match message:
            case protocol.Beat():
                if message.node.generation == this.number and takes_part:
                    self._guard.hear(message, now_s)
                    self.steps |= {rank.rank: rank.step for rank in message.node.ranks if rank.step is not None}
                    self._note_progress(message.node)
                    self._note_handlers(index, message.node)
                    self._note_traffic(now_s)
                    if self._members.note_begun(index):
                        self._confirmed = this.number
            case protocol.Ended() if message.generation != this.number:
                self._record("worker_ended_late", node=name, generation=message.generation)
            case protocol.Ended(end=end, age_s=age_s):
                # Ends of one node keep their order, however late each of its messages is heard.
                ahead_s = this.ahead_s.setdefault(index, now_s - age_s - end.time_s)
                by_ours = msgspec.structs.replace(end, time_s=min(now_s, end.time_s + ahead_s))
                self._guard.ended(by_ours, now_s, wall_s=end.time_s)
                fields = {"rank": end.rank, "node": name, "exit_code": end.exit_code, "told": end.ended_by_us}
                self._record("worker_ended" if end.lingers is None else "worker_lingers", **fields)
                if end.lost_lines and end.lingers is None:
                    self._note_lost(end, name)
                self._next_look_s = now_s
                self.is_finished |= end.is_finished
                this.is_cut_short |= end.ended_by_us and self.phase is Phase.RUNNING
            case protocol.Interrupted(signum=signum):
                self._record("interrupted", signum=signum, node=name)
                if signum in (SAVE_SIGNAL, *STOP_SIGNALS):
                    self._take(signum, now_s)
                else:
                    self._relay(index, signum, now_s)
            case protocol.Stopped():
                if message.generation == this.number and takes_part:
                    node.state = State.STOPPED
            case _:
                self._do(events.Disconnect(node=index))
                self._lose(index, f"it sent {type(message).__name__}, which is not a message of an agent", now_s)

    def _find_missing(self, now_s: float) -> str:
        """Say what the next generation lacks, nodes, or room on a disk that has ended the last one; empty: nothing."""
        num_nodes, at_least, judged = len(self._members.nodes), self._terms.min_nodes, self._generation.judged
        if num_nodes < at_least:
            return f"only {num_nodes} of at least {at_least} nodes"
        is_late = self._capacity_until_s is not None and now_s >= self._capacity_until_s
        needs_room = judged is not None and any(part.needs_room for part in judged.parts)
        full = self._guard.find_full() if needs_room else []
        if is_late:  # with a little room, it is tried
            full = [(node, place) for node, place in full if place.room.is_full]
        return disk.describe_full(full)

    def _note_traffic(self, now_s: float) -> None:
        """Write down what the nodes send and how long steps wait: from time to time, and when that is known better."""
        if now_s < self._next_traffic_s:
            return
        traffic, told = self._guard.traffic, self._told_share
        share = None if traffic is None else traffic.wait_share
        is_news = share is not None and (told is None or abs(share - told) >= SHARE_CHANGE)
        if traffic is not None and (is_news or now_s >= self._traffic_due_s):
            self._traffic_look_s *= 2 if is_news and told is not None else 1
            self._traffic_due_s, self._told_share = now_s + TRAFFIC_EVERY_S, share
            self._record("network", **msgspec.to_builtins(traffic))
        self._next_traffic_s = now_s + min(self._traffic_look_s, TRAFFIC_EVERY_S)

    def _note_lost(self, end: protocol.WorkerEnd, node: str) -> None:
        """Take in that lines of a worker's output could not be written."""
        before, _ = self.lost_lines.pop(end.rank, (0, ""))
        self.lost_lines[end.rank] = before + end.lost_lines, end.lost_why
        self._lost_on.add(node)
        self._record("lines_lost", rank=end.rank, node=node, lines=end.lost_lines, why=end.lost_why)

    def _note_checkpoints(self, *steps: int | None) -> None:
        newest = max((step for step in (self.checkpoint, *steps) if step is not None), default=None)
        if newest != self.checkpoint:
            self.checkpoint, self._kept_s = newest, min(self._stepped_s, self._generation.ended_s)

    def _note_progress(self, beat: NodeBeat) -> None:
        """Take in which checkpoints are complete, and how many steps there will be."""
        self._note_checkpoints(*(rank.checkpoint for rank in beat.ranks))
        for rank in beat.ranks:
            self.total_steps = rank.total_steps or self.total_steps
            if rank.write_s is not None and rank.checkpoint not in (None, self._complete[0]):
                self._complete = rank.checkpoint, self._stepped_s
                self._record("checkpoint", step=rank.checkpoint, write_s=round(rank.write_s, 3), is_verified=True)

    def _take(self, signum: int, now_s: float) -> None:
        """Take in a signal, which SLURM sends to all agents, and ask the scheduler, once, what it means."""
        if signum == SAVE_SIGNAL:
            is_asked = self.interrupted_by is None
        else:
            self.interrupted_by = self.interrupted_by or signum
            self._guard.expect_leaving()  # the job ends in any case: at the latest, after asked_until_s
            is_asked = self.phase is Phase.RUNNING
        if is_asked and signum not in self._signals:
            self._signals.add(signum)
            self._unanswered[signum] = now_s + ANSWER_S
            self._do(events.AskScheduler(signum=signum, can_save=bool(self.steps)))

    def _note_handlers(self, index: int, beat: NodeBeat) -> None:
        alive = [rank for rank in beat.ranks if rank.state is not ProcessState.GONE]
        self._handled[index] = frozenset(signum for rank in alive for signum in rank.handles)
        self._saving.discard(index)
        if any(rank.is_saving for rank in alive):
            self._saving.add(index)
        if signal.SIGTERM in self._handled[index] and not self._has_asked_kill_wait:
            self._has_asked_kill_wait = True
            self._do(events.FindKillWait())

    def _takes_its_time(self, index: int) -> bool:
        """Whether a rank of this node handles the signal that ends it, or saves."""
        handled = self._handled.get(index, frozenset())
        is_told_to_stop = self.interrupted_by is not None  # then agents give their ranks the time, whatever comes next
        return index in self._saving or (is_told_to_stop and not handled.isdisjoint(STOP_SIGNALS))

    def _note_kill_wait(self, kill_wait_s: float) -> None:
        """Say what SLURM leaves ranks that save on SIGTERM, where that is less than they would have otherwise."""
        if max(1.0, kill_wait_s - SPARE_S) < self._terms.shutdown_s:
            self._say(describe_kill_wait(kill_wait_s, spare_s=SPARE_S))

    def _relay(self, index: int, signum: int, now_s: float) -> None:
        """An agent has got a signal that means nothing to the job: ranks that handle it get it, on all nodes."""
        if self._relayed.is_copy(signum, index, now_s):
            return
        name = name_signal(signum)
        if signum == FORWARDED and any(signum in handled for handled in self._handled.values()):
            self._say(f"{name}: passed to the ranks that handle it")
            self._send(Relay(signum=signum), self._members.here)
        else:
            self._say(f"{name}: no rank handles it, and it means nothing to allranks")

    # Connections

    def _admit(self, joined: events.Joined) -> None:
        """An agent has authenticated itself: a member that comes back, or a node for the next generation."""
        card, number, members = joined.card, joined.connection, self._members
        number_now, is_running = self._generation.number, self.phase is Phase.RUNNING
        index = members.take_back(card, joined.address, generation=number_now, may_return=is_running)
        if index is not None:
            self._do(events.Accept(connection=number, node=index))
            if members.nodes[index].state is not State.WAITING:
                self._guard.returned(self._generation.plan.nodes.index(index), joined.now_s)
                self._tell_again(index, card.generation)
            return
        found = members.admit(card) if self._generation.plan.max_restarts > 0 else "the job is not started again"
        if isinstance(found, str):
            self._do(events.Reject(connection=number, reason=found))
            return
        members.nodes[found] = ConnectedNode(card=card, name=card.host, address=joined.address, state=State.WAITING)
        self._do(events.Accept(connection=number, node=found))
        if card.generation >= 0:  # it was given up, and comes back with workers of a generation that goes on without it
            self._send(Stop(signum=signal.SIGTERM), [found])
        self._say(f"{card.host} has joined and waits for the next restart")

    def _tell_again(self, node: int, generation: int) -> None:
        """Send what an agent with workers of this generation may have missed; it ignores what it knows."""
        this = self._generation
        if generation < this.number and node in this.plan.nodes:
            self._send(msgspec.structs.replace(this.plan, node_index=this.plan.nodes.index(node)), [node])
        for message in (this.order, this.stop):
            if message is not None:
                self._send(message, [node])

    def _miss(self, lost: events.Lost) -> None:
        """A connection has ended; a node that the next generation leaves out is lost at once."""
        index, reason, members = lost.node, lost.reason, self._members
        if index not in members.nodes:
            return
        if index in members.waiting:
            self._say(f"{members.name_of(index)} joined, then disconnected")
            members.remove(index)
        elif index in self._generation.decision.without:
            self._lose(index, reason, lost.now_s)
        else:
            self._suspect(index, reason, lost.now_s)
            members.miss(index, reason, lost.now_s + RETURN_S)

    def _suspect(self, index: int, reason: str, now_s: float) -> None:
        """Tell the guard of a lost connection, if that node's workers run."""
        if self.phase is Phase.RUNNING and index in self._members.running:
            self._guard.lost(self._generation.plan.nodes.index(index), reason, now_s)

    def _lose(self, index: int, reason: str, now_s: float) -> None:
        """A node is lost."""
        members = self._members
        name = members.name_of(index)
        self._suspect(index, reason, now_s)
        members.remove(index)
        if not self._is_own_fault:  # else that node is not lost, and asks the run directory whether others go on
            self._record("node_lost", node=name, reason=reason)
        if index not in members.excluded:
            self._do(events.ExpectBack(node=index, name=name))

    def _lose_away(self, now_s: float, *, nodes: Collection[int] | None = None) -> None:
        """Give up the members that are away: these ones, or all that are overdue."""
        for index, away in list(self._members.away.items()):
            if index in nodes if nodes is not None else now_s >= away.until_s:
                self._lose(index, away.reason, now_s)

    # Words to all

    def _pronounce(self, findings: tuple[Finding, ...]) -> None:
        """Print the findings and write them to events.jsonl."""
        for finding in findings:
            names = ("cause", "cause_id", "node", "ranks", "confidence", "message")
            told = {name: getattr(finding, name) for name in names}
            self._record("verdict", generation=self._generation.number, **told)
        self._do(events.Show(findings=findings))
        self.is_said = True

    def _ask(self, ending: Ending, why: str, *, signum: int = 0, until_s: float | None = None) -> None:
        """Order all ranks to save at the same step boundary, and leave."""
        this = self._generation
        this.asked, this.asked_until_s = ending, until_s
        self._record("save_asked", why=why, step=self.furthest)
        self._say(why)
        this.order = Order(at_step=(self.furthest or 0) + 1, why=why, signum=signum)
        self._send(this.order, self._members.here)
