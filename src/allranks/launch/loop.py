"""The one loop of an agent: turns sockets, pidfds, signals and time into events, and effects into deeds.

One thread, one selector. The workers' output is read between two waits, and written by threads that may block
(launch.console). On one node the leader lives in the same loop (launch.lead.driver); if it is lost, on another one.
"""

from __future__ import annotations

import functools
import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from allranks.launch import events
from allranks.launch.agent import Agent, Phase
from allranks.launch.crew import Crew
from allranks.launch.events import GRACE_S, Driver, Effect
from allranks.launch.inbox import SignalInbox
from allranks.launch.lead.outcome import describe_running
from allranks.launch.rendezvous import Rendezvous
from allranks.launch.succession import has_ended
from allranks.launch.workers import Worker, reap_orphans, wait_for_writers
from allranks.model.card import Card
from allranks.model.errors import AllranksError, WireError
from allranks.wire.connection import Connection
from allranks.wire.protocol import Ended, Goodbye, Order, Plan, Try
from allranks.wire.seek import Search

if TYPE_CHECKING:
    from allranks.guard.watch import Watch
    from allranks.launch.lead.driver import LeaderDriver

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
        rendezvous: the connection to the leader, and how to find another one.
        watch: makes what this node tells of its workers.
        gone_s: a silent connection to another leader ends after this time.
        lead: makes this agent the leader, with connections to all agents, by node, its own included; from the first
            generation on with None, else with what the agent knows of the job.
    """

    def __init__(
        self,
        agent: Agent,
        crew: Crew,
        rendezvous: Rendezvous,
        *,
        inbox: SignalInbox,
        watch: Watch,
        gone_s: float,
        lead: Callable[[events.Lead | None, Mapping[int, Connection]], LeaderDriver],
    ) -> None:
        self._agent, self._crew, self._inbox, self._watch = agent, crew, inbox, watch
        self._line, self._acceptor, self._seek = rendezvous.leader, rendezvous.acceptor, rendezvous.seek
        self._gone_s, self._lead = gone_s, lead
        self._search: Search | None = None
        self._joined: dict[int, Connection] = {}
        """Agents that have lost the leader, too, by the descriptor of their connection."""
        self.driver: LeaderDriver | None = None
        """Of the leader, where this agent leads."""
        self._feed = Driver(agent.step, self._carry_out).feed
        self._selector = selectors.DefaultSelector()
        self._num_ended = 0
        self._pulse = Pulse(time.monotonic())
        self._plan_to_start: Plan | None = None
        """While its workers wait for the standby."""

    def run(self) -> Goodbye:
        """Go through all generations of the job and return the leader's last word."""
        agent = self._agent
        self._selector.register(self._inbox, selectors.EVENT_READ, lambda _: None)  # each turn takes the signals
        try:
            self._hear(self._line or self._become_leader(None))
            if self.driver is None and self._acceptor is not None:
                self._acceptor.attach(
                    self._selector,
                    on_peer=self._let_join,
                    on_rejected=lambda *_: None,
                    say=self._crew.say,
                    refuses=lambda: agent.refuses(time.monotonic()),
                )
            self._feed(events.Due(now_s=time.monotonic()))
            self._listen()  # what came together with the Plan
            while agent.phase is not Phase.GONE:
                self._turn()
                if self.driver is not None:
                    self.driver.turn(time.monotonic())
                else:
                    self._look_for_leader(time.monotonic())
            wait_for_writers(WRITERS_S if agent.interrupted_by is None else GRACE_S, self._crew.say)
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
            self._disconnect()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for something to happen, handle it, show new output, do what is due."""
        agent = self._agent
        self._handle_ready(PUMP_S if self._plan_to_start is None else STANDBY_POLL_S)
        while self._handle_ready(0.0):  # the leader in this process hears of all ends before it judges one of them
            pass
        now_s = time.monotonic()
        for signum in self._inbox.take():
            self._feed(events.Signalled(now_s=now_s, signum=signum))
        silent_s = self._pulse.turn(now_s, has_news=self._crew.console.pump())
        if silent_s is not None and self.driver and self._crew.still_running and agent.phase is Phase.WATCHING:
            size, step = agent.plan.world_size, self.driver.leader.furthest
            self._crew.say(describe_running(size, silent_s, has_spoken=self._pulse.has_spoken, step=step))
        reap_orphans(self._crew.workers)
        self._start_when_ready()
        self._feed(events.Due(now_s=now_s))
        has_workers = self._plan_to_start is None and agent.phase is not Phase.GONE
        if has_workers and (beat := self._watch.turn(now_s)) is not None:
            self._feed(events.Observed(now_s=time.monotonic(), beat=beat))

    def _handle_ready(self, timeout_s: float) -> bool:
        """Handle what is ready, or is within the timeout; return whether a worker has ended."""
        num_before = self._num_ended
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        return self._num_ended > num_before

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        crew = self._crew
        match effect:
            case events.Send(message=message):
                if self._line is not None:
                    try:
                        self._line.send(message)
                    except ConnectionError as exc:
                        self._lose(str(exc))
            case events.Disconnect():
                self._disconnect()
            case events.Seek(contacts=contacts):
                self._end_search()
                self._search = self._seek(contacts, self._agent)
            case events.Reject(connection=number):
                self._joined.pop(number).close()
            case events.Lead(joined=joined) if has_ended(crew.run_dir.count_events):
                for each in joined.values():
                    self._joined.pop(each.connection).close()
                self._feed(events.NotFound(now_s=time.monotonic(), reason="the job has ended"))
            case events.Lead():
                self._follow(self._become_leader(effect), self._agent.node)
            case events.Say(text=text):
                crew.say(text)
            case events.Start(plan=plan):
                self._plan_to_start = plan
                self._start_when_ready()
            case events.Signal(signum=signum, ranks=ranks):
                crew.signal(signum, ranks)
            case events.PassOn(order=Order() as order):
                crew.order(order)
            case events.PassOn(order=Try() as order):
                self._watch.order(order, time.monotonic())
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
                left = crew.sweep(SWEEP_GRACE_S, spared=self.driver.started_pids if self.driver is not None else ())
                self._feed(events.Swept(now_s=time.monotonic(), left=tuple(left)))

    def _start_when_ready(self) -> None:
        """Start the workers of a plan; wait for `import torch` in the standby, unless they are to be ended anyway."""
        plan, standby = self._plan_to_start, self._crew.standby
        if plan is None or (standby is not None and standby.is_importing and self._agent.ending is None):
            return
        self._plan_to_start = None
        self._crew.start(plan)
        now_s, generation = time.monotonic(), plan.generation
        watched = self._crew.watched
        self._watch.begin(generation, watched, now_s, node_index=plan.node_index, num_nodes=len(plan.members))
        self._pulse = Pulse(now_s)
        pids = {worker.rank: worker.pid for worker in self._crew.still_running if worker.pid is not None}
        self._feed(events.Started(now_s=now_s, generation=generation, pids=pids))
        # Where this node can be tried, before anything can happen to it.
        self._feed(events.Observed(now_s=now_s, beat=self._watch.beat(now_s)))
        for worker in self._crew.workers:
            report = functools.partial(self._report, worker, generation)
            if worker.end is None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, report)
            else:
                report()

    def _report(self, worker: Worker, generation: int, pidfd: int | None = None) -> None:
        """A worker has ended, or could not be started."""
        if pidfd is not None:
            self._selector.unregister(pidfd)
        end = worker.end or worker.reap()
        self._num_ended += 1
        now_s = time.monotonic()
        if end.exit_code and not end.ended_by_us:  # its last calls, before they are overtaken by its end
            self._feed(events.Observed(now_s=now_s, beat=self._watch.beat(now_s)))
        ended = Ended(end=end, age_s=max(0.0, time.time() - end.time_s), generation=generation)
        self._feed(events.WorkerEnded(now_s=now_s, ended=ended))

    # The connection to the leader

    def _hear(self, line: Connection) -> None:
        """Speak to the leader over this connection from now on."""
        self._line = line
        self._selector.register(line, selectors.EVENT_READ, lambda _: self._listen())

    def _listen(self) -> None:
        if self._line is None:
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
        if self._line is not None:
            self._selector.unregister(self._line)
            self._line.close()
            self._line = None

    def _follow(self, line: Connection, leader: int) -> None:
        """Speak to another leader, or to the same one over another connection, from now on."""
        self._disconnect()
        self._end_search()
        self._hear(line)
        self._feed(events.Found(now_s=time.monotonic(), leader=leader))
        self._listen()  # what came together with the Welcome

    def _become_leader(self, effect: events.Lead | None) -> Connection:
        """Lead the job from now on, and return this agent's line to its leader, which is a socket pair."""
        here, there = socket.socketpair()
        node, name = self._agent.node, self._agent.plan.members[self._agent.plan.node_index].name
        connections = {node: Connection(there, peer=name)}
        if effect is not None:
            assert self._acceptor is not None
            self._acceptor.detach()
            for index, joined in effect.joined.items():
                connections[index] = self._joined.pop(joined.connection)
                connections[index].expect_alive_within(self._gone_s)
        self.driver = self._lead(effect, connections)
        self.driver.attach(self._selector)
        return Connection(here, peer=name)

    # Without a leader

    def _look_for_leader(self, now_s: float) -> None:
        """Do what is due while the leader is lost."""
        if self._acceptor is not None:
            self._acceptor.turn(now_s)
        for number in [number for number, connection in self._joined.items() if _has_ended(connection)]:
            self._joined.pop(number).close()
            self._feed(events.Withdrew(now_s=now_s, connection=number))
        try:
            found = self._search.poll() if self._search is not None else None
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

    def _let_join(self, peer: Connection, card: Card) -> None:
        self._joined[peer.fileno()] = peer
        now_s, address = time.monotonic(), peer.peer_address
        self._feed(events.Joined(now_s=now_s, connection=peer.fileno(), card=card, address=address))


