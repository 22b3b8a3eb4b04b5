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
from allranks.launch.events import Effect, Event
from allranks.launch.lead.course import Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import Node
from allranks.launch.lines import Lines
from allranks.launch.queue import ending
from allranks.launch.queue.revival import Revivals
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.worker_group import WorkerGroup
from allranks.preflight.called import Rendezvous
from allranks.preflight.datapath import LOOPBACK
from allranks.preflight.rollcall import deliver
from allranks.report.refusal import print_findings
from allranks.report.text import say
from allranks.state.saved.manifest import parse_final
from allranks.wire.accept import Acceptor, turn_away
from allranks.wire.connection import Connection

TOLD_AGAIN_S = 60.0
"""How often the same host is reported as rejected for the same cause."""


@dataclass(slots=True)
class LeaderDriver:
    """Owns the connections to all agents."""

    leader: Leader
    gone_s: float
    """A silent connection of an agent that joins while the job runs ends after this time."""
    checkpoints: Path
    """Where `allranks.session()` saves."""
    say: Callable[[str], None]
    on_event: Callable[..., None]
    """Writes to events.jsonl."""
    on_signal: Callable[..., ending.Decision]
    """Decides what a signal means for the job, given `can_save`; it may take seconds."""
    reviver: Revivals | None = None
    """Starts lost agents again; None outside of SLURM."""
    node_names: Sequence[str] = ()
    """By index, as the scheduler calls them."""
    _told_s: dict[tuple[str, str | None], float] = field(default_factory=dict)
    """Host and cause of the rejected peers that were reported lately, and when."""
    _answers: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _lines: Lines = field(init=False)

    def attach(
        self, selector: selectors.BaseSelector, connections: Mapping[int, Connection], acceptor: Acceptor | None
    ) -> None:
        """Let the agent's selector watch all connections; it calls `key.data(fileobj)`.

        Args:
            connections: to all agents that are here at first, by their index in the job.
            acceptor: the caller's, for agents that join while the job runs; None: nobody is accepted.
        """
        self._lines = Lines(self.leader.step, self._carry_out, selector)
        for node, connection in connections.items():
            self._lines.add(node, connection)
        for node in connections:
            self._lines.listen(node)
        if acceptor is not None:
            acceptor.attach(selector, on_peer=self._lines.join, on_rejected=self._tell_rejected, say=self.say)

    def turn(self, now_s: float) -> None:
        """Do what is due; the agent's loop calls it between two waits."""
        while not self._answers.empty():
            self._lines.feed(msgspec.structs.replace(self._answers.get(), now_s=now_s))
        self._lines.feed(events.Due(now_s=now_s))
        for text in self.reviver.turn(now_s) if self.reviver is not None else ():
            self.say(text)

    def close(self) -> None:
        """Give slow agents a moment to receive their last message, and close all connections."""
        deliver(self._lines.connections.values())
        self._lines.close()
        if self.reviver is not None:
            self.reviver.close()

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Accept(connection=number, node=node):
                connection = self._lines.joined.pop(number)
                connection.expect_alive_within(self.gone_s)
                self._lines.add(node, connection)  # instead of one whose loss its agent has noticed first
                self._lines.listen(node)
            case events.Reject(connection=number, reason=reason):
                turn_away(self._lines.joined.pop(number), reason)
            case events.Say(text=text):
                self.say(text)
            case events.Show(findings=findings):
                print_findings(findings)
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
        threading.Thread(target=lambda: self._answers.put(look()), name="allranks-leader-look", daemon=True).start()

    def _tell_rejected(self, cause: str | None, host: str, text: str) -> None:
        now_s, key = time.monotonic(), (host, cause)
        self._told_s = {each: told_s for each, told_s in self._told_s.items() if now_s - told_s < TOLD_AGAIN_S}
        if key not in self._told_s:
            self._told_s[key] = now_s
            self.say(text)


def appoint_leader(
    workers: WorkerGroup,
    rendezvous: Rendezvous,
    scheduler: Scheduler | None,
    *,
    store_port: int,
) -> LeaderDriver:
    """Return the driver of a leader: of the first generation, or of one that another leader has begun.

    Args:
        rendezvous: the generation that runs, and the agents that are here.
        store_port: where rank 0 of the next generations has its store.
    """
    plan, run_dir, request = workers.job, workers.run_dir, workers.job.request
    group, own_address = rendezvous.group, rendezvous.own_address or LOOPBACK
    addresses = {index: peer.peer_address for index, peer in rendezvous.peers.items()}
    assert group.past is not None
    leader = Leader(
        Terms(
            job=plan.job,
            wanted_backend=plan.wanted_backend,
            store_address=plan.data_path.address if plan.data_path else own_address,
            store_port=store_port,
            num_nodes=plan.num_nodes,
            min_nodes=plan.min_nodes,
            capacity_s=request.capacity_s,
            can_change_leader=len(group.successors) > 1,
            own=group.nodes[group.node_index],
        ),
        guard=Guard(plan.guard, job=plan.job),
        past=group.past,
        nodes={
            index: Node(card=card, name=card.host, address=addresses.get(index) or own_address)
            for index, card in rendezvous.cards.items()
        },
        plan=group,
        now_s=time.monotonic(),
    )
    reviver = None
    if rendezvous.acceptor is not None and scheduler is not None and request.max_restarts:
        log = lambda node: run_dir.create_node(node) / "back.log"  # noqa: E731
        reviver = Revivals(env=workers.env, log=log, patience_s=request.capacity_s)
    # Said once, with the first line about a slow rank.
    end = f"the job ends after {plan.guard.hang_s:g} s of this (--hang-timeout)"
    hint = [f"{end}; allranks stack {plan.job} shows all ranks"]
    tell = lambda line: say(f"{line}; {hint.pop()}" if hint and line.startswith("slow: ") else line)  # noqa: E731
    return LeaderDriver(
        leader,
        gone_s=plan.guard.gone_s,
        checkpoints=run_dir.checkpoints_path(request.checkpoint_dir),
        say=tell,
        on_event=run_dir.add_event,
        on_signal=scheduler.decide if scheduler is not None else partial(ending.decide, job=None),
        reviver=reviver,
        node_names=plan.node_names,
    )


def find_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a directory; None: there is none, or no directory."""
    with contextlib.suppress(OSError):
        return max((found[0] for path in directory.iterdir() if (found := parse_final(path.name))), default=None)
    return None
