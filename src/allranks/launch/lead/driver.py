"""Make a leader and drive it: turn its connections and time into events, and its effects into deeds.

Agents that join while the job runs (their node is back, or was late) connect to the side port that the announcement in
the run directory names, since rank 0's store now has the port of the roll call. They authenticate as in the roll call.
What may wait for a file server or for SLURM runs in a thread of its own, and its result is an event.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from allranks.guard.goodput.ledger import Books
from allranks.guard.verdict import Guard
from allranks.host.threads import start_thread
from allranks.launch import events
from allranks.launch.events import Effect, Event
from allranks.launch.lead.course import Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.lead.metrics_writer import open_metrics
from allranks.launch.lead.status import on_wall_clock
from allranks.launch.lines import ConnectionDriver
from allranks.launch.plan import JobPlan
from allranks.launch.queue import ending
from allranks.launch.queue.revival import Revivals
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.worker_group import WorkerGroup
from allranks.preflight.called import Rendezvous
from allranks.preflight.datapath import LOOPBACK
from allranks.preflight.rollcall import deliver
from allranks.report.refusal import print_findings
from allranks.report.rundir import RunDir, SignOfLife
from allranks.report.text import say
from allranks.state.saved.manifest import parse_final
from allranks.wire.accept import Acceptor, Rejection, Rejections, turn_away
from allranks.wire.connection import Connection
from allranks.wire.protocol import own_age_s


class LeaderDriver:
    """Owns the leader's connections to all agents, and brings lost agents back.

    Args:
        workers: of the leader's own node.
        scheduler: None outside of SLURM.
        selector: the agent's, which watches all connections; it calls `key.data(fileobj)`.
        connections: to all agents that are here at first, by their index in the job.
        acceptor: the caller's, for agents that join while the job runs; None: nobody is accepted.
    """

    def __init__(
        self,
        leader: Leader,
        workers: WorkerGroup,
        scheduler: Scheduler | None,
        *,
        selector: selectors.BaseSelector,
        connections: Mapping[int, Connection],
        acceptor: Acceptor | None,
    ) -> None:
        self.plan, self.run_dir, self._console = workers.job, workers.run_dir, workers.console
        self._checkpoints = workers.checkpoints
        decide = scheduler.decide if scheduler is not None else partial(ending.decide, job=None)
        self._decide = partial(decide, shutdown_s=self.plan.request.shutdown_s)
        self._scheduler = scheduler
        self._can_revive = scheduler is not None and self.plan.request.max_restarts > 0
        self.revivals = Revivals(env=workers.env, run_dir=self.run_dir, patience_s=self.plan.request.capacity_s)
        self._rejections = Rejections()
        self._is_hang_told = False
        self._sign_of_life = SignOfLife(self.run_dir)
        self._started_s = find_start(self.run_dir)
        self._metrics = open_metrics(self.plan.metrics_dir, job=self.plan.job, env=workers.env, say=say)
        self._answers = queue.SimpleQueue[Event]()
        if scheduler is not None:
            find_s = scheduler.find_eligible_s
            self._answer_later(lambda: events.EligibleFound(now_s=0.0, eligible_s=find_s()))
        self._lines = ConnectionDriver(leader.step, self._carry_out, selector)
        for node, connection in connections.items():
            self._lines.add(node, connection)
        for node in connections:
            self._lines.listen(node)
        if acceptor is not None:
            acceptor.attach(selector, on_peer=self._lines.join, on_rejected=self._tell_rejected, say=say)

    def turn(self, now_s: float) -> None:
        """Do what is due; the agent's loop calls it between two waits."""
        while not self._answers.empty():
            self._lines.feed(msgspec.structs.replace(self._answers.get(), now_s=now_s))
        self._lines.feed(events.Due(now_s=now_s))
        for text in self.revivals.turn(now_s):
            say(text)

    def close(self) -> None:
        """Give slow agents a moment to receive their last message, and close all connections."""
        self._sign_of_life.end()
        deliver(self._lines.connections.values())
        self._lines.close()
        self.revivals.close()
        self._metrics.close()

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Accept(connection=number, node=node):
                connection = self._lines.joined.pop(number)
                connection.expect_alive_within(self.plan.guard.gone_s)
                self._lines.add(node, connection)  # instead of one whose loss its agent has noticed first
                self._lines.listen(node)
            case events.Reject(connection=number, reason=reason):
                turn_away(self._lines.joined.pop(number), reason)
            case events.Say(text=text):
                say(text + self._describe_hang() if text.startswith("slow: ") else text)
            case events.Show(findings=findings):
                self._console.drop_tracebacks()
                print_findings(findings)
            case events.Record(event=event, fields=fields):
                self.run_dir.add_event(event, **fields)
            case events.WriteStatus(status=status, ledger=ledger):
                offset_s = time.time() - time.monotonic()
                told = on_wall_clock(status, offset_s=offset_s, started_s=self._started_s)
                self.run_dir.status_files.show(told)
                self._metrics.offer(msgspec.structs.replace(told, ledger=ledger), now_s=time.monotonic())
            case events.WriteLedger(ledger=ledger):
                self.run_dir.status_files.keep(ledger)
            case events.ExpectBack(node=node, name=name) if self._can_revive:
                self.revivals.expect(self.plan.node_names[node] if self.plan.node_names else name, node)
            case events.AskScheduler(signum=signum, can_save=can_save):
                self._answer_later(
                    lambda: events.Meant(now_s=0.0, signum=signum, decision=self._decide(signum, can_save=can_save))
                )
            case events.FindKillWait() if (scheduler := self._scheduler) is not None:
                self._answer_later(lambda: events.KillWaitFound(now_s=0.0, kill_wait_s=scheduler.find_kill_wait_s()))
            case events.FindCheckpoint():
                checkpoints = self._checkpoints
                self._answer_later(lambda: events.CheckpointFound(now_s=0.0, step=find_checkpoint(checkpoints)))

    def _answer_later(self, look: Callable[[], Event]) -> None:
        """Look something up in a thread; the leader does not wait for ever, and gets it at the time of a turn."""
        start_thread(lambda: self._answers.put(look()), name="allranks-leader-look")

    def _tell_rejected(self, rejection: Rejection) -> None:
        if rejection.cause_id is not None and self._rejections.is_news(
            rejection
        ):  # port checks and slow agents are no news
            say(rejection.line)

    def _describe_hang(self) -> str:
        """What becomes of a slow rank, and how to look at it; said once, with the first line about one."""
        is_told, self._is_hang_told = self._is_hang_told, True
        ends = f"; the job ends after {self.plan.guard.hang_s:g} s of this (--hang-timeout)"
        return "" if is_told else f"{ends}; allranks stack {self.plan.job} shows all ranks"


