"""Are bytes that others wrote a value, or one error?"""

from __future__ import annotations

import subprocess
import sys

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


_TURNS = """
import threading, time, msgspec
from allranks.model.foreign import decode_json

def slow():
    time.sleep(0.05)
    return int

class Inner(msgspec.Struct):
    number: "slow()"

class Outer(msgspec.Struct):
    inner: Inner

def decode():
    print(decode_json(b'{"inner": {"number": 1}}', Outer))

threads = [threading.Thread(target=decode) for _ in range(3)]
[thread.start() for thread in threads]
"""


def test_threads_that_use_a_type_for_the_first_time_take_turns():
    """Else msgspec ends the process with SIGSEGV: the second thread finds a type without fields."""
    done = subprocess.run([sys.executable, "-c", _TURNS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, 3 * "Outer(inner=Inner(number=1))\n")
