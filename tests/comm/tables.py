"""Tables of the network, as `allranks bench` would write them of links of some rate."""

from __future__ import annotations

from allranks.comm.bench_table import BenchRow, BenchTable, bus_factor

MIB = 1 << 20
TCP = 0.945
"""Payload in what a link carries."""
ALONE = 1.1
"""A ring beside which no other one is under way leaves gaps."""
SMALL_S = {100: 0.0165, 500: 0.011, 1000: 0.010}
"""An all-reduce of a few KB, by the link's rate: 8 to 20 ms on two cores that serve six ranks."""
EXCHANGE_S = 0.0145
"""Of all-to-all and all-gather, beside their bytes."""


def bench_of(mbit: int, ranks: int = 6) -> BenchTable:
    """A table as `allranks bench` writes it of links of this rate."""

    def row(collective: str, size: int, overhead_s: float, in_flight: int = 1, gaps: float = 1.0) -> BenchRow:
        wire_s = bus_factor(collective, ranks) * size * 8e-6 / (mbit * TCP)
        time_s = gaps * wire_s + overhead_s
        return BenchRow(
            collective=collective, size_bytes=size, count=size // 4, in_flight=in_flight, time_s=time_s, p95_s=time_s
        )

    buckets = [MIB // 2 << power for power in range(7)]
    rows = [row("all_reduce", size, 0.0005, in_flight=8) for size in buckets]
    rows += [row("all_reduce", size, 0.002, gaps=ALONE) for size in buckets]
    rows += [row("all_reduce", size, SMALL_S[mbit]) for size in (4 << 10, 64 << 10)]
    rows += [
        row(name, size, EXCHANGE_S)
        for name in ("all_to_all", "all_gather")
        for size in (4 << 10, 64 << 10, MIB, 16 * MIB)
    ]
    nodes = tuple(f"node{number + 1:02}" for number in range(ranks))
    return BenchTable(backend="gloo", nodes=nodes, ranks=ranks, rows=tuple(rows))
