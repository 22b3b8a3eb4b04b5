"""The answer of `allranks why --json` to a folder of logs, in the benchmark's format."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from allranks.cli.why import why
from allranks.model.errors import HostlistError
from allranks.model.hostlist import expand_hosts

_ADDRESS = re.compile(r"(?<![\d.])\d+\.\d+\.\d+\.\d+(?![\d.])")
_PROCESS = re.compile(r"process (\d+)")


def ask(folder: Path) -> dict[str, Any]:
    """Return the answer for a folder.

    Raises:
        RuntimeError: the command broke.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # one process: small jobs gain nothing from more
    try:
        result = CliRunner().invoke(why, ["--json", str(folder)])
    finally:
        os.sched_setaffinity(0, before)
    if not result.stdout.startswith("{"):
        raise RuntimeError(f"{folder}: {result.output[-2000:]} {result.exception!r}")
    return to_answer(json.loads(result.stdout))


def to_answer(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first finding in the benchmark's format."""
    findings = document["findings"]
    if not findings:
        return {"cause": None, "confidence": "undecided"}
    first = findings[0]
    node = first.get("node") or ""
    names = [name for part in node.split(" or ") for name in _expand(part)] if node else []
    subject = first.get("subject") or ""
    return {
        "cause": first["cause"].partition(" ")[2],
        "confidence": first["confidence"],
        "ranks": list(first.get("ranks") or ()),
        "nodes": [name for name in names if not _ADDRESS.fullmatch(name)],
        "addresses": [*_ADDRESS.findall(subject), *(name for name in names if _ADDRESS.fullmatch(name))],
        "pids": [int(pid) for pid in _PROCESS.findall(subject)],
        "message": first.get("message"),
    }


def _expand(text: str) -> list[str]:
    try:
        return list(expand_hosts(text))
    except HostlistError:
        return [text]
