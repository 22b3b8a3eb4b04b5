"""`allranks check --checkpoints DIR`: does the directory hold checkpoints, or only look as if it did?"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from allranks.model.errors import Exit
from allranks.report.text import Style, printable, say

DEADLINE_S = 240.0


def check_checkpoints(directory: Path, *, as_json: bool) -> int:
    """Write, kill, load there, in a process of its own, since that needs torch and may hang; returns the exit code.

    Args:
        directory: where a job's checkpoints would lie.
        as_json: print one JSON document instead of lines.
    """
    began_s = time.monotonic()
    steps, unknown = _try(directory)
    exit_code = Exit.UNKNOWN if unknown else Exit.OK if all(step["is_fine"] for step in steps) else Exit.USER_CODE
    elapsed_s = time.monotonic() - began_s
    if as_json:
        document = {"directory": str(directory), "steps": steps, "unknown": unknown, "exit_code": int(exit_code)}
        click.echo(json.dumps({**document, "elapsed_s": round(elapsed_s, 3)}, indent=2))
        return exit_code
    style = Style.of(sys.stdout)
    for step in steps:
        mark = style.mark("✓", "+") if step["is_fine"] else style.mark("✗", "x")
        click.echo(printable(f"{mark} {step['name']:<6} {step['note']}"))
    if unknown:
        say(printable(unknown))
    verdict = {Exit.OK: "checkpoints can lie there", Exit.UNKNOWN: "could not tell"}.get(exit_code, "not fit for them")
    click.echo(printable(f"{directory}: {verdict}; {elapsed_s:.1f} s"))
    return exit_code


def _try(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """What was tried, and why it cannot be told, if so."""
    command = [sys.executable, "-m", "allranks.state.saved.dry_run", str(directory.absolute())]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        note = f"no answer in {DEADLINE_S:.0f} s: the file system hangs, or is far too slow"
        return [{"name": "write", "is_fine": False, "note": note}], ""
    if result.returncode != 0:
        last = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        return [], f"a dry run needs PyTorch in {sys.executable}: {last}"
    return json.loads(result.stdout), ""
