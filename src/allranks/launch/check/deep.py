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
from allranks.launch.check.collective import End, PairOrder, Report, Told
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


def plan_pairs(held: Held, *, port: int) -> tuple[PairOrder | None, dict[str, str]]:
    """Return which nodes form pairs, and why others cannot take part; None if no pair is left.

    Args:
        held: result of the ordinary check, which found nothing that would stop a job.
        port: used if the roll call had no port.
    """
    names = name_nodes(held.seen.cards)
    ends, skipped = dict[str, End](), dict[str, str]()
    network = _network_of_the_leader(held)
    for index, name in names.items():
        card = held.seen.cards[index]
        end = _end(card, network)
        if card.facts is None or "torch" not in card.facts.packages:
            skipped[name] = "torch is not installed"
        elif end is None:
            skipped[name] = "its data interface is unknown; name it in cluster.toml"
        else:
            ends[name] = end
    if len(ends) < 2:
        return None, skipped | dict.fromkeys(ends, ALONE if len(names) < 2 else "no other node can take part")
    cards = [held.seen.cards[index] for index, name in names.items() if name in ends]
    has_gpus = all(card.num_gpus and card.facts and card.facts.torch_cuda for card in cards)
    backends = ("gloo", "nccl") if has_gpus else ("gloo",)
    order = PairOrder(ends=ends, rounds=matchings(list(ends)), backends=backends, port=held.store_port or port)
    return order, skipped


def judge_told(
    order: PairOrder | None, told: Told, *, skipped: Mapping[str, str], wanted: Collection[type[Cause]]
) -> Deep:
    """Find the culprits in the reports.

    Args:
        order: which nodes formed pairs; None if there were none.
        told: their reports.
        skipped: node -> why it did not take part.
        wanted: causes to look for.
    """
    wanted_ids = {cause.id for cause in wanted}
    gone = {each.node: each.no_torch for each in told.reports if each.no_torch}
    skipped = {**skipped, **gone}
    results: list[Result] = []
    findings: list[Finding] = []
    for cause_id in sorted(_BACKENDS.keys() & wanted_ids):
        cause, backend = find_cause(cause_id), _BACKENDS[cause_id]
        cells = {name: (Status.SKIP, why) for name, why in skipped.items()}
        if order is not None and backend not in order.backends:
            cells = dict.fromkeys([*order.ends, *skipped], (Status.SKIP, NO_GPU))
        elif order is not None:
            edges, reasons = _edges(order, told, backend, without=gone)
            found = blame(edges)
            findings += [_finding(cause, backend, each, edges, reasons) for each in found]
            cells |= _cells(order, edges, told, without=skipped)
        results += [
            Result(cause=cause.label(), node=name, status=status, note=note) for name, (status, note) in cells.items()
        ]
    if _SLOW in wanted_ids:
        cells_of_speed, slow = _slow(order, told, skipped=skipped)
        results, findings = results + cells_of_speed, findings + slow
    return Deep(tuple(results), tuple(findings), tuple(_figures(order, told)))


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


def _cells(
    order: PairOrder, edges: Sequence[Edge], told: Told, *, without: Collection[str]
) -> dict[str, tuple[Status, str]]:
    """One cell per node, unless the node is a culprit."""
    failed = {name for edge in edges if not edge.is_ok for name in (edge.source, edge.target)}
    met = {name for edge in edges if edge.is_ok for name in (edge.source, edge.target)}
    cells = {}
    for name in order.ends:
        if name in without:
            continue
        if name in met:
            cells[name] = Status.PASS, ""
        elif name in failed:
            cells[name] = Status.UNKNOWN, "no pair with this node passed"
        else:
            taken = next((each.what for each in told.reports if each.node == name and each.status == "unknown"), "")
            cells[name] = Status.UNKNOWN, taken or "no pair with this node was tested"
    return cells


