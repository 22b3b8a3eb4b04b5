"""The formats of lines, read from `formats.toml`: what launchers and collectors put before a line tells who wrote it.

    writer = LineWriter()
    read_prefixes("3: [rank3]:RuntimeError: x", writer)      # 11: where the line's own text begins
    writer.rank == 3

Launchers wrap each other, so prefixes are removed one by one. What an inner one names counts more: it is nearer to the
process.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from allranks.causes.book import expand
from allranks.why.logs.log_path import HOST, MAX_RANK, read_path

TEXT = Path(__file__).parent / "formats.toml"
MAX_PREFIXES = 10
REACH = 800
"""Number of characters in which one prefix ends: Loki's labels are long."""
_NUMBERS = frozenset(("rank", "local_rank", "pid", "task"))
_GROUP = re.compile(r"\(\?P<(\w+)>")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the text of a line, or, as a header, at the beginning of a program's own text."""

    name: str
    match: str
    source: str
    kept: bool = False
    collector: bool = False
    needs: tuple[str, ...] = ()


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which keys of a JSON object hold what."""

    text: tuple[str, ...]
    time: tuple[str, ...]
    more: tuple[str, ...]
    nested: tuple[str, ...]
    who: dict[str, tuple[str, ...]]

    @property
    def fields(self) -> dict[str, str]:
        """Key -> the field of LineWriter that it tells."""
        return {key: field for field, keys in self.who.items() for key in keys}


class Formats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the file says; `(?&name)` is expanded."""

    parts: dict[str, str]
    prefix: tuple[Format, ...]
    header: tuple[Format, ...]
    keys: Keys


@cache
def load_formats() -> Formats:
    """Read the file, once."""
    table = tomllib.loads(TEXT.read_text(encoding="utf-8"))
    parts = table["parts"] | {"host": HOST}
    for row in (*table["prefix"], *table["header"]):
        row["match"] = expand(row["match"], parts)
    return msgspec.convert(table, Formats)


class LineWriter(msgspec.Struct, gc=False):
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


@cache
def _prefixes() -> tuple[re.Pattern[str], dict[str, Format]]:
    """Return one expression for all prefixes, with a group for each and their own groups behind its name; and them."""
    prefixes = load_formats().prefix
    rows = [f"(?P<{prefix.name}>" + _GROUP.sub(rf"(?P<{prefix.name}__\1>", prefix.match) + ")" for prefix in prefixes]
    return re.compile("|".join(rows)), {prefix.name: prefix for prefix in prefixes}


def read_prefixes(text: str, writer: LineWriter, *, is_one: bool = False) -> int:
    """Read the prefixes of a line without colors into `writer`; return where its own text begins.

    A source that `is_one` process's has no prefix `3: `.
    """
    table, prefixes = _prefixes()
    at = end = 0
    has_tasks = not is_one
    for _ in range(MAX_PREFIXES):
        match = table.match(text, at, at + REACH)
        if match is None or match.lastgroup is None or (match.lastgroup == "srun" and not has_tasks):
            break
        at = match.end()
        prefix = prefixes[match.lastgroup]
        has_tasks &= prefix.collector
        if prefix.kept:
            continue
        end = at
        for group in _groups_of(prefix):
            if (said := match[f"{prefix.name}__{group}"]) is not None:
                _note(group, said, writer)
    if writer.rank is not None and writer.rank > MAX_RANK:
        writer.rank = None
    return end


@cache
def _groups_of(prefix: Format) -> list[str]:
    return _GROUP.findall(prefix.match)


def _note(group: str, said: str, writer: LineWriter) -> None:
    if group == "path":
        node, rank, local_rank, _ = read_path(said)
        writer.node, writer.rank = node or writer.node, writer.rank if rank is None else rank
        writer.local_rank = writer.local_rank if local_rank is None else local_rank
    elif group == "labels":
        fields = load_formats().keys.fields
        for name, value in _LABEL.findall(said):
            if value and name in fields:
                _note(fields[name], value, writer)
    elif group not in _NUMBERS:
        setattr(writer, group, said)
    elif said.isdecimal() and len(said) < 10:
        setattr(writer, group, int(said))
