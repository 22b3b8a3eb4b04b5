"""Are bytes that others wrote a value, or one error?"""

from __future__ import annotations

import msgspec
import pytest

from allranks.model.curve import read_curves
from allranks.model.foreign import Unreadable, decode_fields, decode_json


class Note(msgspec.Struct):
    text: str = ""
    number: int = 0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'{"text": 5}', b'{"text": "\xff"}', b'{"number": NaN}', b'{"number": 1e999}',
        b'{"x": ' + 100_000 * b"[", b'{"x": ' + 100_000 * b"[" + 100_000 * b"]" + b"}", b'{"text": "\\ud8',
        b'{"number": ' + 5000 * b"9" + b"}",
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_value_is_one_error_of_one_line(data: bytes):
    with pytest.raises(Unreadable, match=r"\A.{1,200}\Z"):
        decode_json(data, Note)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (rb'{"text": "\ud800 a"}', r"\ud800 a"),
        (rb'{"text": "a\\ud800 \udcff"}', r"a\ud800 \udcff"),
        (rb'{"text": "\ud83d\ude00 \udcff\""}', "\N{GRINNING FACE} " + r'\udcff"'),
    ],
)
def test_halves_of_characters_become_text(data: bytes, text: str):
    assert decode_json(data, Note) == Note(text)


def test_fields_are_read_each_alone():
    assert decode_fields(b'{"text": [[[]]], "number": 3, "other": [1]}', Note) == Note(number=3)
    with pytest.raises(Unreadable):
        decode_fields(b'["text"]', Note)


def test_lines_of_curves_that_are_none_are_left_out():
    lines = [b'{"step": 1, "time_s": 1, "values": {}}', b'{"step": ' + 100_000 * b"[", b'{"values": {"\xff": 1}}', b""]
    assert [point.step for point in read_curves(b"\n".join([*lines, lines[0]]))] == [1, 1]
