"""How do real collectives run between pairs of nodes? A second srun step starts one child with torch on each node.

Phases, each with its own deadline:

1 `srun` gets the same nodes again                                                          queue_s
2 every node sends a message through SLURM and starts join/pair.py, which imports torch     START_S
3 the pairs run in rounds; each node reports each result at once                            at most PAIR_S each
4 whatever is left of the step is ended

The nodes use the port of the roll call, because firewalls let it through. A child that hangs is killed with the process
of its pair. A node that sent nothing has no reports; the reports of its partners count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import allranks.join
from allranks.launch.check.members import SLACK_S, End, begin_member, lines_of, run_members
from allranks.launch.check.where import Place
from allranks.launch.srun import send
from allranks.report.text import say

START_S = 40.0
"""From the step's first message to the first pair: all nodes load torch from one file system at the same time."""
PAIR_S = 20.0
"""For one pair, once both nodes are ready."""
COLLECTIVE_S = 10.0
"""Timeout of Gloo and NCCL themselves; shorter than PAIR_S, so that their error message is received."""


class PairOrder(msgspec.Struct, frozen=True, kw_only=True, tag="pairs"):
    """What the children run."""

    ends: dict[str, End]
    """By node."""
    rounds: tuple[tuple[tuple[str, str], ...], ...]
    backends: tuple[str, ...]
    port: int

    @property
    def deadline_s(self) -> float:
        """Longest run time of a child."""
        return START_S + (len(self.rounds) * len(self.backends) + 1) * PAIR_S


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of a pair reports, or why a node cannot take part; an empty one says that the node is there."""

    node: str = ""
    peer: str = ""
    backend: str = ""
    round: int = 0
    status: str = "ok"
    """ok, failed; unknown: something else than the pair failed."""
    what: str = ""
    seconds: float | None = None
    """Of one all-reduce of 4 MiB, the median of three."""
    payload_bytes: int = 0
    """Of the all-reduces that measure the bandwidth."""
    payload_s: float | None = None
    """Of the fastest of them, without set-up; None of a pair that failed."""
    no_torch: str = ""
    """Why this node has no working torch."""
    matmul_s: tuple[float, ...] = ()
    """Seconds of a matmul, one entry per GPU."""


NO_REPORT = Report(status="failed", what="it did not finish the collective")


@dataclass(frozen=True, slots=True)
class Meeting:
    """One pair in one round with one backend."""

    backend: str
    round: int
    nodes: tuple[str, str]
    ends: tuple[Report, ...]
    """The reports of both nodes."""
    link_gb_s: float | None
    """Speed of the slower of the two data interfaces; None if one of them reports no speed."""
    size_bytes: int
    """Payload of the all-reduces that measured the bandwidth."""
    time_s: float
    """Of one of them, at the slower end; 0 if they were not measured at both ends with the same payload."""

    @property
    def busbw_gb_s(self) -> float:
        """Bus bandwidth in gigabytes (1e9) a second: between two ranks, every byte crosses the wire once.

        Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth", AllReduce.
        """
        return self.size_bytes / self.time_s / 1e9

    @property
    def of_link(self) -> float | None:
        """Fraction of the link's speed."""
        return self.busbw_gb_s / self.link_gb_s if self.link_gb_s else None


def list_meetings(order: PairOrder, reports: Iterable[Report]) -> list[Meeting]:
    """Return every pair that was to meet. Pure."""
    said = {(each.backend, each.round, each.node): each for each in reports}
    speeds = {name: max(end.link_mbit_s or 0, 0) / 8000 for name, end in order.ends.items()}
    meetings = []
    for backend, (number, pairs) in itertools.product(order.backends, enumerate(order.rounds)):
        for pair in pairs:
            ends = tuple(said.get((backend, number, node), NO_REPORT) for node in pair)
            is_measured = all(each.payload_s for each in ends) and ends[0].payload_bytes == ends[1].payload_bytes
            time_s = max(each.payload_s or 0.0 for each in ends) if is_measured else 0.0
            link_gb_s = min(speeds[node] for node in pair) or None
            meetings.append(Meeting(backend, number, pair, ends, link_gb_s, ends[0].payload_bytes, time_s))
    return meetings


def run_pairs(place: Place, order: PairOrder, *, queue_s: float, env: Mapping[str, str]) -> list[Report]:
    """Start the children on the nodes, and return their reports.

    Raises:
        AllranksError: SLURM started nothing.
    """
    reports = list[Report]()
    silent = run_members(
        place,
        order,
        [*order.ends],
        lambda node, report: reports.append(msgspec.structs.replace(report, node=node)),
        kinds={"pair": Report},
        what="the collectives",
        queue_s=queue_s,
        next_s=order.deadline_s + SLACK_S,
        env=env,
    )
    if silent:
        say(f"the collectives did not finish on {', '.join(silent)}")
    return reports


def serve_pairs(order: PairOrder, env: Mapping[str, str]) -> None:
    """Run on one node: start the child with torch, and send its reports to the process that started the step.

    Raises:
        AllranksError: this task cannot take part.
    """
    node = begin_member(env)
    send(node, "pair", Report())  # it is here
    program = Path(allranks.join.__path__[0]) / "trial.py"
    for _, line in lines_of(program, [work_of(order, node)], deadline_s=order.deadline_s, env=env):
        send(node, "pair", msgspec.Raw(line))
    send(node, "done")


def work_of(order: PairOrder, node: str) -> dict[str, Any]:
    """Return the order of join/pair.py on one node: its pairs, in the order of the rounds. Pure."""
    work = [
        {
            "step": order.backends.index(each.backend) * len(order.rounds) + each.round,
            "round": each.round,
            "backend": each.backend,
            "peer": each.nodes[1 - each.nodes.index(node)],
            "rank": each.nodes.index(node),
            "address": order.ends[each.nodes[0]].address,
            "port": order.port,
            "interface": order.ends[node].interface,
        }
        for each in list_meetings(order, ())
        if node in each.nodes
    ]
    num_gpus = order.ends[node].num_gpus if node in order.ends and "nccl" in order.backends else 0
    return {"work": work, "num_gpus": num_gpus, "start_s": START_S, "pair_s": PAIR_S, "timeout_s": COLLECTIVE_S}
