"""Which pairs run collectives, and which culprits follow from their reports? Pure.

A pair passes if both ends say so. A failed pair is an edge for preflight.blame: two rounds with different partners show
whether a node fails with both, or only met a faulty partner. With two nodes only, the culprit stays undecided.
launch.check.bandwidth compares the bandwidths of the pairs that passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from statistics import median

from allranks.causes.catalogue import find_cause
from allranks.causes.cause import Cause, Outcome
from allranks.launch.check.bandwidth import (
    MIN_PAIRS,
    NAMES,
    TOO_FEW,
    Speed,
    describe_speed,
    hold_against_each_other,
    judge_speeds,
    speeds_of,
)
from allranks.launch.check.collective import End, Meeting, PairOrder, Report, Told, list_meetings
from allranks.launch.check.member import Held
from allranks.launch.check.outcome import ALONE
from allranks.model.card import Card
from allranks.model.finding import Confidence, Finding, Result, Status
from allranks.model.hostlist import fold_hosts
from allranks.preflight.blame import Blame, Edge, Kind, blame
from allranks.preflight.judge import name_nodes
from allranks.preflight.matchings import matchings

PAYLOAD_MB = (4 << 20) / 1e6
"""Size of the tensor that join/pair.py reduces."""
MAX_EVIDENCE = 6
NO_GPU = "no NVIDIA GPU"
_BACKENDS = {"AR403": "gloo", "AR416": "nccl"}
_SLOW = "AR417"


@dataclass(frozen=True, slots=True)
class Deep:
    """Result of the collectives."""

    results: tuple[Result, ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: tuple[Mapping[str, object], ...] = ()
    """Times and bandwidths, one entry per pair and per GPU."""


def plan_pairs(held: Held, *, port: int) -> tuple[PairOrder, dict[str, str]]:
    """Return which nodes form pairs, none if fewer than two can, and why others cannot take part.

    Args:
        held: result of the ordinary check, which found nothing that would stop a job.
        port: used if the roll call had no port.
    """
    ends, skipped = dict[str, End](), dict[str, str]()
    cards, network = list[Card](), _network_of_the_leader(held)
    names = name_nodes(held.seen.cards)
    for index, name in names.items():
        card = held.seen.cards[index]
        end = _end(card, network)
        if card.facts is None or "torch" not in card.facts.packages:
            skipped[name] = "torch is not installed"
        elif end is None:
            skipped[name] = "its data interface is unknown; name it in cluster.toml"
        else:
            ends[name] = end
            cards.append(card)
    if len(ends) < 2:
        skipped |= dict.fromkeys(ends, ALONE if len(names) < 2 else "no other node can take part")
        return PairOrder(ends={}, rounds=(), backends=tuple(NAMES), port=port), skipped
    has_gpus = all(card.num_gpus and card.facts and card.facts.torch_cuda for card in cards)
    backends = tuple(NAMES) if has_gpus else ("gloo",)
    return PairOrder(ends=ends, rounds=matchings(list(ends)), backends=backends, port=held.store_port or port), skipped


def judge_told(order: PairOrder, told: Told, *, skipped: Mapping[str, str], wanted: Collection[type[Cause]]) -> Deep:
    """Find the culprits in the reports.

    Args:
        skipped: node -> why it did not take part.
    """
    wanted_ids = {cause.id for cause in wanted}
    skipped = {**skipped, **{each.node: each.no_torch for each in told.reports if each.no_torch}}
    meetings = list_meetings(order, told.reports)
    speeds = {
        backend: speeds_of([each for each in meetings if each.backend == backend], order.ends)
        for backend in order.backends
    }
    results, findings = list[Result](), list[Finding]()
    for cause_id in sorted(_BACKENDS.keys() & wanted_ids):
        cause, backend = find_cause(cause_id), _BACKENDS[cause_id]
        if backend in order.backends:
            edges, reasons = _edges(meetings, backend, absent=skipped.keys() | (order.ends.keys() - told.here))
            findings += [_finding(cause, backend, each, edges, reasons) for each in blame(edges)]
            cells = {name: (Status.SKIP, why) for name, why in skipped.items()} | {
                name: _cell(name, edges, told) for name in order.ends if name not in skipped
            }
        else:
            cells = dict.fromkeys([*order.ends, *skipped], (Status.SKIP, NO_GPU))
        results += _results(cause, cells)
    if _SLOW in wanted_ids:
        cause = find_cause(_SLOW)
        results += _results(cause, {name: (Status.SKIP, why) for name, why in skipped.items()})
        for backend, of_backend in speeds.items():
            findings += [cause.find(said, node=name) for name, said in judge_speeds(of_backend, backend, order.ends)]
            taking_part = order.ends.keys() - skipped.keys()
            results += _results(cause, {name: _cell_of_speed(name, backend, of_backend) for name in taking_part})
    return Deep(tuple(results), tuple(findings), (*_figures(meetings, speeds), *_matmuls(told.reports)))


def render_figures(deep: Deep) -> str:
    """Return a line for each pair and GPU, with its time."""
    lines = []
    for each in deep.figures:
        if each["backend"] == "matmul":
            lines.append(
                f"{each['node']} GPU {each['gpu']}: matmul {each['seconds']} s, {each['of_median']} of the median"
            )
        else:
            lines.append(
                f"{each['backend']}, round {each['round']}: {' <-> '.join(each['nodes'])}: "  # type: ignore[arg-type]
                f"4 MiB in {each['seconds']} s, {each['mb_s']} MB/s"
                + (f"; {each['measured']}" if "measured" in each else "")
            )
    return "\n".join(lines)


def _results(cause: type[Cause], cells: Mapping[str, tuple[Status, str]]) -> list[Result]:
    return [Result(cause=cause.label(), node=name, status=status, note=note) for name, (status, note) in cells.items()]


def _cell(name: str, edges: Sequence[Edge], told: Told) -> tuple[Status, str]:
    """One cell of a node that took part; that of a culprit gets its finding later."""
    own = [edge.is_ok for edge in edges if name in (edge.source, edge.target)]
    if any(own):
        return Status.PASS, ""
    if own:
        return Status.UNKNOWN, "no pair with this node passed"
    taken = next((each.what for each in told.reports if each.node == name and each.status == "unknown"), "")
    return Status.UNKNOWN, taken or "no pair with this node was tested"


def _cell_of_speed(name: str, backend: str, speeds: Sequence[Speed]) -> tuple[Status, str]:
    own = [each for each in speeds if name in each.nodes]
    if not own or len(speeds) < MIN_PAIRS:
        return Status.SKIP, TOO_FEW if own else "no pair with this node was measured"
    return Status.PASS, f"{NAMES[backend]}: {describe_speed(max(own, key=lambda each: each.busbw_gb_s))}"


def _edges(
    meetings: Sequence[Meeting], backend: str, *, absent: Collection[str]
) -> tuple[list[Edge], dict[tuple[str, str], str]]:
    """Return the tests as edges, and the reason of each failed one."""
    edges: list[Edge] = []
    reasons: dict[tuple[str, str], str] = {}
    for each in meetings:
        is_unknown = any(end is not None and end.status == "unknown" for end in each.ends)
        if each.backend != backend or is_unknown or set(each.nodes) & set(absent):
            continue
        for (source, target), report in zip((each.nodes, each.nodes[::-1]), each.ends, strict=True):
            is_ok = report is not None and report.status == "ok"
            edges.append(Edge(source, target, is_ok))
            if not is_ok:
                reasons[source, target] = _reason(report)
    return edges, reasons


def _reason(report: Report | None) -> str:
    return (report.what or "failed") if report is not None else "it did not finish the collective"


def _finding(
    cause: type[Cause], backend: str, found: Blame, edges: Sequence[Edge], reasons: Mapping[tuple[str, str], str]
) -> Finding:
    culprits = [name for group in found.groups for name in group]
    peers = {name for edge in found.explains for name in (edge.source, edge.target)} - set(culprits)
    evidence = [
        f"{edge.source} with {edge.target}: {reasons[edge.source, edge.target]}"
        for edge in found.explains
        if (edge.source, edge.target) in reasons
    ][:MAX_EVIDENCE]
    between = fold_hosts(sorted(culprits)) if not peers else f"{fold_hosts(culprits)} and {fold_hosts(sorted(peers))}"
    outcome = Outcome(
        Status.FAIL,
        values={"what": f"an all-reduce of 4 MiB over {NAMES[backend]} fails between {between}"},
        evidence=(*evidence, *([f"to be certain: {found.would_decide}"] if found.would_decide else [])),
        confidence=Confidence.UNDECIDED if found.kind is Kind.UNDECIDED else found.confidence,
    )
    others = {name for edge in edges for name in (edge.source, edge.target)} - set(culprits)
    return cause.find(outcome, node=found.culprit, waiting=fold_hosts(sorted(others)) or None)


def _figures(meetings: Sequence[Meeting], speeds: Mapping[str, Sequence[Speed]]) -> list[Mapping[str, object]]:
    """Time of the all-reduce of each pair, and the bandwidth that was measured."""
    measured = {
        (backend, each.round, each.nodes): {
            "measured": describe_speed(each),
            "payload_bytes": each.size_bytes,
            "ms": round(each.time_s * 1000, 3),
            "busbw_gb_s": round(each.busbw_gb_s, 4),
            "of_yardstick": round(share, 3),
            "of_link": None if each.of_link is None else round(each.of_link, 3),
        }
        for backend, of_backend in speeds.items()
        for each, share in zip(of_backend, hold_against_each_other(of_backend), strict=True)
    }
    figures = list[Mapping[str, object]]()
    for each in sorted(meetings, key=lambda one: (one.backend, one.round, one.nodes)):
        # The slower end waited for the result.
        if seconds := max((end.seconds for end in each.ends if end is not None and end.seconds), default=None):
            pair = {"backend": each.backend, "round": each.round + 1, "nodes": list(each.nodes), "seconds": seconds}
            speed = measured.get((each.backend, each.round, each.nodes), {})
            figures.append({**pair, "mb_s": round(PAYLOAD_MB / seconds, 1), **speed})
    return figures


def _matmuls(reports: Sequence[Report]) -> list[Mapping[str, object]]:
    gpus = [(each.node, number, s) for each in reports for number, s in enumerate(each.matmul_s) if s]
    usual = median(s for _, _, s in gpus) if gpus else 1.0
    return [
        {"backend": "matmul", "node": node, "gpu": number, "seconds": s, "of_median": round(s / usual, 3)}
        for node, number, s in gpus
    ]


def _network_of_the_leader(held: Held) -> str | None:
    """The network on which the nodes found each other, if no file names one; a job would use it, too."""
    leader = held.seen.cards.get(0)
    if leader is None or leader.facts is None:
        return None
    for card in held.seen.cards.values():
        host = (card.came_by or "").partition(" ")[0].rpartition(":")[0].strip("[]")
        known = card.facts.resolved.get(host, ()) if card.facts else ()
        for nic in leader.facts.interfaces:
            for address, network in zip(nic.addresses, nic.networks, strict=False):
                if address in (host, *known) and nic.kind != "loopback":
                    return network
    return None


def _end(card: Card, network: str | None) -> End | None:
    nics = card.facts.interfaces if card.facts else ()
    if card.data_interface and card.data_address:
        speed = next((nic.speed_mbit_s for nic in nics if nic.name == card.data_interface), None)
        return End(address=card.data_address, interface=card.data_interface, num_gpus=card.num_gpus, link_mbit_s=speed)
    for nic in nics if network else ():
        for address, own in zip(nic.addresses, nic.networks, strict=False):
            if own == network and not ip_address(address).is_link_local:
                return End(address=address, interface=nic.name, num_gpus=card.num_gpus, link_mbit_s=nic.speed_mbit_s)
    return None
