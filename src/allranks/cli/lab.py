"""`allranks lab`: the nodes of a cluster.toml as a real SLURM cluster on one machine."""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.drill import drill
from allranks.cli.options import name_option, timeout_option
from allranks.cli.verb_groups import VerbGroup
from allranks.config.file import find_cluster_file, read_cluster
from allranks.lab.release import RELEASES
from allranks.model.errors import UsageError
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.lab.faults.fault import Fault, LabScene

SIX_NODES = Path(__file__).parents[1] / "lab" / "six-node.toml"
"""The default cluster: a copy of examples/six-node/cluster.toml, which an installed package does not have."""


@click.group(cls=VerbGroup)
def lab() -> None:
    """Start a real SLURM cluster on this Linux machine, in network namespaces. Needs root.

    \b
    allranks lab up                                            six nodes, by default
    allranks lab exec master-node -- sinfo                     any command, on any node
    allranks lab exec master-node -- srun -N6 allranks run train.py
    allranks lab inject cable-pulled                           break something; inject --list prints all faults
    allranks lab heal                                          remove the injected faults
    allranks lab status
    allranks lab down
    """


@lab.command()
@click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Path of cluster.toml. [default: $ALLRANKS_CLUSTER, ./cluster.toml, six nodes]",
)
@click.option(
    "--tasks-per-node",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="K",
    help="Maximum number of workers per node.",
)
@click.option(
    "--slurm",
    "slurm_release",
    type=click.Choice(list(RELEASES)),
    help="Release of SLURM, from Debian's packages; needs mmdebstrap. [default: the one of this machine]",
)
@click.option("--accounting", is_flag=True, help="Also run slurmdbd, so that sacct works; needs mariadb-server.")
@timeout_option(
    "--kill-wait", "kill_wait", waits_for="for a job after SIGTERM, before SIGKILL (SLURM's KillWait)", default=5.0
)
@timeout_option(
    "--grace-time", "grace_time", waits_for="for a job that is preempted (GraceTime of the partitions)", default=10.0
)
@click.option("--login", is_flag=True, help="Also start a login node, which runs slurmctld and is in no partition.")
@name_option
def up(
    cluster_file: Path | None,
    tasks_per_node: int,
    slurm_release: str | None,
    accounting: bool,
    login: bool,
    kill_wait: float,
    grace_time: float,
    name: str,
) -> None:
    """Start the lab; if it is already up, restart what died in it. `heal` removes injected faults.

    \b
    allranks lab up
    allranks lab up --cluster cluster.toml --name second --tasks-per-node 4
    allranks lab up --slurm 24.11                              the packages are kept in ~/.cache/allranks/slurm
    allranks lab up --login                                    a job outlives the loss of any of its nodes
    allranks lab up --kill-wait 40 --grace-time 40             time for a long checkpoint after SIGTERM
    """
    from allranks.lab.lab import Lab

    began = time.monotonic()
    path = find_cluster_file(cluster_file, os.environ, Path()) or SIX_NODES
    which = Lab(name)
    cluster = read_cluster(path).cluster
    planned = which.up(
        cluster,
        tasks_per_node=tasks_per_node,
        slurm_release=slurm_release,
        has_accounting=accounting,
        has_login=login,
        kill_wait_s=round(kill_wait),
        grace_s=round(grace_time),
        say=say,
    )
    flag = "" if name == "lab" else f" --name {name}"
    say(
        f"{which.label}: {len(planned)} nodes ready after {time.monotonic() - began:.1f} s; "
        f"try: allranks lab exec{flag} {which.controller().name} -- sinfo"
    )


@lab.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@name_option
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def execute(name: str, node: str, command: tuple[str, ...]) -> None:
    """Run a command on a node and exit with its code.

    The command runs in this directory.

    \b
    allranks lab exec node03 -- ip -brief address
    allranks lab exec --name second master-node -- sbatch job.slurm
    """
    from allranks.lab.hosts import run_for_user
    from allranks.lab.lab import Lab
    from allranks.lab.slurm_daemons import conf_path

    which = Lab(name)
    if command[0] == "--":
        command = command[1:] or ("true",)
    # Jobs in the lab use the allranks that made it.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    env = os.environ | {"SLURM_CONF": str(conf_path(which.dir)), "PATH": path}
    sys.exit(run_for_user(which.find_init(node), command, env))


@lab.command()
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str, as_json: bool) -> None:
    """Print the nodes and the injected faults.

    Of each node it prints the SLURM state, the interfaces and the process ids.

    \b
    allranks lab status --json
    """
    from allranks.lab.faults.injected import read_records
    from allranks.lab.lab import Lab

    which = Lab(name)
    found = which.status() | {"faults": [record.key for record in read_records(which)]}
    click.echo(json.dumps(found, indent=2) if as_json else _render_status(found))


