"""The formats of lines, read from `formats.toml`: prefixes, headers of programs, keys of JSON objects.

load_formats().prefix[0].name             # "allranks"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from allranks.causes.book import expand
from allranks.why.logs.log_path import HOST

TEXT = Path(__file__).parent / "formats.toml"


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the text of a line."""

    name: str
    match: str
    source: str
    kept: bool = False
    collector: bool = False


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program prints at the beginning of its own text."""

    name: str
    match: str
    source: str
    needs: tuple[str, ...]
    anywhere: bool = False


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
    prefix: tuple[Prefix, ...]
    header: tuple[Header, ...]
    keys: Keys


@cache
def load_formats() -> Formats:
    """Read the file, once."""
    table = tomllib.loads(TEXT.read_text(encoding="utf-8"))
    parts = table["parts"] | {"host": HOST}
    for row in (*table["prefix"], *table["header"]):
        row["match"] = expand(row["match"], parts)
    return msgspec.convert(table, Formats)


@cache
def list_headers() -> tuple[tuple[tuple[str, ...], Callable[[str], re.Match[str] | None]], ...]:
    """Return, for each header, the texts of which it needs one, and what finds it in the beginning of a text."""
    compiled = ((header, re.compile(header.match)) for header in load_formats().header)
    return tuple((header.needs, pattern.search if header.anywhere else pattern.match) for header, pattern in compiled)
