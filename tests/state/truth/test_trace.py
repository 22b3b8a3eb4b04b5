"""The record of a training: which rows stay, and what a resume, a torn write and a full disk do to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.model.membership import Membership
from allranks.state.truth.parting import find_parting
from allranks.state.truth.trace import Trace
from allranks.state.truth.trace_file import (
    FOLDER,
    MOST_ROWS,
    OtherFormatError,
    TraceRow,
    parse_rows,
    read_record,
    to_bytes,
)

pytestmark = pytest.mark.torch

ABOUT = {"script": "train.py", "text": "5eed", "arguments": "", "torch": "2.13.0"}


@dataclass
class Thing:
    """A batch of a class of the script."""

    x: torch.Tensor
    other: Any = field(default_factory=object)


class Odd:
    """A batch that cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def train(directory: Path, steps: range, *, rank: int = 0, num_ranks: int = 2, seed: int = 1, strike: int = -1) -> None:
    trace = Trace(directory, Membership.spread(rank, num_ranks), ABOUT)
    for step in steps:
        torch.manual_seed(seed * 1000 + step)
        trace.note(step, {"model/w": step + 7 * (step >= strike >= 0), "model/v": 5, "optimizer/m": 3})
        trace.batch([(torch.full((2,), step), Thing(torch.ones(3)))])
    trace.flush()


def rows_of(directory: Path, rank: int = 0) -> list[TraceRow]:
    return read_record(directory)[rank]


def test_rank_0_records_parts_and_each_rank_its_generators_and_batch(tmp_path: Path) -> None:
    for rank in (0, 1):
        train(tmp_path, range(3), rank=rank)
    own = {"batch", "generator/python", "generator/torch"}
    columns = [{name for name in rows_of(tmp_path, rank)[1].numbers if name != "generator/numpy"} for rank in (0, 1)]
    assert columns == [own | {"part/model", "part/optimizer"}, own]
    assert [row.step for row in rows_of(tmp_path)] == [0, 1, 2]
    assert rows_of(tmp_path)[0].about["world_size"] == 2


def test_equal_runs_have_equal_rows_also_where_batches_are_objects(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, range(5))
    parting = find_parting(read_record(tmp_path / "a"), read_record(tmp_path / "b"))
    assert (parting.until, parting.last, parting.num_steps) == (None, 4, 5)


def test_a_resume_cuts_what_lies_behind_its_step(tmp_path: Path) -> None:
    train(tmp_path, range(8), strike=5)
    train(tmp_path, range(5, 7))
    train(tmp_path / "undisturbed", range(7))
    assert [row.step for row in rows_of(tmp_path)] == [*range(7)]
    assert find_parting(read_record(tmp_path), read_record(tmp_path / "undisturbed")).until is None


def test_rows_are_appended_between_two_saves(tmp_path: Path) -> None:
    trace = Trace(tmp_path, Membership.spread(0, 1), ABOUT)
    for step in range(4):
        trace.note(step, {"model/w": step}, is_saved=True)
        trace.batch([step])
        assert [row.step for row in rows_of(tmp_path)] == [*range(step + 1)]
    assert (tmp_path / FOLDER / "rank_00000").read_bytes().count(b'"format"') == 1


def test_of_too_many_rows_every_other_one_goes() -> None:
    from allranks.state.truth.trace_file import thin

    rows = [TraceRow(step, {"part/model": step}, {}) for step in range(0, 6 * MOST_ROWS, 2)]
    steps = [row.step for row in thin(rows)]
    assert steps == [*range(0, 6 * MOST_ROWS, 4 * 2)][: len(steps)]
    assert MOST_ROWS / 2 < len(steps) <= MOST_ROWS


def test_long_runs_are_thinned_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.state.truth.trace_file.MOST_ROWS", 8)
    train(tmp_path, range(21))
    assert [row.step for row in rows_of(tmp_path)] == [0, 4, 8, 12, 16, 18, 20]


@pytest.mark.parametrize("cut", [2, 10, 40, 100])
def test_a_torn_write_costs_the_rows_that_it_tore(cut: int) -> None:
    rows = [TraceRow(step, {"part/model": step, "batch": -step}, {"torch": "2"}) for step in range(20)]
    data = to_bytes(rows)
    kept = parse_rows(data[:-cut])
    assert [row.step for row in kept] == [*range(len(kept))]
    assert 20 - 1 - cut // 40 <= len(kept) < 20
    assert all(row.numbers["part/model"] == row.step for row in kept)


def test_no_flipped_bit_gives_a_row_another_number_or_column() -> None:
    rows = [TraceRow(0, {"a": 1}, {}), TraceRow(1, {"a": 1, "b": 2}, {}), TraceRow(2, {"b": 2}, {"torch": "2"})]
    data = to_bytes(rows)
    chance = random.Random(4)
    for _ in range(300):
        torn = bytearray(data)
        torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(7)
        assert all(row in rows for row in parse_rows(bytes(torn)))


def test_another_version_is_refused() -> None:
    from allranks.state.truth import trace_file

    line = trace_file._with_crc('{"format": 3, "about": {}}')
    with pytest.raises(OtherFormatError, match="format 3"):
        parse_rows(line.encode())


def test_a_record_of_another_version_begins_anew_and_one_rank_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from allranks.state.truth import trace_file

    (tmp_path / FOLDER).mkdir()
    for rank in (0, 1):
        line = trace_file._with_crc('{"format": 1, "about": {}}')
        (tmp_path / FOLDER / trace_file.file_name(rank)).write_text(line)
        train(tmp_path, range(4, 6), rank=rank)
    assert [[row.step for row in rows_of(tmp_path, rank)] for rank in (0, 1)] == [[4, 5], [4, 5]]
    assert capsys.readouterr().err == (
        "allranks: the record for `allranks diff` begins anew at step 4: the steps before have format 1, this "
        "allranks reads format 2\n"
    )


def test_a_directory_that_takes_nothing_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file, where the directory should be")
    train(tmp_path, range(3))
    assert read_record(tmp_path) == {}
    (tmp_path / FOLDER).unlink()
    train(tmp_path, range(3))
    assert len(rows_of(tmp_path)) == 3


def test_a_batch_that_cannot_be_read_costs_its_number_only(tmp_path: Path) -> None:
    trace = Trace(tmp_path, Membership.spread(0, 1), ABOUT)
    trace.note(0, {"model/w": 1})
    trace.batch([Odd()])
    trace.flush()
    assert "part/model" in rows_of(tmp_path)[0].numbers
    assert "batch" not in rows_of(tmp_path)[0].numbers
