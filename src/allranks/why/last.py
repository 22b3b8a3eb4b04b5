"""If no cause is known: which log stops first, and what are its last lines? Or is it no log at all? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.report.text import fold_ranks
from allranks.why.findings import show_line, tell_place
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs

LAST_LINES = 8
_CODE = {
    "py": "Python source", "sh": "a shell script", "sbatch": "a batch script", "slurm": "a batch script",
    "toml": "TOML", "yaml": "YAML", "yml": "YAML",
}  # fmt: skip
"""Suffix of a file that is no log, and what it is."""


def name_code(logs: Logs) -> str | None:
    """Return what the files are if all are source code; None if one of them may be a log.

    A file with the name of source code is a log, too, if any of its lines has a time, a rank or a known message.
    """
    kinds = [_CODE.get(tail.source.shown.lower().rpartition(".")[2]) for tail in logs.tails]
    lines = [line for tail in logs.tails for line in tail.lines] if all(kinds) else []
    said = logs.printed or any(event.cause for event in logs.events)
    if not lines or said or any(line.time is not None or line.rank is not None for line in lines):
        return None
    return kinds[0]


def last_words(logs: Logs) -> tuple[str, tuple[Line, ...]]:
    """Return whose last lines they are, as a clause, and the lines; no lines if the logs are empty.

    A rank stopped first if all logs end with a time of one kind, and its time is the earliest.
    """
    ends = [lines for tail in logs.tails if (lines := tail.lines)]
    if not ends:
        return "", ()
    if len(ends) == 1:
        return f"the last lines of {_name(ends[0])} are", ends[0][-LAST_LINES:]
    last = [next((line for line in reversed(lines) if line.time is not None), None) for lines in ends]
    times = [line.time for line in last if line is not None and line.time is not None]
    kinds = {(line.has_year, line.has_date) for line in last if line is not None}
    if len(times) == len(ends) and len(kinds) == 1:
        first = ends[times.index(min(times))]
        return f"the last lines of {_name(first)}, which stopped first, are", first[-LAST_LINES:]
    shortest = min(ends, key=lambda lines: lines[-1].number)
    return (
        f"which of the {len(ends)} logs stopped first is unknown, since some have no times; the last lines of the "
        f"shortest, {_name(shortest)}, are",
        shortest[-LAST_LINES:],
    )


def tell_line(line: Line) -> str:
    """`rank_3.err:812: loss 0.1`."""
    return f"{tell_place(line)}: {show_line(line)}"


def _name(lines: Sequence[Line]) -> str:
    ranks = {line.rank for line in lines}
    rank = next(iter(ranks)) if len(ranks) == 1 else None
    source = lines[-1].source.shown
    name = "standard input" if source == "-" else source
    return name if rank is None else f"{fold_ranks([rank])} ({name})"
