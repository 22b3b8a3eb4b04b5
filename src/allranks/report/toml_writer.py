"""Write TOML with a comment on each value; the standard library only reads TOML.

>>> print(render_toml([Table("[network]", (TomlKey("port", 29500, "torchrun's default"),))]), end="")
[network]
port = 29500                   # torchrun's default
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.report.text import printable

COMMENT_COLUMN = 30


@dataclass(frozen=True, slots=True)
class TomlKey:
    """One value with its reason; None is written as a comment, so that the key is visible."""

    name: str
    value: str | int | bool | None
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One table; without a head, only comments."""

    head: str
    """`[network]`, `[[node]]`."""
    keys: tuple[TomlKey, ...] = ()
    notes: tuple[str, ...] = ()
    """Comment lines above the keys."""


def render_toml(tables: Sequence[Table], *, title: str = "") -> str:
    """Return the text of a file, with a final newline.

    Args:
        tables: in their order.
        title: comment at the top.
    """
    blocks = [_comment(title)] if title else []
    for table in tables:
        lines = [table.head] if table.head else []
        lines += [_comment(note) for note in table.notes]
        lines += [_line(key) for key in table.keys]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _line(key: TomlKey) -> str:
    if key.value is None:
        return _comment(f"{key.name}: {key.comment}" if key.comment else key.name)
    # A JSON text is a TOML text, too: both escape with \" \\ \n \uXXXX.
    value = json.dumps(key.value)
    text = f"{key.name} = {value}"
    return f"{text:<{COMMENT_COLUMN}} {_comment(key.comment)}" if key.comment else text


def _comment(text: str) -> str:
    return "# " + " ".join(printable(text).split())
