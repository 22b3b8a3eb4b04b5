"""What do the streams between nodes say of the network: which are slow, lossy, or met other traffic? Pure.

usual     the median of all streams
slow      below SLOW_BELOW of the usual, in its fastest moments, too: a busy machine makes a stream slow on average,
          and a slow link makes it slow at all times
lossy     segments were sent again, at least LOSSY_ABOVE of them, and LOSSY_TIMES as many as in the median stream
busy      what others sent at the same time is more than BUSY_ABOVE of the usual: the stream says nothing of the
          links, neither good nor bad, unless it was fast all the same
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from allranks.comm.streams import RoundReport
from allranks.comm.table import Pair
from allranks.report.text import count_of

SLOW_BELOW = 0.5
LOSSY_ABOVE = 0.004
LOSSY_TIMES = 4.0
LOST_AT = 0.8
HEAVY_LOSS = 0.06
MIN_LOST = 5
BUSY_ABOVE = 0.1
MAX_NODES = 16
"""Of a matrix; between more nodes, the slowest streams are listed."""
MAX_LISTED = 8
NO_TIME = "not among the rounds that fit into the time"


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
    """Return a stream for each two nodes, each way; one that no round had, or nobody told of, is not tested.

    Args:
        nodes: in the order of their ranks.
        rounds: as the nodes ran them.
        reports: of both ends of each pair.
    """
    said = {(each.node, each.peer): each for each in reports}
    planned = {way for pairs in rounds for a, b in pairs for way in ((a, b), (b, a))}
    found = []
    for way in ((a, b) for a in nodes for b in nodes if a != b):
        own, other = said.get(way), said.get(way[::-1])
        if own is None or own.mbit_s is None:
            why = own.why if own else f"{way[0]} did not say" if way in planned else NO_TIME
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


def mark(pairs: Iterable[Pair]) -> Marks:
    """Return which streams are out of the ordinary."""
    tested = [pair for pair in pairs if pair.mbit_s is not None]
    if not tested:
        return Marks(0.0)
    usual = median(_of(pair) for pair in tested)
    usual_loss = median(_loss(pair) for pair in tested)
    slow = [pair for pair in tested if max(_of(pair), pair.peak_mbit_s) < SLOW_BELOW * usual]
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
        starved=tuple(pair for pair in tested if _of(pair) < SLOW_BELOW * usual and pair not in slow),
    )


def confirm(first: Iterable[Pair], again: Iterable[Pair]) -> tuple[Pair, ...]:
    """Return the streams with the better of two looks: what is slow or lossy now and then is a busy network."""
    second = {(pair.source, pair.target): pair for pair in again if pair.mbit_s is not None}

    def better(pair: Pair) -> Pair:
        other = second.get((pair.source, pair.target), pair)
        fast, clean = max(pair, other, key=_of), min(pair, other, key=_loss)
        return replace(
            fast,
            retransmitted=clean.retransmitted,
            segments=clean.segments,
            lost_at=min(pair.lost_at, other.lost_at),
            peak_mbit_s=max(pair.peak_mbit_s, other.peak_mbit_s),
            others_mbit_s=max(pair.others_mbit_s, other.others_mbit_s),
        )

    return tuple(better(pair) if pair.mbit_s is not None else pair for pair in first)


def _of(pair: Pair) -> float:
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
    return f"{_of(pair):.0f} Mbit/s{lost}"


def describe_rates(pairs: Iterable[Pair]) -> str:
    """`48`, or `48 to 52`: Mbit/s."""
    rates = sorted({f"{_of(pair):.0f}" for pair in pairs}, key=float)
    return rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"


def describe_busy(marks: Marks) -> tuple[str, ...]:
    """Return a line for each reason why slow streams are held against no node and no link."""
    lines = []
    if marks.busy:
        worst = max(marks.busy, key=lambda pair: pair.others_mbit_s)
        met = f"{worst.source} -> {worst.target} met {worst.others_mbit_s:.0f} Mbit/s of other traffic"
        told = f"the network is busy: {met}"
        if marks.unjudged:
            told += (
                f"; {count_of(len(marks.unjudged), 'slow or lossy stream')} cannot be judged: measure when it is quiet"
            )
        lines.append(told)
    if marks.starved:
        lines.append(
            f"the machines are busy: {count_of(len(marks.starved), 'stream')} of {marks.num_tested} waited for a core, "
            "and were fast at times: no link is slow for that"
        )
    return tuple(lines)


def describe_untested(pairs: Sequence[Pair]) -> str:
    """Return why streams failed, for one of them; empty: all were measured for which there was time."""
    failed = [pair for pair in pairs if pair.mbit_s is None and pair.why != NO_TIME]
    if not failed:
        return ""
    first = failed[0]
    return f"{len(failed)} of {len(pairs)} streams failed: {first.source} -> {first.target}: {first.why}"


def render_streams(nodes: Sequence[str], pairs: Sequence[Pair], marks: Marks) -> str:
    """Return the streams as a matrix, of more than MAX_NODES nodes the slowest ones, and a line that sums them up."""
    tested = sorted((pair for pair in pairs if pair.mbit_s is not None), key=_of)
    if not tested:
        return "no stream was measured"
    slowest = tested[0]
    total = f"streams: median {marks.usual_mbit_s:.0f} Mbit/s, slowest {slowest.source} -> {slowest.target}"
    total += f" {describe(slowest)}; {lost_percent(tested)} % of all segments were sent again"
    if left := sum(pair.why == NO_TIME for pair in pairs):
        total += f"; {left} of {len(pairs)} not tested, for lack of time"
    if len(nodes) > MAX_NODES:
        listed = [f"{pair.source} -> {pair.target}: {describe(pair)}" for pair in tested[:MAX_LISTED]]
        return "\n".join(["slowest streams", *listed, total])
    return "\n".join([_matrix(nodes, {(pair.source, pair.target): pair for pair in pairs}, marks), total])


def _matrix(nodes: Sequence[str], pairs: Mapping[tuple[str, str], Pair], marks: Marks) -> str:
    def cell(way: tuple[str, str]) -> str:
        pair = pairs.get(way)
        if pair is None:
            return "- "
        if pair.mbit_s is None:
            return ". "
        sign = "*" if pair in marks.slow else "!" if pair in marks.lossy else "~" if pair in marks.busy else " "
        return f"{pair.mbit_s:.0f}{sign}"

    names = [f"{number} {node}" for number, node in enumerate(nodes, start=1)]
    rows = [[cell((a, b)) for b in nodes] for a in nodes]
    width = max(3, *(len(text) for row in rows for text in row))
    first = max(map(len, ("Mbit/s from, to", *names)))
    shown = "".join(text for row in rows for text in row)
    signs = {"*": "slow", "!": "lossy", "~": "met other traffic", ".": "not tested"}
    legend = "; ".join(f"{sign} {word}" for sign, word in signs.items() if sign in shown)
    lines = [f"{'Mbit/s from, to':<{first}}" + "".join(f"{number:>{width}} " for number in range(1, len(nodes) + 1))]
    lines += [
        f"{name:<{first}} " + " ".join(f"{text:>{width}}" for text in row)
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [*lines, *([legend] if legend else [])])
