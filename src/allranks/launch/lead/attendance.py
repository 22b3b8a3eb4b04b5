"""Which agents are connected to the leader: they join, lose their connection, come back, or are lost. No I/O.

A member whose connection has ended is away, and has RETURN_S to take it up again; the guard suspects it from then on. A
node that is lost, and comes back, waits for the next generation.
"""

from __future__ import annotations

import signal
from collections.abc import Collection

from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.course import GATHER_S, RETURN_S
from allranks.launch.lead.generation import Generation
from allranks.launch.lead.members import Members, Node, State
from allranks.wire.protocol import Stop


class Attendance:
    """Comings and goings of a job's agents.

    Args:
        members: the nodes, which it changes.
        guard: is told of members that are lost while workers run.
        can_restart: whether a node that joins later can take part.
    """

    def __init__(self, members: Members, guard: Guard, *, can_restart: bool) -> None:
        self._members, self._guard, self._can_restart = members, guard, can_restart

    def admit(self, joined: events.Joined, generation: Generation) -> list[Effect]:
        """An agent has authenticated itself: a member that comes back, or a node for the next generation."""
        card, number = joined.card, joined.connection
        if (index := self._members.find_returned(card, generation.number)) is not None:
            self._members.welcome_back(index, card, joined.address)
            return [events.Accept(connection=number, node=index), *generation.tell_again(index, card.generation)]
        found = self._members.admit(card) if self._can_restart else "the job is not started again"
        if isinstance(found, str):
            return [events.Reject(connection=number, reason=found)]
        self._members.add(found, Node(card=card, name=card.host, address=joined.address, state=State.WAITING))
        accept = events.Accept(connection=number, node=found)
        say = events.Say(text=f"{card.host} has joined and waits for the next restart")
        if card.generation < 0:
            return [accept, say]
        # It was given up, and comes back with workers of a generation that has gone on without it.
        return [accept, events.Send(node=found, message=Stop(signum=signal.SIGTERM)), say]

    def miss(self, lost: events.Lost, generation: Generation, *, is_running: bool) -> list[Effect]:
        """A connection has ended.

        Args:
            lost: whose, and why.
            generation: a node that it leaves out is lost at once.
            is_running: whether its workers run, so that the guard must know.
        """
        index, reason, members = lost.node, lost.reason, self._members
        if index not in members:
            return []
        if index in members.waiting:
            name = members.name_of(index)
            members.remove(index)
            return [events.Say(text=f"{name} joined, then disconnected")]
        if index in generation.without:
            return self.lose(index, reason, lost.now_s, is_running=is_running)
        members.miss(index, reason, lost.now_s + RETURN_S)
        self._suspect(index, reason, lost.now_s, is_running=is_running)
        return []

    def await_members(self, lost: tuple[int, str], now_s: float, *, has_resigned: bool) -> None:
        """This leader is new: the members come one after another, and the last leader's node does not.

        Args:
            lost: index of the last leader's node, and why it is gone.
            now_s: the time.
            has_resigned: it has left the job, after a verdict.
        """
        index, reason = lost
        members = self._members
        for member, name in members.group:
            if member not in members and member != index:
                why = f"{name} has not come to the new leader"
                members.miss(member, why, now_s + GATHER_S)
                self._suspect(member, why, now_s, is_running=not has_resigned)
        position = members.position(index)
        if has_resigned:
            members.excluded.add(index)
        elif position is not None:
            self._guard.lost(position, reason, now_s)
            members.miss(index, reason, now_s)  # given up in this turn, and expected back

    def _suspect(self, index: int, reason: str, now_s: float, *, is_running: bool) -> None:
        position = self._members.position(index)
        if is_running and position is not None and index in self._members.running:
            self._guard.lost(position, reason, now_s)

    def lose(self, index: int, reason: str, now_s: float, *, is_running: bool) -> list[Effect]:
        """A node is lost."""
        if index not in self._members and index not in self._members.away:
            return []
        name = self._members.name_of(index)
        self._suspect(index, reason, now_s, is_running=is_running)
        self._members.remove(index)
        record = events.Record(event="node_lost", fields={"node": name, "reason": reason})
        return [record, *([] if index in self._members.excluded else [events.ExpectBack(node=index, name=name)])]

    def lose_away(self, now_s: float, *, is_running: bool, nodes: Collection[int] | None = None) -> list[Effect]:
        """Give up the members that are away: these ones, or all that are overdue."""
        overdue = {
            index: away.reason
            for index, away in self._members.away.items()
            if (index in nodes if nodes is not None else now_s >= away.until_s)
        }
        return [
            effect
            for index, reason in overdue.items()
            for effect in self.lose(index, reason, now_s, is_running=is_running)
        ]
