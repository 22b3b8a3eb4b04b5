"""The nodes of a job as its leader knows them: who is here, whose workers run, who is away, and who may go on? Pure.

So that never two groups go on: every agent is connected to one leader at a time. A leader may begin a generation only
with members that are the majority of the last one: a member counts 2, that one's leader 3, and more than half is
needed. So of two equal halves the leader's goes on, and of two nodes only the leader's. Ranks train only if all members
of their generation have begun it. Two generations that each have the majority of the last one share a member, and a
member begins only one of them.

A leader on whose node srun runs needs no majority: nobody succeeds it while its agent lives (launch.succession). Once
it has begun a generation without the majority, nobody succeeds it at all, since the members that it has lost could
succeed it in the last generation; `minority` in events.jsonl tells them not to.

While the leader does not know that all members have begun a generation, it needs the majority of the one before, too:
the others may not have got that Plan. Dead members count as missing, however sure it is that they are dead: they may
have begun a generation before. An agent that was started again is a new one, and no member.

Source: weighted voting, Gifford 1979; joint majorities of two configurations, Ongaro 2014 (Raft), 4.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from allranks.model.card import WIRE_FLAGS, Card
from allranks.wire.protocol import Plan


class State(StrEnum):
    """What a connected node does."""

    WAITING = "waiting"
    """It has joined while the job runs, and takes part in the next generation."""
    RUNNING = "running"
    """It has workers of this generation."""
    STOPPED = "stopped"
    """Its workers have ended, or have not begun."""


@dataclass(slots=True, kw_only=True)
class ConnectedNode:
    """One node whose agent is connected."""

    card: Card
    name: str
    address: str
    """Where its agent comes from."""
    state: State = State.STOPPED

    @property
    def addresses(self) -> dict[str, str]:
        """Where it can be tried: on the data network, and on the one that its agent speaks over; and its interfaces."""
        nics = self.card.facts.interfaces if self.card.facts else ()
        known = {address: nic.name for nic in nics if nic.is_up for address in nic.addresses}
        known |= {"data": self.card.data_address or self.address, "control": self.address}
        return known | ({"interface": self.card.data_interface} if self.card.data_interface else {})


@dataclass(slots=True)
class Away:
    """A member whose connection has ended, and that may come back."""

    node: ConnectedNode | None
    """None: it was connected to the last leader, never to this one."""
    reason: str
    until_s: float


@dataclass(slots=True)
class Members:
    """All nodes with connected agents, by their index in the job."""

    num_nodes: int
    nodes: dict[int, ConnectedNode]
    group: dict[int, str] = field(default_factory=dict)
    """Name of each node of this generation, in the order of the Plan."""
    excluded: set[int] = field(default_factory=set)
    away: dict[int, Away] = field(default_factory=dict)
    electors: tuple[tuple[int, ...], ...] = ()
    """Generations whose majority this leader needs, or its successor."""
    needs_majority: bool = True
    may_be_succeeded: bool = True
    """Whether others may lead if this leader is lost."""
    _begun: set[int] = field(default_factory=set)
    """Members that are known to have begun this generation."""

    @property
    def here(self) -> dict[int, ConnectedNode]:
        """Nodes that take part now; those that wait do not."""
        return {index: node for index, node in self.nodes.items() if node.state is not State.WAITING}

    @property
    def waiting(self) -> dict[int, ConnectedNode]:
        """Nodes that have joined since this generation began."""
        return {index: node for index, node in self.nodes.items() if node.state is State.WAITING}

    @property
    def running(self) -> list[int]:
        """Nodes whose agents have not said that their workers have ended; they may be away."""
        away = [index for index, one in self.away.items() if one.node is None or one.node.state is State.RUNNING]
        return [*(index for index, node in self.nodes.items() if node.state is State.RUNNING), *away]

    def have_majority(self, *, without: Collection[int] = (), and_away: bool = False) -> bool:
        """Whether the connected members, without these nodes, may begin another generation.

        Args:
            without: nodes that are left out.
            and_away: if those come back that are away.
        """
        here = self.here.keys() | self.away.keys() if and_away else self.here.keys()
        return not self.needs_majority or has_majority(here - set(without), self.electors)

    @property
    def are_minority(self) -> bool:
        """Whether those that are here are no majority, also where the leader needs none."""
        return not has_majority(self.here.keys(), self.electors)

    def give_up_succession(self) -> bool:
        """Before a generation: note, once, that it begins without the majority, and nobody may succeed the leader."""
        is_first = self.may_be_succeeded and self.are_minority
        self.may_be_succeeded &= not is_first
        return is_first

    def name_of(self, index: int) -> str:
        """A node's name: as it is connected, or as the Plan has it."""
        return self.nodes[index].name if index in self.nodes else self.group.get(index, f"node {index}")

    def remove(self, index: int) -> None:
        """A node's agent is gone for good."""
        self.nodes.pop(index, None)
        self.away.pop(index, None)

    def miss(self, index: int, reason: str, until_s: float) -> None:
        """The connection of a member has ended, or it has not come to this leader yet."""
        self.away[index] = Away(self.nodes.pop(index, None), reason, until_s)

    def begin(self, plan: Plan) -> None:
        """A generation begins; whoever is away is not in it."""
        self.group = {index: member.name for index, member in zip(plan.nodes, plan.members, strict=True)}
        self.electors = (*plan.electors, plan.nodes)
        self._begun = set()
        self.away.clear()
        for index, name in self.group.items():
            if index in self.nodes:
                self.nodes[index].state, self.nodes[index].name = State.RUNNING, name

    def note_begun(self, index: int) -> bool:
        """A member has begun this generation; returns whether all have, now or before."""
        self._begun.add(index)
        is_confirmed = len(self._begun) == len(self.group)
        if is_confirmed:
            self.electors = self.electors[-1:]
        return is_confirmed

    def take_back(self, card: Card, address: str, *, generation: int, may_return: bool) -> int | None:
        """Take back a member that has only lost its connection, by what its agent says; None: its agent is a new one.

        One that is away from the last leader has never been seen by this one: it is believed by its generation, and its
        workers run until it says otherwise. So is one that was given up, where it `may_return`: its generation runs.
        """
        index = card.node_index
        if index is None or not card.incarnation:
            return None
        away = self.away.get(index)
        before, state = self.nodes.get(index) or (away.node if away is not None else None), State.RUNNING
        if before is not None and before.card.incarnation == card.incarnation:
            state = before.state
        elif (
            before is not None
            or card.generation not in (generation, max(0, generation - 1))  # -1: started again, it has had none
            or (away is None and not (may_return and index in self.group and card.generation == generation))
        ):
            return None
        self.away.pop(index, None)
        self.nodes[index] = ConnectedNode(card=card, name=self.name_of(index), address=address, state=state)
        return index

    def admit(self, card: Card) -> int | str:
        """Return the index of a node that has joined, or why it is rejected."""
        free = set(range(self.num_nodes)) - self.nodes.keys() - self.excluded - self.away.keys()
        index = card.node_index if card.node_index is not None else min(free, default=-1)
        if index in free:
            return self._other_flags(card) or index
        if index in self.excluded:
            return f"node rank {index} was at fault and is excluded for the rest of this job"
        return f"node rank {index} is already in the job, or all {self.num_nodes} nodes are"

    def _other_flags(self, card: Card) -> str:
        """Return which flags a new node has that the job has not, or the other way round: the roll call is over."""
        known = next((node.card.facts.environment for node in self.nodes.values() if node.card.facts), None)
        if known is None or card.facts is None or "environment" in card.facts.unread:
            return ""
        own = card.facts.environment
        told = [
            f"{flag} {own.get(name, 'unset')} (in the job {known.get(name, 'unset')})"
            for name, flag in WIRE_FLAGS.items()
            if own.get(name) != known.get(name)
        ]
        return f"it was started with {', '.join(told)}: all nodes must send gradients alike" if told else ""


def has_majority(here: Collection[int], electors: Iterable[Sequence[int]]) -> bool:
    """Tell whether these nodes are the majority of each of several generations.

    Args:
        here: nodes whose agents follow one leader, its own included, by their index in the job.
        electors: the nodes of each generation, its leader's first.
    """
    # Two for each member that is here, and one more for the leader; the sum of all is 2 n + 1.
    return all(2 * sum(node in here for node in nodes) + (nodes[0] in here) > len(nodes) for nodes in electors)
