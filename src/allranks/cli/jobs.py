"""`allranks render`, `submit`: SLURM jobs, from the login node."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.context import load_cluster
from allranks.cli.options import json_option, note_misplaced
from allranks.cli.request import REQUEST_FLAGS, make_request, parse_nnodes
from allranks.cli.run import run as run_command
from allranks.config.file import find_cluster_file
from allranks.host.programs import OWN_COMMAND
from allranks.launch.batch.batch_script import (
    SbatchOptions,
    name_secrets,
    parse_env,
    refuse_secret_values,
    render_sbatch,
    submission_env,
)
from allranks.launch.plan import no_script
from allranks.model.errors import AllranksError, Exit, UsageError, exit_for_signal
from allranks.report.rundir import LATEST, as_file_name
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.launch.batch.submit import Submission

# Flags of `run` that are copied into the script.
RUN_FLAGS = (
    "nproc_per_node", "nnodes", "backend", "master_port", "module", "no_python", "redirects", "tee",
    "local_ranks_filter", "status", "log_dir", "cluster_file", "max_restarts", "restart_on_error", "standby",
    "capacity_timeout", "hang_timeout", "shutdown_timeout", "checkpoint_every", "checkpoint_dir", "container",
    "container_runtime", "ignore", "compress", "bucket_mb", "metrics_dir",
)  # fmt: skip
MAX_RESTARTS = 3
"""Default of a submitted job, since nobody watches it; torchrun's default is 0."""
_HELP = {
    "nproc_per_node": "Number of ranks per node. [default: one per GPU that the job gets on a node, else 1]",
    "nnodes": "Number of nodes; MIN:MAX lets the job run with fewer than MAX. [default: as --nodes]",
}
"""What flags of `run` do in a job that is submitted, where that differs."""
_BOTH_SPELLINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}
_SCRIPT = {"allow_interspersed_args": False, **_BOTH_SPELLINGS}


def _run_flags(command: click.Command) -> click.Command:
    """Add the flags of `run` without their short forms: in sbatch, `-t` is the time limit."""
    for param in _taken_from_run():
        mine = copy.copy(param)
        mine.opts = [flag for flag in param.opts if flag.startswith("--") or flag == "-m"]
        if isinstance(mine, click.Option) and mine.name in _HELP:
            mine.help = _HELP[mine.name]
        if isinstance(mine, click.Option) and mine.name == "max_restarts":
            mine.default, mine.help = (
                MAX_RESTARTS,
                (mine.help or "").replace("[default: 0]", f"[default: {MAX_RESTARTS}]"),
            )
        command.params.append(mine)
    return command


def _taken_from_run() -> list[click.Parameter]:
    """Return the options of `run` that RUN_FLAGS names."""
    return [param for param in run_command.params if param.name in RUN_FLAGS and not getattr(param, "hidden", False)]


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add sbatch's options under their own names, and the options that change the script."""
    more = [
        click.option(
            "--sbatch-option", "more", multiple=True, metavar="--NAME=VALUE", help="Pass any other option to sbatch."
        ),
        click.option(
            "--env",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Set a variable in the job; for secrets give the NAME only.",
        ),
        click.option(
            "--exclude-suspects",
            is_flag=True,
            help="Exclude nodes that broke more jobs than chance explains; `allranks why --history` names them.",
        ),
        click.option(
            "--template",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Jinja template that overrides blocks of the script.",
        ),
        click.option(
            "--allranks-command",
            metavar="COMMAND",
            help="Command that starts allranks on the nodes. [default: this Python, -P -m allranks]",
        ),
    ]
    own = []
    for field in fields(SbatchOptions):
        flag = "--" + field.name.replace("_", "-")
        kind: dict[str, Any] = {"type": int if isinstance(field.default, int) or field.name == "cpus_per_task" else str}
        if field.name == "requeue":
            flag, kind = "--requeue/--no-requeue", {}
        elif field.default is False:
            kind = {"is_flag": True}
        text = field.metadata["help"]
        names = filter(None, (field.metadata["short"], flag, field.name))
        own.append(click.option(*names, default=field.default, help=text, metavar=field.metadata["metavar"], **kind))
    for option in reversed([*own, *more]):
        function = option(function)
    return function


@_run_flags
@click.command("render", context_settings=_SCRIPT)
@_job_options
@click.argument("script", shell_complete=complete.paths)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.paths)
def render(**flags: Any) -> None:
    """Print the batch script that `submit` would pass to SLURM; it also works with plain sbatch.

    \b
    allranks render --nodes 6 --gpus-per-node 1 train.py --epochs 3 > job.sh
    allranks render --nodes 2 --env NCCL_DEBUG=INFO --backend nccl train.py
    allranks render --nodes 2 --template mine.j2 train.py      {% extends "allranks/job.sh.j2" %}, your own block
    """
    click.echo(_render(flags)[0], nl=False)


