"""The one loop of an agent: turns sockets, pidfds, signals and time into events, and effects into deeds.

One thread, one selector. The workers' output is read between two waits, and written by threads that may block
(launch.console). On one node the leader lives in the same loop (launch.lead.driver); if it is lost, on another one.
"""

from __future__ import annotations

import contextlib
import functools
import select
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from allranks.guard.node.gpus import GpuMeter
from allranks.guard.node.heartbeat import WorkerWatch
from allranks.host.net import listens
from allranks.launch import events
from allranks.launch.agent import Agent, AgentPhase
from allranks.launch.events import GRACE_S, Effect
from allranks.launch.inbox import SignalInbox
from allranks.launch.knocking import Knocking
from allranks.launch.lines import ConnectionDriver
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.room import RoomWatch
from allranks.launch.succession import find_end, find_events, why_not_lead
from allranks.launch.worker_group import WorkerGroup
from allranks.launch.workers import Worker, age, reap_orphans, wait_for_writers
from allranks.model.beat import NodeBeat
from allranks.model.errors import AllranksError, UsageError
from allranks.preflight.called import Rendezvous
from allranks.preflight.datapath import LOOPBACK
from allranks.preflight.meeting import announce_leader
from allranks.report.runs import describe_kill
from allranks.report.text import say
from allranks.wire.connection import Connection
from allranks.wire.leader_port import Hint, bind_port
from allranks.wire.protocol import Contact, Goodbye, Order, Plan, Stop, Try, WorkerEnd
from allranks.wire.seek import Search

if TYPE_CHECKING:
    from allranks.launch.lead.driver import LeaderDriver
    from allranks.launch.lead.leader import Leader

PUMP_S = 0.05
"""How often new output is shown."""
STANDBY_POLL_S = 0.005
"""How often a standby is asked whether torch is imported, while workers wait for it."""
WRITERS_S = 60.0
"""For checkpoints that are still being written when all is over."""
KEEP_S = 1.0
"""For the last calls and stacks of this node's workers, before they are ended."""
SWEEP_GRACE_S = 0.5
SRUN_S = 1.0
"""For the machine of srun to accept a connection."""
ROOM_S = 0.05
"""For the file system of the run directory to answer, when a worker has failed: was there room?"""


