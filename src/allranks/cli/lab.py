"""`allranks lab`: the cluster of a cluster.toml as a real SLURM on this one machine."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from allranks.config import find_cluster_file, read_cluster
from allranks.model.errors import UsageError
from allranks.report.text import say

EXAMPLE = Path(__file__).parents[3] / "examples" / "six-node" / "cluster.toml"
"""The default cluster, in a checkout of the project; an installed package comes without it."""

name_option = click.option("--name", default="lab", show_default=True, help="Which lab; several may be up.")


@click.group()
def lab() -> None:
    """Make a real SLURM cluster on this one Linux machine, in network namespaces. Needs root.

    \b
    allranks lab up                                            six nodes, as in examples/six-node/cluster.toml
    allranks lab exec master-node -- sinfo                     any command, on any node
    allranks lab exec master-node -- srun -N6 allranks run train.py
    allranks lab status
    allranks lab down
    """


@lab.command()
@click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="[default: $ALLRANKS_CLUSTER, ./cluster.toml, six nodes]",
)
@click.option(
    "--tasks-per-node",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="K",
    help="Workers that fit on a node.",
)
@name_option
def up(cluster_file: Path | None, tasks_per_node: int, name: str) -> None:
    """Bring every node in service; mend what is missing of a lab that is up already.

    \b
    allranks lab up
    allranks lab up --cluster cluster.toml --name second --tasks-per-node 4
    """
    from allranks.lab.lab import Lab

    began = time.monotonic()
    path = find_cluster_file(cluster_file, os.environ, Path()) or EXAMPLE
    if path == EXAMPLE and not path.exists():
        raise UsageError("lab up: no cluster.toml here, and the example came without this package; give --cluster FILE")
    planned = Lab(name).up(read_cluster(path).cluster, tasks_per_node=tasks_per_node, say=say)
    flag = "" if name == "lab" else f" --name {name}"
    say(
        f"lab {name}: {len(planned)} nodes in service after {time.monotonic() - began:.1f} s; "
        f"try: allranks lab exec{flag} {planned[0].name} -- sinfo"
    )


@lab.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@name_option
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def execute(name: str, node: str, command: tuple[str, ...]) -> None:
    """Run a command on a node, here in this directory; ends with its exit code.

    \b
    allranks lab exec node03 -- ip -brief address
    allranks lab exec --name second master-node -- sbatch job.slurm
    """
    from allranks.lab.hosts import run_for_user
    from allranks.lab.lab import Lab
    from allranks.lab.slurm import conf_path

    which = Lab(name)
    if command[0] == "--":
        command = command[1:] or ("true",)
    # The allranks that made the lab is the one that its jobs find.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    env = os.environ | {"SLURM_CONF": str(conf_path(which.dir)), "PATH": path}
    sys.exit(run_for_user(which.find_init(node), command, env))


@lab.command()
@name_option
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(name: str, as_json: bool) -> None:
    """Print the nodes, what SLURM says of them, their interfaces and process ids.

    \b
    allranks lab status --json
    """
    from allranks.lab.lab import Lab

    found = Lab(name).status()
    click.echo(json.dumps(found, indent=2) if as_json else _render_status(found))


@lab.command()
@name_option
def down(name: str) -> None:
    """Remove the lab: its processes, its interfaces, its directory. Nothing else is touched.

    \b
    allranks lab down --name second
    """
    from allranks.lab.lab import Lab

    if not Lab(name).down():
        say(f"lab {name}: was not up")


def _render_status(found: dict[str, Any]) -> str:
    lines = [f"lab {found['name']}   {found['directory']}   SLURM_CONF={found['slurm_conf']}"]
    for node in found["nodes"]:
        pids = {"init": node["init_pid"] or "dead", **node["daemon_pids"]}
        processes = " ".join(f"{what} {pid}" for what, pid in pids.items())
        lines.append(f"{node['name']}   {node['slurm_state'] or 'unknown to SLURM'}   {processes}")
        for interface in node["interfaces"]:
            notes = [] if interface["is_up"] else ["down"]
            notes += [f"mtu {interface['mtu']}"] if interface["mtu"] not in (1500, 65536) else []
            notes += [f"{interface['rate_gbit_s']:g} Gbit/s"] if interface["rate_gbit_s"] else []
            lines.append(f"  {interface['name']:<15} {' '.join(interface['addresses'])}   {', '.join(notes)}".rstrip())
    if not any(interface["rate_gbit_s"] for node in found["nodes"] for interface in node["interfaces"]):
        lines.append("the data links are not shaped: this kernel has no tbf")
    return "\n".join(lines)
