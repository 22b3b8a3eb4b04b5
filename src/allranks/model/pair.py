"""A test between two nodes, and its result. Data only: `preflight.mesh` measures it."""

from __future__ import annotations

import msgspec

from allranks.model.card import TestPorts

MAX_PAIR_BYTES = 1 << 20
"""Most that the test of one pair sends, both ways together."""


class PairTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A node to be tried, from here."""

    node_index: int
    address: str
    """On the data network."""
    ports: TestPorts
    store_port: int | None = None
    """The leader's port, where the target is the leader."""
    probe_bytes: int = 0
    """Size of an unfragmentable IP packet that goes there and back in the place of the large payload, where the effort
    has no MTU probe; 0: none."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much one pair is tried; what this sends stays below MAX_PAIR_BYTES."""

    num_ports: int = 8
    """TCP ports of the target that are tried."""
    large_bytes: int = 48 << 10
    """Payload that goes there and comes back over one TCP connection; 0: none."""
    num_datagrams: int = 40
    """Small datagrams, each echoed, from which loss and clock offset are counted; 0: none."""
    has_mtu_probe: bool = True
    """Whether datagrams of the interface's MTU are sent that must not be fragmented."""


FULL = Effort()
SPARSE = Effort(num_ports=1, large_bytes=1024, num_datagrams=4, has_mtu_probe=False)
"""For hundreds of nodes: one connection, at most 4 KiB a pair. `PairTarget.probe_bytes` goes beyond that where the MTU
is above 1700: such a pair sends one packet of it each way, 18 KB at MTU 9000, and up to five more while none comes
back. Each node is the source of one such pair."""
LARGE = Effort(num_ports=1, num_datagrams=4)
"""For the few pairs among hundreds of nodes in which large packets are in doubt."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one node saw of another."""

    source: int
    """Index of the node that tried."""
    target: int
    num_open: int = 0
    """TCP ports that accepted and answered."""
    closed: dict[int, str] = {}
    """TCP port -> why it did not: `no answer in 1.0 s`, `refused`, `No route to host (EHOSTUNREACH)`."""
    store: str | None = None
    """`` (empty) where the leader's port answered, else why it did not; None: not tried."""
    large_s: float | None = None
    """Seconds for the large payload, there and back; None: not tried, or it did not come back."""
    large_sent: int = 0
    large_back: int = 0
    """Bytes that came back."""
    delivery_mbit_s: float | None = None
    """How fast the target's kernel took the large payload, in Mbit/s (TCP_INFO); None: not known."""
    segment_bytes: int = 0
    """Largest segment of the large connection (TCP_INFO)."""
    retransmits: int = 0
    """Segments sent again on the large connection (TCP_INFO)."""
    unacked_bytes: int = 0
    """Bytes that the target's kernel had not acknowledged at the end."""
    datagrams_sent: int = 0
    datagrams_lost: int = 0
    datagrams: dict[int, bool] = {}
    """IP packet size of unfragmentable datagrams -> whether one came back (False: all tries were lost)."""
    rtt_s: float | None = None
    """Shortest round trip seen."""
    clock_offset_s: float | None = None
    """The target's clock minus ours, from the exchange with the shortest round trip."""
    problem: str | None = None
    """Why it could not be tried at all: `the tester crashed: ...`."""
