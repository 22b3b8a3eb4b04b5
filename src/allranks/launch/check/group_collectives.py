"""How fast are collectives of all ranks? A step starts join/trial.py for each rank, by `allranks bench`.

It is the same program, with the same phases, as that of the pairs of `allranks check --deep` (pair_collectives.py).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import allranks.join
from allranks.comm.bench_table import BenchRow
from allranks.host.net import read_tcp_counters
from allranks.join.collectives import BUCKET_SIZES, SIZES, list_cases
from allranks.launch.check.member_step import SLACK_S, MemberAddress, begin_member, lines_of, run_members
from allranks.launch.check.network_streams import Show
from allranks.launch.check.pair_collectives import COLLECTIVE_S, START_S, Report
from allranks.launch.check.where import SrunNodes
from allranks.launch.srun import send
from allranks.model.card import Card
from allranks.model.errors import UsageError
from allranks.report.text import count_of

LOST_ABOVE = 0.001
MAX_TOLD = 4
AFTER_FAILURE_S = 3.0
"""From the first rank that failed to the end of the step: others that failed because of it say so in that time."""
TIMEOUT_S = 2 * COLLECTIVE_S
"""Of one collective: the largest ones take longer than those of a pair."""


_OWN_ENDS = ("killed by", "crashed", "cannot start")
"""Words about the end of a rank's own process; all other words are about the group."""


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """What the children run: one group, with these ranks on each node."""

    ends: dict[str, MemberAddress]
    """By node, in the order of their ranks."""
    ranks_per_node: int = 1
    backend: str
    port: int
    cases: tuple[dict[str, Any], ...]
    """As join/collectives.py makes them."""
    budget_s: float
    """For all cases."""

    @property
    def names(self) -> list[str]:
        """The node of each rank."""
        return [node for node in self.ends for _ in range(self.ranks_per_node)]

    @property
    def group_s(self) -> float:
        """Longest life of the group, from the arrival of its ranks."""
        return self.budget_s + 3 * TIMEOUT_S


class RankReport(Report, frozen=True, kw_only=True):
    """A line of one rank's child."""

    rank: int = 0


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's kernel did during the collectives, for all its TCP connections."""

    segments: int = 0
    retransmitted: int = 0


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What came of the collectives."""

    rows: list[BenchRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Cases that were not measured, and why."""
    counters: dict[str, Counters] = field(default_factory=dict)
    problem: str = ""
    """Which rank failed, and how; empty: none did."""

    def describe_skipped(self) -> str:
        """Return how many cases were not measured, and why one of them was not; empty: all were."""
        return (
            f"{count_of(len(self.skipped), 'collective')} not measured, such as {self.skipped[0]}"
            if self.skipped
            else ""
        )

    def describe_lost(self) -> str:
        """Return which nodes sent segments again during the collectives, the most first; empty: next to none did."""
        shares = {node: counters.retransmitted / max(1, counters.segments) for node, counters in self.counters.items()}
        worst = sorted((node for node in shares if shares[node] >= LOST_ABOVE), key=lambda node: -shares[node])
        told = [f"{node} {100 * shares[node]:.2g} %" for node in worst[:MAX_TOLD]]
        return f"segments sent again during the collectives: {', '.join(told)}" if told else ""


def find_end_alone(card: Card) -> tuple[dict[str, MemberAddress], int]:
    """Return the end of the only node, over loopback, and a port that is free there."""
    num_gpus = card.num_gpus if card.facts and card.facts.torch_cuda else 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return {card.host: MemberAddress(address="127.0.0.1", interface="lo", num_gpus=num_gpus)}, int(
            listener.getsockname()[1]
        )


def plan_group(
    ends: Mapping[str, MemberAddress],
    *,
    wanted: str,
    ranks_per_node: int | None,
    sizes: Sequence[int] | None,
    port: int,
    budget_s: float,
) -> GroupOrder:
    """Return what the ranks do. Pure.

    Args:
        wanted: auto: NCCL if all nodes have GPUs that torch can use.
        ranks_per_node: None: one for each GPU; without GPUs one, and two where the node is alone.
    Raises:
        UsageError: the nodes have too few GPUs.
    """
    num_gpus = min(end.num_gpus for end in ends.values())
    backend = ("nccl" if num_gpus else "gloo") if wanted == "auto" else wanted
    ranks = ranks_per_node or (num_gpus if backend == "nccl" else 0) or (2 if len(ends) == 1 else 1)
    if backend == "nccl" and ranks > num_gpus:
        poorest = min(ends, key=lambda name: ends[name].num_gpus)
        raise UsageError(f"--backend nccl: {ranks} ranks a node need as many GPUs, and {poorest} has {num_gpus}")
    if len(ends) * ranks < 2:
        raise UsageError("--nproc-per-node 1: expected at least 2 ranks on one node")
    cases = list_cases(bucket_sizes=sizes or BUCKET_SIZES, sizes=sizes or SIZES, has_formats=backend == "gloo")
    return GroupOrder(
        ends=dict(ends), ranks_per_node=ranks, backend=backend, port=port, cases=tuple(cases), budget_s=budget_s
    )


