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
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from allranks.model.foreign import UNREADABLE
from allranks.why.logs.formats import load_formats

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


def find_json(data: bytes) -> Callable[[bytes], bytes] | None:
    """Return what renders chunks of a log that begins with this as text; None: it has no JSON objects with a text."""
    if not data.startswith(b"{"):
        return None
    lines = [line for line in data[:_HEAD_BYTES].split(b"\n", _PROBED)[:_PROBED] if line.strip()]
    objects = [found for line in lines if (found := _read_object(line)) is not None]
    if not objects or 2 * len(objects) < len(lines):
        return None
    known = load_formats().keys
    text_key = next((key for key in known.text if all(isinstance(found.get(key), str) for found in objects)), None)
    if text_key is None:
        return None
    keys = {key for found in objects for key in found} - {text_key}
    time_key = next((key for key in known.time if key in keys), None)
    first = objects[0]
    inside = [key for key in known.nested if isinstance(first.get(key), Mapping)]
    places = [(None, key) for key in first] + [(outer, key) for outer in inside for key in first[outer]]
    fields = known.fields
    told = {fields[key]: (outer, key) for outer, key in reversed(places) if key in fields}  # the first place counts
    who = [(field, *told[field]) for field in known.who if field in told]  # in the order of the prefix `record`

    def render(line: bytes) -> bytes:
        if (found := _read_object(line)) is None or not isinstance(text := found.get(text_key), str):
            return line
        words = ["[record", *([time] if time_key and (time := _time_of(found.get(time_key))) else [])]
        for field, outer, key in who:
            place = found if outer is None else found.get(outer)
            if word := _word_of(place.get(key) if isinstance(place, dict) else None, field):
                words.append(f"{field}={word}")
        head = " ".join(words) + "] "
        if text.startswith("{") and (inner := _read_object(text.encode())) is not None:  # the program's, in docker's
            text = next((inner[key] for key in known.text if isinstance(inner.get(key), str)), text)
            text = _with_more(text, inner, known.more)
        if text_key != "log" or len(found) > _FEW_KEYS:
            text = _with_more(text, found, known.more)
        text = text.rstrip("\r\n").replace("\r\n", "\n").replace("\n", "\r" + head)
        return (head + text).encode("utf-8", "replace")

    return lambda data: b"\n".join(map(render, data.split(b"\n")))


def _read_object(line: bytes) -> dict[str, Any] | None:
    """Return a line's JSON object; None if it is none."""
    try:
        found = _decode(line)
    except UNREADABLE:
        return None
    return found if isinstance(found, dict) else None


def _with_more(text: str, found: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return a text with the error and the traceback that stand beside it."""
    for key in keys:
        more = found.get(key)
        for part in more.values() if isinstance(more, dict) else (more,):
            if isinstance(part, str) and part and part not in text:
                text = f"{text}\n{part}"
    return text


def _word_of(said: Any, field: str) -> str:
    if field in {"node", "pod", "container"}:
        return re.sub(r"[^\w.:/-]", "", said)[:120] if isinstance(said, str) else ""
    word = str(said)
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
