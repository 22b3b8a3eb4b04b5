"""What is known of the data network when the workers start: how fast it is, and what carries it. Data alone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class DataNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The leader finds it out once a roll call; later generations keep it."""

    link_mbit_s: float | None = None
    """What one interface of the slowest node carries one way, in 1e6 bits a second; None: not known."""
    link_reason: str = ""
    link_source: str = ""
    interfaces: Mapping[int, tuple[str, ...]] = {}
    """By index of the node in the job: its interfaces on the same networks in the same order, where it has several that
    all nodes reach each other over; else empty."""
    ring: tuple[int, ...] = ()
    """Indices of the nodes in the order in which they should stand in a ring; empty: any."""
    ring_reason: str = ""