def find_start(run_dir: RunDir) -> float:
    """Return when this attempt of the job began, since the epoch: the roll call has said so, or the last leader."""
    seen = run_dir.status_files.newest or run_dir.status_files.read_status()
    is_of_this = seen is not None and seen.attempt == run_dir.attempt
    return seen.started_s if seen is not None and is_of_this else time.time() - own_age_s()


def make_leader(
    plan: JobPlan, rendezvous: Rendezvous, *, run_dir: RunDir, store_port: int, takes_over: bool = False
) -> Leader:
    """Return the leader of the first generation, or of one that another leader has begun.

    Args:
        rendezvous: the generation that runs, and the agents that are here.
        run_dir: has the books of earlier attempts, or of the last leader.
        store_port: where rank 0 of the next generations has its store.
        takes_over: another leader has begun the generation.
    """
    group, peers, own_address = rendezvous.group, rendezvous.peers, rendezvous.own_address or LOOPBACK
    assert group.past is not None
    return Leader(
        Terms(
            job=plan.job,
            wanted_backend=plan.wanted_backend,
            store_address=plan.data_path.address if plan.data_path else own_address,
            store_port=store_port,
            num_nodes=plan.num_nodes,
            min_nodes=plan.min_nodes,
            capacity_s=plan.request.capacity_s,
            shutdown_s=plan.request.shutdown_s,
        ),
        guard=Guard(
            plan.guard,
            reader=msgspec.structs.replace(plan.facts.reader, job=plan.job),
            books=Books(
                epoch_s=time.time() - time.monotonic(),
                started_s=find_start(run_dir),
                # Without SLURM, what lies between two attempts is nobody's queue.
                earlier=run_dir.status_files.read_ledger() if takes_over or plan.is_slurm else None,
                attempt=run_dir.attempt,
                takes_over=takes_over,
            ),
        ),
        past=group.past,
        nodes={
            index: ConnectedNode(
                card=card, name=card.host, address=peers[index].peer if index in peers else own_address
            )
            for index, card in rendezvous.cards.items()
        },
        plan=group,
        now_s=time.monotonic(),
    )


def find_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a directory; None: there is none, or no directory."""
    with contextlib.suppress(OSError):
        return max((found[0] for path in directory.iterdir() if (found := parse_final(path.name))), default=None)
    return None
