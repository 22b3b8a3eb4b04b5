"""The terms of a roll call, and who has joined it. Data and pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.model.card import Card, JobDirectory
from allranks.model.errors import AllranksError
from allranks.model.hostlist import fold_hosts
from allranks.model.job_status import MAX_NODES, JobStatus, NodeRow
from allranks.model.safe_text import as_utf8
from allranks.wire.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCallTerms:
    """What the roll call is about."""

    job: str
    attempt: int
    num_nodes: int
    min_nodes: int
    node_names: tuple[str, ...] = ()
    """As the scheduler says; empty where nobody does."""
    join_s: float = 60.0
    gone_s: float = 10.0
    tests_s: float | None = None
    """Deadline of the pair tests; None: what suits nodes that have their cores for themselves."""
    store_port: int | None = None
    """The leader's port, as rank 0's store will have it."""
    second_network: str | None = None
    """Further subnet for gradients, of the leader's cluster.toml."""
    run_dir_nonce: str | None = None
    """What every node should find in the run directory."""
    ignored: frozenset[str] = frozenset()
    """Ids of causes that stop nobody."""


MAX_MISSING = 4096
"""Characters of the names of missing nodes in a status."""
SHARED = ("environment", "packages", "code", "limits", "unread")
"""Facts that are large, and mostly the same on all nodes of a job."""


@dataclass(slots=True)
class Roster:
    """Who has come: per node index its card, and the connection to it (none to the leader itself)."""

    terms: RollCallTerms
    cards: dict[int, Card] = field(default_factory=dict)
    peers: dict[int, Connection] = field(default_factory=dict)

    _common: dict[tuple[str, bytes], Any] = field(default_factory=dict)
    """Parts of the cards that are the same on most nodes, by their bytes: kept once."""
    _first_free: int = 0
    """No node below is missing: where nobody numbers them, the next one is looked for from here."""

    def admit(self, card: Card, peer: Connection) -> int | str:
        """Take a node in and return its index, or why it is rejected."""
        index, num_nodes = card.node_index, self.terms.num_nodes
        if index is None:
            index = next((i for i in range(self._first_free, num_nodes) if i not in self.cards), None)
            if index is None:
                return f"all {num_nodes} nodes have already joined"
            self._first_free = index + 1
        if not 0 <= index < num_nodes:
            return f"node rank {index} does not exist in a job of {num_nodes} nodes (--nnodes)"
        if index in self.cards:
            there = self.cards[index]
            return (
                f"node rank {index} has already joined ({there.host}, pid {there.pid}); give each node its own "
                "--node-rank (JobSet: one replicated Job with replicas: 1), and each job its own --rdzv-id"
            )
        self.cards[index] = self._share(card)
        self.peers[index] = peer
        return index

    def _share(self, card: Card) -> Card:
        """Return a card that has its common parts from the cards before it: two fifths of the memory of thousands."""
        if card.facts is None:
            return card
        parts = {}
        for name in SHARED:
            part = getattr(card.facts, name)
            parts[name] = self._common.setdefault((name, msgspec.msgpack.encode(part)), part)
        return msgspec.structs.replace(card, facts=msgspec.structs.replace(card.facts, **parts))

    def remove(self, index: int) -> tuple[Card, Connection]:
        """Take a node out again whose connection is gone, and return what was known of it."""
        self._first_free = min(self._first_free, index)
        return self.cards.pop(index), self.peers.pop(index)

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have come."""
        return len(self.cards) == self.terms.num_nodes

    def missing(self) -> tuple[int, ...]:
        """Indices of the nodes that have not come."""
        return tuple(index for index in range(self.terms.num_nodes) if index not in self.cards)

    def name_missing(self) -> str:
        """Name who has not come: hosts where the scheduler told them, else node ranks."""
        absent = self.missing()
        if self.terms.node_names:
            return fold_hosts([self.terms.node_names[index] for index in absent])
        plural = "s" if len(absent) > 1 else ""
        return f"node rank{plural} {', '.join(map(str, absent[:16]))}{' ...' if len(absent) > 16 else ''}"


def see_waiting(roster: Roster, *, left_s: float, now_s: float, started_s: float) -> JobStatus:
    """Return who is missing, as the status of a job that has no leader yet.

    Args:
        left_s: for how long missing nodes are still waited for.
        now_s: since the epoch.
        started_s: when this agent began, since the epoch.
    """
    terms, cards = roster.terms, roster.cards
    is_complete = roster.is_complete
    return JobStatus(
        job=terms.job,
        written_s=round(now_s, 3),
        started_s=round(started_s, 3),
        phase="forming",
        attempt=terms.attempt,
        num_nodes=terms.num_nodes,
        num_ranks=sum(card.num_workers for card in cards.values()),
        missing="" if is_complete else roster.name_missing()[:MAX_MISSING],
        gives_up_in_s=None if is_complete else round(max(0.0, left_s), 1),
        nodes=tuple(
            NodeRow(name=cards[index].host, num_ranks=cards[index].num_workers) for index in sorted(cards)[:MAX_NODES]
        ),
    )


def mtu_of(card: Card) -> int | None:
    """MTU of a node's data interface, where it is known."""
    interfaces = card.facts.interfaces if card.facts else ()
    return next((nic.mtu for nic in interfaces if nic.name == card.data_interface), None)


def with_place(card: Card, place: JobDirectory | None) -> Card:
    """Return the card with what was seen of a directory, in the place of what it said before."""
    if place is None or card.facts is None:
        return card
    places = (*(other for other in card.facts.places if other.purpose != place.purpose), place)
    return msgspec.structs.replace(card, facts=msgspec.structs.replace(card.facts, places=places))


def with_problem(card: Card, problem: AllranksError | None) -> Card:
    """Return the card with this reason why the node cannot take part; None: it can."""
    return msgspec.structs.replace(
        card,
        problem=as_utf8(str(problem)) if problem else None,
        problem_exit=problem.exit_code if problem else 0,
        problem_finding=problem.finding if problem else None,
    )
