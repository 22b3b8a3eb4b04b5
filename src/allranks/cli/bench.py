"""`allranks bench`: what does the network between the nodes carry, and how fast are collectives over it?"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.check import find_place, look_at, node_options, say_network, with_join
from allranks.cli.context import load_cluster
from allranks.cli.options import cluster_option, json_option, log_dir_option
from allranks.cli.progress_line import SHOW_AFTER_S, ProgressLine
from allranks.model.errors import Exit, UsageError
from allranks.model.hostlist import fold_hosts
from allranks.model.identity import GivenFlags, world_from_env
from allranks.model.world import Launcher
from allranks.report.machine import to_json
from allranks.report.text import Style, count_of, printable, render_findings, say

if TYPE_CHECKING:
    from allranks.comm.bench import Marks
    from allranks.comm.bench_table import BenchTable, Pair
    from allranks.launch.check.check_step import Held
    from allranks.launch.check.group_collectives import GroupOrder, GroupResult
    from allranks.launch.check.member_step import MemberAddress
    from allranks.launch.check.where import SrunNodes
    from allranks.model.finding import Finding

BUDGET_S = 30.0
"""For all collectives: the network and the collectives of a few nodes take about a minute."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_BYTES = 4 << 30
_BARS = Path("-")
"""As a plot: on the terminal."""


class Sizes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """Sizes in bytes, with K, M and G as nccl-tests has them: `Sizes().convert("4K,1M", None, None)`."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the bytes of each."""
        found = []
        for text in str(value).upper().replace("IB", "").removesuffix("B").split(","):
            match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMG]?)", text.strip())
            size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
            if not 4 <= size <= MAX_BYTES:
                self.fail(f"{value!r}: expected sizes from 4 bytes to 4G, for example 4K,1M,16M", param, ctx)
            found.append(size)
        return tuple(sorted(set(found)))


@click.command("bench")
@node_options
@click.option(
    "--nproc-per-node",
    "ranks_per_node",
    type=click.IntRange(min=1, max=256),
    metavar="N",
    help="Ranks per node. [default: one for each GPU; without GPUs 1, on one machine 2]",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default="auto",
    show_default=True,
    help="Backend of the collectives.",
)
@click.option(
    "--sizes", type=Sizes(), metavar="SIZE,...", help="Sizes of the collectives: 4K,1M,16M. [default: 4K to 32M]"
)
@click.option("--network-only", is_flag=True, help="Measure only TCP streams between nodes; needs no torch.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw bandwidth against size as SVG; - prints bars.",
)
@log_dir_option
@cluster_option
@json_option
def bench(
    ranks_per_node: int | None,
    backend: str,
    sizes: tuple[int, ...] | None,
    network_only: bool,
    plot: Path | None,
    log_dir: Path,
    cluster_file: Path | None,
    as_json: bool,
    join_s: float,
    queue_s: float,
    **flags: Any,
) -> int:
    """Measure the network between nodes, then collectives over it, and name the slow link, slow node or lossy port.

    \b
    allranks bench                          in a job: all its nodes; elsewhere: the ranks of this machine
    allranks bench --nodes 6                from a login node: six nodes that SLURM chooses
    allranks bench --network-only           TCP streams between all nodes, each way: six nodes take 5 s
    allranks bench --nproc-per-node 6 --sizes 64K,1M,16M --plot bench.svg

    The result is in runs/bench.json; allranks advise and allranks run read it there.
    Exit codes: 0 measured, 1 a node or link is slow or lossy, a collective failed, or a file cannot be written, 2 usage
    error, 3 cannot tell, because of other traffic.
    """
    from allranks.launch.check.where import Asked

    asked = Asked(**flags)
    world = world_from_env(os.environ, given=GivenFlags(is_alone=True))
    if world.launcher is Launcher.SLURM and not asked.is_any:
        raise UsageError("bench starts its own job steps: run it in the allocation, without srun")
    if plot == _BARS and as_json:
        raise UsageError("--plot - prints bars, and --json only JSON: name a file for the plot, such as bench.svg")
    if plot is not None and not os.path.isdir(plot.parent):  # noqa: PTH112  (never raises)
        raise UsageError(f"--plot {plot}: no such directory: {plot.parent}")
    cluster = load_cluster(cluster_file).cluster
    place = find_place(asked, os.environ, verb="bench")
    if network_only and (place is None or place.num_nodes == 1):
        raise UsageError("--network-only: one node has no network to others; choose some with --nodes N or --nodelist")
    wanted = str(cluster.train.backend) if backend == "auto" else backend
    run = _Run(place=place, queue_s=queue_s, as_json=as_json)
    try:
        held = look_at(place, with_join(cluster, join_s), queue_s=queue_s)
        if run.begin(held):
            say_network(held, cluster)
            run.measure_network()
            if not network_only:
                run.measure_collectives(wanted=wanted, ranks_per_node=ranks_per_node, sizes=sizes)
    finally:
        run.line.clear()
    return run.finish(log_dir, plot)


