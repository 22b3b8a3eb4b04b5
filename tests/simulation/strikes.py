"""How each kind of fault of a life happens in its world."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .kernel import Worker
from .lives import FOREVER_S, HEIR, LEADER, Fault, Kind
from .network import Line, Network, Process
from .terms import KILL_WAIT_S

if TYPE_CHECKING:
    from .leading import Lead
    from .world import World

SLOW_S = 1.5


class Strikes(Network):
    """Faults that happen at their time, or when something else happens."""

    def begin_strikes(self: World) -> None:
        self.armed: list[Fault] = []
        """Faults that wait for something to happen."""
        self.is_network_faulty = self.is_healed = False
        self.cut_off_core: set[int] = set()
        """The nodes that were healed, where the others cannot reach them any more."""
        self.suspended_until_s = 0.0

    def strike(self: World, fault: Fault) -> None:
        """Let a fault happen, now or when its moment comes."""
        if self.is_healed:
            return
        if fault.on:
            self.armed.append(fault)
        else:
            _hit(self, fault)

    # Moments

    def note_phase(self: World, phase: str) -> None:
        """A leader is in another phase."""
        if self.armed:
            self._fire(phase)

    def note_leaderless(self: World) -> None:
        """An agent has lost its leader."""
        if self.armed:
            self._fire("leaderless")

    def note_lead(self: World, process: Process) -> None:
        """An agent leads."""
        self.look_whether_done()
        if self.armed:
            self._fire("took over")

    def said(self: World, lead: Lead, line: Line, message: Any) -> None:
        """A leader has said something: it may be lost, with its connection, and with the leader."""
        if not self.armed or line.agent is line.host:
            return
        name = type(message).__name__.lower()
        if due := [fault for fault in self.armed if fault.on == name]:
            self._fire(name)
            self._fired = self.now_s, name
            self._is_leader_lost = any(fault.kind is not Kind.LINE_ENDS for fault in due)
        if self._fired == (self.now_s, name) and self.rng("losses").random() < 0.5:
            self.tell(f"{name} to n{line.node} is lost")
            if self._is_leader_lost:
                self.faulty.add(line.node)  # two things have happened to it
            self.is_network_faulty = True
            self.break_line(line)

    _fired: tuple[float, str] = (0.0, "")
    _is_leader_lost = False

    def _fire(self: World, moment: str) -> None:
        due = [fault for fault in self.armed if fault.on == moment]
        self.armed = [fault for fault in self.armed if fault.on != moment]
        for fault in due:
            self.at(fault.after_s, lambda fault=fault: None if self.is_healed else _hit(self, fault))


def _hit(world: World, fault: Fault) -> None:
    node = _resolve(world, fault.node)
    process = world.current[node]
    world.tell(f"{fault.kind} on n{node}, for {fault.for_s:.1f} s")
    if fault.kind.value.startswith("worker"):
        world.faulty.add(node)
        _strike_worker(world, fault, node)
        return
    match fault.kind:
        case Kind.LINE_ENDS:
            _break_lines(world, node, fault)
        case Kind.NODE_IS_CUT_OFF:
            _cut(world, {node}, fault, both_ways=True)
        case Kind.ONE_WAY:
            _cut(world, {node}, fault, both_ways=False)
        case Kind.PARTITION:
            _cut(world, {node, *fault.others}, fault, both_ways=True)
        case Kind.LINE_IS_SLOW if node != world.lead.node:
            world.slow[node] = SLOW_S
            world.faulty.add(node)
            world.at(fault.for_s, lambda: world.slow.pop(node, None))
        case Kind.AGENT_STOPS:
            if process.is_alive and not process.is_stopped:
                world.faulty.add(node)
                process.is_stopped, process.goes_on = True, fault.for_s < FOREVER_S
                process.stopped_s = world.now_s
                world.look_whether_done()
                world.at(fault.for_s, lambda: _go_on(world, process))
        case Kind.AGENT_DIES:
            world.faulty.add(node)
            world.kill(process, is_node=False)
            world.kernel.kill_all(node)
        case Kind.NODE_DIES:
            world.faulty.add(node)
            if world.machines[node].is_up:
                world.machines[node].had_agent = process.is_alive and process.agent is not None
            world.machines[node].is_up = False
            world.kill(process, is_node=True)
            world.kernel.kill_all(node)
            world.at(fault.for_s, lambda: _come_up(world, node))
        case Kind.SIGNAL:
            _signal(world, process, fault, fault.signum, everywhere=fault.everywhere)
        case Kind.SUSPENDED:
            _suspend(world, fault.for_s)
        case Kind.PREEMPTED:
            _signal(world, process, fault, signal.SIGTERM, everywhere=True)
            world.at(KILL_WAIT_S, world.kill_all)
        case Kind.ONLY_A_QUORUM_HEALS:
            _heal(world)


def _resolve(world: World, node: int) -> int:
    """The node that is meant."""
    if node == LEADER:
        return world.lead.node
    if node == HEIR:
        heirs = [each for each in world.lead.leader._generation.plan.nodes if each != world.lead.node]
        return next((each for each in heirs if world.current[each].is_alive), world.lead.node)
    return node


# The network


def _break_lines(world: World, node: int, fault: Fault) -> None:
    """A connection ends, and both sides notice it at different times; nobody is at fault."""
    world.is_network_faulty = True
    rng = world.rng("breaks")
    lead, own = world.lead, world.current[node].line
    lines = list(lead.lines.values()) if node == lead.node else [own] if own is not None else []
    for line in lines:
        if line.agent is not line.host:
            first_s, second_s = (0.0, fault.after_s) if fault.doubled else (fault.after_s, 0.0)
            world.break_line(line, agent_s=first_s + 0.1 * rng.random(), host_s=second_s + 0.1 * rng.random())


def _cut(world: World, nodes: Iterable[int], fault: Fault, *, both_ways: bool) -> None:
    here = frozenset(nodes)
    there = frozenset(range(world.life.num_nodes)) - here
    world.is_network_faulty = True
    world.faulty |= here
    is_leader, members = world.lead.node in here, world.lead.leader._members
    have_left = any(each.end is not None for machine in world.machines for each in machine.workers)
    if len(here) > 1 or len(members.here) <= 2 or (is_leader and have_left):  # either side may be the one at fault
        world.faulty |= there
    if both_ways or fault.doubled:
        world.raise_wall(here, there, fault.for_s)
    if both_ways or not fault.doubled:
        world.raise_wall(there, here, fault.for_s)
    if world.life.is_blind_when_cut and both_ways:
        world.blind |= here
        world.were_blind |= here
        world.at(fault.for_s, lambda: world.blind.difference_update(here))


def _heal(world: World) -> None:
    """The majority of the nodes is healed; all that is wrong with the others, and between, stays so."""
    rng, num_nodes = world.rng("heals"), world.life.num_nodes
    order = sorted(range(num_nodes), key=lambda _: rng.random())
    core = set(order[: num_nodes // 2 + 1 + int(rng.random() * 2)])
    world.tell(f"{sorted(core)} are healed, all else stays")
    world.is_healed = True
    others = set(range(num_nodes)) - core
    was_apart = any(world.is_split({one, other}) for one in core for other in others)
    world.walls.clear()
    world.blind &= others
    world.faulty |= others
    if was_apart and others:
        world.cut_off_core = core
        world.raise_wall(core, others, FOREVER_S)
        world.raise_wall(others, core, FOREVER_S)
    for process in world.processes:
        if process.node in core:
            _go_on(world, process, is_sure=True)
        elif process.is_stopped:
            process.goes_on = False
    for node in range(num_nodes):
        if node not in core:
            continue
        world.slow.pop(node, None)
        world.machines[node].is_up = True
        for worker in world.machines[node].all_workers:
            _release(world, worker)
    world.look_whether_done()


def _come_up(world: World, node: int) -> None:
    if not world.is_healed:
        world.machines[node].is_up = True


# Processes


def _suspend(world: World, for_s: float) -> None:
    """Stop all processes of the job; they go on within a second of each other."""
    if world.now_s < world.suspended_until_s:
        return
    for_s = min(for_s, 20.0)
    world.suspended_until_s = world.now_s + for_s + 1.0
    processes = [process for process in world.processes if process.is_alive and not process.is_stopped]
    workers = [each for machine in world.machines for each in machine.workers if each.is_well]
    for process in processes:
        process.is_stopped = process.goes_on = True
        process.stopped_s = world.now_s
    for worker in workers:
        worker.stopped_s = world.now_s
    rng = world.rng("suspend")
    for process in processes:
        world.at(for_s + 0.5 * rng.random(), lambda process=process: _go_on(world, process, is_sure=True))
    for worker in workers:
        world.at(for_s + 0.5 * rng.random(), lambda worker=worker: _release(world, worker))


def _strike_worker(world: World, fault: Fault, node: int) -> None:
    kernel = world.kernel
    if fault.kind is Kind.WORKER_IS_DEAF:
        kernel.deaf.add((node, fault.worker))
    workers = [worker for worker in world.machines[node].workers if worker.end is None]
    if not workers:
        return
    worker = workers[fault.worker % len(workers)]
    match fault.kind:
        case Kind.WORKER_CRASHES:
            kernel.end(worker, -signal.SIGSEGV)
        case Kind.WORKER_RAISES:
            if world.rng(f"lingers {fault.at_s}").random() < 0.3:
                kernel.linger(worker)
            else:
                kernel.end(worker, 1, message="ValueError: batch 17 has no label")
        case Kind.WORKER_MEETS_A_FULL_DISK:
            machine = world.machines[node]
            machine.full_since_s = machine.full_since_s if machine.full_until_s > world.now_s else world.now_s
            machine.full_until_s = max(machine.full_until_s, world.now_s + fault.for_s)
            kernel.end(worker, 1, message="OSError: [Errno 28] No space left on device")
        case Kind.WORKER_HANGS:
            worker.is_hung = True
        case Kind.WORKER_STOPS:
            worker.stopped_s = world.now_s
            world.at(fault.for_s, lambda: _release_unless_healed(world, worker))
        case Kind.WORKER_IS_HELD:
            worker.held_s = world.now_s
            world.at(fault.for_s, lambda: _release_unless_healed(world, worker))
        case Kind.WORKER_IS_DEAF:
            worker.is_deaf = True


def _release_unless_healed(world: World, worker: Worker) -> None:
    if not world.is_healed:
        _release(world, worker)


def _release(world: World, worker: Worker) -> None:
    if worker.end is None:
        world.kernel.release(worker)


def _go_on(world: World, process: Process, *, is_sure: bool = False) -> None:
    """A process that was stopped goes on, with all that it missed; one of a suspended job with the job."""
    if not process.is_alive or not process.is_stopped or (world.is_healed and not process.goes_on and not is_sure):
        return
    if not is_sure and world.now_s < world.suspended_until_s:
        world.at(world.suspended_until_s - world.now_s, lambda: _go_on(world, process))
        return
    process.is_stopped = process.goes_on = False
    world.machines[process.node].woke_s = world.now_s
    if process.lead is not None:
        process.lead.woke_s = world.now_s
        process.lead.slept_s += world.now_s - process.stopped_s
    missed, process.backlog = process.backlog, []
    for do in missed:
        world.on(process, do)


def _signal(world: World, process: Process, fault: Fault, signum: int, *, everywhere: bool) -> None:
    for target in list(world.current.values()) if everywhere else [process]:
        for again in range(1 + fault.doubled):
            after_s = 0.05 * world.rng(f"{fault.kind} {fault.node} {fault.signum}").random() + 0.5 * again
            world.at(after_s, lambda target=target: world.signal(target, signum))
