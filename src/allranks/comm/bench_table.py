"""What did a measurement of the network find? The table that `allranks bench` makes and others read. Pure.

`allranks bench` writes it to bench.json in the directory of the runs; `allranks advise` predicts steps from it, and
`s.ddp()` chooses the size of its buckets by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

# A table is a file that others may have written: what no network does would make nonsense of all that is computed.
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_MbitS = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]

VERSION = 1
FILE = "bench.json"
"""Below the directory of the runs: the newest measurement."""
_BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "send_recv": lambda ranks: 1.0,
    "barrier": lambda ranks: 0.0,
    **dict.fromkeys(("pack_bf16", "pack_int8", "reduce_powersgd"), lambda ranks: 0.0),
}
"""From algorithm to bus bandwidth. Source: nccl-tests doc/PERFORMANCE.md, "Bus bandwidth". Packing gradients in a wire
format (join/packing.py) sends nothing, and PowerSGD next to nothing."""
COLLECTIVES = tuple(_BUS_FACTORS)


def bus_factor(collective: str, ranks: int) -> float:
    """Return how often each byte of a collective crosses the slowest link, one way, where no algorithm does better."""
    return _BUS_FACTORS[collective](ranks)


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One collective at one size, as the slowest rank saw it."""

    collective: str
    """One of COLLECTIVES."""
    size_bytes: _Count
    """As nccl-tests counts it: of the larger of a rank's two buffers, input and output."""
    count: _Count
    """Elements."""
    dtype: str = "float"
    redop: str = "none"
    root: int = -1
    in_flight: _Count = 1
    """How many of this size were under way at once; the times are then of one, their sum divided."""
    time_s: _Seconds
    """Median over repetitions."""
    p95_s: _Seconds
    best_s: _Seconds = 0.0
    """Of the fastest repetition."""
    repetitions: int = 0
    wrong: int | None = None
    """Elements that came out wrong, over all ranks; None: not checked."""

    def algbw_gb_s(self) -> float:
        """Size over time, in gigabytes (1e9) a second."""
        return self.size_bytes / self.time_s / 1e9 if self.time_s > 0 else 0.0

    def busbw_gb_s(self, ranks: int) -> float:
        """What the slowest link carried one way, in gigabytes (1e9) a second: comparable with its advertised speed."""
        return self.algbw_gb_s() * bus_factor(self.collective, ranks)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One TCP stream, from one node to another, while no other stream used either of them."""

    source: str
    target: str
    mbit_s: _MbitS | None = None
    """Payload that arrived, in 1e6 bits a second; None: not tested, `why` says the reason."""
    retransmitted: int = 0
    """Segments that the source's kernel sent again during the stream."""
    segments: int = 0
    """Segments that it sent."""
    lost_at: float = 0.0
    """Fraction of the stream's tenths in which segments were sent again."""
    peak_mbit_s: _MbitS = 0.0
    """What the target's kernel acknowledged in its fastest tenth: much more than mbit_s on machines that are busy."""
    others_mbit_s: _MbitS = 0.0
    """What else used the two interfaces in this direction: at the end where it was more."""
    why: str = ""


class BenchTable(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one group of nodes."""

    version: int = VERSION
    began_s: Annotated[float, msgspec.Meta(ge=0, lt=1 << 32)] = 0.0
    """Seconds since the epoch."""
    backend: str
    """gloo or nccl."""
    nodes: tuple[str, ...]
    """In the order of their ranks."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    interfaces: Mapping[str, tuple[str, ...]] = {}
    """Data interfaces of each node that the streams and collectives used."""
    link_mbit_s: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] | None = None
    """The lowest speed that the data interfaces report; None: they report none, as virtual interfaces do."""
    pairs: tuple[Pair, ...] = ()
    rows: tuple[BenchRow, ...] = ()

    def slowest_mbit_s(self) -> float | None:
        """The slowest stream, which decides over a ring; None: no stream was tested.

        One that waited for a core and was fast at times counts as what the median stream carried.
        """
        tested = [(pair.mbit_s, pair.peak_mbit_s) for pair in self.pairs if pair.mbit_s is not None]
        usual = median(mean for mean, _ in tested) if tested else 0.0
        return min((max(mean, min(peak, usual)) for mean, peak in tested), default=None)


def to_json(table: BenchTable) -> bytes:
    """Return the table as one line of JSON."""
    return msgspec.json.encode(table) + b"\n"


def from_json(data: bytes) -> BenchTable | str:
    """Return what `to_json` wrote, or the reason why it cannot be read."""
    try:
        table = msgspec.json.decode(data, type=BenchTable)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return f"not a table of allranks bench ({exc})"
    if table.version != VERSION:
        return f"written by another allranks: version {table.version}, expected {VERSION}"
    return table


def find_table(run_root: Path) -> Path:
    """Return where the newest measurement of a directory of runs is written."""
    return run_root / FILE
