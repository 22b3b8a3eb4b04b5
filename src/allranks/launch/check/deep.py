"""Which pairs run collectives, and which culprits follow from their reports? Pure.

A pair passes if both ends say so. A failed pair is an edge for preflight.blame: two rounds with different partners show
whether a node fails with both, or only met a faulty partner. With two nodes only, the culprit stays undecided.

The bandwidths of the pairs that passed are compared with each other:

    busbw      bytes per second on the wire, one way: comparable with the link's advertised speed
    yardstick  the smaller of the link's speed and the median of all pairs, so that a slow type of link, or machines
               that are all busy, are not reported
    slow       below WARN_BELOW of the yardstick; if all pairs of a node are below FAIL_BELOW, the node fails

A node is named if all its pairs are slow, and there are at least two of them. A single slow pair, or any other pattern,
is one measurement on machines that may be busy: below FAIL_BELOW it is a warning with an undecided culprit; above, it
is only shown in the figures. Where most pairs do not come near the speed of their link, cores decide how fast each is,
and only what is below FAIL_BELOW is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.causes.outcome import failed, warned
from allranks.launch.check.check_outcome import CheckOutcome, add_more
from allranks.launch.check.check_step import Held
from allranks.launch.check.member_step import MemberAddress, find_ends
from allranks.launch.check.pair_collectives import Meeting, PairOrder, Report, list_meetings
from allranks.model.finding import Confidence, Finding, Result, Status
from allranks.model.hostlist import fold_hosts
from allranks.preflight.matchings import matchings
from allranks.preflight.pair_blame import Blame, Edge, Kind, blame

WARN_BELOW = 0.8
"""As a fraction of the yardstick; links usually reach 80 % of their advertised speed."""
FAIL_BELOW = 0.5
MIN_PAIRS = 4
"""With fewer pairs, one slow pair is a large part of the median that it is compared with."""
OVER_THE_LINK = 1.1
"""Above this fraction of the data interface's speed, the traffic must use another path, for example RDMA."""
PAYLOAD_MB = (4 << 20) / 1e6
"""Size of the smaller all-reduce."""
MAX_EVIDENCE = 6
NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
_CAUSES = {"gloo": "AR403", "nccl": "AR416"}
"""Backend -> why its collectives fail between a pair."""
_SLOW = "AR417"
_PAIR = "{backend}, round {round}: {nodes[0]} <-> {nodes[1]}: 4 MiB in {seconds} s, {mb_s} MB/s"
_MATMUL = "{node} GPU {gpu}: matmul {seconds} s, {of_median} of the median"


def plan_pairs(held: Held) -> tuple[PairOrder, dict[str, str]]:
    """Return which nodes form pairs, none if fewer than two can, and why others cannot take part.

    Args:
        held: result of the ordinary check, which found nothing that would stop a job.
    """
    ends, skipped = find_ends(held, needs_torch=True)
    # Without any end: what is skipped says why, whether there are GPUs or not.
    backends = tuple(NAMES) if all(end.num_gpus for end in ends.values()) else ("gloo",)
    return PairOrder(ends=ends, rounds=matchings([*ends]), backends=backends, port=held.store_port or 0), skipped


def judge_reports(
    outcome: CheckOutcome,
    order: PairOrder,
    reports: Sequence[Report],
    *,
    skipped: Mapping[str, str],
    wanted: Collection[Cause],
) -> CheckOutcome:
    """Return the outcome of a check with the culprits that follow from the reports, and with the figures.

    Args:
        skipped: node -> why it did not take part.
    """
    skipped = {**skipped, **{report.node: report.no_torch for report in reports if report.no_torch}}
    here = [name for name in order.ends if name not in skipped]
    meetings = list_meetings(order, reports)
    shares = {
        backend: compare(meeting for meeting in meetings if meeting.backend == backend) for backend in order.backends
    }
    findings = list[Finding]()
    absent = skipped.keys() | (order.ends.keys() - {report.node for report in reports})
    left_out = [(name, Status.SKIP, why) for name, why in skipped.items()]
    cells: dict[Cause, list[tuple[str, Status, str]]] = {}
    for backend, cause in ((name, find_cause(cause_id)) for name, cause_id in _CAUSES.items()):
        if cause in wanted and backend in order.backends:
            tests = _tests(meetings, backend, absent=absent)
            edges = [Edge(*pair, not reason) for pair, reason in tests.items()]
            findings += [_finding(cause, NAMES[backend], blamed, tests) for blamed in blame(edges)]
            cells[cause] = [*left_out, *((name, *_cell(name, tests, reports)) for name in here)]
        elif cause in wanted:
            cells[cause] = [(name, Status.SKIP, "no NVIDIA GPU") for name in (*order.ends, *skipped)]
    slow = find_cause(_SLOW)
    if slow in wanted:
        speeds = ((name, *_cell_of_speed(name, share)) for share in shares.values() for name in here)
        cells[slow] = [*left_out, *speeds]
        findings += [found for share in shares.values() for found in find_slow(share, order.ends)]
    results = [
        Result(cause=cause.label, node=name, status=status, note=note)
        for cause, of_cause in cells.items()
        for name, status, note in of_cause
    ]
    figures = (*_figures(meetings, shares), *_matmuls(reports))
    return replace(add_more(outcome, results, findings), figures=figures)