class Loop:
    """Drives this node's agent until its job is over, and the leader, where it is this one.

    Args:
        rendezvous: the group, and the connections to it; they are this loop's.
        scheduler: the leader asks it; None outside of SLURM.
    """

    def __init__(
        self, workers: WorkerGroup, rendezvous: Rendezvous, *, inbox: SignalInbox, scheduler: Scheduler | None
    ) -> None:
        self.workers, self.rendezvous, self.inbox, self.scheduler = workers, rendezvous, inbox, scheduler
        shutdown_s, is_slurm = workers.job.request.shutdown_s, scheduler is not None
        self.agent = Agent(rendezvous.group, now_s=time.monotonic(), shutdown_s=shutdown_s, is_slurm=is_slurm)
        self.leader: Leader | None = None
        """Where this agent leads."""
        self.driver: LeaderDriver | None = None
        self.began_s = time.monotonic()
        told = workers.run_dir.read_events() if rendezvous.group.generation else []  # it may be back from a loss
        self.times_lost = len(find_events(told, "node_lost", node=self.name))
        plan, address = workers.job, rendezvous.own_address or LOOPBACK
        self.rooms = RoomWatch(workers.run_dir)
        """Goes on after `run`: the last files of a job may need the room that it keeps."""
        self._watch = WorkerWatch(
            plan.guard,
            data_address=plan.data_path.address if plan.data_path else address,
            control_address=address,
            further=rendezvous.group.own_interfaces[1:],
            see_room=self.rooms.seen,
            see_full=workers.places.full,
            gpus=GpuMeter(workers.env) if plan.facts.num_gpus else None,
        )
        self._search: Search | None = None
        self._knocking: Knocking | None = None
        """At the machine of a lost leader, where it must be proven that only its agent has ended."""
        self._selector = selectors.DefaultSelector()
        self._lines = ConnectionDriver(self._step, self._carry_out, self._selector)
        self._feed = self._lines.feed
        self._num_ended = 0
        self._holds: dict[int, events.EndingFacts] = {}
        """What the agent was told last of how its workers are to be ended."""
        self._plan_to_start: Plan | None = None
        """While its workers wait for the standby."""

    @property
    def name(self) -> str:
        """Of this node."""
        return self.agent.plan.members[self.agent.plan.node_index].name

    @property
    def _is_beside_srun(self) -> bool:
        srun = self.agent.plan.srun
        return self.driver is not None and srun is not None and srun.node == self.agent.node

    def run(self) -> Goodbye:
        """Go through all generations of the job and return the leader's last word."""
        agent, acceptor = self.agent, self.rendezvous.acceptor
        self._selector.register(self.inbox, selectors.EVENT_READ, lambda _: None)  # each turn takes the signals
        try:
            self._lines.add(0, self.rendezvous.leader or self._lead())
            if self.driver is None and acceptor is not None:
                acceptor.attach(
                    self._selector,
                    on_peer=self._lines.join,
                    on_rejected=lambda _: None,
                    say=say,
                    refuses=lambda: agent.refuses(time.monotonic()),
                )
            self._feed(events.Due(now_s=time.monotonic()))
            self._lines.listen(0)  # what came together with the Plan
            while agent.phase is not AgentPhase.GONE:
                self._turn()
                if acceptor is not None:
                    acceptor.turn(time.monotonic())
                if self.driver is not None:
                    self.driver.turn(time.monotonic())
                elif agent.succession is not None:
                    self._look_for_leader(time.monotonic())
                else:
                    self._end_search()  # this agent has given up
            wait_for_writers(WRITERS_S if agent.interrupted_by is None else max(GRACE_S, agent.left_s), say)
            assert agent.goodbye is not None
            return agent.goodbye
        finally:
            self.workers.close()
            self._watch.close()
            self._end_search()
            if self.driver is not None:
                self.driver.close()
            if acceptor is not None and self._is_beside_srun:
                # Others take a closed port for the proof that this agent has ended (launch.succession): it closes with
                # this process, when events.jsonl says how the job has ended.
                acceptor.detach()
            elif acceptor is not None:
                acceptor.close()
            self._lines.close()
            self._selector.close()
            if self.rendezvous.listener is not None:
                self.rendezvous.listener.close()

    def _turn(self) -> None:
        """Wait for something to happen, handle it, show new output, do what is due."""
        agent = self.agent
        self._handle_ready(PUMP_S if self._plan_to_start is None else STANDBY_POLL_S)
        while self._handle_ready(0.0):  # the leader in this process hears of all ends before it judges one of them
            pass
        now_s = time.monotonic()
        self._sense(now_s)
        for signum in self.inbox.take():
            self._feed(events.Signalled(now_s=now_s, signum=signum))
        if self.workers.console.pump():
            self.workers.live.hear(now_s)
        if self.leader is not None:
            self.workers.live.tell(self.workers.run_dir.status_files.newest)
            self.workers.live.turn(now_s)
        reap_orphans(self.workers.processes)
        for worker in self.workers.still_running:
            if end := worker.find_lingering(time.monotonic_ns(), main_at=self._watch.place_of(worker.rank)):
                self._tell_end(events.WorkerFailed, end, agent.plan.generation)
        self._start_when_ready()
        self._feed(events.Due(now_s=now_s))
        has_workers = self._plan_to_start is None and agent.phase is not AgentPhase.GONE
        if has_workers and (beat := self._watch.turn(now_s)) is not None:
            self._tell_beat(beat)

    def _sense(self, now_s: float) -> None:
        """Tell the agent which signals the workers handle, and who saves, where that has changed."""
        if self._plan_to_start is None and (holds := self.workers.sense()) != self._holds:
            self._holds = holds
            self._feed(events.Sensed(now_s=now_s, ranks=holds))

    def _handle_ready(self, timeout_s: float) -> bool:
        """Handle what is ready, or is within the timeout; return whether a worker has ended."""
        num_before = self._num_ended
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        return self._num_ended > num_before

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        workers = self.workers
        match effect:
            case events.Seek(contacts=contacts):
                self._seek(contacts)
            case events.Reject(connection=number):
                self._lines.joined.pop(number).close()
            case events.Lead():
                self._succeed(effect)
            case events.Say(text=text):
                say(text)
            case events.Start(plan=plan):
                self._plan_to_start = plan
                with contextlib.suppress(UsageError):  # the workers' start says it
                    folder = workers.run_dir.create_node(plan.members[plan.node_index].name)
                    self.rooms.begin(folder, [member.name for member in plan.members], plan.node_index)
                self._start_when_ready()
            case events.Signal(signum=signum, ranks=ranks):
                workers.signal(signum, ranks)
            case events.Forward(signum=signum, ranks=ranks, ends=ends):
                workers.forward(signum, ranks, ends=ends)
            case events.PassOn(order=Order() as order):
                workers.order(order)
            case events.PassOn(order=Try() as order):
                self._watch.order(order, time.monotonic())
            case events.KeepEvidence():
                with contextlib.suppress(OSError):
                    self._watch.keep(workers.run_dir.hold_node(self.name), within_s=KEEP_S)
                workers.console.drop_tracebacks()
            case events.WriteBook():
                workers.write_book(self._watch.book.pack())
            case events.PrepareStandby():
                workers.prepare_standby()
            case events.Mute():
                workers.console.mute("err")
            case events.Sweep():
                # What they did last, also of those that ended well.
                self._tell_beat(self._watch.beat(time.monotonic()))
                # Processes that bring nodes back are descendants of this one, but no workers' left-overs.
                revivals = self.driver.revivals.pids if self.driver is not None else ()
                left = workers.sweep(SWEEP_GRACE_S, spared=revivals)
                self._feed(events.Swept(now_s=time.monotonic(), left=tuple(left)))

    def _start_when_ready(self) -> None:
        """Start the workers of a plan; wait for `import torch` in the standby, unless they are to be ended anyway."""
        plan, standby = self._plan_to_start, self.workers.standby
        if plan is None or (standby is not None and standby.is_importing and self.agent.ending is None):
            return
        self._plan_to_start = None
        refused: list[WorkerEnd] = []
        try:
            self.workers.start(plan, interface=self.rendezvous.interface)
        except UsageError as exc:
            refused = self.workers.refuse(plan, str(exc))
        now_s, generation = time.monotonic(), plan.generation
        sizes = {"num_nodes": len(plan.members), "num_ranks": plan.world_size}
        self._watch.begin(generation, self.workers.watch(), now_s, node_index=plan.node_index, **sizes)
        self.workers.live.begin(now_s)
        pids = {worker.rank: worker.pid for worker in self.workers.still_running}
        self._feed(events.Started(now_s=now_s, generation=generation, pids=pids))
        # Where this node can be tried, before anything can happen to it.
        self._tell_beat(self._watch.beat(now_s))
        for worker in self.workers.processes:
            report = functools.partial(self._report, worker, generation)
            if worker.end is None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, report)
            else:
                report()
        for end in refused:
            self._tell_end(events.WorkerEnded, end, generation)

    def _report(self, worker: Worker, generation: int, pidfd: int | None = None) -> None:
        """A worker has ended, or could not be started."""
        self._watch.note_end(worker.rank)
        if pidfd is not None:
            self._selector.unregister(pidfd)
        self._num_ended += 1
        self._tell_end(events.WorkerEnded, worker.end or worker.reap(), generation)

    def _tell_beat(self, beat: NodeBeat) -> None:
        """Tell how this node is. The leader compares clocks by it, so the time is that of the beat's own clock."""
        self._feed(events.Observed(now_s=self._watch.looked_s, beat=beat))

    def _tell_end(self, event: type[events.WorkerEnded | events.WorkerFailed], end: WorkerEnd, generation: int) -> None:
        now_s = time.monotonic()
        if end.exit_code and not end.ended_by_us:  # its last calls, before they are overtaken by its end
            self.workers.places.look(end, ROOM_S)
            self.rooms.look(ROOM_S)
            self._tell_beat(self._watch.beat(now_s))
        self._feed(event(now_s=now_s, ended=age(end, generation)))

    def _step(self, event: events.Event) -> list[Effect]:
        """Have the agent take in an event; before it ends its workers after a fault, it tells which have failed."""
        effects: list[Effect] = []
        if isinstance(event, events.Heard) and isinstance(event.message, Stop) and event.message.grace_s is not None:
            for worker in self.workers.still_running:
                if (end := worker.failed_already()) is not None:
                    ended = age(end, self.agent.plan.generation)
                    effects += self.agent.step(events.WorkerFailed(now_s=event.now_s, ended=ended))
        return effects + self.agent.step(event)

    # The leader

    def _follow(self, line: Connection, leader: int) -> None:
        """Speak to another leader, or to the same one over another connection, from now on."""
        self._end_search()
        self._lines.add(0, line)
        self._feed(events.LeaderFound(now_s=time.monotonic(), leader=leader))
        self._lines.listen(0)

    def _lead(self, lead: events.Lead | None = None) -> Connection:
        """Lead the job from now on, and return this agent's line to its leader, which is a socket pair.

        Args:
            lead: what the agent knows of a job that another one has led; None: the job begins.
        """
        # Here, since only a leader's node needs all that the leader needs.
        from allranks.launch.lead.driver import LeaderDriver, make_leader

        workers, rendezvous = self.workers, self.rendezvous
        if lead is not None:
            assert rendezvous.acceptor is not None
            rendezvous.acceptor.detach()
            rendezvous.listener, peers = bind_port(workers.job.port), {}
            cards = {self.agent.node: msgspec.structs.replace(rendezvous.card, generation=lead.plan.generation)}
            for index, joined in lead.joined.items():
                cards[index], peers[index] = joined.card, self._lines.joined.pop(joined.connection)
                peers[index].expect_alive_within(workers.job.guard.gone_s)
            rendezvous = replace(rendezvous, group=lead.plan, cards=cards, peers=peers)
        listener = rendezvous.listener
        assert listener is not None
        port = int(listener.getsockname()[1])
        self.leader = leader = make_leader(
            workers.job, rendezvous, run_dir=workers.run_dir, store_port=port, takes_over=lead is not None
        )
        if workers.env.get("ALLRANKS_HOOK") != "0" and workers.job.request.container is None:
            workers.store_fd = listener.fileno()
        else:
            listener.close()  # rank 0 binds the port itself; between here and there it is free for anybody
        if lead is not None:
            announce_leader(rendezvous.applicant, port, side_port=rendezvous.card.agent_port)
            leader.take_over(lead.lost, time.monotonic(), has_resigned=lead.has_resigned)
            workers.make_owner(generation=lead.plan.generation + 1).begin_later()
        here, there = socket.socketpair()
        connections = {self.agent.node: Connection(there, peer=self.name), **rendezvous.peers}
        acceptor, selector = rendezvous.acceptor, self._selector
        self.driver = LeaderDriver(
            leader, workers, self.scheduler, selector=selector, connections=connections, acceptor=acceptor
        )
        return Connection(here, peer=self.name)

    # Without a leader

    def _succeed(self, lead: events.Lead) -> None:
        """Lead, unless the run directory says that nobody may, or srun is lost with the leader."""
        told, (node, reason) = self.workers.run_dir.read_events(), lead.lost
        why = why_not_lead(told, self.agent.leader_name)
        srun = self.agent.succession.srun if self.agent.succession is not None else None
        # Asked once, by one agent: srun prints `Zero Bytes were transmitted or received`.
        if why is None and srun is not None and not listens(srun.address, srun.port, within_s=SRUN_S):
            why = "srun does not answer"
        if why is not None:
            for joined in lead.joined.values():
                self._lines.joined.pop(joined.connection).close()
            self._feed(events.NotFound(now_s=time.monotonic(), reason=why))
            return
        if (ended := find_end(told, self.agent.leader_name)) is not None:
            lead = msgspec.structs.replace(lead, lost=(node, f"{reason}; killed by {describe_kill(ended)}"))
        self._follow(self._lead(lead), self.agent.node)

    def _look_for_leader(self, now_s: float) -> None:
        """Do what is due while the leader is lost."""
        ended = select.poll()  # not the selector: what they have sent stays unread until this agent leads
        for number in self._lines.joined:
            ended.register(number, select.POLLRDHUP)
        for number, _ in ended.poll(0):
            self._lines.joined.pop(number).close()
            self._feed(events.Withdrew(now_s=now_s, connection=number))
        if self._knocking is not None and (answer := self._knocking.poll()) is not None:
            self._feed(events.Knocked(now_s=now_s, listens=answer.listens))
        try:
            found = self._search.poll() if self._search is not None else None
        except AllranksError as exc:
            self._end_search()
            self._feed(events.NotFound(now_s=now_s, reason=str(exc)))
            return
        if found is not None:
            self._search = None
            line, hint = found
            line.expect_alive_within(self.workers.job.guard.gone_s)
            self._follow(line, hint.node)

    def _seek(self, contacts: Sequence[Contact]) -> None:
        """Begin to look for a leader at these agents."""
        self._end_search()
        own, agent = self.rendezvous.acceptor, self.agent
        assert own is not None
        known = {"node_index": agent.node, "attempt": own.attempt, "generation": agent.plan.generation}
        card = msgspec.structs.replace(self.rendezvous.card, **known)
        hints = [
            [Hint(address, contact.port, source=f"agent on {contact.name}", node=contact.node)]
            for contact in contacts
            for address in dict.fromkeys(filter(None, (contact.control_address, contact.data_address)))
        ]
        self._search = Search(lambda: hints, job=own.job, secret=lambda: own.secret, card=card)
        if agent.succession is not None and agent.succession.srun is not None:
            leader = agent.succession.leader
            self._knocking = Knocking(next(heir for heir in agent.plan.successors if heir.node == leader))

    def _end_search(self) -> None:
        for search in (self._knocking, self._search):
            if search is not None:
                search.stop()
        self._knocking = self._search = None
