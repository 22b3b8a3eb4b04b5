"""What a job's nodes send and how long its ranks wait for that: what the leader writes down, and status reads. Data."""

from __future__ import annotations

from typing import Annotated

import msgspec

from allranks.model.beat import MAX_INTERFACES, Age, Amount, InterfaceSeen, Word

MAX_NODES = 16
"""Nodes of a larger job that are told: the busiest ones."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class NodeTraffic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node."""

    node: Word
    interfaces: Annotated[tuple[InterfaceSeen, ...], msgspec.Meta(max_length=MAX_INTERFACES)] = ()
    wait_share: Share | None = None
    """Fraction of the time in which all of its ranks wait in collectives; None: not known."""
    segments: Amount = 0
    """Of TCP, that its ranks have sent to other nodes since they began; and of those, sent again."""
    retransmits: Amount = 0


class Traffic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job."""

    iteration: Amount | None = None
    """Steps of the rank that is furthest, since its process began; None: none is seen."""
    step_s: Age | None = None
    """Lately, median over the ranks."""
    wait_share: Share | None = None
    """Fraction of the time that ranks wait in collectives (`wait` and `transfer` of the ledger), median over the
    ranks, lately; None: not known."""
    least_wait_share: Share | None = None
    """Of the rank that waits least: a rank that is late makes the others wait, and waits less itself."""
    num_nodes: Amount = 0
    nodes: Annotated[tuple[NodeTraffic, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """In their order; of more than MAX_NODES the busiest ones."""
