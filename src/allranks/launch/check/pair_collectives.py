"""How do real collectives run between pairs of nodes? A second srun step starts one child with torch on each node.

Phases, each with its own deadline:

1 `srun` gets the same nodes again                                                          queue_s
2 every node sends a message through SLURM and starts join/trial.py, which imports torch    START_S
3 the pairs run in rounds; each node reports each result at once                            at most PAIR_S each
4 whatever is left of the step is ended

The nodes use the port of the roll call, because firewalls let it through. A child that hangs is killed with the process
of its pair. A node that sent nothing has no reports; the reports of its partners count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import allranks.join
from allranks.comm.bench_table import BenchRow
from allranks.launch.check.member_step import SLACK_S, MemberAddress, begin_member, lines_of, run_members
from allranks.launch.check.where import SrunNodes
from allranks.launch.srun import send
from allranks.report.text import say

START_S = 40.0
"""From the step's first message to the first pair: all nodes load torch from one file system at the same time."""
PAIR_S = 20.0
"""For one pair, once both nodes are ready."""
COLLECTIVE_S = 10.0
"""Timeout of Gloo and NCCL themselves; shorter than PAIR_S, so that their error message is received."""
SIZES = {"gloo": (4 << 20, 16 << 20), "nccl": (4 << 20, 64 << 20)}
"""Of the all-reduces: 4 MiB are more than any buffer on the way holds; the larger one measures the bandwidth. 16 MiB
take 0.14 s at 1 Gbit/s, and a GPU's link needs more to come to speed."""
MEASURE_S = 4.0
"""For all-reduces of all sizes; where the larger one does not fit, the smaller one stands."""
REPEAT = (3, 4)
"""Fewest and most repetitions."""


class PairOrder(msgspec.Struct, frozen=True, kw_only=True, tag="pairs"):
    """What the children run."""

    ends: dict[str, MemberAddress]
    """By node."""
    rounds: tuple[tuple[tuple[str, str], ...], ...]
    backends: tuple[str, ...]
    port: int

    @property
    def deadline_s(self) -> float:
        """Longest run time of a child."""
        return START_S + (len(self.rounds) * len(self.backends) + 1) * PAIR_S


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of a pair reports, or why a node cannot take part; an empty one says that the node is there.

    The first node of a pair sends a report with `row` for each all-reduce; both then send one of how the pair ended.
    """

    node: str = ""
    backend: str = ""
    round: int = 0
    row: BenchRow | None = None
    skipped: dict[str, Any] | None = None
    """A case that would have taken too long; `why` says how long."""
    why: str = ""
    status: str = "ok"
    """ok, failed; unknown: something else than the pair failed."""
    what: str = ""
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
    seconds: float = 0.0
    """Of one all-reduce of the smallest size, the median; 0: the pair failed."""
    size_bytes: int = 0
    """Of the largest all-reduces that fitted into the time; they measure the bandwidth."""
    time_s: float = 0.0
    """Of the fastest of them: a busy moment of a machine makes one slower, and none faster."""

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
    said, rows = dict[tuple[str, int, str], Report](), dict[tuple[str, int, str], list[BenchRow]]()
    for report in reports:
        if report.row:
            rows.setdefault((report.backend, report.round, report.node), []).append(report.row)
        elif report.skipped is None:
            said[report.backend, report.round, report.node] = report
    speeds = {name: max(end.link_mbit_s or 0, 0) / 8000 for name, end in order.ends.items()}
    meetings = []
    for backend, (number, pairs) in itertools.product(order.backends, enumerate(order.rounds)):
        for pair in pairs:
            measured = rows.get((backend, number, pair[0]), [])
            ends = tuple(_end_of(said.get((backend, number, node)), measured) for node in pair)
            meeting = Meeting(backend, number, pair, ends, link_gb_s=min(speeds[node] for node in pair) or None)
            if measured and all(end.status == "ok" for end in ends):
                largest = measured[-1]
                meeting = replace(
                    meeting, seconds=measured[0].time_s, size_bytes=largest.size_bytes, time_s=largest.best_s
                )
            meetings.append(meeting)
    return meetings


def _end_of(said: Report | None, rows: Iterable[BenchRow]) -> Report:
    """Return how one end ended; a wrong sum is a failure, although the collective went through."""
    if said is None:
        return NO_REPORT
    for row in rows:
        if row.wrong:
            what = f"the sum of an all-reduce of {row.size_bytes >> 20} MiB is wrong in {row.wrong} of {row.count}"
            return msgspec.structs.replace(said, status="failed", what=what)
    return said


def run_pairs(place: SrunNodes, order: PairOrder, *, queue_s: float, env: Mapping[str, str]) -> list[Report]:
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
    """Return the order of join/trial.py on one node: its pairs, in the order of the rounds. Pure."""
    work = [
        {
            "step": order.backends.index(meeting.backend) * len(order.rounds) + meeting.round,
            "round": meeting.round,
            "backend": meeting.backend,
            "rank": meeting.nodes.index(node),
            "names": meeting.nodes,
            "address": order.ends[meeting.nodes[0]].address,
            "port": order.port,
            "interface": order.ends[node].interface,
            "cases": [
                {"collective": "all_reduce", "size_bytes": size, "in_flight": 1} for size in SIZES[meeting.backend]
            ],
            "budget_s": MEASURE_S,
            "repeat": REPEAT,
        }
        for meeting in list_meetings(order, ())
        if node in meeting.nodes
    ]
    num_gpus = order.ends[node].num_gpus if node in order.ends and "nccl" in order.backends else 0
    times = {"start_s": START_S, "group_s": PAIR_S, "timeout_s": COLLECTIVE_S}
    return {
        "work": work,
        **times,
        "num_gpus": num_gpus,
    }
