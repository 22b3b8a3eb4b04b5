"""The one loop of an agent: turns sockets, pidfds, signals and time into events, and effects into deeds.

One thread, one selector. The workers' output is read between two waits, and written by threads that may block
(launch.screen). On one node the leader lives in the same loop (launch.lead.driver); if it is lost, on another one.
"""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from allranks.launch import events
from allranks.launch.agent import Agent, Phase
from allranks.launch.crew import Crew
from allranks.launch.events import GRACE_S, SAVE_SIGNAL, Driver, Effect
from allranks.launch.inbox import SignalInbox
from allranks.launch.lead.outcome import describe_running
from allranks.launch.pulse import Pulse
from allranks.launch.workers import Worker, reap_orphans
from allranks.model.card import Card
from allranks.model.errors import AllranksError, WireError
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.protocol import Contact, Goodbye, Plan, WorkerEnd
from allranks.wire.seek import Search

if TYPE_CHECKING:
    from allranks.guard.watch import Watch
    from allranks.launch.lead.driver import LeaderDriver
    from allranks.launch.lead.progress import Progress

PUMP_S = 0.05
"""How often new output is shown."""
STANDBY_POLL_S = 0.005
"""How often a standby is asked whether torch is imported, while workers wait for it."""
WRITERS_S = 60.0
"""For checkpoints that are still being written when all is over."""
KEEP_S = 1.0
"""For the last calls and stacks of this node's workers, before they are ended."""
SWEEP_GRACE_S = 0.5