def render_figures(figures: Iterable[Mapping[str, object]]) -> str:
    """Return a line for each pair and GPU, with its time."""
    lines = []
    for figure in figures:
        text = _PAIR + ("; {measured}" if "measured" in figure else "")
        lines.append((_MATMUL if figure["backend"] == "matmul" else text).format_map(figure))
    return "\n".join(lines)


def compare(meetings: Iterable[Meeting]) -> dict[Meeting, float]:
    """Return the pairs that measured their bandwidth, and which fraction of its yardstick each reaches."""
    done = [meeting for meeting in meetings if meeting.time_s]
    usual = median(meeting.busbw_gb_s for meeting in done) if done else 0.0
    is_on_the_link = all((meeting.of_link or 0) <= OVER_THE_LINK for meeting in done)
    limits = [min(usual, meeting.link_gb_s or usual) if is_on_the_link else usual for meeting in done]
    return {meeting: meeting.busbw_gb_s / limit for meeting, limit in zip(done, limits, strict=True)}


def find_slow(shares: Mapping[Meeting, float], ends: Mapping[str, MemberAddress]) -> Iterator[Finding]:
    """Name the slow nodes and pairs of one backend; none below MIN_PAIRS pairs."""
    if len(shares) < MIN_PAIRS:
        return
    are_at_speed = median(meeting.of_link or 1 for meeting in shares) >= WARN_BELOW
    slow_below = WARN_BELOW if are_at_speed else FAIL_BELOW
    for culprit in blame(Edge(*meeting.nodes, share >= slow_below) for meeting, share in shares.items()):
        explained = {(edge.source, edge.target) for edge in culprit.explains}
        slow = [meeting for meeting in shares if meeting.nodes in explained]
        node = culprit.groups[0][0]
        around = [share for meeting, share in shares.items() if node in meeting.nodes]
        is_node = culprit.kind is Kind.NODE and len(around) > 1 and max(around) < slow_below
        if not is_node and min(shares[meeting] for meeting in slow) >= FAIL_BELOW:
            continue
        carried = " and ".join(f"{meeting.busbw_gb_s:.3g}" for meeting in slow[:2])
        usual = f"the median of all pairs {median(meeting.busbw_gb_s for meeting in shares):.3g}"
        said = (failed if is_node and max(around) < FAIL_BELOW else warned)(
            *(f"{' <-> '.join(meeting.nodes)}: {describe_speed(meeting)}" for meeting in slow[:MAX_EVIDENCE]),
            what=f"all-reduces over {NAMES[slow[0].backend]} reach {carried} GB/s here, {usual}",
            interface=ends[node].interface if is_node else None,
        )
        name = culprit.culprit if is_node or len(slow) > 1 else " <-> ".join(slow[0].nodes)
        confidence = culprit.confidence if is_node else Confidence.UNDECIDED
        yield replace(said, confidence=confidence).to_finding(find_cause(_SLOW), node=name)


def describe_speed(pair: Meeting) -> str:
    """`16 MiB in 134 ms, busbw 0.125 GB/s, 100 % of the link`."""
    link = f", {100 * pair.of_link:.0f} % of the link" if pair.of_link else ""
    return f"{pair.size_bytes / (1 << 20):g} MiB in {pair.time_s * 1000:.3g} ms, busbw {pair.busbw_gb_s:.3g} GB/s{link}"


