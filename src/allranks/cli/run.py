"""`allranks run`: torchrun's flags, with dashes or underscores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from allranks.cli import complete
from allranks.cli.context import plan_here
from allranks.cli.options import AliasedOption, Duration, cluster_option, note_misplaced, timeout_option
from allranks.cli.request import FORMATS, REQUEST_FLAGS, hidden_streams, make_request
from allranks.launch.lead.course import SHUTDOWN_S
from allranks.launch.plan import refuse_world_of_one
from allranks.model.errors import UsageError

# Flags of torchrun that have no effect here, with the reason. These take one value; the next ones take none.
UNUSED_WITH_VALUE = {
    "--rdzv-backend": "the leader's roll call replaces the rendezvous",
    "--rdzv-conf": "cluster.toml [guard] sets the timeouts",
    "--monitor-interval": "workers are watched without polling",
    "--start-method": "workers are started as new processes",
    "--event-log-handler": "events are in events.jsonl of the run directory",
    "--duplicate-stdout-filters": "every rank has its own output files",
    "--duplicate-stderr-filters": "every rank has its own output files",
    "--log-line-prefix-template": "lines begin with node and rank",
    "--logs-specs": "the layout of the run directory is fixed",
    "--numa-binding": "workers are not bound to NUMA nodes",
    "--signals-to-handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT end the job; ranks get those that they handle",
}
UNUSED_WITHOUT_VALUE = {
    "--run-path": "the script is always started directly",
    "--virtual-local-rank": "LOCAL_RANK is always the real local rank",
}


def both_spellings(flag: str) -> tuple[str, ...]:
    """`--node-rank` and `--node_rank`, as torchrun accepts them."""
    underscored = "--" + flag[2:].replace("-", "_")
    return (flag,) if underscored == flag else (flag, underscored)


class _TorchrunOption(click.Option):
    """An option in both spellings; the help shows the one with dashes."""

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
    """Add the flags that are accepted and reported as unused."""
    for flag in UNUSED_WITH_VALUE:
        function = torchrun_option(flag, hidden=True)(function)
    for flag in UNUSED_WITHOUT_VALUE:
        function = torchrun_option(flag, is_flag=True, default=None, hidden=True)(function)
    return function


def _print_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        from allranks.cli.show import completion

        ctx.invoke(completion, shell=shell)
        ctx.exit()


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="Accepts all flags of torchrun; those without an effect are reported.",
)
@torchrun_option(
    "--nproc-per-node",
    metavar="N|auto|gpu|cpu",
    help="Number of ranks on this node. [default: 1; under a scheduler one per GPU]",
)
@torchrun_option("--nnodes", metavar="N|MIN:MAX", help="Number of nodes. [default: 1; under a scheduler its own]")
@torchrun_option(
    "--node-rank", type=click.IntRange(min=0), metavar="N", help="Index of this node. [default: order of arrival]"
)
@torchrun_option("--rdzv-endpoint", metavar="HOST[:PORT]", help="Address of the first node, where the nodes meet.")
@torchrun_option("--rdzv-id", metavar="NAME", help="Name of the job; it must be the same on all nodes.")
@torchrun_option("--master-addr", metavar="HOST", help="Like --rdzv-endpoint, without the port.")
@torchrun_option(
    "--master-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port of the leader; the next free one if it is in use. [default: 29500]",
)
@torchrun_option("--local-addr", metavar="IP", help="This node's address on the data network.")
@torchrun_option("--standalone", is_flag=True, help="Run on this machine only, whatever the environment says.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "nccl", "gloo"]),
    help="Backend of the process group. [default: auto: nccl if every rank has a GPU, else gloo]",
)
@torchrun_option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Maximum number of restarts after faults that a restart can cure. [default: 0]",
)
@click.option(
    "--restart-on-error",
    is_flag=True,
    help="With --max-restarts: also restart after errors of the script, as torchrun does.",
)
@click.option(
    "--standby/--no-standby",
    "standby",
    default=True,
    help="Import torch once per node, in a standby process that forks the workers. [default: if a node has several "
    "ranks, or restarts are allowed]",
)
@timeout_option(
    "--capacity-timeout",
    "capacity_timeout",
    waits_for="for more nodes while the job has fewer than MIN, or for room on a full disk before a restart",
    default=600.0,
)
@timeout_option(
    "--hang-timeout",
    "hang_timeout",
    waits_for="for a hanging rank before all stacks are saved and the workers are ended",
    shown_default="cluster.toml, else 600s",
    at_least=0.001,
)
@torchrun_option(
    "--shutdown-timeout",
    type=Duration(),
    default=SHUTDOWN_S,
    metavar="DURATION",
    help="How long to wait for ranks that handle SIGTERM, or save, before SIGKILL; SLURM may leave less, and other "
    "ranks have 3 s: 90, 90s, 5m or 1h. [default: 30s]",
)
@click.option(
    "--checkpoint-dir",
    metavar="DIR",
    help="Directory of checkpoints, on a shared file system. [default: checkpoints/ in the run directory]",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Steps between checkpoints. [default: computed from the cost of a checkpoint and the failure rate]",
)
@click.option(
    "--compress",
    type=click.Choice(FORMATS),
    envvar="ALLRANKS_COMPRESS",
    help="Format in which DistributedDataParallel sends gradients; changes the sums slightly. [default: unchanged]",
)
@click.option(
    "--bucket-mb",
    metavar="N|auto",
    envvar="ALLRANKS_BUCKET_MB",
    help="Bucket size of DistributedDataParallel in MiB, if the script sets none; auto: chosen by the network's speed. "
    "[default: torch's 25]",
)
@torchrun_option("--role", default="default", help="Value of ROLE_NAME.", hidden=True)
@torchrun_option("--module", "-m", is_flag=True, help="SCRIPT is a module, as with python -m.")
@torchrun_option("--no-python", is_flag=True, help="SCRIPT is an executable, not a Python file.")
@torchrun_option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Parent of the run directory.",
)
@click.option(
    "--metrics-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of node_exporter's textfile collector on the first node; the job's metrics go there every 10 s. "
    "[default: cluster.toml, else none]",
)
@torchrun_option(
    "--redirects",
    "-r",
    default="0",
    metavar="SPEC",
    help="Hide from the terminal: 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:1,2:3.",
)
@torchrun_option(
    "--tee", "-t", default="0", metavar="SPEC", help="Show on the terminal in spite of --redirects; same format."
)
@torchrun_option(
    "--local-ranks-filter", default="", metavar="0,1,...", help="Show only these local ranks on the terminal."
)
@click.option(
    "--status",
    type=click.Choice(["row", "plain", "off"]),
    help="Show what the job does: row, the last row of the terminal; plain, a line at most once a minute; off. "
    "[default: row on a terminal, else plain]",
)
@click.option("--container", metavar="IMAGE", help="Run the workers in this image; the agent stays on the host.")
@click.option(
    "--container-runtime",
    type=click.Choice(["apptainer", "singularity", "enroot"]),
    help="Container runtime. [default: the first of these on PATH]",
)
@cluster_option
@click.option(
    "--ignore",
    multiple=True,
    metavar="ID",
    help="Skip this check of the roll call: an id (AR213), a name, or a prefix (AR2).",
)
@click.option(
    "--dry-run",
    "show_plan",
    cls=AliasedOption,
    aliases=("--plan",),
    is_flag=True,
    help="Print what would run where, and why; start nothing.",
)
@click.option(  # as torchrun 2.15 has it; in the help it is a verb, `allranks completion`
    "--print-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    hidden=True,
    callback=_print_completion,
)
@unused_options
@click.argument("script", type=str, shell_complete=complete.paths)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.paths)
def run(script: str, arguments: tuple[str, ...], **flags: Any) -> int:
    """Start SCRIPT on all ranks and watch them; a drop-in replacement for torchrun.

    \b
    allranks run --nproc-per-node 6 train.py --epochs 3         six ranks on this machine
    srun allranks run train.py                                  in a SLURM job, one agent per node
    allranks run --nnodes 2 --rdzv-endpoint node01:29500 ...    without a scheduler: the same line on both nodes

    The report names the first rank that failed, with its traceback; the others are stopped. Output of every rank is in
    runs/latest/.
    """
    for flag, reason in (UNUSED_WITH_VALUE | UNUSED_WITHOUT_VALUE).items():
        if flags.pop(flag[2:].replace("-", "_")) is not None:
            click.echo(f"allranks: {flag} has no effect: {reason}", err=True)
    note_misplaced(arguments)
    if os.environ.get("ALLRANKS_HOOK") == "0" and (flags["compress"] or flags["bucket_mb"]):
        raise UsageError("--compress and --bucket-mb need the hook in the workers; unset ALLRANKS_HOOK")
    request = make_request((script, *arguments), **{name: flags[name] for name in REQUEST_FLAGS})
    plan = plan_here(request, cluster_file=flags["cluster_file"], job=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    refuse_world_of_one(plan)
    from allranks.launch.job import run_job, worker_command

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
    return run_job(plan, os.environ, log_dir=flags["log_dir"], hidden=hidden, shows=flags["status"])