class Loop:
    """Drives an agent until its job is over.

    Args:
        agent: the reducer.
        crew: starts and ends its workers.
        line: the connection to the leader; on the leader's own node it is a socket pair.
        inbox: signals.
        watch: makes what this node tells of its workers.
        gone_s: a silent connection to another leader ends after this time.
        acceptor: accepts agents that have lost the leader; None: nobody can succeed it.
        seek: begins to look for a leader at these agents, for workers of this generation.
        lead: makes this agent the leader, with these connections, by node, and its own.
    """

    def __init__(
        self,
        agent: Agent,
        crew: Crew,
        line: Connection,
        *,
        inbox: SignalInbox,
        watch: Watch,
        gone_s: float,
        acceptor: Acceptor | None = None,
        seek: Callable[[Sequence[Contact], Agent], Search] | None = None,
        lead: Callable[[events.Lead, Mapping[int, Connection]], LeaderDriver] | None = None,
    ) -> None:
        self._agent, self._crew, self._line, self._inbox, self._watch = agent, crew, line, inbox, watch
        self._gone_s, self._acceptor, self._seek, self._lead = gone_s, acceptor, seek, lead
        self._search: Search | None = None
        self._joined: dict[int, Connection] = {}
        """Agents that have lost the leader, too, by the number that this agent answers with."""
        self._num_joined = 0
        self.driver: LeaderDriver | None = None
        """Of the leader, where this agent leads."""
        self._feed = Driver(agent.step, self._carry_out).feed
        self._selector = selectors.DefaultSelector()
        self._num_signals = self._num_ended = 0
        self._has_saved = False
        self._pulse = Pulse(time.monotonic())
        self._plan_to_start: Plan | None = None
        """While its workers wait for the standby."""
        self._silent_s: float | None = None
        """For how long the workers here have written nothing, when that is worth a line."""

    def run(self, driver: LeaderDriver | None) -> Goodbye:
        """Go through all generations of the job and return the leader's last word.

        Args:
            driver: on the leader's node, of the other half of this process.
        """
        selector, agent, self.driver = self._selector, self._agent, driver
        selector.register(self._inbox, selectors.EVENT_READ, lambda _: self._inbox.clear())
        selector.register(self._line, selectors.EVENT_READ, lambda _: self._listen())
        try:
            if driver is not None:
                driver.attach(selector)
            elif self._acceptor is not None:
                self._acceptor.attach(
                    selector,
                    on_peer=self._let_join,
                    on_rejected=lambda _: None,
                    say=self._crew.say,
                    refuses=lambda: agent.refuses(time.monotonic()),
                )
            for effect in agent.begin():
                self._carry_out(effect)
            self._listen()  # what came together with the Plan
            while agent.phase is not Phase.GONE:
                self._turn()
                if self.driver is not None:
                    self.driver.turn(time.monotonic())
                    self._tell_silence(self.driver.leader.progress)
                else:
                    self._look_for_leader(time.monotonic())
            self._crew.wait_for_writers(WRITERS_S if agent.interrupted_by is None else GRACE_S)
            assert agent.goodbye is not None
            return agent.goodbye
        finally:
            self._crew.close()
            self._watch.close()
            self._end_search()
            for connection in self._joined.values():
                connection.close()
            if self.driver is not None:
                self.driver.close()
            elif self._acceptor is not None:
                self._acceptor.close()
            self._line.close()
            selector.close()

    def _turn(self) -> None:
        """Wait for something to happen, handle it, show new output, do what is due."""
        self._handle_ready(PUMP_S if self._plan_to_start is None else STANDBY_POLL_S)
        while self._handle_ready(0.0):  # the leader in this process hears of all ends before it judges one of them
            pass
        now_s = time.monotonic()
        if self._inbox.has_to_save and not self._has_saved:
            self._has_saved = True
            self._feed(events.Signalled(now_s=now_s, signum=SAVE_SIGNAL))
        for signum in self._inbox.received[self._num_signals :]:
            self._num_signals += 1
            self._feed(events.Signalled(now_s=now_s, signum=signum))
        self._silent_s = self._pulse.turn(now_s, has_news=self._crew.console.pump())
        reap_orphans(self._crew.workers)
        self._start_when_ready()
        self._feed(events.Due(now_s=now_s))
        is_running = self._plan_to_start is None and self._agent.phase not in (Phase.WAITING, Phase.GONE)
        if is_running and (beat := self._watch.turn(now_s)) is not None:
            self._feed(events.Observed(now_s=time.monotonic(), beat=beat))

    def _handle_ready(self, timeout_s: float) -> bool:
        """Handle what is ready, or is within the timeout; return whether a worker has ended."""
        num_before = self._num_ended
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        return self._num_ended > num_before

    def _tell_silence(self, progress: Progress) -> None:
        """Say that the workers run, where they have written nothing here for a while."""
        if self._silent_s is not None and self._crew.still_running and self._agent.phase is Phase.WATCHING:
            size, has_spoken = self._agent.plan.world_size, self._pulse.has_spoken
            self._crew.say(describe_running(size, self._silent_s, has_spoken=has_spoken, step=progress.step))

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        crew = self._crew
        match effect:
            case events.Send(message=message):
                if self._line.fileno() >= 0:
                    try:
                        self._line.send(message)
                    except ConnectionError as exc:
                        self._lose(str(exc))
            case events.Disconnect():
                self._disconnect()
            case events.Seek(contacts=contacts):
                assert self._seek is not None
                self._end_search()
                self._search = self._seek(contacts, self._agent)
            case events.Reject(connection=number):
                self._joined.pop(number).close()
            case events.Lead():
                self._become_leader(effect)
            case events.Say(text=text):
                crew.say(text)
            case events.Start(plan=plan):
                self._plan_to_start = plan
                self._start_when_ready()
            case events.Signal(signum=signum, ranks=ranks):
                crew.signal(signum, ranks)
            case events.GiveOrder(order=order):
                crew.order(order)
            case events.MakeTries(order=tries):
                self._watch.order(tries, time.monotonic())
            case events.KeepEvidence():
                plan = self._agent.plan
                directory = crew.run_dir.node_path(plan.members[plan.node_index].name)
                self._watch.keep(directory, within_s=KEEP_S)
                crew.console.drop_tracebacks()
            case events.PrepareStandby():
                crew.prepare_standby()
            case events.Mute():
                crew.console.mute("err")
            case events.Sweep():
                left = crew.sweep(grace_s=SWEEP_GRACE_S)
                self._feed(events.Swept(now_s=time.monotonic(), left=tuple(left)))

    def _start_when_ready(self) -> None:
        """Start the workers of a plan; wait for `import torch` in the standby, unless they are to be ended anyway."""
        plan = self._plan_to_start
        if plan is not None and (self._agent.is_ending or not self._crew.is_waiting):
            self._plan_to_start = None
            self._start(plan)

    def _start(self, plan: Plan) -> None:
        self._crew.start(plan)
        now_s, generation = time.monotonic(), plan.generation
        num_nodes = len(plan.members)
        self._watch.begin(generation, self._crew.watched, now_s, node_index=plan.node_index, num_nodes=num_nodes)
        self._pulse = Pulse(now_s)
        running = self._crew.still_running
        pids = {worker.rank: worker.pid for worker in running if worker.pid is not None}
        self._feed(events.Started(now_s=now_s, generation=generation, pids=pids))
        # Where this node can be tried, before anything can happen to it.
        self._feed(events.Observed(now_s=now_s, beat=self._watch.beat(now_s)))
        for worker in self._crew.workers:
            if worker.end is None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, self._reaper_of(worker, generation))
            else:
                self._report(worker.end, generation)

    def _reaper_of(self, worker: Worker, generation: int) -> Callable[[object], None]:
        def reap(fd: object) -> None:
            self._selector.unregister(fd)  # type: ignore[arg-type]
            self._report(worker.reap(), generation, is_finished=worker.is_finished)

        return reap

    def _report(self, end: WorkerEnd, generation: int, *, is_finished: bool = False) -> None:
        self._num_ended += 1
        now_s = time.monotonic()
        if end.exit_code and not end.ended_by_us:  # its last calls, before they are overtaken by its end
            self._feed(events.Observed(now_s=now_s, beat=self._watch.beat(now_s)))
        age_s = max(0.0, time.time() - end.time_s)
        self._feed(
            events.WorkerEnded(now_s=now_s, generation=generation, end=end, age_s=age_s, is_finished=is_finished)
        )

    # The connection to the leader

    def _listen(self) -> None:
        if self._line.fileno() < 0:
            return
        try:
            messages = self._line.receive()
            self._line.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(str(exc))
            return
        for message in messages:
            self._feed(events.Heard(now_s=time.monotonic(), message=message))

    def _lose(self, reason: str) -> None:
        self._disconnect()
        self._feed(events.Lost(now_s=time.monotonic(), reason=reason))

    def _disconnect(self) -> None:
        if self._line.fileno() >= 0:
            self._selector.unregister(self._line)
            self._line.close()

    def _follow(self, line: Connection, leader: int) -> None:
        """Speak to another leader, or to the same one over another connection, from now on."""
        self._disconnect()
        self._end_search()
        self._line = line
        self._selector.register(line, selectors.EVENT_READ, lambda _: self._listen())
        self._feed(events.Found(now_s=time.monotonic(), leader=leader))
        if line.has_unread:
            self._listen()

    # Without a leader

    def _look_for_leader(self, now_s: float) -> None:
        """Do what is due while the leader is lost."""
        if self._acceptor is not None:
            self._acceptor.turn(now_s)
        for number in [number for number, connection in self._joined.items() if _has_ended(connection)]:
            self._joined.pop(number).close()
            self._feed(events.Withdrew(now_s=now_s, connection=number))
        if self._search is None:
            return
        try:
            found = self._search.poll()
        except AllranksError as exc:
            self._end_search()
            self._feed(events.NotFound(now_s=now_s, reason=str(exc)))
            return
        if found is not None:
            self._search = None
            line, hint = found
            line.expect_alive_within(self._gone_s)
            self._follow(line, hint.node)

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.stop()
            self._search = None

    def _let_join(self, connection: Connection, card: Card) -> None:
        self._num_joined += 1
        self._joined[self._num_joined] = connection
        self._feed(
            events.Joined(
                now_s=time.monotonic(), connection=self._num_joined, card=card, address=connection.peer_address
            )
        )

    def _become_leader(self, effect: events.Lead) -> None:
        """The other agents' connections are the leader's from now on; this agent speaks to it through a socket pair."""
        assert self._lead is not None
        assert self._acceptor is not None
        self._acceptor.detach()
        here, there = socket.socketpair()
        node, name = self._agent.node, self._agent.plan.members[self._agent.plan.node_index].name
        connections = {index: self._joined.pop(number) for index, number in effect.connections.items()}
        for connection in connections.values():
            connection.expect_alive_within(self._gone_s)
        self.driver = self._lead(effect, {node: Connection(there, peer=name), **connections})
        self.driver.attach(self._selector)
        self._follow(Connection(here, peer=name), node)


def _has_ended(connection: Connection) -> bool:
    """Whether the other side has closed a connection, which may still hold messages that nobody has read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
