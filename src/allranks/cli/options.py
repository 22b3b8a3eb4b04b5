"""Options that several verbs have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from allranks.model.errors import UsageError
from allranks.report.text import say

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A duration: seconds, or a number with a unit. Its value is in seconds.

    >>> Duration().convert("5m", None, None), Duration().convert("1.5", None, None)
    (300.0, 1.5)
    """

    name = "duration"

    def __init__(self, *, at_least: float = 0.0, at_most: float = float("inf")) -> None:
        self._at_least, self._at_most = at_least, at_most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", str(value).strip())
        if match is None:
            self.fail(
                f"{value!r}: expected seconds, or a number with s, m, h or d, for example 90, 90s or 5m", param, ctx
            )
        seconds = float(match[1]) * _SECONDS[match[2]]
        if not self._at_least <= seconds <= self._at_most:
            most = "" if self._at_most == float("inf") else f" and at most {self._at_most:g} s"
            self.fail(f"{value!r}: expected at least {self._at_least:g} s{most}", param, ctx)
        return seconds


class OutputFile(click.Path):
    """A file to write at the end of long work: a path that cannot be one is refused before the work begins."""

    def __init__(self, *, example: str, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, allow_dash=allow_dash)
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        path = Path(value)
        if self.allow_dash and str(path) == "-":
            return path
        if os.path.isdir(path):  # noqa: PTH112  (never raises)
            self.fail(f"{path} is a directory; expected a file, for example {path / self._example}", param, ctx)
        if path.parent != Path() and not os.path.isdir(path.parent):  # noqa: PTH112
            self.fail(f"{path}: no such directory: {path.parent}", param, ctx)
        return path


class AliasedOption(click.Option):
    """An option with further spellings, `aliases`, that the help does not show."""

    def __init__(self, *args: Any, aliases: tuple[str, ...] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.opts = [*self.opts, *aliases]
        self.aliases = aliases

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's line of the help, without the aliases."""
        opts, self.opts = self.opts, [opt for opt in self.opts if opt not in self.aliases]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = opts


_LAUNCH_ONLY = frozenset((
    "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "rdzv_conf", "standalone",
    "max_restarts", "restart_on_error", "standby", "capacity_timeout", "hang_timeout", "no_python", "redirects", "tee",
    "local_ranks_filter", "container", "container_runtime", "checkpoint_every", "cluster_file", "nodes",
    "ntasks_per_node", "gpus_per_node", "cpus_per_task", "partition", "nodelist", "min_np", "max_np", "slots_per_host",
    "elastic_timeout_s",
))  # fmt: skip
"""Options that a script hardly has of its own; `--backend`, `--log-dir` and `--time` it may well have."""


def note_misplaced(arguments: Sequence[str]) -> None:
    """Say of options of this command that stand behind the script that they go to the script.

    An option that is given before the script, too, is meant for both.
    """
    if os.environ.get("SLURM_PROCID", "0") != "0":  # the first task of a step says it
        return
    ctx = click.get_current_context()
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if param.name not in _LAUNCH_ONLY or given:
            continue
        flags = {flag.replace("_", "-") for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")}
        words = (word.partition("=")[0] for word in arguments)
        if found := next((word for word in words if word.replace("_", "-") in flags), None):
            say(f"{found} stands behind the script, which gets it; for {ctx.command_path}, write it before the script")


def timeout_option(
    flag: str,
    name: str,
    *,
    waits_for: str,
    default: float | None = None,
    shown_default: str = "",
    at_least: float = 0.0,
    at_most: float = float("inf"),
    aliases: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Add an option that is a timeout; all timeouts take the same values and have the same help.

    Args:
        waits_for: ends the sentence "How long to wait ...".
        shown_default: where the default is no number of seconds.
    """
    default_text = shown_default or (f"{default:g}s" if default is not None else "")
    return click.option(
        flag,
        name,
        cls=AliasedOption,
        aliases=aliases,
        type=Duration(at_least=at_least, at_most=at_most),
        default=default,
        metavar="DURATION",
        help=f"How long to wait {waits_for}: 90, 90s, 5m or 1h. [default: {default_text}]",
    )


cluster_option = click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Path of cluster.toml. [default: $ALLRANKS_CLUSTER, ./cluster.toml]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
name_option = click.option(
    "--name", default="lab", show_default=True, help="Name of the lab; several can run at the same time."
)
log_dir_option = click.option(
    "--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="As for `allranks run`."
)


def read_pids(verb: str, words: Sequence[str]) -> tuple[int, ...]:
    """Return process ids, and say which of them do not exist.

    Raises:
        UsageError: one of the words is none, or none of them is a process of this machine.
    """
    pids = tuple(int(word) for word in words if word.isascii() and word.isdigit())
    if not pids or len(pids) < len(words):
        given = " ".join(["--pid", *words])
        raise UsageError(f"{verb} {given}: expected process ids, for example --pid 4711 4712")
    gone = [pid for pid in pids if not Path(f"/proc/{pid}").exists()]
    words_of_gone = f"no such process on this machine: {', '.join(map(str, gone))}"
    if len(gone) == len(pids):
        raise UsageError(f"{verb}: {words_of_gone}")
    if gone:
        say(words_of_gone)
    return pids
