"""`allranks run`: torchrun's flags, spelled with dash or underscore, and what they mean here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from allranks.cli.context import plan_here
from allranks.launch.plan import Request, refuse_world_of_one
from allranks.model.errors import UsageError
from allranks.wire.leader import Hint

DEFAULT_PORT = 29500

# Flags of torchrun that mean nothing here, with why. They take one value; the flags below them take none.
UNUSED_WITH_VALUE = {
    "--rdzv-backend": "the leader's own roll call is used",
    "--rdzv-conf": "the figures are in cluster.toml, [guard]",
    "--max-restarts": "workers are not restarted yet",
    "--monitor-interval": "workers are watched without polling",
    "--start-method": "workers are processes of their own",
    "--event-log-handler": "events are in events.jsonl of the run directory",
    "--duplicate-stdout-filters": "every rank has its own files",
    "--duplicate-stderr-filters": "every rank has its own files",
    "--logs-specs": "the run directory has one form",
    "--numa-binding": "workers are not bound yet",
    "--signals-to-handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT are handled",
    "--shutdown-timeout": "workers get 3 s after the first signal",
}
UNUSED_WITHOUT_VALUE = {
    "--run-path": "the script is started as it is",
    "--virtual-local-rank": "local ranks are real",
}


def both_spellings(flag: str) -> tuple[str, ...]:
    """`--node-rank` and `--node_rank`, as torchrun accepts them."""
    underscored = "--" + flag[2:].replace("-", "_")
    return (flag,) if underscored == flag else (flag, underscored)


class _TorchrunOption(click.Option):
    """An option in both spellings, of which the help shows the one with dashes."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        opts, self.opts = self.opts, [opt for opt in self.opts if "_" not in opt]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = opts


def torchrun_option(flag: str, *short: str, **attributes: Any) -> Callable[[Any], Any]:
    """Add an option in both spellings, with torchrun's PET_ variable as its default."""
    variable = "PET_" + flag[2:].replace("-", "_").upper()
    name = flag[2:].replace("-", "_")
    return click.option(*short, *both_spellings(flag), name, envvar=variable, cls=_TorchrunOption, **attributes)


def unused_options(function: Any) -> Any:
    """Add the flags that are accepted and said to be unused."""
    for flag in UNUSED_WITH_VALUE:
        function = torchrun_option(flag, hidden=True)(function)
    for flag in UNUSED_WITHOUT_VALUE:
        function = torchrun_option(flag, is_flag=True, default=None, hidden=True)(function)
    return function


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="Takes torchrun's flags; those that mean nothing here are accepted and said to be unused.",
)
@torchrun_option(
    "--nproc-per-node", metavar="N|auto|gpu|cpu", help="Ranks on this node. [default: 1; in SLURM one a GPU]"
)
@torchrun_option("--nnodes", metavar="N|MIN:MAX", help="Nodes of the job. [default: 1; in SLURM the step's]")
@torchrun_option(
    "--node-rank", type=click.IntRange(min=0), metavar="N", help="Index of this node. [default: order of arrival]"
)
@torchrun_option("--rdzv-endpoint", metavar="HOST[:PORT]", help="Where the nodes meet: the first node.")
@torchrun_option("--rdzv-id", metavar="NAME", help="Name of the job, the same on all nodes.")
@torchrun_option("--master-addr", metavar="HOST", help="As --rdzv-endpoint, without the port.")
@torchrun_option(
    "--master-port", type=click.IntRange(0, 65535), metavar="PORT", help="Preferred port. [default: 29500]"
)
@torchrun_option("--local-addr", metavar="IP", help="This node's address that carries gradients.")
@torchrun_option("--standalone", is_flag=True, help="This machine alone, whatever the environment says.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "nccl", "gloo"]),
    help="[default: auto, nccl where every rank has a GPU]",
)
@torchrun_option("--role", default="default", help="Value of ROLE_NAME.", hidden=True)
@torchrun_option("--module", "-m", is_flag=True, help="SCRIPT is a module, as with python -m.")
@torchrun_option("--no-python", is_flag=True, help="SCRIPT is a program of its own.")
@torchrun_option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where the run directory goes.",
)
@torchrun_option(
    "--redirects",
    "-r",
    default="0",
    metavar="SPEC",
    help="Not on the terminal: 1 out, 2 err, 3 both, or 0:1,2:3 by local rank.",
)
@torchrun_option(
    "--tee", "-t", default="0", metavar="SPEC", help="On the terminal all the same, spelled as --redirects."
)
@torchrun_option(
    "--local-ranks-filter", default="", metavar="0,1,...", help="Show only these local ranks on the terminal."
)
@click.option("--container", metavar="IMAGE", help="Run the workers in this image; the agent stays on the host.")
@click.option(
    "--container-runtime",
    type=click.Choice(["apptainer", "singularity", "enroot"]),
    help="[default: the first of them on PATH]",
)
@click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="[default: $ALLRANKS_CLUSTER, ./cluster.toml]",
)
@click.option("--plan", "show_plan", is_flag=True, help="Print what would run where and why, and start nothing.")
@unused_options
@click.argument("script", type=str)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], **flags: Any) -> int:
    """Start SCRIPT on all ranks and watch them: a drop-in for torchrun.

    \b
    allranks run --nproc-per-node 6 train.py --epochs 3         six ranks here
    srun allranks run train.py                                  in a SLURM job, one agent a node
    allranks run --nnodes 2 --rdzv-endpoint node01:29500 ...    by hand, the same line on both nodes

    The first rank that fails is named, with its traceback; the others are ended. Output of every rank is in
    runs/latest/.
    """
    for flag, reason in (UNUSED_WITH_VALUE | UNUSED_WITHOUT_VALUE).items():
        if flags.pop(flag[2:].replace("-", "_")) is not None:
            click.echo(f"allranks: {flag} is unused: {reason}", err=True)
    request = make_request((script, *arguments), **{name: flags[name] for name in REQUEST_FLAGS})
    plan = plan_here(request, cluster_file=flags["cluster_file"], job=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    refuse_world_of_one(plan)
    from allranks.launch.job import Output, run_job, worker_command

    if flags["show_plan"]:
        from allranks.cli.show import print_plan

        worker_command(request)
        if plan.problem is not None:
            raise plan.problem
        print_plan(plan)
        return 0
    hidden = hidden_streams(
        redirects=flags["redirects"],
        tee=flags["tee"],
        local_ranks_filter=flags["local_ranks_filter"],
        num_workers=plan.num_workers,
    )
    return run_job(plan, Output(log_dir=flags["log_dir"], hidden=hidden), os.environ)


REQUEST_FLAGS = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_id",
    "master_addr",
    "master_port",
    "local_addr",
    "standalone",
    "backend",
    "role",
    "module",
    "no_python",
    "container",
    "container_runtime",
)