def _has_ended(connection: Connection) -> bool:
    """Whether the other side has closed a connection, which may still hold messages that nobody has read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


class Pulse:
    """When to say that the workers run but write nothing: at growing intervals. Pure.

    Args:
        began_s: monotonic, when they were started.
    """

    FIRST_S = 10.0
    """A script that has written nothing yet: does it run at all?"""
    SPOKEN_S = 300.0
    """A script that has written something: shorter silence between two lines of its own is no news."""
    FACTOR = 6.0
    """Each pause is so many times as long as the one before."""
    LONGEST_S = 3600.0

    def __init__(self, began_s: float) -> None:
        self.has_spoken = False
        """Whether they have written anything."""
        self._pause_s, self._heard_s, self._next_s = self.FIRST_S, began_s, began_s + self.FIRST_S

    def turn(self, now_s: float, *, has_news: bool) -> float | None:
        """Return for how long nothing has been written, where that is worth a line now."""
        if has_news:
            self.has_spoken, self._heard_s = True, now_s
            self._pause_s = max(self._pause_s, self.SPOKEN_S)
            self._next_s = now_s + self._pause_s
        if now_s < self._next_s:
            return None
        self._pause_s = min(self.LONGEST_S, self.FACTOR * self._pause_s)
        self._next_s = now_s + self._pause_s
        return now_s - self._heard_s
