"""What does the network between the nodes carry, and which node or link is at fault? TCP streams, by `allranks bench`.

A step starts comm/streams.py on each node. What is slow or lossy is looked at again in a step of its own, for longer:
only what is so both times is blamed (preflight.blame). The streams decide, not what the check before has found.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause, Symptom
from allranks.causes.outcome import failed
from allranks.comm.bench import Marks, confirm, describe, describe_rates, join_reports, lost_percent, mark
from allranks.comm.bench_table import Pair
from allranks.comm.streams import BUDGET_S, SLOT_S, RoundReport, StreamPlan, run_streams
from allranks.launch.check.member_step import SLACK_S, MemberAddress, begin_member, run_members
from allranks.launch.check.where import SrunNodes
from allranks.launch.srun import send
from allranks.model.card import Card
from allranks.model.finding import Finding, Severity
from allranks.model.hostlist import fold_hosts
from allranks.preflight.matchings import matchings
from allranks.preflight.pair_blame import Blame, Edge, Kind, blame
from allranks.wire.rounds import LATE_S, START_S

Show = Callable[[str], None] | None
"""Shows a line about the progress; None: nobody looks."""
AGAIN_TIMES = 2
"""The streams of a second look are so many times as long."""
MAX_AGAIN = 12
"""Rounds of a second look; of a node with many slow streams, these decide."""
MAX_EVIDENCE = 6
FULL = 0.9
"""Of the usual rate of a slow node: a stream that carries so much fills its link."""
MEASURED = {Symptom.LOSSY, Symptom.SLOW}
"""What the streams show better than the tests of a check."""


class StreamOrder(msgspec.Struct, frozen=True, kw_only=True, tag="streams"):
    """What the members do: their part of a plan."""

    plan: StreamPlan
    num_rounds: int = 0
    """The plan has none of its own, and each member makes these: those of 1,000 nodes fit into no variable."""

    @classmethod
    def of(cls, plan: StreamPlan) -> StreamOrder:
        """Return the order to run a plan."""
        if plan.rounds == matchings([*plan.addresses], len(plan.rounds)):
            return cls(plan=msgspec.structs.replace(plan, rounds=()), num_rounds=len(plan.rounds))
        return cls(plan=plan)

    def full_plan(self) -> StreamPlan:
        """Return the plan with its rounds."""
        rounds = matchings([*self.plan.addresses], self.num_rounds)
        return msgspec.structs.replace(self.plan, rounds=rounds) if self.num_rounds else self.plan


def plan_streams(ends: Mapping[str, MemberAddress], *, port: int) -> StreamPlan:
    """Return the rounds that fit into BUDGET_S: all pairs of up to 70 nodes, each way. Pure."""
    return StreamPlan(
        rounds=matchings([*ends], int(BUDGET_S / SLOT_S)),
        addresses={name: end.address for name, end in ends.items()},
        interfaces={name: end.interface for name, end in ends.items()},
        port=port,
        key=secrets.token_hex(8),
    )


def plan_again(plan: StreamPlan, marks: Marks) -> StreamPlan:
    """Return the rounds of a second look: the odd pairs only. Pure."""
    rounds = list[list[tuple[str, str]]]()
    for pair in dict.fromkeys(tuple(sorted((stream.source, stream.target))) for stream in (*marks.slow, *marks.lossy)):
        free = next(
            (one_round for one_round in rounds if not {*pair} & {name for one in one_round for name in one}), None
        )
        if free is None and len(rounds) < MAX_AGAIN:
            rounds.append(free := [])
        if free is not None:
            free.append((pair[0], pair[1]))
    return msgspec.structs.replace(plan, rounds=tuple(map(tuple, rounds)), times=AGAIN_TIMES)


def run_plan(
    place: SrunNodes, plan: StreamPlan, *, queue_s: float, env: Mapping[str, str], show: Show
) -> tuple[Pair, ...]:
    """Run the streams of a plan.

    Args:
        show: gets a line about the progress, a few times a second.
    Raises:
        AllranksError: SLURM started nothing.
    """
    reports, nodes = list[RoundReport](), [*plan.addresses]
    total = 2 * sum(map(len, plan.rounds))
    run_members(
        place,
        StreamOrder.of(plan),
        nodes,
        lambda _, report: reports.append(report),
        kinds={"stream": RoundReport},
        what="TCP streams",
        queue_s=queue_s,
        next_s=START_S + LATE_S + SLOT_S * plan.times + SLACK_S,
        env=env,
        tick=show and (lambda: show(f"{len(reports)} of {total} TCP streams done")),
    )
    return join_reports(nodes, plan.rounds, reports)


def look_at_network(
    place: SrunNodes, plan: StreamPlan, *, queue_s: float, env: Mapping[str, str], show: Show
) -> tuple[tuple[Pair, ...], Marks]:
    """Run the streams, and what is odd of them again; returns them, and which are odd both times."""
    pairs = run_plan(place, plan, queue_s=queue_s, env=env, show=show)
    marks = mark(pairs)
    if marks.is_odd:
        again = run_plan(place, plan_again(plan, marks), queue_s=queue_s, env=env, show=show)
        pairs = confirm(pairs, again)
        marks = mark(pairs)
    return pairs, marks


def serve_streams(order: StreamOrder, env: Mapping[str, str]) -> None:
    """Run on one node: its part of the plan, with a report after each round.

    Raises:
        AllranksError: this task cannot take part.
    """
    node = begin_member(env)
    run_streams(order.full_plan(), node, lambda report: send(node, "stream", report))
    send(node, "done")


def judge_network(pairs: Sequence[Pair], marks: Marks, ends: Mapping[str, MemberAddress]) -> tuple[Finding, ...]:
    """Return the nodes and links that lose packets or are slow. Pure.

    TCP slows down where packets are lost, so a lossy stream is not held against the speed of its nodes. And a slow
    node's queue drops what does not fit, so what a stream loses that fills a slow node's link is no loss of the link.
    """
    known = [pair for pair in pairs if pair.mbit_s is not None and pair not in marks.unjudged]
    clean = [pair for pair in known if pair not in marks.lossy]
    narrow = _blame(clean, marks.slow)
    full_mbit_s = {
        name: FULL * median(pair.mbit_s or 0.0 for pair in clean if name in (pair.source, pair.target))
        for found in narrow if found.kind is Kind.NODE
        for name in found.groups[0]
    }  # fmt: skip
    losing = [
        pair for pair in marks.lossy
        if all((pair.mbit_s or 0.0) < full_mbit_s.get(name, math.inf) for name in (pair.source, pair.target))
    ]  # fmt: skip
    lossy = [_find(find_cause("AR212"), found, known, ends) for found in _blame(known, losing)]
    usual_mbit_s = f"{marks.usual_mbit_s:.0f}"
    slow = [_find(find_cause("AR213"), found, known, ends, usual_mbit_s=usual_mbit_s) for found in narrow]
    return (*lossy, *slow)


def find_obstacles(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return what keeps nodes from being measured: all that would stop a job, except what bench measures itself."""
    bad = (finding for finding in findings if finding.severity is Severity.FAIL)
    return tuple(obstacle for obstacle in bad if not set(find_cause(obstacle.cause_id).symptoms) & MEASURED)