def _cell_of_speed(name: str, shares: Mapping[Meeting, float]) -> tuple[Status, str]:
    own = [meeting for meeting in shares if name in meeting.nodes]
    if not own or len(shares) < MIN_PAIRS:
        return Status.SKIP, "too few pairs to compare" if own else "no pair with this node was measured"
    best = max(own, key=lambda meeting: meeting.busbw_gb_s)
    return Status.PASS, f"{NAMES[best.backend]}: {describe_speed(best)}"


def _cell(name: str, tests: Mapping[tuple[str, str], str], reports: Sequence[Report]) -> tuple[Status, str]:
    """One cell of a node that took part; that of a culprit gets its finding later."""
    own = [reason for pair, reason in tests.items() if name in pair]
    if own:
        return (Status.UNKNOWN, "no pair with this node passed") if all(own) else (Status.PASS, "")
    taken = next((report.what for report in reports if report.node == name and report.status == "unknown"), "")
    return Status.UNKNOWN, taken or "no pair with this node was tested"


def _tests(meetings: Sequence[Meeting], backend: str, *, absent: Collection[str]) -> dict[tuple[str, str], str]:
    """Return what each node says of each partner: why the collective failed, or an empty text."""
    tests = {}
    for meeting in meetings:
        is_unknown = any(end.status == "unknown" for end in meeting.ends)
        if meeting.backend == backend and not is_unknown and not set(meeting.nodes) & set(absent):
            for pair, end in zip((meeting.nodes, meeting.nodes[::-1]), meeting.ends, strict=True):
                tests[pair] = "" if end.status == "ok" else end.what or "failed"
    return tests


def _finding(cause: Cause, backend: str, found: Blame, tests: Mapping[tuple[str, str], str]) -> Finding:
    culprits = [name for group in found.groups for name in group]
    failures = [(edge.source, edge.target) for edge in found.explains]
    peers = sorted({name for pair in failures for name in pair} - set(culprits))
    between = f"{fold_hosts(culprits)} and {fold_hosts(peers)}" if peers else fold_hosts(sorted(culprits))
    evidence = [f"{a} with {b}: {tests[a, b]}" for a, b in failures[:MAX_EVIDENCE]]
    evidence += [f"to be certain: {found.would_decide}"] if found.would_decide else []
    said = failed(*evidence, what=f"an all-reduce of 4 MiB over {backend} fails between {between}")
    others = sorted({name for pair in tests for name in pair} - set(culprits))
    said = replace(said, confidence=found.confidence)
    return said.to_finding(cause, node=found.culprit, waiting=fold_hosts(others) or None)


def _figures(
    meetings: Sequence[Meeting], shares: Mapping[str, Mapping[Meeting, float]]
) -> Iterator[Mapping[str, object]]:
    """Time of the all-reduce of each pair, and the bandwidth that was measured."""
    for meeting in sorted(meetings, key=lambda one: (one.backend, one.round, one.nodes)):
        if meeting.seconds:
            figure = {"backend": meeting.backend, "round": meeting.round + 1, "nodes": list(meeting.nodes)}
            figure |= {"seconds": round(meeting.seconds, 6), "mb_s": round(PAYLOAD_MB / meeting.seconds, 1)}
            if meeting in shares[meeting.backend]:
                figure |= {
                    "measured": describe_speed(meeting),
                    "payload_bytes": meeting.size_bytes,
                    "ms": round(meeting.time_s * 1000, 3),
                    "busbw_gb_s": round(meeting.busbw_gb_s, 4),
                    "of_yardstick": round(shares[meeting.backend][meeting], 3),
                    "of_link": None if meeting.of_link is None else round(meeting.of_link, 3),
                }
            yield figure


def _matmuls(reports: Sequence[Report]) -> list[Mapping[str, object]]:
    gpus = [(report.node, number, s) for report in reports for number, s in enumerate(report.matmul_s) if s]
    usual = median(s for _, _, s in gpus) if gpus else 1.0
    return [
        {"backend": "matmul", "node": node, "gpu": number, "seconds": s, "of_median": round(s / usual, 3)}
        for node, number, s in gpus
    ]
