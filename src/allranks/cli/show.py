"""`allranks env`, `config`, `completion`: print what would be set, and why; start nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.context import load_cluster, plan_here
from allranks.cli.options import cluster_option, json_option
from allranks.cli.request import make_request
from allranks.cli.verb_groups import VerbGroup
from allranks.model.setting import Setting
from allranks.report.machine import settings_to_json
from allranks.report.mask import mask_setting
from allranks.report.text import Style, render_settings

if TYPE_CHECKING:
    from allranks.launch.plan import JobPlan


@click.command("env")
@click.option(
    "--explain", is_flag=True, help="Also print this process's identity, and the source and reason of every value."
)
@click.option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="As for `allranks run`.")
@click.option("--backend", type=click.Choice(["auto", "nccl", "gloo"]), help="As for `allranks run`.")
@click.option("--standalone", is_flag=True, help="As for `allranks run`.")
@cluster_option
@json_option
def show_env(explain: bool, cluster_file: Path | None, as_json: bool, **flags: object) -> None:
    """Print the environment that the first worker of this node would get.

    \b
    allranks env                                 NAME=value lines
    allranks env --explain                       every derived value, with its reason and source
    srun -l allranks env --explain               on every node of a SLURM job
    """
    plan = plan_here(make_request((), **flags), cluster_file=cluster_file, job="this-job")  # type: ignore[arg-type]
    if plan.problem is not None:
        raise plan.problem
    settings = first_worker_settings(plan)
    if as_json:
        click.echo(settings_to_json([*plan.settings, *torch_settings(), *settings] if explain else settings))
    elif explain:
        print_plan(plan)
    else:
        click.echo("\n".join(f"{setting.name}={setting.value}" for setting in map(mask_setting, settings)))


@click.group("config", cls=VerbGroup)
def config() -> None:
    """Print the configuration from cluster.toml."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Also print the source of each value: file and line, or default.")
@cluster_option
@json_option
def show_config(origin: bool, cluster_file: Path | None, as_json: bool) -> None:
    """Print every key of the cluster.toml in use, including defaults.

    \b
    allranks config show --origin
    """
    settings = load_cluster(cluster_file).settings()
    if as_json:
        click.echo(settings_to_json(settings))
    elif origin:
        click.echo(render_settings(settings, Style.of(sys.stdout)))
    else:
        click.echo("\n".join(f"{setting.name} = {setting.value}" for setting in map(mask_setting, settings)))


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(allranks completion bash)"           in ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    from allranks.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "allranks", "_ALLRANKS_COMPLETE").source())


def first_worker_settings(plan: JobPlan) -> list[Setting]:
    """Return the environment of this node's first worker, as far as one node can know it."""
    from allranks.launch.lead.network import foresee_network, read_bench
    from allranks.launch.worker_environment import node_settings, provisional_group, rank_settings

    interface = plan.data_path.interface if plan.data_path else None
    network = foresee_network(read_bench(Path("runs")), plan.node_names, plan.facts.host, interface)
    group = provisional_group(plan, network=network)
    settings = node_settings(plan, group, env=os.environ, interface=interface)
    error_file = Path("runs", plan.job, "attempt_0", plan.facts.host, "rank_N.error.json")
    return rank_settings(group, 0, error_file=error_file) + settings


def _checkpoint_setting(plan: JobPlan) -> Setting:
    """Return how often `allranks.session()` saves."""
    from allranks.state.cadence import choose_interval

    if (steps := plan.request.checkpoint_every) is not None:
        return Setting(
            "checkpoint_every", f"{steps} steps", reason="given on the command line", source="--checkpoint-every"
        )
    interval = choose_interval(stall_s=None, write_s=None, num_nodes=plan.num_nodes)
    return Setting("checkpoint_every", f"{interval.seconds:.0f} s", reason=interval.reason, source="state.cadence")


def torch_settings() -> list[Setting]:
    """Return the version of torch that is installed here, and what it lacks; nothing without torch."""
    from allranks.host.software import read_packages
    from allranks.launch.worker_environment import describe_torch

    version = read_packages(("torch",)).get("torch")
    return describe_torch(version) if version else []


def print_plan(plan: JobPlan) -> None:
    """Print this process's identity, the plan of the job, and the environment of this node's first worker."""
    style = Style.of(sys.stdout)
    click.echo(style.paint("this process and this job", "1"))
    click.echo(render_settings((*plan.settings, *torch_settings(), _checkpoint_setting(plan)), style))
    for note in plan.world.notes:
        click.echo(f"note: {note}")
    click.echo()
    click.echo(style.paint(f"environment of this node's first worker (of {plan.num_workers})", "1"))
    click.echo(render_settings(first_worker_settings(plan), style))