def find_gaps(cards: Iterable[Card]) -> tuple[str, ...]:
    """Return a line for each network in which most nodes have a working interface and some do not. Pure."""
    hosts, working = list[str](), dict[str, dict[str, str]]()
    for card in cards:
        hosts.append(card.host)
        for nic in card.facts.interfaces if card.facts else ():
            if nic.kind in ("physical", "virtual"):
                for network in nic.networks if nic.is_up else ():
                    working.setdefault(network, {})[card.host] = nic.name
    gaps = []
    for network, there in working.items():
        without = [host for host in hosts if host not in there]
        if without and len(there) > len(without):
            gaps.append(
                f"{fold_hosts(without)} {'has' if len(without) == 1 else 'have'} no working interface in {network}, "
                f"and {len(there)} of {len(hosts)} nodes have one; the measurement did not use it"
            )
    return tuple(gaps)


def _blame(known: Iterable[Pair], bad: Sequence[Pair]) -> tuple[Blame, ...]:
    return blame(Edge(pair.source, pair.target, pair not in bad) for pair in known) if bad else ()


def _find(
    cause: Cause, found: Blame, pairs: Iterable[Pair], ends: Mapping[str, MemberAddress], **values: object
) -> Finding:
    ways = {(edge.source, edge.target) for edge in found.explains}
    bad = sorted((pair for pair in pairs if (pair.source, pair.target) in ways), key=lambda pair: pair.mbit_s or 0.0)
    groups = [fold_hosts(list(group)) for group in found.groups]
    peers = sorted({name for way in ways for name in way} - {name for group in found.groups for name in group})
    is_between = found.kind in (Kind.LINK, Kind.PARTITION)
    used = dict.fromkeys(ends[name].interface for group in found.groups for name in group if name in ends)
    outcome = failed(
        *(f"{pair.source} -> {pair.target}: {describe(pair)}" for pair in bad[:MAX_EVIDENCE]),
        *([f"to be certain: {found.would_decide}"] if found.would_decide else []),
    )
    values |= {
        "culprit": " and ".join(groups) if is_between and "usual_mbit_s" in values else groups[0],
        "peers": groups[1] if is_between else fold_hosts(peers) if peers else "the others",
        "interface": ", ".join(used),
        "mbit_s": describe_rates(bad),
        "percent": lost_percent(bad),
    }
    outcome = replace(
        outcome, values=values, interface=next(iter(used)) if len(used) == 1 else None, confidence=found.confidence
    )
    return outcome.to_finding(cause, node=found.culprit)
