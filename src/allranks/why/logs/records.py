"""A log whose lines are JSON objects, as plain text: one line for each object, so line numbers are kept. Pure.

    decode = find_json(data)                          # None: the log is no JSON
    decode(data)
    # {"log":"\\tx\\n","time":"2026-03-25T10:34:07Z"}  ->  [record 2026-03-25T10:34:07Z] <tab>x

Written by docker's driver json-file, journalctl -o json, logcli -o jsonl, fluent-bit, and the loggers of programs. The
first lines decide which keys hold text, time and writer. A newline within a text becomes a carriage return,
which ends a segment but no line. A line that is no such object stays as it is.

Speed: 0.17 to 0.2 GB/s of docker's JSON (390 bytes a line), from file to hits, where plain text is read with 0.8 to 1;
a line takes about 2 us. Of a log that does not begin with a brace, only the first byte is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from allranks.why.logs.formats import Keys, load_formats

_FEW_KEYS = 3
"""Keys of an object of docker: log, stream, time."""
_PROBED = 8
"""Lines of which half must be such objects: a crash prints plain text between them."""
_HEAD_BYTES = 1 << 16
_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|[+-]\d\d:?\d\d))?")
_MIN_YEAR_S, _MAX_YEAR_S = 946684800.0, 4102444800.0
"""2000 and 2100 in seconds since the epoch: a number between them, at the right scale, is a time."""
_MAX_NUMBER = 1e20
"""Integers of JSON have any number of digits, and few of them are a float."""
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Shape:
    """Which keys of a log's objects are read."""

    text: str
    time: str | None
    who: tuple[tuple[str | None, str, str], ...]
    """(the object within the object, key, field of LineWriter), in the order of the row."""
    known: Keys


def find_json(data: bytes) -> Callable[[bytes], bytes] | None:
    """Return what renders chunks of a log that begins with this as text; None: it has no JSON objects with a text."""
    if not data.startswith(b"{"):
        return None
    lines = [line for line in data[:_HEAD_BYTES].split(b"\n", _PROBED)[:_PROBED] if line.strip()]
    objects = [found for line in lines if (found := read_object(line)) is not None]
    if not objects or 2 * len(objects) < len(lines):
        return None
    known = load_formats().keys
    fields = known.fields
    text = next((key for key in known.text if all(isinstance(found.get(key), str) for found in objects)), None)
    if text is None:
        return None
    first = objects[0]
    keys = {key for found in objects for key in found}
    time = next((key for key in known.time if key in keys and key != text), None)
    places: dict[str, tuple[str | None, str, str]] = {}
    for inside, names in (
        (None, first),
        *((key, first[key]) for key in known.nested if isinstance(first.get(key), Mapping)),
    ):
        for key in names:
            if (field := fields.get(key)) is not None:
                places.setdefault(field, (inside, key, field))
    who = tuple(places[field] for field in known.who if field in places)
    shape = Shape(text, time, who, known)
    return lambda data: b"\n".join([_render_line(line, shape) for line in data.split(b"\n")])


def read_object(line: bytes) -> dict[str, Any] | None:
    """Return a line's JSON object; None if it is none."""
    try:
        found = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _render_line(line: bytes, shape: Shape) -> bytes:
    try:
        found = _decode(line)
        text = found[shape.text]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return line
    if not isinstance(text, str):
        return line
    head = _head_of(found, shape)
    if (
        text.startswith("{") and (inner := read_object(text.encode())) is not None
    ):  # the program's own JSON, in docker's
        text = next((inner[key] for key in shape.known.text if isinstance(inner.get(key), str)), text)
        text = _with_more(text, inner, shape)
    if shape.text != "log" or len(found) > _FEW_KEYS:
        text = _with_more(text, found, shape)
    text = text.rstrip("\r\n")
    if "\n" in text:
        text = text.replace("\r\n", "\n").replace("\n", "\r" + head)
    return (head + text).encode("utf-8", "replace")


def _with_more(text: str, found: Mapping[str, Any], shape: Shape) -> str:
    """Return a text with the error and the traceback that stand beside it."""
    for key in shape.known.more:
        more = found.get(key)
        for part in more.values() if isinstance(more, dict) else (more,):
            if isinstance(part, str) and part and part not in text:
                text = f"{text}\n{part}"
    return text


def _head_of(found: Mapping[str, Any], shape: Shape) -> str:
    """Return what the row `record` of the table of prefixes reads."""
    time = _time_of(found.get(shape.time)) if shape.time else ""
    if not shape.who:
        return f"[record {time}] " if time else "[record] "
    words = ["[record", time] if time else ["[record"]
    for inside, key, field in shape.who:
        place = found if inside is None else found.get(inside)
        said = place.get(key) if isinstance(place, dict) else None
        if said is not None and (word := _word_of(said, field)):
            words.append(f"{field}={word}")
    return " ".join(words) + "] "


def _word_of(said: Any, field: str) -> str:
    word = str(said)
    if field in {"node", "pod", "container"}:
        return re.sub(r"[^\w.:/-]", "", word)[:120] if isinstance(said, str) else ""
    return word if word.isdecimal() and len(word) < 8 else ""


def _time_of(said: Any) -> str:
    """Return a time as ISO 8601 has it; empty if it is none."""
    if isinstance(said, str):
        if match := _DATE.match(said):
            return match[0].replace(" ", "T", 1).replace(" ", "")
        if not said.replace(".", "", 1).isdecimal():
            return ""
        said = float(said)
    if isinstance(said, bool) or not isinstance(said, int | float) or not abs(said) < _MAX_NUMBER:
        return ""
    for scale in (1, 1e3, 1e6, 1e9):  # seconds, and the thousandths that loggers count in
        if _MIN_YEAR_S < said / scale < _MAX_YEAR_S:
            return datetime.fromtimestamp(said / scale, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return ""
