"""docs/evidence/watch.md, from docs/evidence/watch.json: what each kind of run found last. Pure but for the two files.

keep("faults", {"results": [...], "date": "2026-11-29"})      # replaces this part, and writes the page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .faults import FAULTS
from .jobs import LAUNCHERS

PAGE = Path(__file__).parents[2] / "docs/evidence/watch.md"
RECORD = PAGE.with_suffix(".json")


def keep(part: str, found: Mapping[str, Any]) -> None:
    """Replace one part of the record, and write the page from all parts."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[part] = found
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(record))


def render(record: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# allranks watch: planted faults and healthy jobs",
        "",
        "`python -m benchmarks.watch` writes this page: small trainings with three ranks (Gloo, CPU, one machine)",
        "that allranks did not start, watched by `allranks watch --json` while a fault is planted. Seconds count from",
        "the fault to the document that names the right rank, pair or process. The kernel proves each fault: process",
        "states, sockets, steps that stand still.",
    ]
    parts = {"faults": _render_faults, "healthy": _render_healthy, "strace": _render_strace, "beside": _render_beside}
    for part, write in parts.items():
        if part in record:
            lines += ["", *write(record[part])]
    return "\n".join(lines) + "\n"


def _render_faults(part: Mapping[str, Any]) -> list[str]:
    results: Sequence[Mapping[str, Any]] = part["results"]
    right = sum(_is_right(result) for result in results)
    lines = [
        "## Faults",
        "",
        f"{part['date']}, torch {part['torch']}, {part['cores']} cores; {right} of {len(results)} drills right.",
        f"DeepSpeed: {part['deepspeed']}.",
        "Of several drills minimum / median / maximum. A verdict is allowed 3 s, a state 6 s.",
        *filter(None, [part.get("note")]),
        "",
        "| fault | to be named | as | " + " | ".join(LAUNCHERS) + " |",
        "|---|---|---|" + "---|" * len(LAUNCHERS),
    ]
    for fault in FAULTS.values():
        mine = [result for result in results if result["fault"] == fault.name]
        if mine:
            cells = [_cell([result for result in mine if result["launcher"] == launcher]) for launcher in LAUNCHERS]
            kind = "verdict" if fault.is_proven else "state"
            lines.append(f"| {fault.what} | {fault.named} | {kind} | {' | '.join(cells)} |")
    lines += ["", "What was said, once for each fault:", "", "| fault | words | certainty |", "|---|---|---|"]
    for fault in FAULTS.values():
        said = next((result for result in results if result["fault"] == fault.name and result["said"]), None)
        if said is not None:
            lines.append(f"| {fault.name} | {_plain(said['said'])} | {said['certainty']} |")
    if wrong := [result for result in results if not _is_right(result)]:
        lines += ["", "Wrong:", ""]
        lines += [
            f"- {result['fault']} under {result['launcher']}: {_plain('; '.join(result['planted'] + result['wrong']))}"
            for result in wrong
        ]
    loads = [result["load"] for result in results]
    return [
        *lines,
        "",
        f"Load average before each drill: median {statistics.median(loads):.1f}, at most {max(loads):.1f}.",
    ]


def _is_right(result: Mapping[str, Any]) -> bool:
    return not result["wrong"] and not result["planted"]


def _cell(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "-"
    named = sorted(result["named_s"] for result in results if result["named_s"] is not None)
    times = "not named" if not named else f"{named[0]:.1f} s"
    if len(named) > 1:
        times = f"{named[0]:.1f} / {statistics.median(named):.1f} / {named[-1]:.1f} s"
    num_right = sum(map(_is_right, results))
    return times if num_right == len(results) else f"**{num_right} of {len(results)} right**, {times}"


def _render_healthy(part: Mapping[str, Any]) -> list[str]:
    kinds: Sequence[Mapping[str, Any]] = part["kinds"]
    minutes = sum(kind["seconds"] for kind in kinds) / 60
    verdicts = sum(len(kind["verdicts"]) for kind in kinds)
    num_jobs = sum(kind["num_jobs"] for kind in kinds)
    lines = [
        "## Healthy jobs",
        "",
        f"{part['date']}: {minutes:.0f} minutes, {num_jobs} jobs, {verdicts} verdicts (expected 0).",
        "Each job is watched from before its ranks run until they have ended.",
        *filter(None, [part.get("note")]),
        "",
        "| job | minutes | verdicts | states that were told |",
        "|---|---|---|---|",
    ]
    for kind in kinds:
        states = "; ".join(map(_plain, kind["states"])) or "none"
        said = "; ".join(map(_plain, kind["verdicts"])) or "0"
        lines.append(f"| {kind['kind']} | {kind['seconds'] / 60:.1f} | {said} | {states} |")
    return lines


def _render_strace(part: Mapping[str, Any]) -> list[str]:
    seen = "; ".join(map(_plain, [*part["stops"], *part["disturbing"]])) or "none"
    documents = part["num_documents"]
    return [
        "## A watched rank notices nothing",
        "",
        f"{part['date']}: strace of {part['num_processes']} ranks and of the watcher for {part['seconds']:.0f} s;",
        f"it printed {documents} documents. Stops and signals of ranks, calls of the watcher that signal or trace",
        f"a process of the job, and connections by TCP: {seen}.",
    ]


def _render_beside(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Beside py-spy dump",
        "",
        f"{part['date']}, py-spy {part['version']}: `py-spy dump --pid` of each rank of a torchrun job,",
        f"{part['after_s']:.0f} s after the fault.",
        "",
        "| fault | what the dumps show | the rank can be told from it |",
        "|---|---|---|",
    ]
    for row in part["rows"]:
        lines.append(f"| {row['fault']} | {_plain(row['shown'])} | {row['told']} |")
    return lines


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