class _Run:
    """One measurement: what was found so far, printed as it comes."""

    def __init__(self, *, place: SrunNodes | None, queue_s: float, as_json: bool) -> None:
        self.place, self.queue_s, self.as_json = place, queue_s, as_json
        self.began_s, self.line = time.time(), ProgressLine()
        self.names: tuple[str, ...] = ()
        self.without_torch: list[str] = []
        self.ends: dict[str, MemberAddress] = {}
        self.port = 0
        self.findings: tuple[Finding, ...] = ()
        self.notes: list[str] = []
        """What the reader must know of the result, one line each."""
        self.problem = ""
        """Why not all was measured."""
        self.unwritten = ""
        """Which file cannot be written, and why."""
        self.pairs: tuple[Pair, ...] = ()
        self.marks: Marks | None = None
        self.order: GroupOrder | None = None
        self.group: GroupResult | None = None

    def begin(self, held: Held) -> bool:
        """Take what the check found; tells whether the nodes can be measured."""
        from allranks.causes.cause import Family
        from allranks.launch.check.check_outcome import choose_checks, judge_check
        from allranks.launch.check.group_collectives import find_end_alone
        from allranks.launch.check.member_step import find_ends
        from allranks.launch.check.network_streams import find_gaps, find_obstacles

        cards = held.seen.cards
        self.without_torch = [
            card.host for card in cards.values() if card.facts is None or "torch" not in card.facts.packages
        ]
        if held.num_nodes == 1:  # the network of cluster.toml does not matter on one machine
            self.names = (cards[0].host,)
            self.ends, self.port = find_end_alone(cards[0])
            return True
        of_network = [cause for cause in choose_checks((), ()) if cause.family is Family.NETWORK]
        outcome = judge_check(held, of_network)
        self.names, self.port = outcome.nodes, held.store_port or 0
        self.findings = find_obstacles(outcome.findings)
        self.ends, skipped = find_ends(held, needs_torch=False)
        if self.findings or skipped:
            told = [f"{name}: {why}" for name, why in skipped.items()] if not self.findings else []
            self.problem = f"nothing was measured: {'; '.join(told) or 'a job would not run on these nodes'}"
            return False
        assert self.place is not None
        self.place = replace(self.place, num_nodes=len(self.ends), pinned=tuple(self.ends))
        self.notes += find_gaps(cards.values())
        return True

    def _show(self, text: str) -> None:
        if time.time() > self.began_s + SHOW_AFTER_S:
            self.line.write(f"allranks: {text}")

    def measure_network(self) -> None:
        """Run the TCP streams, and print them."""
        from allranks.launch.check.matrix import describe_busy, describe_untested, render_streams
        from allranks.launch.check.network_streams import judge_network, look_at_network, plan_streams

        if self.place is None or len(self.ends) < 2:
            return  # there is no network between nodes
        self.pairs, self.marks = look_at_network(
            self.place,
            plan_streams(self.ends, port=self.port),
            queue_s=self.queue_s,
            env=os.environ,
            show=self._show if self.line.is_shown else None,
        )
        self.line.clear()
        self.findings = judge_network(self.pairs, self.marks, self.ends)
        self.notes += describe_busy(self.marks)
        self.problem = describe_untested(self.pairs)
        if not self.as_json:
            click.echo(printable(render_streams(tuple(self.ends), self.pairs, self.marks)) + "\n")

    def measure_collectives(self, *, wanted: str, ranks_per_node: int | None, sizes: tuple[int, ...] | None) -> None:
        """Run the collectives of all ranks, and print them."""
        from allranks.launch.check.group_collectives import plan_group, run_group

        if self.without_torch:
            self.problem = self.problem or f"no collectives: torch is not installed on {fold_hosts(self.without_torch)}"
        if self.problem:
            return
        self.order = plan_group(
            self.ends, wanted=wanted, ranks_per_node=ranks_per_node, sizes=sizes, port=self.port, budget_s=BUDGET_S
        )
        self.group = run_group(
            self.place,
            self.order,
            queue_s=self.queue_s,
            env=os.environ,
            show=self._show if self.line.is_shown else None,
        )
        self.line.clear()
        self.problem = self.group.problem and f"collectives: {self.group.problem}"
        self.notes += filter(None, (self.group.describe_lost(), self.group.describe_skipped()))
        if not self.as_json and self.group.rows:
            from allranks.comm.chart import render_table

            click.echo(render_table(self.table) + "\n")

    @property
    def table(self) -> BenchTable:
        """What was measured."""
        from allranks.comm.bench_table import BenchTable

        return BenchTable(
            began_s=round(self.began_s, 3),
            backend=self.order.backend if self.order else "",
            nodes=tuple(self.ends),
            ranks=len(self.order.names) if self.order else len(self.ends),
            interfaces={name: (end.interface,) for name, end in self.ends.items()},
            link_mbit_s=min((end.link_mbit_s for end in self.ends.values() if end.link_mbit_s), default=None),
            pairs=self.pairs,
            rows=tuple(self.group.rows) if self.group else (),
        )

    def finish(self, log_dir: Path, plot: Path | None) -> int:
        """Write the files, print the rest, and return the exit code."""
        from allranks.comm.bench import count_untested
        from allranks.comm.bench_table import find_table
        from allranks.comm.bench_table import to_json as table_to_json
        from allranks.files.folder import Folder, write_named

        table, written = self.table, list[str]()
        if not self.problem and any(row.wrong for row in table.rows):
            self.problem = "collectives: wrong results; see the column #wrong"
        # Half a table would mislead those who read it, and streams alone would take the place of a whole one.
        if not self.problem and (table.rows or not find_table(log_dir).exists()):
            path = find_table(log_dir)
            written += self._write(path, lambda: Folder.root(path.parent).write_whole(path.name, table_to_json(table)))
        if plot == _BARS and table.rows:
            from allranks.comm.chart import draw_bars

            style = Style.of(sys.stdout)
            click.echo(draw_bars(table, width=min(style.width, 120), is_unicode=style.is_unicode) + "\n")
        elif plot is not None and table.rows:
            from allranks.comm.chart import draw_svg

            written += self._write(plot, lambda: write_named(plot, draw_svg(table).encode()))
        is_untold = bool(self.marks and self.marks.unjudged)
        is_bad = bool(self.findings or self.problem or self.unwritten)
        code = Exit.USER_CODE if is_bad else Exit.UNKNOWN if is_untold else Exit.OK
        elapsed_s = time.time() - self.began_s
        if self.as_json:
            document = {
                "nodes": self.names,
                "table": table,
                "untested": count_untested(table.nodes, table.pairs) if table.pairs else 0,
                "findings": self.findings,
                "retransmitted": self.group.counters if self.group else {},
                "notes": [*self.notes, *(self.group.skipped if self.group else ())],
                "problem": self.problem or self.unwritten,
                "elapsed_s": round(elapsed_s, 3),
                "exit_code": code,
            }
            click.echo(to_json(document))
            return code
        for note in self.notes:
            click.echo(printable(f"note: {note}"))
        if self.findings:
            click.echo(render_findings(self.findings, Style.of(sys.stdout)) + "\n")
        if self.problem:
            say(self.problem)
        verdict = "measurement incomplete" if self.problem else "measured"
        if self.findings:
            where = ", ".join(finding.node or "?" for finding in self.findings)
            what = count_of(len(self.findings), "network fault" if self.marks else "problem")
            verdict = f"{what}{'' if self.marks else ' that would stop a job'} ({where})"
        click.echo(
            printable(f"{count_of(len(self.names), 'node')}: {verdict}; {'; '.join([f'{elapsed_s:.1f} s', *written])}")
        )
        return code

    def _write(self, path: Path, write: Callable[[], object]) -> list[str]:
        """Write a file, and its directory if it is missing; returns its path, if it was written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
            return [str(path)]
        except OSError as exc:
            self.unwritten = f"{path} cannot be written: {(exc.strerror or str(exc)).lower()}"
            say(self.unwritten)
            return []
