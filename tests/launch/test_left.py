"""What counts of what a worker left behind: error files and cells of all kinds in, fields of an end out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell
from allranks.guard.node.activity import Output
from allranks.launch.last_words import read_left, read_tail
from allranks.launch.worker_end import Left

DEEP = 100_000 * "["


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell.create()
    made.claim()
    yield made
    made.close()


def left(folder: Path, cell: Cell) -> Left:
    return read_left(Folder.at(folder), "error.json", "exit.json", cell)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", ["error.json", "exit.json"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "directory", "1 TB", "2 MB", "deep", "junk"])
def test_a_file_that_is_none_of_ours_counts_as_not_left(tmp_path: Path, cell: Cell, name: str, kind: str):
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "directory":
        path.mkdir()
    elif kind == "1 TB":
        path.touch()
        os.truncate(path, 10**12)
    else:
        path.write_text({"2 MB": json.dumps({"message": 2_000_000 * "x"}), "deep": DEEP, "junk": "\xff{"}[kind])
    assert left(tmp_path, cell) == Left()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"message": "KeyError: 3"}', {"message": "KeyError: 3", "before": ()}),
        ('{"message": {"message": "KeyError: 3", "extraInfo": ["a"]}}', {"message": "KeyError: 3", "before": ()}),
        (
            '{"message": {"message": "x", "extraInfo": {"py_callstack": "T", "time_s": "now", "before": ["y"]}}}',
            {"message": "x", "traceback": "T", "before": ("y",)},
        ),
        ('{"message": {"message": "x", "extraInfo": {"time_s": 1e300, "python": 3, "before": {"a": 1}}}}', None),
        ('{"message": {"message": "x", "extraInfo": ' + DEEP + "}}", {}),
        ('{"message": {"message": 7, "extraInfo": {}}}', {}),
        ('{"message": ""}', {}),
        ("[]", {}),
    ],
    ids=range(8),
)
def test_of_an_error_file_counts_what_has_its_type(tmp_path: Path, cell: Cell, text: str, expected):
    (tmp_path / "error.json").write_text(text)
    error = dict(left(tmp_path, cell).error)
    assert error.pop("time_s", 1e9) < 1e10  # of the file, where it does not say
    assert error == ({"message": "x", "before": ()} if expected is None else expected)


@pytest.mark.parametrize("exit_code", ["1", "true", "-9", "256", "1e0", "null", "9" * 5000])
def test_an_exit_that_no_process_can_have_is_none(tmp_path: Path, cell: Cell, exit_code: str):
    (tmp_path / "exit.json").write_text(f'{{"exit_code": {exit_code}, "time_s": 3, "before": []}}')
    found = left(tmp_path, cell).exit
    assert (found is not None and found.exit_code) == (exit_code == "1")


def test_a_cell_with_junk_has_no_last_words(tmp_path: Path, cell: Cell):
    for data in (DEEP.encode()[:60_000], b"\xff", b"[]", b'{"failed": 3, "message": {}, "threads": [1]}'):
        assert cell.raised(data)
        assert cell.last_words(data)
        assert left(tmp_path, cell) == Left()


def test_long_texts_are_cut_and_the_whole_cut_is_said(tmp_path: Path, cell: Cell):
    text = "ValueError: " + 50_000 * "x" + "\n... 49.9 MB cut ...\n" + 50_000 * "y"
    told = {"message": text, "extraInfo": {"py_callstack": text, "before": 99 * [3000 * "z"]}}
    (tmp_path / "error.json").write_text(json.dumps({"message": told}))
    error = left(tmp_path, cell).error
    assert (len(error["message"]) <= 8000, len(error["traceback"]) <= 32_000) == (True, True)
    assert "\n... 50.0 MB cut ...\n" in error["message"]
    assert (len(error["before"]), max(map(len, error["before"])) <= 2000) == (16, True)


def test_the_tail_of_a_file_with_a_hole_has_no_zeros(tmp_path: Path):
    path = tmp_path / "rank_0.err"
    path.write_text("line\n")
    os.truncate(path, 10**12)
    stderr = Output(Folder.at(tmp_path), path.name)
    assert read_tail(stderr) is None
    with path.open("ab") as file:
        file.write(b"last line\n")
    assert read_tail(stderr) == "last line"