@_run_flags
@click.command("submit", context_settings=_SCRIPT)
@_job_options
@click.option("--dry-run", is_flag=True, help="Print the script and let SLURM test it; submit nothing.")
@click.option("-W", "--wait", "is_waiting", is_flag=True, help="Wait for the job to end, and exit with its exit code.")
@click.option("-f", "--follow", "is_followed", is_flag=True, help="As --wait, and print the job's output meanwhile.")
@json_option
@click.argument("script", shell_complete=complete.paths)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.paths)
def submit(dry_run: bool, is_waiting: bool, is_followed: bool, as_json: bool, **flags: Any) -> int:
    """Render the batch script, check it, submit it, and print how to follow the job.

    \b
    allranks submit --nodes 6 --gpus-per-node 1 train.py --epochs 3
    allranks submit --nodes 2 --nproc-per-node 4 --cpus-per-task 32 --time 30 train.py
    allranks submit --nodes 2 --env HF_TOKEN train.py          passes the token by name; its value is stored nowhere
    allranks submit --array 0-2 --dry-run train.py
    allranks submit -N 2 -t 30 --wait train.py && ./next       Ctrl-C ends only the wait: the job continues
    allranks submit -N 2 -t 30 --follow train.py               prints the output until the job ends
    """
    from allranks.host.slurm import JOB_ENVIRONMENT
    from allranks.launch.batch.submit import check_script
    from allranks.launch.batch.submit import submit as submit_job

    if is_followed and as_json:
        raise UsageError("submit: --follow prints the job's output, and --json prints no other; expected one of them")
    if dry_run and as_json:
        raise UsageError("submit: --dry-run prints the script, and --json what was submitted; expected one of them")
    text, options, names = _render(flags)
    _check_there(flags, options)
    said = [field.name for field in fields(SbatchOptions) if _is_said(field.name)]
    env, withheld = submission_env(os.environ, names, said=said)
    check_script(text)
    if dry_run:
        click.echo(text, nl=False)
        say(f"submit would run: sbatch --parsable {JOB_ENVIRONMENT} < this script")
        say(f"the job's environment: {' '.join(sorted(env))}")
        _note_withheld(withheld)
        _try(text, options, env)
        _note_limits(options, env)
        return Exit.OK
    is_first = not os.path.lexists(Path(options.chdir or ".", flags["log_dir"], LATEST))
    submission = submit_job(text, options, env=env, log_dir=flags["log_dir"])
    if as_json:
        from allranks.report.machine import to_json

        click.echo(to_json(submission, indent=None))
    else:
        _tell(submission)
        _note_withheld(withheld)
        if submission.waits_for and (not (is_waiting or is_followed) or submission.cannot_start):
            say(
                f"job {submission.job} {'cannot start' if submission.cannot_start else 'waits'}: {submission.waits_for}"
            )
        if submission.set_aside:
            say(f"an older job also had the id {submission.job}; its files are now in {submission.set_aside}")
        if submission.problem:
            say(submission.problem)
        _note_limits(options, env, is_site_known=not is_first)
    if submission.cannot_start:
        return Exit.SETUP
    if not (is_waiting or is_followed):
        return Exit.OK
    log_dir = Path(options.chdir or ".", flags["log_dir"])
    return _wait(submission.job, log_dir, as_json=as_json, is_followed=is_followed)


def _tell(submission: Submission) -> None:
    """Print the job's id, and the commands to follow it."""
    job, trial = submission.job, submission.trial
    log_dir = "" if submission.log_dir == "runs" else f" --log-dir {shlex.quote(submission.log_dir)}"
    files = [file if "*" in file else shlex.quote(file) for file in (submission.output, submission.error) if file]
    click.echo(f"job {job} submitted" + (f", expected to start {trial.start} on {trial.nodes}" if trial.start else ""))
    click.echo(f"  allranks status{log_dir} {job}")
    click.echo(f"  allranks logs{log_dir} -f {job}")
    click.echo(f"  squeue -j {job}")
    click.echo(f"  tail -F {' '.join(files)}")
    click.echo(f"  allranks cancel {job}")


def _wait(job: str, log_dir: Path, *, as_json: bool, is_followed: bool = False) -> int:
    """Wait for a job to end and return its exit code; 130 if the user presses Ctrl-C."""
    from allranks.cli.follow import show_reports
    from allranks.launch.batch.follow import wait_for_end
    from allranks.launch.batch.logs import WantedLines, show_logs

    try:
        if is_followed:
            with contextlib.suppress(UsageError):  # it has printed nothing, and its state tells why
                show_logs(job, log_dir=log_dir, wanted=WantedLines(is_followed=True))
        reports, exit_code = wait_for_end(job, log_dir=log_dir)
    except KeyboardInterrupt:
        say(f"stopped waiting; job {job} continues (allranks status {job}; allranks cancel {job} ends it)")
        return exit_for_signal(signal.SIGINT)
    if not as_json:
        show_reports(reports)
    return exit_code


