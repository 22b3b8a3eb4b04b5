"""`allranks explain`: what a cause means, why it breaks the job, how to fix it; without an argument, all causes."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from allranks.cli import complete
from allranks.model.fix import ANYBODY, Reader, SchedulerKind, Vendor
from allranks.report.text import Style

if TYPE_CHECKING:
    from allranks.causes.cause import Cause

MAX_WIDTH = 100
"""Longer lines are hard to read, however wide the terminal is."""


@click.command("explain")
@click.argument("cause", required=False, metavar="[ID|NAME|ALIAS]", shell_complete=complete.causes)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(cause: str | None, as_json: bool) -> None:
    """Explain a cause: what it means, why it breaks the job, how to fix it. Without a cause, list all.

    \b
    allranks explain                             all causes, one line each
    allranks explain AR101                       one cause, also by name: fabric-manager
    """
    from allranks.causes.book import all_causes, find_cause

    style = Style.of(sys.stdout)
    if cause is None:
        if as_json:
            click.echo(json.dumps([_to_dict(known) for known in all_causes()], indent=2))
        else:
            click.echo(_plain(render_list(style), style))
        return
    found = find_cause(cause)
    click.echo(json.dumps(_to_dict(found), indent=2) if as_json else _plain(render_cause(found, style), style))


def render_list(style: Style) -> str:
    """Return all causes by family, one line each."""
    from allranks.causes.book import FAMILIES, all_causes

    width = max((len(cause.label) for cause in all_causes()), default=0)
    blocks = []
    for digit, family in FAMILIES.items():
        rows = [
            f"  {cause.label:<{width}}  {cause.title.removesuffix('.')}"
            + (f" ({', '.join(cause.aliases)})" if cause.aliases else "")
            for cause in all_causes()
            if cause.id[2] == digit
        ]
        if rows:
            blocks.append("\n".join([style.paint(family, "1"), *rows]))
    return "\n\n".join([*blocks, "allranks explain ID prints one of them in full."])


def render_cause(cause: Cause, style: Style) -> str:
    """Return one cause as readable text, no wider than the terminal."""
    from allranks.causes.probes import ways_to_find

    width = min(style.width, MAX_WIDTH)
    blocks = [style.paint(cause.label, "1") + "\n" + _fill(cause.title, width, "")]
    for head, text in cause.sections.items():
        blocks.append(f"{style.paint(head, '1')}\n{_flow(text, width)}")
    if not cause.is_outcome:
        ways = [f"{way}: {what}" if what else way for way, what in ways_to_find(cause).items()]
        ways = ways or ["allranks itself, while it starts or runs the job"]
        if cause.never_on_hardware:
            ways.append("The probe was tested with recorded output only, not on real hardware.")
        lines = [_fill(way, width, "  ", hanging="    ") for way in ways]
        blocks.append(f"{style.paint('How it is found', '1')}\n" + "\n".join(lines))
    if cause.aliases:
        blocks.append(f"Also called {', '.join(cause.aliases)}.")
    return "\n\n".join(blocks)


def _flow(markdown: str, width: int) -> str:
    """Markdown of a section, indented by two: paragraphs and list items are filled, code stays as it is."""
    blocks: list[str] = []
    paragraph: list[str] = []
    is_fenced = False

    def close() -> None:
        if paragraph:
            text = " ".join(paragraph)
            is_item = bool(re.match(r"[-*] |[0-9]+\. ", text))
            blocks.append(_fill(text, width, "  ", hanging="    " if is_item else "  "))
            paragraph.clear()

    for line in markdown.splitlines():
        if line.startswith("```"):
            close()
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            close()
            blocks.append("      " + line.removeprefix("" if is_fenced else "    "))
        elif not line.strip():
            close()
            blocks.append("")
        else:
            if re.match(r"[-*] |[0-9]+\. ", line):
                close()
            paragraph.append(line.strip())
    close()
    return "\n".join(blocks)


def _fill(text: str, width: int, indent: str, *, hanging: str | None = None) -> str:
    return textwrap.fill(
        text,
        width=max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str, style: Style) -> str:
    return text if style.is_unicode else text.encode("ascii", "replace").decode()


def _to_dict(cause: Cause) -> dict[str, object]:
    from allranks.causes.probes import ways_to_find

    return {
        "id": cause.id,
        "name": cause.name,
        "aliases": list(cause.aliases),
        "title": cause.title,
        "sections": cause.sections,
        "message": cause.message,
        "fix": cause.fix.template(ANYBODY),
        "fixes": _tell_fixes(cause),
        "exit_code": int(cause.exit_code),
        "is_outcome": cause.is_outcome,
        "found": ways_to_find(cause),
        "never_on_hardware": cause.never_on_hardware,
    }


def _tell_fixes(cause: Cause) -> dict[str, str]:
    """Return the fix for each reader, `pod nvidia`; empty if it is the same for all."""
    readers = [Reader(scheduler=scheduler, vendor=vendor) for scheduler in SchedulerKind for vendor in Vendor]
    fixes = {f"{reader.scheduler} {reader.vendor}": cause.fix.template(reader) for reader in readers}
    return fixes if len(set(fixes.values())) > 1 else {}
