"""Appoint a leader and drive it: turn its connections and time into events, and its effects into deeds.

Agents that join while the job runs (their node is back, or was late) connect to the side port that the announcement in
the run directory names, since rank 0's store now has the port of the roll call. They authenticate as in the roll call.
What may wait for a file server or for SLURM runs in a thread of its own, and its result is an event.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.end import print_findings
from allranks.launch.events import Driver, Effect, Event
from allranks.launch.lead.course import Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import Node
from allranks.launch.plan import LOOPBACK, JobPlan
from allranks.launch.queue import ending
from allranks.launch.queue.revival import Revivals
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.rendezvous import Rendezvous
from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.model.finding import Finding
from allranks.preflight.rollcall import close_when_sent
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.state.saved.manifest import parse_final
from allranks.wire.accept import Acceptor, Reject, turn_away
from allranks.wire.connection import Connection

TOLD_AGAIN_S = 60.0
"""How often the same host is reported as rejected for the same reason."""


@dataclass(slots=True)
class LeaderDriver:
    """Owns the connections to all agents, and the side port."""

    leader: Leader
    connections: dict[int, Connection]
    """To all agents that are here, by their index in the job."""
    acceptor: Acceptor | None
    """Accepts the agents that join while the job runs; None: nobody is accepted."""
    gone_s: float
    """A silent connection of such an agent ends after this time."""
    checkpoints: Path
    """Where `allranks.session()` saves."""
    say: Callable[[str], None]
    show: Callable[[Sequence[Finding]], None]
    on_event: Callable[..., None]
    """Writes to events.jsonl."""
    on_signal: Callable[..., ending.Decision]
    """Decides what a signal means for the job, given `can_save`; it may take seconds."""
    reviver: Revivals | None = None
    """Starts lost agents again; None outside of SLURM."""
    node_names: Sequence[str] = ()
    """By index, as the scheduler calls them."""
    _joining: dict[int, Connection] = field(default_factory=dict)
    """Authenticated, by their descriptors, until the leader answers."""
    _told_s: dict[tuple[str, Reject], float] = field(default_factory=dict)
    """Host and reason of the rejected peers that were reported lately, and when."""
    _answers: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _feed: Callable[[Event], None] = field(init=False)
    _selector: selectors.BaseSelector = field(init=False)

    def __post_init__(self) -> None:
        self._feed = Driver(self.leader.step, self._carry_out).feed

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Let the agent's selector watch all connections; it calls `key.data(fileobj)`."""
        self._selector = selector
        for node, connection in list(self.connections.items()):
            self._watch(node, connection)
        if self.acceptor is not None:
            self.acceptor.attach(selector, on_peer=self._join, on_rejected=self._tell_rejected, say=self.say)

    def turn(self, now_s: float) -> None:
        """Do what is due; the agent's loop calls it between two waits."""
        if self.acceptor is not None:
            self.acceptor.turn(now_s)
        with contextlib.suppress(queue.Empty):
            while True:
                self._feed(msgspec.structs.replace(self._answers.get_nowait(), now_s=now_s))
        self._feed(events.Due(now_s=now_s))
        for text in self.reviver.turn(now_s) if self.reviver is not None else ():
            self.say(text)

    @property
    def started_pids(self) -> list[int]:
        """Of the processes that bring nodes back: they are descendants of this process, but no workers' left-overs."""
        return self.reviver.pids if self.reviver is not None else []

    def close(self) -> None:
        """Give slow agents a moment to receive their last message, and close all connections."""
        close_when_sent(self.connections.values())
        if self.acceptor is not None:
            self.acceptor.close()
        if self.reviver is not None:
            self.reviver.close()

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Send(node=node, message=message):
                if (connection := self.connections.get(node)) is not None:
                    try:
                        connection.send(message)
                    except ConnectionError as exc:
                        self._lose(node, str(exc))
            case events.Disconnect(node=node):
                self._disconnect(node)
            case events.Accept(connection=number, node=node):
                self._disconnect(node)  # the agent has noticed first that it was lost
                connection = self.connections[node] = self._joining.pop(number)
                connection.expect_alive_within(self.gone_s)
                self._watch(node, connection)
            case events.Reject(connection=number, reason=reason):
                turn_away(self._joining.pop(number), reason)
            case events.Say(text=text):
                self.say(text)
            case events.Show(findings=findings):
                self.show(findings)
            case events.Record(event=event, fields=fields):
                self.on_event(event, **fields)
            case events.ExpectBack(node=node, name=name):
                if self.reviver is not None:
                    self.reviver.expect(self.node_names[node] if self.node_names else name, node)
            case events.AskScheduler(signum=signum, can_save=can_save):
                self._answer_later(
                    lambda: events.Meant(now_s=0.0, signum=signum, decision=self.on_signal(signum, can_save=can_save))
                )
            case events.FindCheckpoint():
                self._answer_later(lambda: events.CheckpointFound(now_s=0.0, step=find_checkpoint(self.checkpoints)))

    def _answer_later(self, look: Callable[[], Event]) -> None:
        """Look something up in a thread; the leader does not wait for ever, and gets it at the time of a turn."""
        run = lambda: self._answers.put(look())  # noqa: E731
        threading.Thread(target=run, name="allranks-leader-look", daemon=True).start()

    # Connections

    def _watch(self, node: int, connection: Connection) -> None:
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._listen(node, connection))
        self._listen(node, connection)  # what came together with the Join

    def _listen(self, node: int, connection: Connection) -> None:
        if self.connections.get(node) is not connection:
            return
        try:
            messages = connection.receive()
            connection.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(node, str(exc))
            return
        for message in messages:
            self._feed(events.Heard(now_s=time.monotonic(), node=node, message=message))

    def _lose(self, node: int, reason: str) -> None:
        self._disconnect(node)
        self._feed(events.Lost(now_s=time.monotonic(), node=node, reason=reason))

    def _disconnect(self, node: int) -> None:
        if (connection := self.connections.pop(node, None)) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()

    def _join(self, peer: Connection, card: Card) -> None:
        self._joining[peer.fileno()] = peer
        self._feed(events.Joined(now_s=time.monotonic(), connection=peer.fileno(), card=card, address=peer.peer))

    def _tell_rejected(self, why: Reject, host: str, text: str) -> None:
        now_s, key = time.monotonic(), (host, why)
        self._told_s = {each: told_s for each, told_s in self._told_s.items() if now_s - told_s < TOLD_AGAIN_S}
        if why is not Reject.SILENT and key not in self._told_s:
            self._told_s[key] = now_s
            self.say(text)