def _render(flags: dict[str, Any]) -> tuple[str, SbatchOptions, tuple[str, ...]]:
    """Return the script's text, the options of sbatch in it, and the variables to pass by name."""
    slurm = load_cluster(flags["cluster_file"]).cluster.slurm
    options = SbatchOptions(**{field.name: flags[field.name] for field in fields(SbatchOptions)})
    options = replace(
        options,
        nodes=nodes_of(options.nodes, flags["nnodes"]),
        job_name=options.job_name or as_file_name(Path(os.path.abspath(flags["script"])).stem),  # noqa: PTH100
        partition=slurm.partition if options.partition is None else options.partition,
        time=slurm.time if options.time is None else options.time,
        output="slurm-%A_%a.out" if options.array and not _is_said("output") else options.output,
    )
    if flags["exclude_suspects"]:
        from allranks.cli.exclusion import exclude_suspects

        options = exclude_suspects(options, slurm, log_dir=Path(options.chdir or ".", flags["log_dir"]))
    note_misplaced(flags["arguments"])
    run_flags = {name: flags[name] for name in REQUEST_FLAGS if name in flags}
    make_request((flags["script"], *flags["arguments"]), **run_flags)  # reject here what the nodes would reject
    values, names = parse_env(flags["env"], os.environ)
    try:
        agent = shlex.split(flags["allranks_command"] or "") or [*OWN_COMMAND]
    except ValueError as exc:
        raise UsageError(f"--allranks-command: {str(exc).lower()}") from exc
    end = ["--"] if flags["script"].startswith("-") else []
    command = [*agent, "run", *_flags_for_run(flags), *end, flags["script"], *flags["arguments"]]
    of_sbatch = [str(getattr(options, field.name)) for field in fields(options)]
    refuse_secret_values([*command, *values.values(), *flags["more"], *of_sbatch], os.environ)
    if found := name_secrets([flags["script"], *flags["arguments"]]):
        say(
            f"note: who can read the script can read the value of {', '.join(found)}; let the program read a variable, "
            "and pass it with --env NAME"
        )
    given = {"env": values, "log_dir": flags["log_dir"], "template": flags["template"]}
    text = render_sbatch(options, command, more=flags["more"], **given)
    return text, options, names


def nodes_of(nodes: str | None, nnodes: str | None) -> str | None:
    """Return the value of `--nodes` for the run's `--nnodes`: SLURM must start as many agents as the run accepts.

    >>> nodes_of(None, "2:4"), nodes_of("3", "2:4")
    ('2-4', '3')

    Raises:
        UsageError: the two contradict each other.
    """
    if nnodes is None:
        return nodes
    low, high = parse_nnodes(nnodes)
    if nodes is None:
        return f"{low}-{high}" if low < high else str(low)
    asked = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", nodes)  # sbatch judges other notations itself
    if asked and not low <= int(asked[1]) <= int(asked[2] or asked[1]) <= high:
        raise UsageError(f"--nodes {nodes} and --nnodes {nnodes} contradict each other; give one of them")
    return nodes


def _flags_for_run(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    if flags["chdir"]:  # the agents would look for cluster.toml there
        found = find_cluster_file(flags["cluster_file"], os.environ, Path())
        words += ["--cluster", str(found.resolve())] if found else []
    has_cluster = bool(words)
    for param in _taken_from_run():
        if param.name is None or (has_cluster and param.name == "cluster_file"):
            continue
        if param.name == "max_restarts" or _is_said(param.name):
            words += words_of(param, flags[param.name])
    return words


def words_of(param: click.Parameter, value: Any) -> list[str]:
    """Return the arguments that give an option this value; none if the option has to be left out for it."""
    flag, no_flag = (
        next((flag for flag in names if flag.startswith("--")), None) for names in (param.opts, param.secondary_opts)
    )
    assert flag is not None
    if isinstance(value, bool):
        said = flag if value else no_flag
        return [said] if said else []
    each_value = value if param.multiple or param.nargs != 1 else [value]
    return [word for one in each_value for word in (flag, str(one))]


def _is_said(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def _check_there(flags: dict[str, Any], options: SbatchOptions) -> None:
    path = Path(options.chdir or ".", flags["script"])
    if not flags["module"] and not flags["no_python"] and not path.exists():
        raise no_script(str(path))


def _note_withheld(names: list[str]) -> None:
    if names:
        say(f"not passed to the job: {', '.join(names)}; to pass one, add --env NAME")


def _note_limits(options: SbatchOptions, env: dict[str, str], *, is_site_known: bool = False) -> None:
    """Print how the options limit requeue and saving, and how this site does, unless it is known or does not answer."""
    from allranks.host.slurm_site import Site, read_partition, read_site
    from allranks.launch.batch.submit import limits

    site, rules = Site(), None
    if not is_site_known:
        with contextlib.suppress(AllranksError):
            rules = read_partition(options.partition.partition(",")[0], env=env) if options.partition else None
            site = read_site(env=env)
    for line in limits(site, rules, options):
        say(f"note: {line}")


def _try(text: str, options: SbatchOptions, env: dict[str, str]) -> None:
    from allranks.host.slurm import try_script
    from allranks.launch.batch.submit import refuse_too_large

    if shutil.which("sbatch") is None:
        say("SLURM did not check the script: this machine has no sbatch")
        return
    trial = try_script(text, env=env)
    if trial.not_now:
        refuse_too_large(options)
    when = (
        f"would start it {trial.start} on {trial.nodes}" if trial.start else f"would not start it now: {trial.not_now}"
    )
    say(f"SLURM {when}")
