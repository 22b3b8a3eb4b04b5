"""DDP on links that are shaped: is `wait` + `transfer` what the ranks wait for communication?

The truth is measured inside of each rank (programs/layers.py), with neither a recorder nor the times of collectives:
from the last gradient, which a hook of the script sees, to the end of `backward()`, less what the same takes without
communication. Both are shares of the time from the first step on, over all ranks. How much of it is `wait`, and how
much `transfer`, is not compared: planted losses do that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from allranks.lab import hosts
from allranks.lab.hosts import SWITCH
from allranks.model.ledger import Ledger

from .jobs import CLUSTER, PROGRAMS, Check, Part, SixNodes, read_ledger, six_nodes

JOBS = ((2, 200, 0.0), (2, 60, 0.0), (6, 200, 0.0), (6, 400, 40.0))
"""Ranks, Mbit/s of each link, and by how much one rank is late in each step, in milliseconds."""
STEPS = 60
POINTS = 5.0
LATE_RANK = 1
BURST = "128kb"
"""As in benchmarks/slow_network.py."""


def measure(directory: Path, *, lab: str, steps: int, sizes: Sequence[int]) -> Part:
    """Run all jobs of so many ranks."""
    part = Part()
    with six_nodes(lab) as nodes:
        for ranks, mbit, late_ms in (job for job in JOBS if job[0] in sizes):
            shape(nodes, mbit)
            part.add(run_job(nodes, directory / f"{ranks}-{mbit}-{late_ms:.0f}", ranks, mbit, late_ms, steps))
    return part


def run_job(nodes: SixNodes, directory: Path, ranks: int, mbit: int, late_ms: float, steps: int) -> Check:
    """Run one job, and compare its account with what its ranks measured."""
    directory.mkdir(parents=True)
    nodes.run(
        directory / "output.txt",
        *("srun", f"--nodes={ranks}", "--ntasks-per-node=1", sys.executable, "-m", "allranks", "run"),
        *("--cluster", str(CLUSTER), "--ignore", "AR213", "--log-dir", str(directory / "runs")),
        *(str(PROGRAMS / "layers.py"), "--dir", str(directory), "--steps", str(steps)),
        *("--late", str(LATE_RANK), "--late-ms", str(late_ms)),
    )
    truths = [json.loads((directory / f"truth_{rank}.json").read_text()) for rank in range(ranks)]
    true_share = sum(truth["blocked_s"] for truth in truths) / sum(truth["passed_s"] for truth in truths)
    own_ms = max(truth["own_ms"] for truth in truths)
    step_ms = 1e3 * truths[0]["passed_s"] / (steps - 1)
    late = f", rank {LATE_RANK} {late_ms:.0f} ms late" if late_ms else ""
    ledger = read_ledger(directory / "runs")
    note = f"steps of {step_ms:.0f} ms; wait {100 * share(ledger, 'wait'):.1f} %, "
    note += f"transfer {100 * share(ledger, 'transfer'):.1f} %; without communication the same takes {own_ms:.1f} ms"
    return Check(
        f"{ranks} ranks at {mbit} Mbit/s{late}", 100 * true_share, 100 * share(ledger, "wait", "transfer"), POINTS,
        unit="%", note=note, owed_to=f"rank {LATE_RANK}" if late_ms else "",
        named=name_late(ledger) if late_ms else "",
    )  # fmt: skip


def share(ledger: Ledger, *categories: str) -> float:
    """Return the share of these categories in the time from the first step on."""
    passed_s = ledger.rank_s - sum(ledger.seconds.get(other, 0.0) for other in ("start", "queue", "end", "unknown"))
    return sum(ledger.seconds.get(category, 0.0) for category in categories) / passed_s


def name_late(ledger: Ledger) -> str:
    """Return for whom the others waited most."""
    ranks = next((loss.ranks for loss in ledger.losses if loss.category == "wait"), ())
    return f"rank {ranks[0]}" if ranks else ""


def shape(nodes: SixNodes, mbit: int) -> None:
    """Give each link this rate, both ways."""
    inits = hosts.find_inits(nodes.lab.dir)
    for index, host in enumerate(nodes.lab.planned_hosts()):
        for pid, interface in ((inits[SWITCH], f"data{index}"), (inits[host.name], host.data_interface)):
            hosts.run_in(pid, ["ethtool", "-K", interface, "tso", "on", "gso", "on", "gro", "on"])
            limit = ["rate", f"{mbit}mbit", "burst", BURST, "latency", "20ms"]
            hosts.run_in(pid, ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limit])
