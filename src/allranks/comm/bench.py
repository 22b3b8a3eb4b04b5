"""Which streams between nodes are slow, lossy, or met other traffic? Pure.

usual     the median of all streams
slow      below SLOW_BELOW of the usual, in its fastest moments, too: a busy machine makes a stream slow on average,
          and a slow link makes it slow at all times
lossy     segments were sent again, at least LOSSY_ABOVE of them, LOSSY_TIMES as many as in the median stream, and in
          LOST_AT of the stream's tenths: where a queue is full, TCP loses many in few moments, by itself
busy      what others sent at the same time is more than BUSY_ABOVE of the usual: such a stream is held against nobody
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from allranks.comm.bench_table import Pair
from allranks.comm.streams import RoundReport

SLOW_BELOW = 0.5
LOSSY_ABOVE = 0.004
LOSSY_TIMES = 4.0
LOST_AT = 0.8
HEAVY_LOSS = 0.06
MIN_LOST = 5
BUSY_ABOVE = 0.1


@dataclass(frozen=True, slots=True)
class Marks:
    """Which streams are out of the ordinary."""

    usual_mbit_s: float
    num_tested: int = 0
    slow: tuple[Pair, ...] = ()
    lossy: tuple[Pair, ...] = ()
    busy: tuple[Pair, ...] = ()
    """Those that met other traffic."""
    unjudged: tuple[Pair, ...] = ()
    """Of these the slow and lossy ones: that may be because of the other traffic."""
    starved: tuple[Pair, ...] = ()
    """Slow on average and fast at times: the processes at their ends got no cores."""

    @property
    def is_odd(self) -> bool:
        """Whether a second look is worth its time."""
        return bool(self.slow or self.lossy)


def join_reports(
    nodes: Sequence[str], rounds: Sequence[Sequence[tuple[str, str]]], reports: Iterable[RoundReport]
) -> tuple[Pair, ...]:
    """Return each stream of the rounds, also those that failed or of which nobody told.

    Args:
        nodes: in the order of their ranks.
        rounds: as the nodes ran them.
        reports: of both ends of each pair.
    """
    said = {(report.node, report.peer): report for report in reports}
    places = {node: place for place, node in enumerate(nodes)}
    planned = {way for pairs in rounds for a, b in pairs for way in ((a, b), (b, a))}
    found = []
    for way in sorted(planned, key=lambda way: (places[way[0]], places[way[1]])):
        own, other = said.get(way), said.get(way[::-1])
        if own is None or own.mbit_s is None:
            why = own.why if own else f"no report from {way[0]}"
            found.append(Pair(source=way[0], target=way[1], why=why))
            continue
        others = max(own.sent_by_others_mbit_s, other.got_by_others_mbit_s if other else 0.0)
        found.append(
            Pair(
                source=way[0],
                target=way[1],
                mbit_s=own.mbit_s,
                retransmitted=own.retransmitted,
                segments=own.segments,
                lost_at=own.lost_at,
                peak_mbit_s=own.peak_mbit_s,
                others_mbit_s=others,
            )
        )
    return tuple(found)


def count_untested(nodes: Sequence[str], pairs: Sequence[Pair]) -> int:
    """Return how many streams between the nodes were in no round, for lack of time."""
    return len(nodes) * (len(nodes) - 1) - len(pairs)


def mark(pairs: Iterable[Pair]) -> Marks:
    """Return which streams are out of the ordinary."""
    tested = [pair for pair in pairs if pair.mbit_s is not None]
    if not tested:
        return Marks(0.0)
    usual = median(rate_of(pair) for pair in tested)
    usual_loss = median(_loss(pair) for pair in tested)
    slow = [pair for pair in tested if max(rate_of(pair), pair.peak_mbit_s) < SLOW_BELOW * usual]
    lossy = [
        pair
        for pair in tested
        if pair.retransmitted >= MIN_LOST
        and _loss(pair) >= max(LOSSY_ABOVE, LOSSY_TIMES * usual_loss)
        and (pair.lost_at >= LOST_AT or _loss(pair) >= HEAVY_LOSS)
    ]
    busy = [pair for pair in tested if pair.others_mbit_s > BUSY_ABOVE * usual]
    return Marks(
        usual,
        len(tested),
        slow=tuple(pair for pair in slow if pair not in busy and pair not in lossy),
        lossy=tuple(pair for pair in lossy if pair not in busy),
        busy=tuple(busy),
        unjudged=tuple(pair for pair in busy if pair in slow or pair in lossy),
        starved=tuple(pair for pair in tested if rate_of(pair) < SLOW_BELOW * usual and pair not in slow),
    )


def confirm(first: Iterable[Pair], again: Iterable[Pair]) -> tuple[Pair, ...]:
    """Return the streams with the better of two looks: what is slow or lossy now and then is a busy network."""
    second = {(pair.source, pair.target): pair for pair in again if pair.mbit_s is not None}

    def better(pair: Pair) -> Pair:
        other = second.get((pair.source, pair.target), pair)
        fast, clean = max(pair, other, key=rate_of), min(pair, other, key=_loss)
        return replace(
            fast,
            retransmitted=clean.retransmitted,
            segments=clean.segments,
            lost_at=min(pair.lost_at, other.lost_at),
            peak_mbit_s=max(pair.peak_mbit_s, other.peak_mbit_s),
            others_mbit_s=max(pair.others_mbit_s, other.others_mbit_s),
        )

    return tuple(better(pair) if pair.mbit_s is not None else pair for pair in first)


def rate_of(pair: Pair) -> float:
    """Return the Mbit/s of a stream; 0 of one that was not tested."""
    return pair.mbit_s or 0.0


def _loss(pair: Pair) -> float:
    return pair.retransmitted / pair.segments if pair.segments else 0.0


def lost_percent(pairs: Iterable[Pair]) -> str:
    """`2.1`: of all segments of these streams, how many were sent again."""
    counted = list(pairs)
    return f"{100 * sum(pair.retransmitted for pair in counted) / max(1, sum(pair.segments for pair in counted)):.2g}"


def describe(pair: Pair) -> str:
    """`48 Mbit/s, 3 of 1094 segments sent again`."""
    lost = f", {pair.retransmitted} of {pair.segments} segments sent again" if pair.retransmitted else ""
    return f"{rate_of(pair):.0f} Mbit/s{lost}"


def describe_rates(pairs: Iterable[Pair]) -> str:
    """`48`, or `48 to 52`: Mbit/s."""
    rates = sorted({f"{rate_of(pair):.0f}" for pair in pairs}, key=float)
    return rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