@lab.command()
@click.argument("fault", required=False, shell_complete=complete.faults)
@click.option("--on", "node", metavar="NODE", help="Node that gets the fault. [default: chosen by the seed]")
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", help="Seed of all random choices. [default: random, printed]"
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Parent of the jobs' run directories (their --log-dir).",
)
@click.option("--list", "is_list", is_flag=True, help="List all faults, and what each does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@name_option
def inject(
    fault: str | None, node: str | None, seed: int | None, run_dir: Path, is_list: bool, as_json: bool, name: str
) -> None:
    """Inject a fault into a running lab.

    \b
    allranks lab inject --list
    allranks lab inject mtu-blackhole --on node03
    allranks lab inject packet-loss-20 --seed 7
    """
    from allranks.lab.faults.catalogue import FAULTS
    from allranks.lab.faults.fault import JobStart
    from allranks.lab.faults.injected import find_fault, refuse_strikes
    from allranks.lab.faults.injected import inject as put
    from allranks.lab.faults.running.strike_catalogue import STRIKES
    from allranks.lab.lab import Lab

    if is_list:
        if as_json:
            click.echo(json.dumps([_describe(known) for known in (*FAULTS.values(), *STRIKES.values())], indent=2))
            return
        click.echo(_HEADER)
        _list(FAULTS.values())
        click.echo("\nfaults in a running job (strikes): allranks lab drill --running NAME")
        _list(STRIKES.values())
        return
    if fault is None:
        raise UsageError("lab inject: expected the name of a fault; allranks lab inject --list prints all")
    refuse_strikes(find_fault(fault))
    which = Lab(name)
    there = put(which, fault, seed=random.randrange(10_000) if seed is None else seed, on=node, run_dir=run_dir)
    if as_json:
        click.echo(json.dumps(_describe(there.fault, there.scene), indent=2))
        return
    say(f"{which.label}: {fault} on {there.scene.where.node} (seed {there.scene.where.seed}): {there.fault.title()}")
    truth = there.fault.culprit(there.scene)
    say(f"expected finding: {' or '.join(there.fault.cause) or 'none'} {truth}".rstrip())
    start = there.fault.start(there.scene)
    parts = (start.srun_flags, start.prefix, ("allranks", "run"), start.run_flags, (str(start.program or "train.py"),))
    if command := [word for part in parts for word in part] if start != JobStart() else []:
        say(f"start the job like this: srun {shlex.join(command)}")


@lab.command()
@click.argument("fault", required=False, shell_complete=complete.faults)
@click.option("--on", "node", metavar="NODE", help="Only on this node. [default: all nodes]")
@name_option
def heal(fault: str | None, node: str | None, name: str) -> None:
    """Remove an injected fault; without FAULT, all of them.

    \b
    allranks lab heal
    allranks lab heal mtu-blackhole --on node03
    """
    from allranks.lab.faults.injected import heal as undo
    from allranks.lab.lab import Lab

    which = Lab(name)
    healed = undo(which, fault, on=node)
    for there in healed:
        say(f"{which.label}: {there.fault.name} on {there.scene.where.node}: healed")
    if not healed:
        say(f"{which.label}: there were no faults")


lab.add_command(drill)


@lab.command()
@name_option
def down(name: str) -> None:
    """Stop the lab, and remove all of it.

    This removes its processes, interfaces and directory; nothing else is touched.

    \b
    allranks lab down --name second
    """
    from allranks.lab.lab import Lab

    which = Lab(name)
    say(f"{which.label}: {'removed' if which.down() else 'was not up'}")


_HEADER = """\
Columns: name, cause that allranks must report (- for none), what must become of the job, what the fault does.
  fail      the job is stopped, and the cause is reported
  warn      the job runs, and the cause is reported as a warning
  resumed   the cause is reported, and the job starts again from its newest checkpoint
  survived  the job runs on, and no rank or node is blamed
"""


def _list(faults: Collection[type[Fault]]) -> None:
    width = max(len(fault.name) for fault in faults)
    for fault in faults:
        click.echo(f"{fault.name:<{width}}  {'|'.join(fault.cause) or '-':<11} {fault.severity:<8} {fault.title()}")


def _describe(fault: type[Fault], scene: LabScene | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fault": fault.name,
        "title": fault.title(),
        "causes": fault.cause,
        "also": fault.also,
        "severity": fault.severity,
        "place": fault.place,
    }
    if scene is not None:
        start = asdict(fault.start(scene))
        start["program"] = start["program"] and str(start["program"])
        found |= {"where": asdict(scene.where), "culprit": asdict(fault.culprit(scene)), "start": start}
    return found


def _render_status(found: dict[str, Any]) -> str:
    from allranks.lab.lab import Lab

    label = Lab(found["name"]).label
    lines = [f"{label}   SLURM {found['slurm']}   {found['directory']}   SLURM_CONF={found['slurm_conf']}"]
    for node in found["nodes"]:
        pids = {"init": node["init_pid"] or "dead", **node["daemon_pids"]}
        processes = " ".join(f"{what} {pid}" for what, pid in pids.items())
        state = "login node" if node["is_login"] else node["slurm_state"] or "unknown to SLURM"
        lines.append(f"{node['name']}   {state}   {processes}")
        for interface in node["interfaces"]:
            notes = [] if interface["is_up"] else ["down"]
            notes += [f"mtu {interface['mtu']}"] if interface["mtu"] not in (1500, 65536) else []
            notes += [f"{interface['rate_gbit_s']:g} Gbit/s"] if interface["rate_gbit_s"] else []
            lines.append(f"  {interface['name']:<15} {' '.join(interface['addresses'])}   {', '.join(notes)}".rstrip())
    if found["faults"]:
        lines.append(f"faults: {', '.join(found['faults'])}; allranks lab heal removes them")
    if not any(interface["rate_gbit_s"] for node in found["nodes"] for interface in node["interfaces"]):
        lines.append("the data links have no speed limit: this kernel has no tbf (CONFIG_NET_SCH_TBF)")
    return "\n".join(lines)
