"""A leader in a simulated process: its reducer, its connections, and what the rules must remember of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from allranks.guard.verdict import Guard
from allranks.host.slurm_job import OwnJob
from allranks.launch import events
from allranks.launch.queue.ending import Told
from allranks.model.past import Past
from allranks.wire.protocol import Goodbye, Plan, Refused

from .invariants import check_after
from .network import Line, Process
from .terms import CAPACITY_S, KILL_WAIT_S, TERMS

if TYPE_CHECKING:
    from .world import World


class Lead:
    """One process that leads, or has led."""

    def __init__(
        self,
        world: World,
        process: Process,
        lines: Mapping[int, Line],
        *,
        plan: Plan,
        past: Past,
        cards: Mapping[int, Any],
        store_port: int,
        takes_over: events.Lead | None = None,
    ) -> None:
        life, cores = world.life, world.cores
        state = cores.State.STOPPED if takes_over is None else cores.State.RUNNING
        self.world, self.process, self.node = world, process, process.node
        self.lines: dict[int, Line] = dict(lines)
        self.joining: dict[int, Line] = {}
        self.restarts_left = past.history.restarts_left + (takes_over is not None and takes_over.has_resigned)
        self.left_out = set(past.excluded)
        self.restarts = self.grows = 0
        self.phase_since_s = self.noticed_s = self.woke_s = self.begun_s = self.status_s = world.now_s
        self.last_phase = "running"
        self.running: set[int] = set()
        self.running_before: set[int] = set()
        self.may_grow = self.has_acted = self.was_alone = False
        self.lacks_room = False
        """Whether a full disk is in its last verdict, and no generation has begun since."""
        self.told_s: float | None = None
        """Since when it knows of a stop signal."""
        self.slept_s = self.slept_before_s = 0.0
        """How long its process was stopped, at all and before this phase."""
        self.verdict: Any = None
        self.leader = cores.Leader(
            cores.Terms(
                job="j", wanted_backend="gloo", store_address=world.address_of(process.node),
                store_port=store_port, num_nodes=life.num_nodes, min_nodes=life.min_nodes,
                capacity_s=CAPACITY_S,
            ),
            guard=Guard(TERMS),
            past=past,
            nodes={
                i: cores.Node(card=card, name=f"n{i}", address=world.address_of(i), state=state)
                for i, card in cards.items()
            },
            plan=plan,
            now_s=world.now_s,
        )  # fmt: skip
        if takes_over is not None:
            self.leader.take_over(takes_over.lost, world.now_s, has_resigned=takes_over.has_resigned)
        self.generation, self.nodes = plan.generation, plan.nodes
        self.members_before: set[int] = set(cards)
        self.has_begun = False
        self.feed = events.Driver(self._step, self._do).feed
        for line in self.lines.values():
            line.lead = self

    @property
    def is_over(self) -> bool:
        """Whether it decides nothing any more."""
        return not self.process.is_alive or self.process.is_through or self.leader.phase == "over"

    @property
    def goes_on(self) -> bool:
        """Whether it leads a job that can go on."""
        return not self.is_over and not self.process.is_stopped and self.leader._members.have_majority()

    def attach(self) -> None:
        """Read what came before."""
        for node, line in list(self.lines.items()):
            unread, line.unread = line.unread, []
            for message in unread:
                if self.lines.get(node) is line:
                    self.feed(events.Heard(now_s=self.world.now_s, node=node, message=message))

    def close(self) -> None:
        """The process ends."""
        for line in [*self.lines.values(), *self.joining.values()]:
            self.world._end_line(line, by_host=True)
        self.joining.clear()

    def _step(self, event: Any) -> list[Any]:
        effects = self.leader.step(event)
        self.world.note(f"lead{self.node}", event, effects)
        if self.leader.phase != self.last_phase:
            self.world.note_phase(str(self.leader.phase))
        check_after(self, event, effects)
        if self.verdict is None and self.leader.verdict is not None:
            self.verdict = self.leader.verdict
            if not self.leader.has_resigned:
                self.world.verdicts.append((self, self.verdict))
        return effects

    def _do(self, effect: Any) -> None:
        world, answer_s = self.world, self.world.life.answer_s
        if not self.process.is_alive:
            return
        match effect:
            case events.Send(node=node, message=message):
                if (line := self.lines.get(node)) is not None:
                    if "continues without" in getattr(message, "summary", ""):
                        line.agent.was_left_out = True
                        self.left_out.add(node)
                        world.revive(node, 2.0)  # somebody starts it again by hand
                    line.agent.was_told_goodbye |= isinstance(message, Goodbye)
                    world._tell_agent(line, message)
                    world.said(self, line, message)
            case events.Disconnect(node=node):
                if (line := self.lines.pop(node, None)) is not None:
                    world._end_line(line, by_host=True)
            case events.Accept(connection=number, node=node):
                if (line := self.lines.pop(node, None)) is not None:
                    world._end_line(line, by_host=True)
                line = self.lines[node] = self.joining.pop(number)
                line.lead = self
            case events.Reject(connection=number, reason=reason):
                self._reject(self.joining.pop(number), reason)
            case events.Record(event=name, fields=fields):
                world.record(self.node, name, fields)
            case events.Show(findings=findings):
                world.shown += [(world.now_s, finding) for finding in findings]
            case events.ExpectBack(node=node):
                if world.life.is_slurm and world.life.max_restarts:
                    world.revive(node, 2.0)
            case events.AskScheduler(signum=signum, can_save=can_save):
                job = OwnJob(id="1", restarts=0, num_nodes=1, is_heterogeneous=False) if world.life.is_slurm else None
                no = "" if world.life.can_requeue else "no batch script"
                told = Told(kill_wait_s=KILL_WAIT_S, left_s=60.0, no_requeue=no)
                meant = world.cores.decide_ending(signum, job=job, told=told, can_save=can_save)
                self._answer(answer_s, events.Meant, signum=signum, decision=meant)
            case events.FindKillWait():
                if world.life.is_slurm:
                    self._answer(answer_s, events.KillWaitFound, kill_wait_s=KILL_WAIT_S)
            case events.FindCheckpoint():
                world.kernel.checkpoints_found += 1
                self._answer(answer_s, events.CheckpointFound, step=world.kernel.checkpoint)

    def _reject(self, line: Line, reason: str) -> None:
        process = line.agent
        if process.agent is None:
            process.is_alive = False
            self.world.revive(process.node, 3.0)
        self.world._tell_agent(line, Refused(reason=reason, is_final=True))
        self.world._end_line(line, by_host=True)

    def _answer(self, after_s: float, kind: type, **more: Any) -> None:
        feed = lambda: self.feed(kind(now_s=self.world.now_s, **more))  # noqa: E731
        self.world.at(after_s, lambda: self.world.on(self.process, feed))
