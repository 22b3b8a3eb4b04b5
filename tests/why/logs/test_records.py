"""Logs whose lines are JSON objects: text, time and writer, with the numbers of the lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.why.logs.line import read_line
from allranks.why.logs.log_events import Logs
from allranks.why.logs.records import find_json
from allranks.why.logs.sources import Source

BARE = Source("-", None, None, None, None, None, 0)
AT = datetime(2026, 3, 25, 10, 34, 7, 530000, tzinfo=UTC).timestamp()
DOCKER = (
    '{"log":"Traceback (most recent call last):\\n","stream":"stderr","time":"2026-03-25T10:34:07.53Z"}\n'
    '{"log":"  File \\"a.py\\", line 3, in \\u003cm\\u003e\\n","stream":"stderr","time":"2026-03-25T10:34:07.53Z"}\n'
    '{"log":"    if \\"CUDA out of memory\\" in x: pass\\n","stream":"stderr","time":"2026-03-25T10:34:07.53Z"}\n'
    '{"log":"ValueError: bad shard 17\\n","stream":"stderr","time":"2026-03-25T10:34:07.53Z"}\n'
)

LINES = [
    # line, text, what it tells
    ('{"log":"\\u003cx\\u003e \\"y\\"\\n","stream":"stderr","time":"2026-03-25T10:34:07.53Z"}', '<x> "y"', {}),
    ('{"log":"x\\n","stream":"stderr","attrs":{"tag":"t"},"time":"2026-03-25T10:34:07.53Z"}', "x", {}),
    ('{"ts":1774434847.53,"level":"error","msg":"x","rank":3,"local_rank":1,"host":"gpu42","pid":77}', "x",
     {"rank": 3, "local_rank": 1, "node": "gpu42", "pid": 77}),
    ('{"__REALTIME_TIMESTAMP":"1774434847530000","_HOSTNAME":"gpu42","MESSAGE":"x","_PID":"362"}', "x",
     {"node": "gpu42", "pid": 362}),
    ('{"labels":{"node_name":"gpu42","pod":"w-1"},"line":"x","timestamp":"2026-03-25T10:34:07.53Z"}', "x",
     {"node": "gpu42", "pod": "w-1"}),
    ('{"@timestamp":"2026-03-25T10:34:07.530Z","log":"x","kubernetes":{"pod_name":"w-1","host":"gpu42",'
     '"container_name":"main"}}', "x", {"node": "gpu42", "pod": "w-1"}),
    ('{"asctime":"2026-03-25 10:34:07,530","message":"x","hostname":"a b] rank=9"}', "x", {"node": "abrank9"}),
    ('{"time":"2026-03-25T10:34:07.53Z","log":"{\\"msg\\":\\"x\\",\\"level\\":\\"info\\"}\\n"}', "x", {}),
]  # fmt: skip
WHO = ("node", "pod", "rank", "local_rank", "pid")


@pytest.mark.parametrize(("line", "text", "who"), LINES, ids=[case[0][:40] for case in LINES])
def test_an_object_is_text_time_and_writer(line: str, text: str, who: dict[str, object]) -> None:
    data = f"{line}\n".encode()
    decode = find_json(data)
    assert decode is not None
    rendered = decode(data)
    assert rendered.count(b"\n") == 1
    found = read_line(rendered, BARE, 1)
    assert found.text == text
    assert {name: getattr(found, name) for name in WHO if getattr(found, name) is not None} == who
    assert (found.time, found.has_year) == (pytest.approx(AT, abs=1e-5), True)


@pytest.mark.parametrize(
    "data",
    [
        "plain\n{}\n", "{'loss': 1.2}\n", '{"loss": 1.2}\n', '{"message": {"message": "x"}}\n', "{\n", "[1]\n", "",
        '{"msg": "x"}\nplain\nplain\n', '{"msg": "x"}\n{"msg": 3}\n', '{"msg": "' + "x" * 100_000 + '"}\n',
        '{"msg":' * 3000,
    ],
)  # fmt: skip
def test_other_logs_are_read_as_they_are(data: str) -> None:
    assert find_json(data.encode()) is None


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, f'"{"9" * 400}"', "1e308", "true"])
def test_a_number_that_is_no_time_is_none(number: str) -> None:
    data = f'{{"ts":{number},"msg":"x"}}'.encode()
    decode = find_json(data)
    assert decode is not None
    assert decode(data) == b"[record] x"


def test_a_traceback_in_objects_is_read_as_one_and_keeps_its_lines(
    read: Callable[[dict[str, str]], Logs],
) -> None:
    logs = read({"0a1b-json.log": DOCKER})
    assert [(event.line.number, event.kind) for event in logs.events] == [
        (1, "traceback"),
        (2, "frame"),
        (4, "exception"),
    ]
    assert all(event.line.time == pytest.approx(AT) for event in logs.events)
    assert logs.tails[0].num_lines == 4


def test_an_error_and_its_traceback_beside_the_text_are_of_the_same_line(
    read: Callable[[dict[str, str]], Logs],
) -> None:
    first = json.dumps({"msg": "start", "rank": 5})
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\nValueError: bad shard 17'
    failed = {"msg": "step failed", "rank": 5, "exc_info": traceback}
    logs = read({"app.log": f"{first}\n{json.dumps(failed)}\nnot JSON\n"})
    assert [(event.line.number, event.kind, event.line.rank) for event in logs.events] == [
        (2, "traceback", 5), (2, "frame", 5), (2, "exception", 5),
    ]  # fmt: skip
    assert logs.tails[0].num_lines == 3


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_is_a_line(text: str, name: str) -> None:
    data = (json.dumps({"msg": text, "host": name}) + "\n").encode()
    decode = find_json(data)
    assert decode is not None
    rendered = decode(data)
    assert rendered.count(b"\n") == 1
    parts = rendered.removesuffix(b"\n").split(b"\r")
    assert all(part.startswith(b"[record") for part in parts) or "\r" in text


def test_a_path_of_a_log_of_objects(tmp_path: Path, read: Callable[[dict[str, str]], Logs]) -> None:
    """A rank that the path tells is the rank of its lines."""
    logs = read({"rank_2.log": '{"msg": "ValueError: x"}\n'})
    assert [(event.kind, event.line.rank) for event in logs.events] == [("exception", 2)]
