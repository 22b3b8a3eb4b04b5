"""A few hundred damaged inputs for each parser; `python tests/mutated/run.py` tries 100,000."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from . import run
from .mutate import MOST_BYTES, mutate
from .parsers import all_parsers

PARSERS = all_parsers()
EACH = 150
SLOW = {"run": 40, "page": 25, "cell": 80, "logs": 25}
"""Fewer inputs where one costs most, by the first word of the name."""


@pytest.fixture(autouse=True)
def deadlines() -> None:
    def too_long(signum: int, frame: object) -> None:
        raise run.TooLong

    for signum in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signum, too_long)


NAMES = [pytest.param(name, marks=pytest.mark.torch) if name == "state headers" else name for name in PARSERS]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_input_is_a_value_or_one_clear_line(tmp_path: Path, name: str):
    numbers = range(SLOW.get(name.partition(":")[0], EACH))
    result = run.try_parser(PARSERS[name], numbers, 3, tmp_path)
    assert [f"{fall.what}: {fall.data[:200]!r}" for fall in result.falls.values()] == []
    assert result.num_values + result.num_refused == len(numbers)


def test_inputs_depend_on_the_seed_alone_and_have_a_bound():
    sound = [b'{"a": [1, 2, {"b": "c"}]}']
    made = [mutate(random.Random(n), sound[0], others=sound, kind="json") for n in range(100)]
    assert made == [mutate(random.Random(n), sound[0], others=sound, kind="json") for n in range(100)]
    assert (len(set(made)) > 70, max(map(len, made)) <= MOST_BYTES) == (True, True)


def test_a_parser_that_falls_is_found_with_a_small_input(tmp_path: Path):
    def crash(data: bytes) -> int:
        return 1 // (b"9" not in data)

    parser = run.Parser("crash", lambda: [b"1 23456 78"], lambda _: crash)
    (fall,) = run.try_parser(parser, range(100), 1, tmp_path).falls.values()
    assert (fall.what.partition(" ")[0], fall.data) == ("ZeroDivisionError", b"9")


def test_a_parser_that_does_not_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def hang(data: bytes) -> None:
        while b"3" not in data:
            pass

    monkeypatch.setattr(run, "CPU_S", 0.05)
    monkeypatch.setattr(run, "_shrink", lambda parser, read, fall: fall.data)
    parser = run.Parser("hang", lambda: [b"0 1 2 3"], lambda _: hang)
    (fall,) = run.try_parser(parser, range(10), 1, tmp_path).falls.values()
    assert fall.what.startswith("TooLong")
