"""Reads what launchers and log collectors put before a line, and what it tells about the writer.

    writer = LineWriter()
    read_prefixes("3: [rank3]:RuntimeError: x", writer)      # 11: where the line's own text begins
    writer.rank == 3

Launchers wrap each other, so prefixes are removed one by one. What an inner one names counts more: it is nearer to the
process. The table of all prefixes is `formats.toml`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from allranks.why.logs.formats import Prefix, load_formats
from allranks.why.logs.log_path import MAX_RANK, read_path

MAX_PREFIXES = 10
REACH = 800
"""Number of characters in which one prefix ends: Loki's labels are long."""


@dataclass(slots=True)
class LineWriter:
    """What the prefixes and the header of a line tell about its writer."""

    node: str | None = None
    pod: str | None = None
    container: str | None = None
    """Name or id of a container. An id is also the host name within it: any other name of the node is preferred."""
    rank: int | None = None
    task: int | None = None
    """The task number of srun -l: the rank, if each task is one rank."""
    message_rank: int | None = None
    """The rank that the words of the message give."""
    is_message_global: bool = False
    """Whether that is a rank of the job: a subgroup numbers its ranks from 0."""
    local_rank: int | None = None
    device: int | None = None
    pid: int | None = None


_GROUP = re.compile(r"\(\?P<(\w+)>")


_FIRST = {r"\[": "[", r"(?:\[": "[", r"\(": "(", r"\d": "0"}
"""How a pattern begins -> with what its matches begin; 0: a digit. The others may begin with anything."""


@cache
def _table(first: str, *, has_tasks: bool) -> re.Pattern[str]:
    """Return one expression for the prefixes that may match where this character stands; all names of groups differ."""
    rows = []
    for prefix in load_formats().prefix:
        begins = {what for how, what in _FIRST.items() if prefix.match.startswith(how)}
        if begins <= {first} and (has_tasks or prefix.name != "srun"):
            rows.append(f"(?P<{prefix.name}>" + _GROUP.sub(rf"(?P<\1__{prefix.name}>", prefix.match) + ")")
    return re.compile("|".join(rows))


@cache
def _find_row(name: str) -> tuple[Prefix, tuple[tuple[str, str], ...]]:
    """Return a prefix and its groups: the field of LineWriter, and the name in the table's expression."""
    prefix = next(prefix for prefix in load_formats().prefix if prefix.name == name)
    return prefix, tuple((group, f"{group}__{name}") for group in _GROUP.findall(prefix.match))


_OPENING = frozenset("[(")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_NUMBERS = frozenset(("rank", "local_rank", "pid", "task"))


def read_prefixes(text: str, writer: LineWriter, *, is_one: bool = False) -> int:
    """Read the prefixes of a line into `writer`; return where its own text begins.

    Args:
        text: the line, without colors.
        writer: gets what the prefixes tell.
        is_one: the source belongs to a single process, so `3: ` is not a prefix.
    """
    at = end = 0
    has_tasks = not is_one
    for _ in range(MAX_PREFIXES):
        first = text[at : at + 1]
        kind = first if first in _OPENING else "0" if first.isdecimal() else ""
        match = _table(kind, has_tasks=has_tasks).match(text, at, at + REACH)
        if match is None or match.lastgroup is None:
            break
        at = match.end()
        prefix, groups = _find_row(match.lastgroup)
        has_tasks &= prefix.collector
        if prefix.kept:
            continue
        end = at
        for group, name in groups:
            if (said := match[name]) is None:
                continue
            if group in _NUMBERS:
                setattr(writer, group, int(said))
            else:
                _note(group, said, writer)
    if writer.rank is not None and writer.rank > MAX_RANK:
        writer.rank = None
    return end


def _note(group: str, said: str, writer: LineWriter) -> None:
    if group == "path":
        node, rank, local_rank, _ = read_path(said)
        writer.node, writer.rank = node or writer.node, writer.rank if rank is None else rank
        writer.local_rank = writer.local_rank if local_rank is None else local_rank
    elif group == "labels":
        _note_labels(said, writer)
    else:
        setattr(writer, group, said)
        if group == "pod" and writer.node is None:
            writer.node = said


def _note_labels(labels: str, writer: LineWriter) -> None:
    fields = load_formats().keys.fields
    found = {fields[name]: said for name, said in _LABEL.findall(labels) if name in fields and said}
    for group, said in found.items():
        if group not in _NUMBERS:
            _note(group, said, writer)
        elif said.isdecimal() and len(said) < 8:
            setattr(writer, group, int(said))
