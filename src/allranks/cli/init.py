"""`allranks init`: examine every node and write cluster.toml, with a reason for each value."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.check import find_place, look_at, node_options, with_join
from allranks.cli.options import OutputFile, json_option
from allranks.config.file import parse_cluster
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.report.text import count_of, say

if TYPE_CHECKING:
    from allranks.launch.check.check_step import Held
    from allranks.launch.check.where import Asked, SrunNodes
    from allranks.preflight.describe import Surroundings


@click.command("init")
@node_options
@click.option("--standalone", is_flag=True, help="Examine this machine only, even if SLURM is there.")
@click.option(
    "-o",
    "--output",
    type=OutputFile(example="cluster.toml", allow_dash=True),
    default=Path("cluster.toml"),
    show_default=True,
    metavar="FILE",
    help="File to write; - is standard output.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def init(
    standalone: bool, output: Path, force: bool, as_json: bool, join_s: float, queue_s: float, **flags: Any
) -> int:
    """Examine the cluster's networks, nodes and GPUs, and write cluster.toml with a reason for each value.

    \b
    allranks init                                all idle nodes of the default partition; without SLURM, this machine
    allranks init --partition gpu --nodes 4      four nodes of it
    allranks init --nodelist node[01-32] -o - | less

    The data network is the fastest one that all nodes share. A comment says what could not be determined.
    """
    from allranks.launch.check.where import Asked
    from allranks.preflight.describe import describe_cluster, reasons_of
    from allranks.report.toml_writer import render_toml

    is_stdout = as_json or str(output) == "-"
    if not is_stdout and output.is_file() and not force:
        raise UsageError(f"init: {output} exists; replace it with --force, or name another file with --output")
    asked = Asked(**flags)
    if standalone and asked.is_any:
        raise UsageError("init: --standalone examines only this machine: remove --nodes, --partition and --nodelist")
    place, around = (None, _nothing_around()) if standalone else _choose(asked)
    held = look_at(place, with_join(Cluster(), join_s), queue_s=queue_s)
    around = replace(around, silent=_silent(held), waited_s=join_s)
    cards = [held.seen.cards[index] for index in sorted(held.seen.cards)]
    title, tables = describe_cluster(cards, around)
    text = render_toml(tables, title=title)
    cluster = parse_cluster(text, output).cluster  # the file must be readable before it is written
    if as_json:
        from allranks.report.machine import to_json

        document = {"cluster": cluster, "reasons": reasons_of(tables), "silent": around.silent, "text": text}
        click.echo(to_json(document))
    elif is_stdout:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        data = cluster.network.data or "not found"
        say(f"{output} written: {count_of(len(cluster.node), 'node')}, data network {data}; next: allranks check")
    for name in around.silent:
        say(f"{name} did not answer within {join_s:.0f} s, and is not in the file")
    return Exit.UNKNOWN if around.silent else Exit.OK


def _choose(asked: Asked) -> tuple[SrunNodes | None, Surroundings]:
    """Return the nodes to examine, and what SLURM says about them."""
    from allranks.host.slurm import NodeState, list_nodes
    from allranks.host.slurm_site import Site, read_site
    from allranks.preflight.describe import Surroundings

    if not (asked.is_any or os.environ.get("SLURM_JOB_ID")) and shutil.which("sinfo") is None:
        return None, _nothing_around()
    in_job = os.environ.get("SLURM_JOB_ID")
    partition, reason = asked.partition, "given by --partition"
    nodes: tuple[NodeState, ...] = ()
    try:
        nodes = list_nodes()
    except AllranksError as exc:
        if partition is None and not in_job:
            raise type(exc)(f"{exc}; to examine only this machine: --standalone") from exc
    default = next((name[:-1] for node in nodes for name in node.partitions if name.endswith("*")), None)
    promised = {node.name: node.num_gpus for node in nodes}
    if partition is None:
        found = os.environ.get("SLURM_JOB_PARTITION") if in_job else default
        partition, reason = found, "partition of the job that this ran in" if in_job else "SLURM's default"
    if not asked.is_any and not in_job:
        if partition is None:
            raise UsageError(
                "init: SLURM has no default partition; give one with --partition, or nodes with --nodelist"
            )
        asked = replace(asked, partition=partition)
    place = find_place(asked, os.environ, verb="init")
    assert place is not None
    if asked.gpus_per_node is None and not in_job:
        # SLURM hides GPUs from a step that asked for none.
        least = min((promised.get(name, 0) for name in place.names), default=0)
        place = replace(place, gpus_per_node=least or None)
    say(f"examining {place.describe()}")
    site = Site()
    with contextlib.suppress(AllranksError):
        site = read_site(env=os.environ)
    return place, Surroundings(
        cluster_name=site.cluster_name or None,
        partition=partition,
        partition_reason=reason,
        promised_gpus=promised,
    )


def _nothing_around() -> Surroundings:
    from allranks.preflight.describe import Surroundings

    return Surroundings()


def _silent(held: Held) -> tuple[str, ...]:
    from allranks.preflight.judge import name_at

    absent = sorted({*held.seen.missing, *held.seen.left} - set(held.seen.cards))
    return tuple(name_at(held.node_names, index) for index in absent)


def _write(path: Path, text: str) -> None:
    from allranks.files.folder import write_named

    try:
        write_named(path, text.encode())
    except OSError as exc:
        raise UsageError(f"init: {path}: {exc.strerror}; name another file with --output") from exc
