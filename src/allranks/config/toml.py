"""What tomllib lacks: the line of each value, the text at an error, and printing of values.

Every text from the file is shown as one line of printable characters.
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from allranks.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    KeyPath = tuple[str | int, ...]


def load_toml(text: str, file: str) -> dict[str, Any]:
    """Read a text.

    Args:
        text: of the file.
        file: what messages call it.
    Raises:
        ConfigError: it is no TOML; the message has the line.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as exc:
        raise ConfigError(f"{file}: nested too deeply: expected tables of plain values") from exc
    except ValueError as exc:  # TOMLDecodeError is one; so is what int() raises above 4300 digits
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(exc), re.DOTALL)
        what = found[1] if found else str(exc).split(";")[0]
        what, place = _shorten(plain(what[:1].lower() + what[1:])), ": at the end" if found else ""
        if found and found[2]:
            line = text.split("\n")[int(found[2]) - 1].strip()
            what, place = f"{what} in {show(line)}", f": line {found[2]}, column {found[3]}"
        raise ConfigError(f"{file}{place}: {what}: expected TOML, with texts in double quotes") from exc


_MAX_STATEMENT_LINES = 100


def find_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of every value in a text that is a valid cluster.toml, ("node", 0, "name") -> 12.

    A statement is valid TOML on its own, and a part of one never is: lines are gathered until tomllib takes them.
    That is quadratic in the length of a statement, so the search ends at one of more than _MAX_STATEMENT_LINES;
    values from there on have no line.
    """
    lines: dict[KeyPath, int] = {}
    table, num_nodes, first, statement = "", 0, 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        first = first if statement else number
        statement += line + "\n"
        try:
            found = tomllib.loads(statement)
        except ValueError:
            if number - first >= _MAX_STATEMENT_LINES:
                break
            continue
        if statement.lstrip().startswith("["):
            table = next(iter(found))
            num_nodes += table == "node"
        elif table == "node":
            lines |= {(table, num_nodes - 1, key): first for key in found}
        else:
            lines |= dict.fromkeys(paths_of({table: found} if table else found), first)
        statement = ""
    return lines


def paths_of(document: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the place of every value in a valid cluster.toml."""
    for table, values in document.items():
        if table == "node":
            yield from ((table, index, key) for index, node in enumerate(values) for key in node)
        else:
            yield from ((table, key) for key in values)


def show(value: object) -> str:
    """Return a value as TOML has it, escaped and shortened."""
    if isinstance(value, str):
        escaped = value[:60].encode("unicode_escape").decode("ascii").replace('"', '\\"')
        return f'"{escaped}"' + ("..." if len(value) > 60 else "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return _shorten(str(value) if value.bit_length() < 10_000 else hex(value))  # str() refuses 4300 digits
    if isinstance(value, list):
        inner = ["..." if isinstance(item, list | dict) else show(item) for item in value[:3]]
        return f"[{', '.join(inner)}{', ...' if len(value) > 3 else ''}]"
    return "{...}" if isinstance(value, dict) else str(value)


def show_key(name: str) -> str:
    """Return a key as TOML has it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else show(name)


def show_entry(name: str, values: object) -> str:
    """Return a top-level entry as one writes it: [name], [[name]] or name = value."""
    if isinstance(values, dict):
        return f"[{show_key(name)}]"
    is_array = isinstance(values, list) and values and all(isinstance(value, dict) for value in values)
    return f"[[{show_key(name)}]]" if is_array else f"{show_key(name)} = {show(values)}"


def plain(text: str) -> str:
    """Return a text as one line of printable characters."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "..."
