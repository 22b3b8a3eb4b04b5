"""The nodes of a job as its leader knows them: who is here, whose workers run, who waits, who is away. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from allranks.launch.lead.quorum import has_majority
from allranks.model.card import Card
from allranks.wire.protocol import Plan


class State(StrEnum):
    """What a connected node does."""

    WAITING = "waiting"
    """It has joined while the job runs, and takes part in the next generation."""
    RUNNING = "running"
    """It has workers of this generation."""
    STOPPED = "stopped"
    """Its workers have ended, or have not begun."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node whose agent is connected."""

    card: Card
    name: str
    address: str
    """Where its agent comes from."""
    state: State = State.STOPPED

    @property
    def addresses(self) -> dict[str, str]:
        """Where it can be tried: on the data network, and on the one that its agent speaks over; its data interface."""
        known = {"data": self.card.data_address or self.address, "control": self.address}
        return known | ({"interface": self.card.data_interface} if self.card.data_interface else {})


@dataclass(frozen=True, slots=True)
class Away:
    """A member whose connection has ended, and that may come back."""

    node: Node | None
    """None: it was connected to the last leader, never to this one."""
    reason: str
    until_s: float


@dataclass(slots=True)
class Members:
    """All nodes with connected agents, by their index in the job."""

    num_nodes: int
    group: tuple[tuple[int, str], ...] = ()
    """Index in the job and name of each node of this generation, in the order of the Plan."""
    excluded: set[int] = field(default_factory=set)
    away: dict[int, Away] = field(default_factory=dict)
    electors: tuple[tuple[int, ...], ...] = ()
    """Generations whose majority this leader needs (launch.lead.quorum)."""
    _nodes: dict[int, Node] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    """Members that are known to have begun this generation."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._nodes))

    def __getitem__(self, index: int) -> Node:
        return self._nodes[index]

    def __contains__(self, index: int) -> bool:
        return index in self._nodes

    @property
    def here(self) -> dict[int, Node]:
        """Nodes that take part now; those that wait do not."""
        return {index: node for index, node in self._nodes.items() if node.state is not State.WAITING}

    @property
    def waiting(self) -> dict[int, Node]:
        """Nodes that have joined since this generation began."""
        return {index: node for index, node in self._nodes.items() if node.state is State.WAITING}

    @property
    def running(self) -> list[int]:
        """Nodes whose agents have not said that their workers have ended; they may be away."""
        away = [index for index, each in self.away.items() if each.node is None or each.node.state is State.RUNNING]
        return [*(index for index, node in self._nodes.items() if node.state is State.RUNNING), *away]

    @property
    def have_majority(self) -> bool:
        """Whether the connected members may begin another generation."""
        return has_majority(self.here, self.electors)

    @property
    def absent(self) -> list[int]:
        """Members that are not connected, by their index in the Plan."""
        here = self.here
        return [position for position, (index, _) in enumerate(self.group) if index not in here]

    def can_spare(self, nodes: frozenset[int]) -> bool:
        """Whether the connected members have the majority without these nodes."""
        return has_majority(self.here.keys() - nodes, self.electors)

    def name_of(self, index: int) -> str:
        """A node's name: as it is connected, or as the Plan has it."""
        return self._nodes[index].name if index in self._nodes else dict(self.group).get(index, f"node {index}")

    def takes_part(self, index: int) -> bool:
        """Whether a node is among those that are here: asked for each message of it."""
        return index in self._nodes and self._nodes[index].state is not State.WAITING

    def add(self, index: int, node: Node) -> None:
        """A node's agent is connected."""
        self._nodes[index] = node

    def remove(self, index: int) -> Node | None:
        """A node's agent is gone for good; returns what was known of it."""
        away = self.away.pop(index, None)
        return self._nodes.pop(index, None) or (away.node if away is not None else None)

    def miss(self, index: int, reason: str, until_s: float) -> None:
        """The connection of a member has ended, or it has not come to this leader yet."""
        self.away[index] = Away(self._nodes.pop(index, None), reason, until_s)

    def wait_longer(self, slept_s: float) -> None:
        """The leader's process has slept: nobody was late."""
        self.away = {index: replace(each, until_s=each.until_s + slept_s) for index, each in self.away.items()}

    def welcome_back(self, index: int, card: Card, address: str) -> None:
        """A member is connected again; its workers run until it says otherwise."""
        away = self.away.pop(index, None)
        before = self._nodes.get(index) or (away.node if away is not None else None)
        state = before.state if before is not None else State.RUNNING
        self._nodes[index] = Node(card=card, name=self.name_of(index), address=address, state=state)

    def set(self, index: int, state: State) -> None:
        """A node does something else now."""
        self._nodes[index] = msgspec.structs.replace(self._nodes[index], state=state)

    def begin(self, plan: Plan) -> None:
        """A generation begins; whoever is away is not in it."""
        self.group = tuple((index, member.name) for index, member in zip(plan.nodes, plan.members, strict=True))
        # Where nobody can succeed the leader, it needs no majority.
        self.electors = (*plan.electors, plan.nodes) if len(plan.successors) > 1 else ()
        self._begun = set()
        self.away.clear()
        for index, name in self.group:
            if index in self._nodes:
                self._nodes[index] = msgspec.structs.replace(self._nodes[index], state=State.RUNNING, name=name)

    def note_begun(self, index: int) -> bool:
        """A member has begun this generation; returns whether all have, now or before."""
        self._begun.add(index)
        is_confirmed = len(self._begun) == len(self.group)
        if is_confirmed:
            self.electors = self.electors[-1:]
        return is_confirmed

    def position(self, index: int) -> int | None:
        """Return a node's index in the Plan; None: it is not in it."""
        return next((i for i, (member, _) in enumerate(self.group) if member == index), None)

    def find_returned(self, card: Card, generation: int) -> int | None:
        """Return the index of a member that has only lost its connection, by what its agent says; None: it is new.

        One that is away from the last leader has never been seen by this one: it is believed by its generation.
        """
        index = card.node_index
        if index is None or not card.incarnation:
            return None
        away = self.away.get(index)
        if away is not None and away.node is None:
            return index if card.generation in (generation, generation - 1) else None
        known = self._nodes.get(index) or (away.node if away is not None else None)
        return index if known is not None and known.card.incarnation == card.incarnation else None

    def admit(self, card: Card) -> int | str:
        """Return the index of a node that has joined, or why it is rejected."""
        free = set(range(self.num_nodes)) - self._nodes.keys() - self.excluded - self.away.keys()
        index = card.node_index if card.node_index is not None else min(free, default=-1)
        if index in free:
            return index
        if index in self.excluded:
            return f"node rank {index} was at fault and is excluded for the rest of this job"
        return f"node rank {index} is already in the job, or all {self.num_nodes} nodes are"
