"""The nodes of a job as its leader knows them: who is here, whose workers run, who waits, who is excluded. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from allranks.model.card import Card
from allranks.model.membership import Member


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


@dataclass(slots=True)
class Members:
    """All nodes with connected agents, by their index in the job."""

    num_nodes: int
    group: tuple[tuple[int, str], ...] = ()
    """Index in the job and name of each node of this generation, in the order of the Plan."""
    excluded: set[int] = field(default_factory=set)
    _nodes: dict[int, Node] = field(default_factory=dict)

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
        """Nodes whose agents have not said that their workers have ended."""
        return [index for index, node in self._nodes.items() if node.state is State.RUNNING]

    def takes_part(self, index: int) -> bool:
        """Whether a node is among those that are here: asked for each message of it."""
        return index in self._nodes and self._nodes[index].state is not State.WAITING

    def add(self, index: int, node: Node) -> None:
        """A node's agent is connected."""
        self._nodes[index] = node

    def remove(self, index: int) -> Node | None:
        """A node's agent is gone; returns what was known of it."""
        return self._nodes.pop(index, None)

    def set(self, index: int, state: State) -> None:
        """A node does something else now."""
        self._nodes[index] = msgspec.structs.replace(self._nodes[index], state=state)

    def begin(self, order: list[int], members: tuple[Member, ...]) -> None:
        """A generation begins; `order` has the indices of its nodes in the order of the Plan."""
        self.group = tuple((index, member.name) for index, member in zip(order, members, strict=True))
        for index, name in self.group:
            self._nodes[index] = msgspec.structs.replace(self._nodes[index], state=State.RUNNING, name=name)

    def position(self, index: int) -> int | None:
        """Return a node's index in the Plan; None: it is not in it."""
        return next((i for i, (member, _) in enumerate(self.group) if member == index), None)

    def admit(self, card: Card) -> int | str:
        """Return the index of a node that has joined, or why it is rejected."""
        free = set(range(self.num_nodes)) - self._nodes.keys() - self.excluded
        index = card.node_index if card.node_index is not None else min(free, default=-1)
        if index in free:
            return index
        if index in self.excluded:
            return f"node rank {index} was at fault and is excluded for the rest of this job"
        return f"node rank {index} is already in the job, or all {self.num_nodes} nodes are"
