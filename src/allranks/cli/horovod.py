"""`allranks horovod`: elastic Horovod in a SLURM allocation, with its pauses and lost workers explained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from allranks.cli.options import cluster_option, log_dir_option, note_misplaced, timeout_option
from allranks.model.errors import UsageError

DEFAULT_TIMEOUT_S = 600
"""Of Horovod (runner/elastic/driver.py, 0.28.1)."""
COOLDOWN_S = (5, 60)
COUNT = click.IntRange(min=1)


@click.command("horovod", context_settings={"allow_interspersed_args": False})
@click.option("--min-np", type=COUNT, metavar="N", help="Train with at least N workers; with fewer, Horovod pauses.")
@click.option("--max-np", type=COUNT, metavar="N", help="Start at most N workers.")
@click.option("-np", "--num-proc", type=COUNT, metavar="N", help="Start with N workers.  [default: all]")
@click.option(
    "--slots-per-host",
    type=COUNT,
    metavar="N",
    help="Workers per node.  [default: the job's GPUs per node, else its tasks per node]",
)
@timeout_option(
    "--elastic-timeout",
    "elastic_timeout_s",
    waits_for="for workers below --min-np, before Horovod ends the job",
    shown_default="HOROVOD_ELASTIC_TIMEOUT, else 600s",
    at_least=1,
)
@click.option(
    "--blacklist-cooldown-range",
    "cooldown_s",
    type=(COUNT, click.IntRange(1, 3600)),
    default=COOLDOWN_S,
    show_default=True,
    metavar="MIN MAX",
    help="Seconds after which a node with a failed worker is used again.",
)
@click.option(
    "--host-discovery-script",
    "script",
    metavar="COMMAND",
    help="Use the hosts that this command prints, in place of the allocation's nodes.",
)
@click.option("--network", "subnet", metavar="SUBNET", help="The data network.  [default: from cluster.toml]")
@cluster_option
@log_dir_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def horovod(
    min_np: int | None,
    max_np: int | None,
    num_proc: int | None,
    slots_per_host: int | None,
    elastic_timeout_s: float | None,
    cooldown_s: tuple[int, int],
    script: str | None,
    subnet: str | None,
    cluster_file: Path | None,
    log_dir: Path,
    command: tuple[str, ...],
) -> int:
    """Run a script of elastic Horovod on the nodes of this SLURM job.

    \b
    salloc --nodes 6 --no-kill allranks horovod --min-np 4 --max-np 6 train.py
    allranks horovod --min-np 4 --elastic-timeout 1h train.py --epochs 90       in a batch script
    allranks horovod --min-np 4 --network 192.168.20.0/24 ./train.sh            a program that is not Python

    Workers are started with srun, not ssh. A lost worker is named, a pause below --min-np is announced with the time
    left, and a node that returns is used again. Horovod is dormant; docs/how-to/horovod.md has the way to
    allranks.session().
    """
    from allranks.horovod.run import HorovodRequest, choose_slots, run_horovod
    from allranks.model.finding import Finding
    from allranks.model.hostlist import expand_hosts
    from allranks.report.rundir import RunDir
    from allranks.report.text import Style, render_findings, say

    note_misplaced(command[1:])
    job_id, nodes = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job_id or not nodes:
        raise UsageError(
            "horovod: this is not a SLURM job (SLURM_JOB_ID is not set); start it in one, for example: "
            "salloc --nodes 6 --no-kill allranks horovod --min-np 4 train.py"
        )
    hosts = tuple(expand_hosts(nodes))
    slots = slots_per_host or choose_slots(os.environ)
    start_np = num_proc or min(len(hosts) * slots, max_np or len(hosts) * slots)
    least = min_np or start_np
    if not least <= start_np <= (max_np or start_np):
        limits = f"--min-np {least}" + (f", --max-np {max_np}" if max_np else "")
        raise UsageError(f"horovod: -np {start_np} does not fit {limits}; expected --min-np <= -np <= --max-np")
    if start_np > len(hosts) * slots and script is None:
        raise UsageError(
            f"horovod: {start_np} workers do not fit on {len(hosts)} nodes with {slots} slots each; lower -np, or name "
            "the workers per node with --slots-per-host"
        )
    is_python = command[0].endswith(".py")
    request = HorovodRequest(
        job_id=job_id,
        hosts=hosts,
        slots=slots,
        min_np=least,
        max_np=max_np,
        start_np=start_np,
        timeout_s=round(elastic_timeout_s or 0) or _timeout_of(os.environ.get("HOROVOD_ELASTIC_TIMEOUT")),
        cooldown_s=cooldown_s,
        subnet=subnet or _data_network(cluster_file),
        discovery_script=script,
        command=(sys.executable, *command) if is_python else command,
    )
    run_dir = RunDir(log_dir, job_id)
    run_dir.create()
    run_dir.create_attempt(None)
    style = Style.of(sys.stdout)

    def show(what: Finding | str) -> None:
        click.echo(what if isinstance(what, str) else "\n" + render_findings([what], style) + "\n")

    where = f"{len(hosts)} nodes ({nodes})"
    say(f"Horovod with {start_np} workers on {where}, at least {least}; logs in {run_dir.attempt_path}")
    return run_horovod(request, run_dir, say=say, show=show)


def _timeout_of(text: str | None) -> int:
    if not text:
        return DEFAULT_TIMEOUT_S
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"HOROVOD_ELASTIC_TIMEOUT={text}: expected a number of seconds")
    return int(text)


def _data_network(cluster_file: Path | None) -> str:
    """Return the subnet of the data network: cluster.toml's, else the one that the roll call would choose here.

    Raises:
        UsageError: there is none.
    """
    from allranks.cli.context import load_cluster
    from allranks.host.node import read_card_facts
    from allranks.model.card import Card
    from allranks.preflight.networks import choose_network

    if subnet := load_cluster(cluster_file).cluster.network.data:
        return subnet
    facts = read_card_facts(os.environ, names=())
    card = Card(host=os.uname().nodename, pid=os.getpid(), node_index=0, num_workers=1, num_gpus=0, facts=facts)
    choice = choose_network([card])
    if choice.network is None:
        raise UsageError(f"horovod: {choice.reason}; name the data network: --network 192.168.20.0/24")
    return choice.network.subnet
