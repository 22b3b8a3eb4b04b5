"""`allranks check --checkpoints DIR`: is the directory fit for checkpoints?"""

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
    """Write, kill and load in a separate process, which needs torch and may hang; return the exit code.

    Args:
        directory: where a job would write checkpoints.
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
    verdict = {Exit.OK: "fit for checkpoints", Exit.UNKNOWN: "no result"}.get(exit_code, "not fit for checkpoints")
    click.echo(printable(f"{directory}: {verdict}; {elapsed_s:.1f} s"))
    return exit_code


def _try(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the steps that ran, and why there is no result, if so."""
    command = [sys.executable, "-P", "-m", "allranks.state.saved.dry_run", str(directory.absolute())]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        note = f"no answer within {DEADLINE_S:.0f} s: the file system hangs, or is far too slow"
        return [{"name": "write", "is_fine": False, "note": note}], ""
    if result.returncode != 0:
        last = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        return [], f"this test needs PyTorch in {sys.executable}: {last}"
    return json.loads(result.stdout), ""