def run_group(
    place: SrunNodes | None, order: GroupOrder, *, queue_s: float, env: Mapping[str, str], show: Show
) -> GroupResult:
    """Run the collectives on all nodes.

    Raises:
        AllranksError: SLURM started nothing.
    """
    reports, result, ends_s = list[RankReport](), GroupResult(), list[float]()

    def take(node: str, report: RankReport | Counters) -> None:
        if isinstance(report, Counters):
            result.counters[node] = report
            return
        reports.append(msgspec.structs.replace(report, node=node))
        if report.row:
            result.rows.append(report.row)
        elif case := report.skipped:
            result.skipped.append(f"{case['collective']} of {case['size_bytes']} B: {report.why}")
        elif report.status != "ok" or report.no_torch:
            ends_s.append(time.monotonic() + AFTER_FAILURE_S)

    silent = run_members(
        place,
        order,
        [*order.ends],
        take,
        kinds={"rank": RankReport, "counters": Counters},
        what="the collectives",
        queue_s=queue_s,
        next_s=START_S + order.group_s + SLACK_S,
        env=env,
        tick=show and (lambda: show(_describe_progress(order, result))),
        is_over=lambda: bool(ends_s) and time.monotonic() > ends_s[0],
    )
    return replace(result, problem=find_problem(reports, silent))


def _describe_progress(order: GroupOrder, result: GroupResult) -> str:
    if not result.rows and not result.skipped:
        return f"torch starts on {count_of(len(order.names), 'rank')}"
    return f"{len(result.rows) + len(result.skipped)} of {len(order.cases)} collectives timed"


def find_problem(reports: list[RankReport], silent: list[str]) -> str:
    """Return which rank failed, and how: without torch, else by its own process, else what rank 0 says. Pure."""
    without = [report for report in reports if report.no_torch]
    failed = [report for report in reports if report.status != "ok"]
    killed = [report for report in failed if any(word in report.what for word in _OWN_ENDS)]
    if first := next(iter([*without, *killed, *sorted(failed, key=lambda report: report.rank)]), None):
        where = f"rank {first.rank} ({first.node})"
        return f"{where}: {first.no_torch or first.what or 'failed'}"
    return f"{', '.join(silent)} did not finish" if silent else ""


def serve_group(order: GroupOrder, env: Mapping[str, str]) -> None:
    """Run on one node: start a child with torch for each of its ranks, and send on what they say.

    Raises:
        AllranksError: this task cannot take part.
    """
    node = begin_member(env)
    send(node, "rank", RankReport(rank=first_rank(order, node)))  # it is here
    before = read_tcp_counters()
    works = works_of(order, node)
    program = Path(allranks.join.__path__[0]) / "trial.py"
    threads = {"OMP_NUM_THREADS": "1"} | dict(env)
    for number, line in lines_of(program, works, deadline_s=START_S + order.group_s, env=threads):
        send(node, "rank", json.loads(line) | {"rank": first_rank(order, node) + number})
    segments, retransmitted = (now - then for now, then in zip(read_tcp_counters(), before, strict=True))
    send(node, "counters", Counters(segments=segments, retransmitted=retransmitted))
    send(node, "done")


def first_rank(order: GroupOrder, node: str) -> int:
    """Return the first rank of a node. Pure."""
    return order.names.index(node)


def works_of(order: GroupOrder, node: str) -> list[dict[str, Any]]:
    """Return the order of join/trial.py for each rank of one node. Pure."""
    first = next(iter(order.ends.values()))
    return [
        {
            "start_s": START_S,
            "group_s": order.group_s,
            "timeout_s": TIMEOUT_S,
            "work": [
                {
                    "step": 0,
                    "round": 0,
                    "backend": order.backend,
                    "rank": first_rank(order, node) + local_rank,
                    "names": order.names,
                    "address": first.address,
                    "port": order.port,
                    "interface": order.ends[node].interface,
                    "device": local_rank,
                    "cases": order.cases,
                    "budget_s": order.budget_s,
                }
            ],
        }
        for local_rank in range(order.ranks_per_node)
    ]
