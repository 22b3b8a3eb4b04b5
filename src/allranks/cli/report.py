"""`allranks report`: one HTML page about a run, to keep or to send to a colleague."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli import complete
from allranks.cli.options import json_option, log_dir_option
from allranks.model.errors import Exit, SetupError, UsageError
from allranks.report.rundir import LATEST
from allranks.report.text import printable

if TYPE_CHECKING:
    from allranks.report.page_data import Page


@click.command("report")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="HTML file to write; - for standard output. [default: report.html in the run directory]",
)
@log_dir_option
@json_option
@click.argument("target", default=LATEST, metavar="[JOB | RUN]", shell_complete=complete.jobs)
def report(target: str, output: Path | None, log_dir: Path, as_json: bool) -> int:
    """Write a report of a run as one HTML file: verdict, where the time went, what each rank did, links, logs.

    \b
    allranks report                              the newest run in runs/, to its directory
    allranks report 4711 -o report.html
    allranks report --json 4711                  the same as data

    `allranks run` writes it at the end of each run. The file needs no network and shows no known secret.
    """
    from allranks.report.page_data import read_page
    from allranks.report.runs import find_run

    run = find_run(target, log_dir)
    if run is None:
        raise UsageError(f"report: {target}: there is no such run in {log_dir}; allranks list prints their ids")
    page = read_page(run.path)
    if as_json:
        from allranks.report.machine import to_json

        click.echo(to_json(page))
        return Exit.OK
    from allranks.report.page import FILE

    write_page(page, output or run.path / FILE, is_named=output is not None)
    return Exit.OK


def write_page(page: Page, output: Path, *, is_named: bool = True) -> None:
    """Write a report, and say where it is; `is_named`: the user has chosen that.

    Raises:
        SetupError: jinja2 is missing.
        UsageError: the file cannot be written.
    """
    from allranks.files.folder import Folder, write_named
    from allranks.report.page import render

    try:
        text = render(page)
    except ImportError as exc:
        raise SetupError(f"a report needs jinja2: {sys.executable} -m pip install jinja2 ({exc})") from exc
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    try:
        data = text.encode("utf-8", "replace")
        if is_named:
            write_named(output, data)
        else:  # what others have left there is replaced
            Folder.root(output.parent).write_whole(output.name, data)
    except OSError as exc:
        raise UsageError(f"{output}: {(exc.strerror or str(exc)).lower()}; name another file") from exc
    click.echo(printable(str(output)))
