"""What a simulated agent does when its job is over for it (launch.end), and what comes after it.

The run directory is on a file server: an event is seen by others after Life.seen_s, and a node that is cut off may not
reach the server at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allranks.launch import events
from allranks.launch.end import LEADER_WRITES_S
from allranks.launch.succession import SEEK_S, find_events
from allranks.model.errors import Exit

from . import dialing
from .invariants import check_requeue
from .network import Network, Process
from .terms import LIMIT_S, TERMS

if TYPE_CHECKING:
    from .world import World

LOOK_S = 0.5
SLURM_ENDS_S = 3.0
"""After a job was requeued, SLURM ends all that is left of it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A line of events.jsonl."""

    at_s: float
    node: int
    event: str
    fields: Mapping[str, Any]
    is_late: bool = False
    """Whether its node did not see the run directory, which gets it when the node does."""


class Ends(Network):
    """Ends of processes, and new processes on nodes that are back."""

    def begin_ends(self: World) -> None:
        self.recorded: list[Recorded] = []
        self.requeues: list[Process] = []
        self.blind: set[int] = set()
        """Nodes that do not see the run directory."""
        self.were_blind: set[int] = set()
        """At any time."""

    # The run directory

    def record(self: World, node: int, event: str, fields: Mapping[str, Any]) -> None:
        """A node's process writes an event."""
        self.recorded.append(Recorded(self.now_s, node, event, dict(fields), is_late=node in self.blind))

    def read_events(self: World, node: int) -> list[dict[str, Any]]:
        """Return what a node can read."""
        if node in self.blind:
            return []
        seen_by_s = self.now_s - self.life.seen_s
        return [
            {"event": each.event, **each.fields}
            for each in self.recorded
            if (each.at_s <= seen_by_s or each.node == node) and not (each.is_late and each.node in self.blind - {node})
        ]

    # The end

    def close(self: World, process: Process) -> None:
        """A process is gone, and its ends of all lines."""
        dialing.stop(process)
        if process.lead is not None:
            process.lead.close()
        for line in process.joined.values():
            self._end_line(line, by_host=True)
        process.joined.clear()
        for line in self.open_lines:
            if line.agent is process:  # one may have been opened by its search, and not been found yet
                self._end_line(line, by_host=False)

    def exit(self: World, process: Process) -> None:
        """An agent is through: do what launch.end.settle does."""
        process.is_through = True
        self.close(process)
        lead = process.lead
        if lead is not None and lead.leader.has_resigned:
            self._leave(process, Exit.OK)
        elif process.agent.goodbye.is_cut_off:
            self._look_for_others(process, SEEK_S, lambda: self._leave(process, Exit.OK), lambda: self._settle(process))
        else:
            self._settle(process)

    def _settle(self: World, process: Process) -> None:
        lead, agent, life = process.lead, process.agent, self.life
        if lead is not None and lead.verdict is not None:
            told = {"exit_code": lead.verdict.exit_code, "leader": f"n{process.node}"}
            self.record(process.node, "ended", {**told, "is_cut_off": agent.goodbye.is_cut_off})
        code = agent.goodbye.exit_code
        if agent.interrupted_by is not None and process.heard is None:
            self.faulty.add(process.node)  # a signal has ended this agent, and no leader was told why
        if agent.is_leader_lost and agent.interrupted_by is None:
            self._look_for_others(
                process,
                LEADER_WRITES_S if life.is_slurm else None,
                lambda: self._leave(process, Exit.OK if life.max_restarts or self._has_ended_well(process) else code),
                lambda: self._go_back(process),
            )
        else:
            if life.is_slurm and lead is not None:
                self._queue_again(process)
            self._leave(process, code)

    def _has_ended_well(self: World, process: Process) -> bool:
        return self.cores.has_ended(self.read_events(process.node), exit_code=0)

    def _go_back(self: World, process: Process) -> None:
        """Nobody else goes on with the job, as far as this agent knows."""
        if self.life.is_slurm and self.life.max_restarts and not process.signalled:
            self.requeue(process)
        self._leave(process, process.agent.goodbye.exit_code)

    def _queue_again(self: World, process: Process) -> None:
        leader = process.lead.leader
        if self.cores.goes_back(
            process.agent.goodbye.exit_code,
            is_to_requeue=leader.is_to_requeue,
            interrupted_by=leader.interrupted_by or next(iter(process.signalled), None),
            has_restarts=bool(self.life.max_restarts) and not leader.is_finished and not self._has_ended_well(process),
        ):
            self.requeue(process)

    def requeue(self: World, process: Process) -> None:
        """Put the job back into the queue, unless another agent has."""
        if self.requeues:
            return
        self.requeues.append(process)
        self.tell(f"n{process.node} requeues the job")
        check_requeue(self, process)
        self.at(SLURM_ENDS_S, self.kill_all)

    def kill_all(self: World) -> None:
        """SLURM ends the job."""
        for process in self.processes:
            if process.is_alive:
                self.kill(process, is_node=False)
                self.kernel.kill_all(process.node)

    def _leave(self: World, process: Process, exit_code: int) -> None:
        process.is_alive, process.exit_code = False, int(exit_code)
        self.look_whether_done()

    def _look_for_others(
        self: World, process: Process, more_s: float | None, if_so: Callable[[], None], if_not: Callable[[], None]
    ) -> None:
        """Whether the run directory says, within some seconds, that the job has a leader elsewhere."""
        until_s = self.now_s + (0.0 if more_s is None else TERMS.gone_s + more_s)

        def look() -> None:
            if process.signalled:
                if_not()
            elif self._is_led_elsewhere(process):
                if_so()
            elif self.now_s >= until_s:
                if_not()
            else:
                self.at(LOOK_S, lambda: self.on(process, look))

        look()

    def _is_led_elsewhere(self: World, process: Process) -> bool:
        node, agent = process.node, process.agent
        told = self.read_events(node)
        times_lost = len(find_events(told, "node_lost", node=f"n{node}"))
        is_given_up = process.lead is None and times_lost > process.times_lost
        return is_given_up or self.cores.is_led_elsewhere(told, agent.plan.generation, agent.leader_name)

    # New processes

    def revive(self: World, node: int, after_s: float) -> None:
        """SLURM starts the agent of a node again, as soon as the node is up."""
        if self.now_s - self.begun_s < LIMIT_S / 2:
            self.at(after_s, lambda: self._start_again(node))

    def _start_again(self: World, node: int) -> None:
        lead = self.lead
        if lead.is_over or lead.process.is_stopped or node in lead.lines:
            return
        is_there = self.machines[node].is_up and self.reaches(node, lead.node) and self.machines[lead.node].is_up
        if not is_there or self.current[node].is_alive:
            self.revive(node, 3.0)
            return
        process = self._add_process(node)
        number = self.next_number()
        process.line = lead.joining[number] = self.open_line(process, lead.process, number)
        lead.feed(
            events.Joined(
                now_s=self.now_s, connection=number, card=self.card_of(process), address=self.address_of(node)
            )
        )
        self.at(self.life.turn_s, process.turn)