def make_request(
    command: tuple[str, ...],
    *,
    nproc_per_node: str | None = None,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    local_addr: str | None = None,
    standalone: bool = False,
    backend: str | None = None,
    role: str = "default",
    module: bool = False,
    no_python: bool = False,
    container: str | None = None,
    container_runtime: str | None = None,
) -> Request:
    """Read the flags, as torchrun spells them, into one request.

    Raises:
        UsageError: a value makes no sense, or two flags contradict each other.
    """
    if module and no_python:
        raise UsageError("-m and --no-python contradict each other: a module is run by Python")
    min_nodes, max_nodes = parse_nnodes(nnodes) if nnodes is not None else (None, None)
    endpoint, port = None, master_port
    if rdzv_endpoint:
        host, named_port = parse_endpoint(rdzv_endpoint)
        if master_addr and master_addr != host:
            raise UsageError(f"--rdzv-endpoint {rdzv_endpoint} and --master-addr {master_addr} contradict each other")
        port = named_port if named_port is not None else master_port
        endpoint = Hint(host, port if port is not None else DEFAULT_PORT, "--rdzv-endpoint")
    elif master_addr:
        endpoint = Hint(master_addr, master_port if master_port is not None else DEFAULT_PORT, "--master-addr")
    return Request(
        command=command,
        is_module=module,
        no_python=no_python,
        container=container,
        container_runtime=container_runtime,
        num_workers=nproc_per_node,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        port=port,
        rdzv_id=None if rdzv_id in (None, "none", "") else rdzv_id,
        standalone=standalone,
        backend=backend,
        role=role,
        local_address=local_addr,
    )


def parse_nnodes(text: str) -> tuple[int, int]:
    """`4` or `2:4` as (min, max)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {text!r}: expected a number from 1, or MIN:MAX, for example 6 or 4:6")
    return low, high


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """`node01`, `node01:29500`, `10.0.0.1:29500` or `[fd00::1]:29500` as host and port."""
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\s\[\]]+))(?::(?P<port>\d{1,5}))?", text)
    if match is None or int(match["port"] or 0) > 65535:
        raise UsageError(f"--rdzv-endpoint {text!r}: expected HOST or HOST:PORT, for example node01:29500")
    return match["v6"] or match["host"], int(match["port"]) if match["port"] else None


def hidden_streams(
    *, redirects: str, tee: str, local_ranks_filter: str, num_workers: int
) -> frozenset[tuple[int, str]]:
    """Return which local rank's `out` and `err` the terminal does not show.

    Raises:
        UsageError: a value cannot be read.
    """
    hidden = _parse_streams("--redirects", redirects, num_workers) - _parse_streams("--tee", tee, num_workers)
    if local_ranks_filter:
        if not re.fullmatch(r"\d+(,\d+)*", local_ranks_filter):
            raise UsageError(f"--local-ranks-filter {local_ranks_filter!r}: expected local ranks, for example 0,1")
        shown = {int(rank) for rank in local_ranks_filter.split(",")}
        hidden |= {(rank, stream) for rank in range(num_workers) if rank not in shown for stream in ("out", "err")}
    return frozenset(hidden)


def _parse_streams(flag: str, text: str, num_workers: int) -> set[tuple[int, str]]:
    if re.fullmatch(r"[0-3]", text):
        by_rank = dict.fromkeys(range(num_workers), int(text))
    elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        by_rank = {int(rank): int(mask) for rank, _, mask in (part.partition(":") for part in text.split(","))}
    else:
        raise UsageError(f"{flag} {text!r}: expected 0, 1, 2 or 3, or local ranks with them, for example 0:3,1:2")
    bits = ((1, "out"), (2, "err"))
    return {(rank, stream) for rank, mask in by_rank.items() for bit, stream in bits if mask & bit}
