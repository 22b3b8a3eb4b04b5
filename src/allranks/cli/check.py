"""`allranks check`: test every node and every pair of nodes before a job needs them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from allranks.cli.context import load_cluster
from allranks.cli.options import cluster_option, json_option, timeout_option
from allranks.model.errors import AllranksError, Exit, SetupError, StoppedBySignal, UsageError
from allranks.model.identity import GivenFlags, world_from_env
from allranks.model.world import Launcher, World
from allranks.report.machine import to_json
from allranks.report.text import Style, count_of, printable, render_findings, say

if TYPE_CHECKING:
    from allranks.launch.check.check_outcome import CheckOutcome
    from allranks.launch.check.check_step import Held
    from allranks.launch.check.where import Asked, SrunNodes
    from allranks.model.cluster import Cluster

JOIN_S = 20.0
QUEUE_S = 60.0
T = TypeVar("T")


def node_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that choose the nodes and the timeouts."""
    options = [
        click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes; SLURM chooses them."),
        click.option(
            "--partition", metavar="NAME", help="Partition of the nodes; without --nodes, all its idle nodes."
        ),
        click.option("--nodelist", metavar="LIST", help="Names of nodes, as in node[01-03,07]."),
        click.option(
            "--gpus-per-node",
            type=click.IntRange(min=0),
            metavar="N",
            help="GPUs per node to request; SLURM may hide GPUs that nobody requested.",
        ),
        timeout_option(
            "--timeout", "join_s", waits_for="for each node to answer", default=JOIN_S, at_least=1, at_most=3600
        ),
        timeout_option(
            "--queue-timeout", "queue_s", waits_for="for SLURM to allocate the nodes", default=QUEUE_S, at_least=1
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("check")
@node_options
@click.option(
    "--select", multiple=True, metavar="ID,...", help="Run only these checks: ids, names or prefixes (AR2: network)."
)
@click.option("--ignore", multiple=True, metavar="ID,...", help="Skip these checks.")
@click.option("--deep", "is_deep", is_flag=True, help="Also run real collectives between pairs of nodes, with torch.")
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Only check whether DIR is fit for checkpoints: write, kill, load.",
)
@click.option("--list", "is_list", is_flag=True, help="List all checks, and how each works.")
@click.option(
    "--exclude-list", "is_exclude_list", is_flag=True, help="Print only the nodes at fault, for sbatch --exclude."
)
@click.option("-v", "--verbose", is_flag=True, help="Print every check, including those that passed.")
@cluster_option
@json_option
@click.option("--member", is_flag=True, hidden=True)  # one node of a check that another process started
def check(
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    is_deep: bool,
    checkpoints: Path | None,
    is_list: bool,
    is_exclude_list: bool,
    verbose: bool,
    cluster_file: Path | None,
    as_json: bool,
    member: bool,
    join_s: float,
    queue_s: float,
    **flags: Any,
) -> int:
    """Check nodes and the network between them, with the tests that every job runs before it starts.

    \b
    allranks check                               this machine; inside a SLURM job, the nodes of the job
    allranks check --nodes 6                     from a login node: six nodes that SLURM chooses
    allranks check --nodelist node[01-04] --select AR2,disk-full
    allranks check --nodes 6 --deep              also runs real collectives between pairs of nodes
    allranks check --checkpoints /scratch/me     is this directory fit for checkpoints?
    sbatch --exclude="$(allranks check --partition main --exclude-list)" job.sh

    Exit codes: 0 no problem, 1 a problem would stop a job, 2 usage error, 3 a check could not tell.
    """
    if member:
        _be_member()
    if checkpoints is not None:
        from allranks.cli.checkpoints import check_checkpoints

        return check_checkpoints(checkpoints, as_json=as_json)
    from allranks.causes.cause import Trait
    from allranks.launch.check.check_outcome import choose_checks
    from allranks.launch.check.where import Asked

    wanted = choose_checks(_split(select), _split(ignore))
    if is_list:
        _print_list(as_json=as_json, chosen={cause.id for cause in wanted})
        return Exit.OK
    if is_exclude_list and (as_json or verbose):
        raise UsageError("--exclude-list prints only names of nodes: remove --json and --verbose")
    if not is_deep and all(cause.deep for cause in wanted):
        raise UsageError(f"--select {wanted[0].id}: this check runs only with --deep")
    loaded = load_cluster(cluster_file)
    view = _View(
        wanted=tuple(cause for cause in wanted if is_deep or not cause.deep),
        ignored=_ids(ignore),
        is_exclude_list=is_exclude_list,
        is_verbose=verbose,
        as_json=as_json,
        cluster=loaded.cluster,
        began_s=time.monotonic(),
    )
    cluster = with_join(loaded.cluster, join_s)
    asked = Asked(**flags)
    world = world_from_env(os.environ, given=GivenFlags(is_alone=True))
    if world.launcher is Launcher.SLURM and not asked.is_any:
        if is_deep:
            raise UsageError("--deep starts its own job steps: run it in the allocation, without srun")
        return _in_step(cluster, world, view=view)
    place = find_place(asked, os.environ, verb="check")
    held = look_at(place, cluster, queue_s=queue_s)
    # A step that asked for no cores in particular has one.
    note = "this check requested only one core per node from SLURM"
    granted = (cause.id for cause in wanted if Trait.OF_GRANTED_CORES in cause.traits)
    skipped = dict.fromkeys(granted, note) if place and place.job_id is None else {}
    outcome = view.judge(held, skipped=skipped)
    if is_deep:
        from allranks.cli.deep import look_deeper

        outcome = look_deeper(place, held, outcome, wanted=wanted, queue_s=queue_s)
    view.show(outcome, held)
    return outcome.exit_code


def find_place(asked: Asked, env: Any, *, verb: str) -> SrunNodes | None:
    """Return the nodes to check, from flags and environment; None for this machine.

    Raises:
        AllranksError: flags contradict each other or the allocation, or SLURM does not know the nodes.
    """
    from allranks.host.slurm import find_jobs, list_nodes
    from allranks.launch.check.where import choose_in_cluster, choose_in_job
    from allranks.model.hostlist import expand_hosts

    job_id = env.get("SLURM_JOB_ID")
    if job_id:
        if env.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
            raise UsageError(
                f"{verb}: job {job_id} is heterogeneous; run this on all its nodes: srun --overlap --het-group=0-1 "
                f"--ntasks-per-node=1 allranks {verb}"
            )
        nodes = env.get("SLURM_JOB_NODELIST") or next((job.nodes for job in _ask(lambda: find_jobs(job_id))), "")
        if not nodes:
            raise UsageError(f"{verb}: SLURM_JOB_ID={job_id}, but this job has no nodes; unset SLURM_JOB_ID")
        return choose_in_job(asked, job_id, expand_hosts(nodes), verb=verb)
    if asked.is_any:
        return choose_in_cluster(asked, verb=verb, list_idle=lambda name: _ask(lambda: list_nodes(partition=name)))
    return None


def _ask(slurm: Callable[[], T]) -> T:
    """Ask SLURM; a missing SLURM is a usage error, not a finding."""
    try:
        return slurm()
    except SetupError as exc:
        raise UsageError(str(exc)) from exc


def with_join(cluster: Cluster, join_s: float) -> Cluster:
    """Return the cluster with another time to wait for each node."""
    from msgspec.structs import replace

    return replace(cluster, guard=replace(cluster.guard, join_s=join_s))


def look_at(place: SrunNodes | None, cluster: Cluster, *, queue_s: float) -> Held:
    """Check nodes of the cluster, or this machine.

    Raises:
        AllranksError: SLURM refuses, or no node answers.
    """
    from allranks.launch.check.check_step import check_nodes, look_here

    if place is None:
        return look_here(cluster, os.environ)
    return check_nodes(place, cluster, queue_s=queue_s, env=os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Which checks run, and which results are printed."""

    wanted: tuple[Any, ...]
    ignored: frozenset[str]
    is_exclude_list: bool
    is_verbose: bool
    as_json: bool
    cluster: Cluster
    began_s: float

    def judge(self, held: Held, *, skipped: dict[str, str]) -> CheckOutcome:
        from allranks.launch.check.check_outcome import judge_check

        return judge_check(held, self.wanted, ignored=self.ignored, skipped=skipped)

    def show(self, outcome: CheckOutcome, held: Held) -> None:
        elapsed_s = time.monotonic() - self.began_s
        if self.is_exclude_list:
            _print_exclude_list(outcome)
        elif self.as_json:
            _print_json(outcome, held, elapsed_s=elapsed_s)
        else:
            self._print_table(outcome, held, elapsed_s=elapsed_s)

    def _print_table(self, outcome: CheckOutcome, held: Held, *, elapsed_s: float) -> None:
        from allranks.causes.book import FAMILIES
        from allranks.report.check_table import render_results

        style = Style.of(sys.stdout)
        table = render_results(
            outcome.results, style, families=FAMILIES, num_nodes=len(outcome.nodes), is_verbose=self.is_verbose
        )
        parts = [table, render_findings(outcome.findings, style)]
        if outcome.figures is not None and self.is_verbose:
            from allranks.launch.check.deep import render_figures

            parts.insert(1, printable(render_figures(outcome.figures)))
        say_network(held, self.cluster)
        click.echo("\n\n".join(filter(None, [*parts, summarise(outcome, elapsed_s=elapsed_s)])))


def say_network(held: Held, cluster: Cluster) -> None:
    """Say which network nodes used for their data, where cluster.toml does not say it."""
    if held.num_nodes == 1 or cluster.network.data or cluster.node:
        return
    from allranks.preflight.networks import advise_network

    path = "the test used the network over which the nodes found each other"
    say(f"cluster.toml does not name the data network: {path}; allranks init writes cluster.toml")
    if advice := advise_network([*held.seen.cards.values()], held.addresses.get(0)):
        say(f"note: {advice}")


def summarise(outcome: CheckOutcome, *, elapsed_s: float) -> str:
    """Return the last line: the verdict and the seconds."""
    from allranks.model.finding import Severity, Status
    from allranks.model.hostlist import fold_hosts

    where = printable(outcome.nodes[0]) if len(outcome.nodes) == 1 else f"{len(outcome.nodes)} nodes"
    fails = sum(finding.severity is Severity.FAIL for finding in outcome.findings)
    warnings = len(outcome.findings) - fails
    lost = {result.cause for result in outcome.results if result.status in (Status.UNKNOWN, Status.CRASH)}
    passed = {result.cause for result in outcome.results if result.status is Status.PASS}
    said = []
    if fails:
        failed = {result.node for result in outcome.results if result.status is Status.FAIL}
        culprits = [node for node in outcome.nodes if node in failed]
        on = f" ({fold_hosts(culprits)})" if 0 < len(culprits) < len(outcome.nodes) else ""
        said.append(f"{count_of(fails, 'problem')} that would stop a job{on}")
    if warnings:
        said.append(count_of(warnings, "warning"))
    if lost:
        said.append(f"{count_of(len(lost), 'check')} without a result")
    verdict = ", ".join(said) or f"no problem found, {count_of(len(passed), 'check')} passed"
    return f"{where}: {verdict}; {elapsed_s:.1f} s"


def _print_exclude_list(outcome: CheckOutcome) -> None:
    from allranks.launch.check.check_outcome import nodes_to_exclude
    from allranks.model.hostlist import fold_hosts

    names, left = nodes_to_exclude(outcome)
    click.echo(printable(fold_hosts(names)))
    for line in left:
        say(printable(line))


def _print_json(outcome: CheckOutcome, held: Held, *, elapsed_s: float) -> None:
    from allranks.preflight.judge import name_nodes

    answered = set(name_nodes(held.seen.cards).values())
    document = {
        "nodes": [{"name": node, "answered": node in answered} for node in outcome.nodes],
        "results": outcome.results,
        "findings": outcome.findings,
        **({"figures": outcome.figures} if outcome.figures is not None else {}),
        "elapsed_s": round(elapsed_s, 3),
        "exit_code": outcome.exit_code,
    }
    click.echo(to_json(document))


def _print_list(*, as_json: bool, chosen: set[str]) -> None:
    from allranks.launch.check.check_outcome import checks

    found = [(cause, ways) for cause, ways in checks().values() if cause.id in chosen]
    if as_json:
        rows = [{"id": c.id, "name": c.name, "title": c.title, "ways": ways} for c, ways in found]
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(len(cause.label) for cause, _ in found)
    for cause, ways in found:
        click.echo(f"{cause.label:<{width}}  {cause.title.removesuffix('.')}; {', '.join(ways)}")


def _be_member() -> None:
    """Check this node for another process, then end this process, even if a thread waits for a hung file system."""
    exit_code = 0
    try:
        _serve()
    except StoppedBySignal as exc:
        exit_code = exc.exit_code
    except AllranksError as exc:
        click.echo(f"error: {exc}", err=True)
        exit_code = exc.exit_code
    sys.stdout.flush()
    os._exit(exit_code)


def _serve() -> None:
    from allranks.launch.check.check_step import ORDER_VARIABLE, CheckOrder, serve
    from allranks.launch.check.group_collectives import GroupOrder, serve_group
    from allranks.launch.check.network_streams import StreamOrder, serve_streams
    from allranks.launch.check.pair_collectives import PairOrder, serve_pairs
    from allranks.launch.srun import decode

    try:
        order = decode(os.environ.pop(ORDER_VARIABLE, ""), CheckOrder | PairOrder | StreamOrder | GroupOrder)
    except ValueError as exc:
        raise UsageError(f"{ORDER_VARIABLE} is not from this version of allranks; unset it") from exc
    if isinstance(order, CheckOrder):
        serve(order, os.environ)
    elif isinstance(order, StreamOrder):
        serve_streams(order, os.environ)
    elif isinstance(order, GroupOrder):
        serve_group(order, os.environ)
    else:
        serve_pairs(order, os.environ)


def _in_step(cluster: Cluster, world: World, *, view: _View) -> int:
    """Check the nodes of a step that the user started: every task takes part, the first one prints."""
    from allranks.launch.check.check_step import CheckOrder, step_directory, take_part
    from allranks.model.card import Card
    from allranks.wire.protocol import Goodbye

    outcomes: list[CheckOutcome] = []

    def judge(held: Held) -> int:
        outcomes.append(view.judge(held, skipped={}))
        return outcomes[0].exit_code

    with step_directory(world, os.environ) as (directory, env):
        order = CheckOrder(cluster=cluster, directory=directory)
        found = take_part(order, world, env, judge=judge)
    if isinstance(found, Goodbye):
        return found.exit_code
    if isinstance(found, Card):
        finding = found.problem_finding
        if finding is None:
            raise AllranksError(found.problem or "this node could not take part in the check")
        if world.rank == 1:  # in a step all terminals are one
            click.echo(render_findings([finding], Style.of(sys.stderr)), err=True)
        return Exit.USER_CODE
    outcome = outcomes[0] if outcomes else view.judge(found, skipped={})
    view.show(outcome, found)
    return outcome.exit_code


def _split(texts: tuple[str, ...]) -> list[str]:
    return [part for text in texts for part in text.split(",") if part.strip()]


def _ids(ignore: tuple[str, ...]) -> frozenset[str]:
    from allranks.causes.book import select_causes

    named = _split(ignore)
    return frozenset(cause.id for cause in select_causes(named, [])) if named else frozenset()
