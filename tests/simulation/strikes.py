"""How each kind of fault of a life happens in its world."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from .kernel import Worker
from .lives import FOREVER_S, Fault, Kind, Stream

if TYPE_CHECKING:
    from .world import World

GONE_S = 3.0
KILL_WAIT_S = 30.0


def strike(world: World, fault: Fault) -> None:
    """Let a fault happen, and note whose fault it is."""
    node, process = fault.node, world.current[fault.node]
    if fault.kind.value.startswith("worker"):
        world.faulty.add(node)
        _strike_worker(world, fault)
        return
    match fault.kind:
        case Kind.LINE_ENDS if node:
            world.faulty.add(node)
            world.is_network_faulty = True
            if process.line is not None:
                world._break_line(process.line)
        case Kind.NODE_IS_CUT_OFF if node:
            world.faulty.add(node)
            world.is_network_faulty = True
            _cut_off(world, node, fault.for_s)
        case Kind.LINE_IS_SLOW if node:
            world.slow[node] = 1.5
            world.faulty.add(node)
            world.at(fault.for_s, lambda: world.slow.pop(node, None))
        case Kind.AGENT_STOPS:
            if process.is_alive and not process.is_stopped:
                world.faulty.add(node)
                process.is_stopped, process.goes_on = True, fault.for_s < FOREVER_S
                process.stopped_s = world.now_s
                world.at(fault.for_s, lambda: _go_on(world, process))
        case Kind.AGENT_DIES:
            world.faulty.add(node)
            world.kill(process, is_node=False)
            world.kernel.kill_all(node)
        case Kind.NODE_DIES:
            world.faulty.add(node)
            world.machines[node].is_up = False
            world.kill(process, is_node=True)
            world.kernel.kill_all(node)
            world.at(fault.for_s, lambda: setattr(world.machines[node], "is_up", True))
        case Kind.SIGNAL:
            _signal(world, fault, fault.signum, everywhere=fault.everywhere)
        case Kind.SUSPENDED:
            _suspend(world, fault)
        case Kind.PREEMPTED:
            _signal(world, fault, signal.SIGTERM, everywhere=True)
            world.at(KILL_WAIT_S, lambda: _kill_all(world))


def _rng(world: World, fault: Fault) -> Stream:
    """Its own: a fault that is left out changes nothing about the others."""
    return world.rng(f"{fault.kind} {fault.node} {fault.signum}")


def _suspend(world: World, fault: Fault) -> None:
    """Stop all processes of the job; they go on within a second of each other."""
    if world.now_s < world.suspended_until_s:
        return
    for_s, rng = min(fault.for_s, 20.0), _rng(world, fault)
    world.suspended_until_s = world.now_s + for_s + 1.0
    processes = [process for process in world.processes if process.is_alive and not process.is_stopped]
    workers = [each for machine in world.machines for each in machine.crew if each.is_well]
    for process in processes:
        process.is_stopped = process.goes_on = True
        process.stopped_s = world.now_s
    for worker in workers:
        worker.stopped_s = world.now_s
    for process in processes:
        world.at(for_s + 0.5 * rng.random(), lambda process=process: _go_on(world, process))
    for worker in workers:
        world.at(for_s + 0.5 * rng.random(), lambda worker=worker: _release(world, worker))


def _strike_worker(world: World, fault: Fault) -> None:
    kernel, node = world.kernel, fault.node
    if fault.kind is Kind.WORKER_IS_DEAF:
        kernel.deaf.add((node, fault.worker))
    crew = [worker for worker in world.machines[node].crew if worker.end is None]
    if not crew:
        return
    worker = crew[fault.worker % len(crew)]
    match fault.kind:
        case Kind.WORKER_CRASHES:
            kernel.end(worker, -signal.SIGSEGV)
        case Kind.WORKER_RAISES:
            kernel.end(worker, 1, message="ValueError: batch 17 has no label")
        case Kind.WORKER_HANGS:
            # Where all ranks hang, nobody waits for anybody, and nothing can be told.
            ranks = world.kernel.generations[worker.generation].workers.values()
            worker.is_hung = sum(not each.is_hung for each in ranks) > 1
        case Kind.WORKER_STOPS:
            worker.stopped_s = world.now_s
            world.at(fault.for_s, lambda: _release(world, worker))
        case Kind.WORKER_IS_HELD:
            worker.held_s = world.now_s
            world.at(fault.for_s, lambda: _release(world, worker))
        case Kind.WORKER_IS_DEAF:
            worker.is_deaf = True


def _release(world: World, worker: Worker) -> None:
    if worker.end is None:
        world.kernel.release(worker)


def _go_on(world: World, process) -> None:
    """A process that was stopped goes on, with all that it missed."""
    if process.is_alive and process.is_stopped:
        process.is_stopped = process.goes_on = False
        world.machines[process.node].woke_s = world.now_s
        if process is world.processes[0]:
            world.woke_s = world.now_s
            world.slept_s += world.now_s - process.stopped_s
        missed, process.backlog = process.backlog, []
        for do in missed:
            world._on(process, do)


def _cut_off(world: World, node: int, for_s: float) -> None:
    world.cut.add(node)
    world.at(for_s, lambda: world.cut.discard(node))
    line = world.current[node].line
    if line is not None:  # TCP gives up after gone_s
        world.at(GONE_S, lambda: world._break_line(line) if node in world.cut else None)


def _signal(world: World, fault: Fault, signum: int, *, everywhere: bool) -> None:
    rng = _rng(world, fault)
    targets = list(world.current.values()) if everywhere else [world.current[fault.node]]
    for process in targets:
        for again in range(1 + fault.doubled):
            after_s = 0.05 * rng.random() + 0.5 * again
            world.at(after_s, lambda process=process: world.signal(process, signum))


def _kill_all(world: World) -> None:
    for process in world.processes:
        if process.is_alive:
            world.kill(process, is_node=False)
            world.kernel.kill_all(process.node)