def appoint_leader(
    plan: JobPlan,
    rendezvous: Rendezvous,
    connections: Mapping[int, Connection],
    run_dir: RunDir,
    scheduler: Scheduler | None,
    env: Mapping[str, str],
    *,
    takes_over: events.Lead | None = None,
    own: int = 0,
    store_port: int | None = None,
) -> LeaderDriver:
    """Return the driver of a leader: of the first generation, or of one that another leader has begun.

    Args:
        rendezvous: this agent's, after the roll call.
        connections: to the agent in this process, and to those that have joined it, by their index in the job.
        takes_over: what this agent knows of the job, and who has joined it; None: the job begins.
        own: index of this node in the job.
        store_port: where rank 0 will have its store; None: where it has it now.
    """
    group, cards, now_s = rendezvous.group, rendezvous.cards, time.monotonic()
    lines = {**rendezvous.peers, **connections}
    own_address, request, acceptor = rendezvous.own_address or LOOPBACK, plan.request, rendezvous.acceptor
    if takes_over is not None:
        group = takes_over.plan
        assert rendezvous.card is not None
        cards = {own: msgspec.structs.replace(rendezvous.card, generation=group.generation)}
        cards |= {node: each.card for node, each in takes_over.joined.items()}
    assert group.past is not None
    leader = Leader(
        Terms(
            job=plan.job,
            wanted_backend=plan.wanted_backend,
            store_address=plan.data_path.address if plan.data_path else own_address,
            store_port=group.store_port if store_port is None else store_port,
            num_nodes=plan.num_nodes,
            min_nodes=plan.min_nodes,
            capacity_s=request.capacity_s,
            can_change_leader=len(group.successors) > 1,
            own=own,
        ),
        guard=Guard(plan.guard, job=plan.job),
        past=group.past,
        nodes={
            index: Node(card=card, name=card.host, address=lines[index].peer_address or own_address)
            for index, card in cards.items()
        },
        plan=group,
        now_s=now_s,
    )
    if takes_over is not None:
        leader.take_over(takes_over.lost, now_s, has_resigned=takes_over.has_resigned)
    reviver = None
    if acceptor is not None and scheduler is not None and request.max_restarts:
        log = lambda node: run_dir.create_node(node) / "back.log"  # noqa: E731
        reviver = Revivals(env=env, log=log, patience_s=request.capacity_s)
    follows = f"the job ends after {plan.guard.hang_s:g} s of this (--hang-timeout); "
    follows += f"allranks stack {plan.job} shows all ranks"
    return LeaderDriver(
        leader,
        lines,
        acceptor=acceptor,
        gone_s=plan.guard.gone_s,
        checkpoints=run_dir.checkpoints_path(request.checkpoint_dir),
        say=_add_to_first("slow: ", follows),
        show=print_findings,
        on_event=run_dir.add_event,
        on_signal=scheduler.decide if scheduler is not None else partial(ending.decide, job=None),
        reviver=reviver,
        node_names=plan.node_names,
    )


def _add_to_first(start: str, follows: str) -> Callable[[str], None]:
    """Return a `say` that says more with the first line that has this start."""
    left = [follows]
    return lambda line: say(f"{line}; {left.pop()}" if left and line.startswith(start) else line)


def find_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a directory; None: there is none, or no directory."""
    with contextlib.suppress(OSError):
        return max((found[0] for path in directory.iterdir() if (found := parse_final(path.name))), default=None)
    return None
