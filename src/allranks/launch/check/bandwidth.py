"""Which bandwidth do the collectives between pairs reach, and is a node slower than the others? Pure.

    busbw      bytes per second on the wire, one way: comparable with the link's advertised speed
    yardstick  the smaller of the link's speed and the median of all pairs, so that a slow type of link, or machines
               that are all busy, are not reported
    slow       below WARN_BELOW of the yardstick; if all pairs of a node are below FAIL_BELOW, the node fails

A node is named if all its pairs are slow, and there are at least two of them. A single slow pair, or any other pattern,
is one measurement on machines that may be busy: below FAIL_BELOW it is a warning with an undecided culprit; above, it
is only shown in the figures. If all pairs are equally slow, nothing is reported: pairs are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from allranks.causes.cause import Outcome
from allranks.launch.check.collective import End, Meeting
from allranks.model.finding import Confidence, Status
from allranks.preflight.blame import Blame, Edge, Kind, blame

WARN_BELOW = 0.8
"""As a fraction of the yardstick; links usually reach 80 % of their advertised speed."""
FAIL_BELOW = 0.5
MIN_PAIRS = 4
"""With fewer pairs, one slow pair is a large part of the median that it is compared with."""
OVER_THE_LINK = 1.1
"""Above this fraction of the data interface's speed, the traffic must use another path, for example RDMA."""
MAX_EVIDENCE = 6
TOO_FEW = "too few pairs to compare"
NAMES = {"gloo": "Gloo", "nccl": "NCCL"}


@dataclass(frozen=True, slots=True)
class Speed:
    """Bandwidth of one pair with one backend."""

    round: int
    nodes: tuple[str, str]
    size_bytes: int
    time_s: float
    """Of one all-reduce, at the slower end."""
    link_gb_s: float | None
    """Speed of the slower of the two data interfaces; None if one of them reports no speed."""

    @property
    def busbw_gb_s(self) -> float:
        """Bus bandwidth in gigabytes (1e9) a second."""
        return bus_bandwidth_gb_s(self.size_bytes, self.time_s, 2)

    @property
    def of_link(self) -> float | None:
        """Fraction of the link's speed."""
        return self.busbw_gb_s / self.link_gb_s if self.link_gb_s else None


def bus_bandwidth_gb_s(size_bytes: int, time_s: float, num_ranks: int) -> float:
    """Bus bandwidth of an all-reduce, comparable across world sizes.

    Every byte crosses the wire 2 (n - 1) / n times, whatever the algorithm: for two ranks once.

    Args:
        size_bytes: payload per rank, not the sum over ranks.
        time_s: wall time of one call, on the slowest rank.
    Returns:
        Gigabytes (1e9) per second.
    Raises:
        ValueError: time_s is not positive.
    Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth", AllReduce.
    """
    if time_s <= 0:
        raise ValueError(f"an all-reduce that took {time_s} s: expected more than 0")
    return size_bytes / time_s * 2 * (num_ranks - 1) / num_ranks / 1e9


def speeds_of(meetings: Iterable[Meeting], ends: Mapping[str, End]) -> list[Speed]:
    """Return the speeds of the pairs for which both ends measured a bandwidth."""
    speeds = []
    for each in meetings:
        done = [end for end in each.ends if end is not None and end.status == "ok" and (end.payload_s or 0) > 0]
        if len(done) == 2 and done[0].payload_bytes == done[1].payload_bytes:
            time_s = max(end.payload_s or 0.0 for end in done)
            speeds.append(Speed(each.round, each.nodes, done[0].payload_bytes, time_s, _link_gb_s(each.nodes, ends)))
    return speeds


def hold_against_each_other(speeds: Sequence[Speed]) -> list[float]:
    """Return the fraction of its yardstick that each pair reaches."""
    usual = median(each.busbw_gb_s for each in speeds) if speeds else 0.0
    is_on_the_link = all(each.of_link is None or each.of_link <= OVER_THE_LINK for each in speeds)
    sticks = [min(usual, each.link_gb_s) if each.link_gb_s and is_on_the_link else usual for each in speeds]
    return [each.busbw_gb_s / stick for each, stick in zip(speeds, sticks, strict=True)]


def judge_speeds(speeds: Sequence[Speed], backend: str, ends: Mapping[str, End]) -> list[tuple[str, Outcome]]:
    """Return the slow nodes and pairs of one backend: (name of the culprit, outcome); empty below MIN_PAIRS pairs."""
    if len(speeds) < MIN_PAIRS:
        return []
    shares = dict(zip(speeds, hold_against_each_other(speeds), strict=True))
    edges = [Edge(*each.nodes, share >= WARN_BELOW) for each, share in shares.items()]
    judged = [_judge(found, shares, backend, ends) for found in blame(edges)]
    return [each for each in judged if each is not None]


def describe_speed(speed: Speed) -> str:
    """`16 MiB in 134 ms, busbw 0.125 GB/s, 100 % of the link`."""
    link = "" if speed.of_link is None else f", {speed.of_link:.0%} of the link".replace("%", " %")
    mib = speed.size_bytes / (1 << 20)
    return f"{mib:g} MiB in {speed.time_s * 1000:.3g} ms, busbw {speed.busbw_gb_s:.3g} GB/s{link}"


def _judge(
    found: Blame, shares: Mapping[Speed, float], backend: str, ends: Mapping[str, End]
) -> tuple[str, Outcome] | None:
    explained = {frozenset((edge.source, edge.target)) for edge in found.explains}
    slow = [each for each in shares if frozenset(each.nodes) in explained]
    node = found.groups[0][0]
    around = [share for each, share in shares.items() if node in each.nodes]
    is_node = found.kind is Kind.NODE and len(around) > 1 and max(around) < WARN_BELOW
    if not is_node and min(shares[each] for each in slow) >= FAIL_BELOW:
        return None
    name = found.culprit if is_node or len(slow) > 1 else " <-> ".join(slow[0].nodes)
    carried = " and ".join(f"{each.busbw_gb_s:.3g}" for each in slow[:2])
    usual = median(each.busbw_gb_s for each in shares)
    outcome = Outcome(
        Status.FAIL if is_node and max(around) < FAIL_BELOW else Status.WARN,
        values={
            "what": f"all-reduces over {NAMES[backend]} reach {carried} GB/s here, the median of all pairs {usual:.3g}"
        },
        evidence=tuple(f"{' <-> '.join(each.nodes)}: {describe_speed(each)}" for each in slow[:MAX_EVIDENCE]),
        interface=ends[node].interface if is_node else None,
        confidence=found.confidence if is_node else Confidence.UNDECIDED,
    )
    return name, outcome


def _link_gb_s(nodes: tuple[str, str], ends: Mapping[str, End]) -> float | None:
    slower = min(ends[node].link_mbit_s or 0 for node in nodes)
    return slower / 8000 if slower > 0 else None
