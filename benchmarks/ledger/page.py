"""docs/evidence/ledger.md, from docs/evidence/ledger.json: what each measurement found last."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .jobs import ROOT, Part

PAGE = ROOT / "docs/evidence/ledger.md"
RECORD = PAGE.with_suffix(".json")
TITLES = {
    "losses": "Seven planted losses",
    "chronic": "A chronic straggler",
    "links": "DDP on shaped links",
    "cost": "What it costs",
    "week": "1,024 ranks for a week",
}
TEXTS = {
    "losses": (
        "Each in a real job of three ranks (Gloo; the restart has two, the requeue two nodes of a lab), allowed 5 % or "
        "50 ms. The truth is what the ranks measured by their own clock; of a wait, from each call of an all-reduce "
        "to the call of its last rank. Rank-seconds."
    ),
    "chronic": (
        "Six ranks on six nodes of a lab, DDP, steps of 100 ms that sleep, of which one rank's take 10 ms longer. The "
        "steps are those that the late rank had made by its own count."
    ),
    "links": (
        "DDP in a lab whose links are shaped. The truth is measured inside of each rank: from the last gradient, which "
        "a hook of the script sees, to the end of `backward()`, less what the same takes without communication."
    ),
    "cost": (
        "Processor time of the leader and agent with the live line (on a terminal), `status.json`, `goodput.json` and "
        "`book.bin`, and without; both alternate in one job. Marks are measured by calling them."
    ),
    "week": (
        "128 virtual nodes with 8 GPUs each, two restarts, a rank that loads its batches late; the leader, its ledger, "
        "and its files are the product's. Every beat is heard at the beginning, around the restarts, and at the end; "
        "in between each node sends one every three hours. A beat grows by what the ledger and `top` add to it. "
        "Points of a core are the leader's processor time with ledger, status and files less that without, with the "
        "same beats by turns."
    ),
}


def keep(name: str, part: Part) -> None:
    """Replace one part of the record, and write the page from all parts."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[name] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": importlib.metadata.version("torch"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "checks": [asdict(check) | {"is_right": check.is_right} for check in part.checks],
        "notes": part.notes,
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(record))


def render(record: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# The ledger, measured",
        "",
        "`python -m benchmarks.ledger losses|chronic|links|cost|week` writes this page: jobs in which something is",
        "planted, and what the ledger says of it. [What the categories mean](../how-to/ledger.md).",
    ]
    for name, title in TITLES.items():
        if name in record:
            lines += ["", f"## {title}", "", *_render_part(record[name], TEXTS[name], name)]
    return "\n".join(lines) + "\n"


def _render_part(part: Mapping[str, Any], text: str, name: str) -> list[str]:
    right = sum(check["is_right"] for check in part["checks"])
    head = f"{part['date']}, torch {part['torch']}, {part['cores']} cores, load {part['load']}: "
    head += f"{right} of {len(part['checks'])} right."
    rows = [_render_check(check) for check in part["checks"]]
    return [
        f"`python -m benchmarks.ledger {name}`. {text}",
        "",
        head,
        "",
        "| what | truth | ledger | allowed | named | |",
        "|---|---|---|---|---|---|",
        *rows,
        *(["", *part["notes"]] if part["notes"] else []),
    ]


def _render_check(check: Mapping[str, Any]) -> str:
    unit = check["unit"]
    truth = "" if check["at_most"] else f"{check['truth']:.3f} {unit}"
    limit = f"at most {check['limit']:.3g} {unit}" if check["at_most"] else f"+- {check['limit']:.3f} {unit}"
    named = check["named"] or ("nobody" if check["owed_to"] else "")
    wrong = "" if check["is_right"] else "**wrong** "
    cells = (check["what"], truth, f"{check['told']:.3f} {unit}", limit, named, f"{wrong}{check['note']}".strip())
    return f"| {' | '.join(cells)} |"
