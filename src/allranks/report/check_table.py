"""The table of a check: one line per cause and status, with equal nodes folded.

    ✓ network: 14 checks passed on 6 nodes
    ✗ AR210 link-down   fail      node03
    - 13 checks skipped on 6 nodes: no NVIDIA GPU

Passed checks are counted by family and skipped ones by reason, so that problems stand out; `is_verbose` lists all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.model.finding import Result, Status
from allranks.model.hostlist import fold_hosts
from allranks.report.text import Style, cell, one_line

MARKS = {
    Status.PASS: ("\u2713", "+", "32"),
    Status.WARN: ("\u26a0", "!", "33;1"),
    Status.FAIL: ("\u2717", "x", "31;1"),
    Status.SKIP: ("-", "-", "2"),
    Status.UNKNOWN: ("?", "?", "33;1"),
    Status.CRASH: ("\u2620", "#", "31;1"),
}
"""Status -> mark, ASCII mark, color (SGR)."""
_FOLDED = (Status.PASS, Status.SKIP)


@dataclass(frozen=True, slots=True)
class _Row:
    """One cause with one status, and the nodes that have it."""

    cause: str
    cause_id: str
    status: Status
    note: str
    nodes: tuple[str, ...]


def render_results(
    results: Sequence[Result], style: Style, *, families: Mapping[str, str], num_nodes: int, is_verbose: bool = False
) -> str:
    """Return the table, without a final newline; empty for no results.

    Args:
        results: in the order of the rows.
        style: characters and colors that the terminal supports.
        families: first digit of an id -> area, in the order of the table.
        num_nodes: number of nodes of the check; a row with all of them does not name them.
        is_verbose: print a line for every cause, including those that passed.
    """
    rows = _fold(results)
    if is_verbose:
        return "\n".join(_lines(rows, style, num_nodes=num_nodes))
    lines: list[str] = []
    for digit, family in families.items():
        mine = [row for row in rows if row.cause_id.startswith(f"AR{digit}")]
        passes = [row for row in mine if row.status is Status.PASS]
        lines += _lines([row for row in mine if row.status not in _FOLDED], style, num_nodes=num_nodes)
        lines += _counts(passes, f"{family}: ", "passed", style, num_nodes=num_nodes)
    return "\n".join(
        lines + _counts([r for r in rows if r.status is Status.SKIP], "", "skipped", style, num_nodes=num_nodes)
    )


def _fold(results: Sequence[Result]) -> list[_Row]:
    """Return the rows in the order of their first results; notes of passed checks do not split rows."""
    nodes: dict[tuple[str, str, Status, str], list[str]] = {}
    for result in results:
        note = "" if result.status is Status.PASS else one_line(result.note)
        nodes.setdefault((result.cause, result.cause_id, result.status, note), []).append(cell(result.node))
    return [_Row(*key, tuple(names)) for key, names in nodes.items()]


def _lines(rows: Sequence[_Row], style: Style, *, num_nodes: int) -> list[str]:
    names = [_name(row.nodes, num_nodes) for row in rows]
    width = max((len(row.cause) for row in rows), default=0)
    name_width = min(40, max(map(len, names), default=0))
    lines = []
    for row, name in zip(rows, names, strict=True):
        # What fails or warns has its own paragraph below the table.
        note = "" if row.status in (Status.FAIL, Status.WARN) else row.note
        text = f"{row.cause:<{width}}   {row.status:<7}   {name:<{name_width}}   {note}".rstrip()
        lines.append(f"{_mark(row.status, style)} {text}")
    return lines


def _counts(rows: Sequence[_Row], head: str, done: str, style: Style, *, num_nodes: int) -> list[str]:
    """Return lines with the number of checks that passed or were skipped, on which nodes and why."""
    counted = Counter((row.status, row.note, row.nodes) for row in rows)
    lines = []
    for (status, note, nodes), count in counted.items():
        what = f"{head}{count} check{'s' if count > 1 else ''} {done} on {_name(nodes, num_nodes)}"
        lines.append(f"{_mark(status, style)} {what}{f': {note}' if note else ''}")
    return lines


def _name(nodes: Sequence[str], num_nodes: int) -> str:
    if len(nodes) == num_nodes > 1:
        return f"{num_nodes} nodes"
    return fold_hosts(list(nodes)) if all(" " not in node for node in nodes) else ", ".join(nodes)


def _mark(status: Status, style: Style) -> str:
    mark, ascii_mark, colour = MARKS[status]
    return style.paint(style.mark(mark, ascii_mark), colour)