def _edges(
    order: PairOrder, told: Told, backend: str, *, without: Collection[str]
) -> tuple[list[Edge], dict[tuple[str, str], str]]:
    """Return the tests as edges, and the reason of each failed one."""
    said = {(each.round, each.node): each for each in told.reports if each.backend == backend}
    edges: list[Edge] = []
    reasons: dict[tuple[str, str], str] = {}
    for number, pairs in enumerate(order.rounds):
        for pair in pairs:
            if set(pair) & set(without) or not set(pair) <= told.here:
                continue
            reports = [said.get((number, node)) for node in pair]
            if any(each is not None and each.status == "unknown" for each in reports):
                continue
            for (source, target), report in zip((pair, pair[::-1]), reports, strict=True):
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


def _slow(order: PairOrder | None, told: Told, *, skipped: Mapping[str, str]) -> tuple[list[Result], list[Finding]]:
    """Compare the bandwidths: one cell per node and backend, and findings."""
    cause = find_cause(_SLOW)
    results = [Result(cause=cause.label(), node=name, status=Status.SKIP, note=why) for name, why in skipped.items()]
    findings: list[Finding] = []
    for backend in order.backends if order is not None else ():
        assert order is not None
        speeds = speeds_of(order, told.reports, backend)
        found = judge_speeds(speeds, backend, order.ends)
        findings += [cause.find(outcome, node=name) for name, outcome in found]
        for name in order.ends.keys() - skipped.keys():
            own = [each for each in speeds if name in each.nodes]
            status, note = Status.SKIP, TOO_FEW if own else "no pair with this node was measured"
            if own and len(speeds) >= MIN_PAIRS:
                best = max(own, key=lambda each: each.busbw_gb_s)
                status, note = Status.PASS, f"{NAMES[backend]}: {describe_speed(best)}"
            results.append(Result(cause=cause.label(), node=name, status=status, note=note))
    return results, findings


def _figures(order: PairOrder | None, told: Told) -> list[Mapping[str, object]]:
    rows: dict[tuple[str, int, tuple[str, str]], float] = {}
    pairs = {
        (number, name): pair for number, of in enumerate(order.rounds if order else ()) for pair in of for name in pair
    }
    for each in told.reports:
        pair = pairs.get((each.round, each.node))
        if pair is not None and each.seconds:
            key = each.backend, each.round, pair
            rows[key] = max(rows.get(key, 0.0), each.seconds)  # the slower end waited for the result
    measured = _measured(order, told)
    figures: list[Mapping[str, object]] = [
        {
            "backend": backend, "round": number + 1, "nodes": list(pair), "seconds": s,
            "mb_s": round(PAYLOAD_MB / s, 1), **measured.get((backend, number, pair), {}),
        }
        for (backend, number, pair), s in sorted(rows.items())
    ]  # fmt: skip
    gpus = [(each.node, number, s) for each in told.reports for number, s in enumerate(each.matmul_s) if s]
    usual = median(s for _, _, s in gpus) if gpus else 1.0
    figures += [
        {"backend": "matmul", "node": node, "gpu": number, "seconds": s, "of_median": round(s / usual, 3)}
        for node, number, s in gpus
    ]
    return figures


def _measured(order: PairOrder | None, told: Told) -> dict[tuple[str, int, tuple[str, str]], Mapping[str, object]]:
    """Bandwidth of each pair, by backend, round and nodes."""
    found = {}
    for backend in order.backends if order is not None else ():
        assert order is not None
        speeds = speeds_of(order, told.reports, backend)
        for each, share in zip(speeds, hold_against_each_other(speeds), strict=True):
            found[backend, each.round, each.nodes] = _row(each, share)
    return found


def _row(speed: Speed, share: float) -> Mapping[str, object]:
    return {
        "measured": describe_speed(speed),
        "payload_bytes": speed.size_bytes,
        "ms": round(speed.time_s * 1000, 3),
        "busbw_gb_s": round(speed.busbw_gb_s, 4),
        "of_yardstick": round(share, 3),
        "of_link": None if speed.of_link is None else round(speed.of_link, 3),
    }


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
