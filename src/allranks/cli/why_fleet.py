"""The options of `allranks why` that are about many jobs: `--history` and `--epilog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from allranks.cli.options import Duration
from allranks.model.errors import UsageError

WINDOW = "30d"


def fleet_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for option in reversed(
        (
            click.option(
                "--history",
                is_flag=True,
                help="Name nodes that broke more jobs than chance explains, from run directories and --epilog files.",
            ),
            click.option(
                "--within",
                type=Duration(at_least=1),
                default=WINDOW,
                show_default=True,
                metavar="TIME",
                help="With --history: how long a failure counts.",
            ),
            click.option(
                "--epilog",
                is_flag=True,
                help="For SLURM's epilog: explain the job that has ended, in the background; exits with 0 at once.",
            ),
            click.option(
                "--to",
                type=click.Path(path_type=Path),
                metavar="FILE|DIR",
                help="With --epilog: also append a line to FILE, or to a file for each node in DIR.",
            ),
        )
    ):
        function = option(function)
    return function


def answer_for_fleet(
    targets: Sequence[str], *, history: bool, within: float, epilog: bool, to: Path | None, as_json: bool
) -> int | None:
    """Do what these options ask for, and return the exit code; None: one job is to be explained.

    Raises:
        UsageError: `--to` without `--epilog`, or there is no history.
    """
    if epilog:
        from allranks.cli.why_epilog import start_epilog

        return start_epilog(to)
    if to is not None:
        raise UsageError("why: --to is where --epilog writes; expected --epilog with it")
    if history:
        from allranks.cli.why_history import show_history

        return show_history(targets, window_s=within, as_json=as_json)
    return None
