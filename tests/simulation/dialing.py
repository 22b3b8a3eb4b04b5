"""How a simulated agent looks for a leader, and what the processes that it finds do about it (wire.seek)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from allranks.launch import events
from allranks.wire.protocol import Contact

from .network import Line, Process

if TYPE_CHECKING:
    from .world import World

STAGGER_S = 0.05
AGAIN_S = 0.1
SILENT_S = 1.0
"""A machine that does not answer holds up a round so long."""
HANDSHAKE_S = 2.0
"""And one whose agent is stopped, so long: its kernel accepts the connection."""


@dataclass(eq=False)
class Search:
    """A thread that tries all contacts, again and again."""

    process: Process
    contacts: Sequence[Contact]
    is_over: bool = False


def seek(world: World, process: Process, contacts: Sequence[Contact]) -> None:
    """Begin to look for a leader."""
    stop(process)
    search = process.search = Search(process, contacts)
    world.at(0.01, lambda: world.on(process, lambda: _go_round(world, search)))


def knock(world: World, process: Process) -> None:
    """Ask the machine of a lost leader whether its agent listens, where that must be known (launch.knocking)."""
    succession = process.agent.succession
    if succession is None or succession.srun is None:
        return
    node = succession.leader
    contact = next(each for each in process.agent.plan.successors if each.node == node)
    target, listens = world.current[node], None
    if world.machines[node].is_up and world.reaches(process.node, node):
        listens = (
            target.is_alive and world.port_of(target) == contact.port
        )  # also while it writes how the job has ended
    world._feed_agent(process, events.Knocked(now_s=world.now_s, listens=listens))


def stop(process: Process) -> None:
    """End a search."""
    if process.search is not None:
        process.search.is_over = True
        process.search = None


def _go_round(world: World, search: Search) -> None:
    if _is_over(search) or not search.process.is_alive:
        return
    rng, last_s = world.rng("dial"), 0.0
    for index, contact in enumerate(search.contacts):
        after_s = STAGGER_S * index + 0.01 * rng.random()
        held_s = _holds_up_s(world, search.process, contact)
        last_s = max(last_s, after_s + held_s)
        world.at(after_s, _later(world, search, lambda contact=contact: _try(world, search, contact)))
    world.at(last_s + AGAIN_S, _later(world, search, lambda: _go_round(world, search)))


def _later(world: World, search: Search, do: Callable[[], None]) -> Callable[[], None]:
    return lambda: world.on(search.process, lambda: None if _is_over(search) else do())


def _is_over(search: Search) -> bool:
    """Whether it has found somebody, or its agent has given up."""
    return search.is_over or search.process.agent.succession is None


def _listener_of(world: World, contact: Contact) -> Process | None:
    """The process that listens at a port; None: nobody does, any more."""
    target = world.current[contact.node]
    is_there = target.is_alive and not target.is_through and world.port_of(target) == contact.port
    return target if is_there and target.agent is not None else None


def _holds_up_s(world: World, process: Process, contact: Contact) -> float:
    if not world.machines[contact.node].is_up or not world.reaches(process.node, contact.node):
        return SILENT_S
    target = _listener_of(world, contact)
    return HANDSHAKE_S if target is not None and target.is_stopped else 0.02


def _try(world: World, search: Search, contact: Contact) -> None:
    process, target = search.process, _listener_of(world, contact)
    is_up = world.machines[contact.node].is_up and world.reaches(process.node, contact.node)
    if target is None or target.is_stopped or not is_up:
        return
    if target.lead is None and target.agent.refuses(world.now_s):
        return
    search.is_over = True  # its thread ends with what it has found
    number = world.next_number()
    line = world.open_line(process, target, number)
    world._carry(line, 0, lambda: world.on(process, lambda: _find(world, search, line)))
    card = msgspec.structs.replace(world.card_of(process), generation=process.agent.plan.generation)
    joined = events.Joined(now_s=world.now_s, connection=number, card=card, address=world.address_of(process.node))
    if target.lead is not None:
        target.lead.joining[number] = line
        target.lead.feed(joined)
    else:
        target.joined[number] = line
        world._feed_agent(target, joined)


def _find(world: World, search: Search, line: Line) -> None:
    """The other side has said Welcome."""
    process = search.process
    if process.search is not search or not process.is_alive or not line.agent_open:
        world._end_line(line, by_host=False)
        if process.search is search and process.is_alive:
            seek(world, process, search.contacts)
        return
    follow(world, process, line)


def follow(world: World, process: Process, line: Line) -> None:
    """Speak to another leader, or to the same one over another connection, from now on."""
    if process.line is not None:
        world._end_line(process.line, by_host=False)
    stop(process)
    process.line = line
    world._feed_agent(process, events.LeaderFound(now_s=world.now_s, leader=line.host.node))
