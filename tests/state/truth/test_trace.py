"""The record of a training: which rows stay, and what a resume, a torn write and a full disk do to it."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.truth.contents import Contents
from allranks.state.truth.fingerprint import hash_numbers
from allranks.state.truth.parting import find_parting
from allranks.state.truth.trace import Trace
from allranks.state.truth.trace_file import (
    FOLDER,
    MOST_ROWS,
    TraceRow,
    is_recorded,
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


def test_batches_of_equal_data_have_one_number_whatever_they_share(tmp_path: Path) -> None:
    def number_of(name: str, batches: list[Any]) -> int:
        trace = Trace(tmp_path / name, Membership.spread(0, 1), ABOUT)
        trace.note(0, {})
        trace.batch(batches)
        return rows_of(tmp_path / name)[0].numbers["batch"]

    x, thing = torch.ones(3), Thing(torch.ones(3), "other")
    shared = number_of("shared", [(x, x, thing), (x, x, thing)])
    batches = [(torch.ones(3), torch.ones(3), Thing(torch.ones(3), "other")) for _ in range(2)]
    assert number_of("alone", batches) == shared
    assert number_of("less", [(x, thing), (x, x, thing)]) != shared


class Slotted:
    """A batch of a class without a __dict__."""

    __slots__ = ("path", "unset", "x")

    def __init__(self, x: Any) -> None:
        self.x, self.path = x, Path("a/b")


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        lambda x: {1: x, "1": torch.ones(3)},
        lambda x: {"1": torch.ones(3), 1: x},
        lambda x: {"a/b": x, "a": {"b": torch.ones(3)}},
        torch.Tensor.to_sparse,
        lambda x: torch.outer(x, x).to_sparse_csr(),
        lambda x: numpy.array([x.tolist(), "text"], dtype=object),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_batches_that_differ_anywhere_have_other_numbers_and_equal_ones_the_same(make: Any) -> None:
    def number_of(x: torch.Tensor) -> int:
        (found,) = Contents.of_batches([make(x)])
        return hash_numbers(found.numbers())

    assert number_of(torch.full((3,), 2.0)) == number_of(torch.full((3,), 2.0)) != number_of(torch.full((3,), 3.0))


def test_what_objects_of_the_standard_library_keep_beside_their_text_does_not_count() -> None:
    asked, fresh = Slotted(1), Slotted(1)
    hash(asked.path)  # which it keeps
    assert Contents.of({"batch": asked}).texts == Contents.of({"batch": fresh}).texts


def test_objects_that_refer_to_each_other_are_read_once() -> None:
    class Doc:
        def __init__(self) -> None:
            self.words = [Thing(torch.full((2,), at), self) for at in range(500)]

    found = Contents.of({"batch": [Doc()]})
    (texts,) = found.texts.values()
    assert (len(found.tensors), len(texts)) == (500, 500)
    assert {text.partition("=")[2] for text in texts} == {"batch/0"}
    ring: list[Any] = [1]
    ring.append({"ring": ring})
    assert len(Contents.of({"batch": ring}).texts["batch/numbers"]) < 50


def test_a_resume_cuts_what_lies_behind_its_step(tmp_path: Path) -> None:
    train(tmp_path, range(8), strike=5)
    train(tmp_path, range(5, 7))
    train(tmp_path / "undisturbed", range(7))
    assert [row.step for row in rows_of(tmp_path)] == [*range(7)]
    assert find_parting(read_record(tmp_path), read_record(tmp_path / "undisturbed")).until is None


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        ((b'"torch":"2.13"', b'"torch":"2.33"'), 5),  # the rows below tell where they began
        ((b'"since":5', b'"since":7'), 5),
        ((b" {", b" ("), 0),  # nothing of it is to be read
    ],
)
def test_a_damaged_object_cuts_what_lies_behind_its_step(damage: tuple[bytes, bytes], kept: int) -> None:
    first, second = ([TraceRow(step, {"a": step}, {"torch": torch}) for step in steps]
                     for torch, steps in (("2.12", range(20)), ("2.13", range(5, 8))))  # fmt: skip
    whole, other = to_bytes(first), to_bytes(second)
    assert parse_rows(whole + other) == [*first[:5], *second]
    assert parse_rows(whole + other.replace(*damage).replace(b"2.13", b"2.33")) == first[:kept]


def test_a_resume_is_told_with_its_first_row(tmp_path: Path) -> None:
    train(tmp_path, range(8), strike=5)
    trace = Trace(tmp_path, Membership.spread(0, 2), ABOUT)
    trace.note(5, {"model/w": 5})
    trace.batch([5])
    assert [row.step for row in rows_of(tmp_path)] == [*range(6)]


def test_rows_are_appended_between_two_saves(tmp_path: Path) -> None:
    trace = Trace(tmp_path, Membership.spread(0, 1), ABOUT)
    for step in range(4):
        trace.note(step, {"model/w": step}, is_saved=True)
        trace.batch([step])
        assert [row.step for row in rows_of(tmp_path)] == [*range(step + 1)]
    assert (tmp_path / FOLDER / "rank_00000.jsonl").read_bytes().count(b'"format"') == 1


def test_of_many_steps_those_have_rows_that_a_power_of_two_divides() -> None:
    steps = [step for step in range(64 * MOST_ROWS) if is_recorded(step)]
    for begin in (2**place for place in range(16)):
        assert 0 < sum(begin <= step < 2 * begin for step in steps) <= MOST_ROWS
    assert set(range(0, 64 * MOST_ROWS, 64)) <= {*steps}


def test_saves_have_rows_at_all_steps(tmp_path: Path) -> None:
    trace = Trace(tmp_path, Membership.spread(0, 1), ABOUT)
    for step in (4 * MOST_ROWS + 4, 4 * MOST_ROWS + 5, 4 * MOST_ROWS + 7):
        trace.note(step, {"model/w": step}, is_saved=step % 8 == 7)
        trace.batch([step])
    assert [row.step for row in rows_of(tmp_path)] == [4 * MOST_ROWS + 4, 4 * MOST_ROWS + 7]
    train(tmp_path, range(4 * MOST_ROWS + 5, 4 * MOST_ROWS + 7))
    assert [row.step for row in rows_of(tmp_path)] == [4 * MOST_ROWS + 4, 4 * MOST_ROWS + 5]


@pytest.mark.parametrize("cut", [2, 10, 40, 100])
def test_a_torn_write_costs_the_rows_that_it_tore(cut: int) -> None:
    rows = [TraceRow(step, {"part/model": step, "batch": -step}, {"torch": "2"}) for step in range(20)]
    data = to_bytes(rows)[:-cut]
    kept = parse_rows(data)
    assert kept == rows[: len(kept)]
    assert 20 - 1 - cut // 30 <= len(kept) < 20
    assert parse_rows(data + to_bytes(rows[-1:], rows[0])) == [*kept, rows[-1]]


def test_rows_below_a_damaged_object_do_not_count() -> None:
    first, second = ([TraceRow(step, {"a": step}, {"torch": torch}) for step in steps]
                     for torch, steps in (("2.12", (0, 1)), ("2.13", (2, 3))))  # fmt: skip
    data = to_bytes([*first, *second])
    assert parse_rows(data) == [*first, *second]
    assert parse_rows(data.replace(b"2.13", b"2.33")) == first
    assert parse_rows(data.replace(b"2.12", b"2.22")) == second
    assert parse_rows(data[:-1] + to_bytes(second[1:], second[0])) == [*first, *second]


def test_no_flipped_bit_gives_a_row_another_number_or_column() -> None:
    rows = [TraceRow(0, {"a": 1}, {}), TraceRow(1, {"a": 1, "b": 2}, {}), TraceRow(2, {"b": 2}, {})]
    data = to_bytes(rows)
    chance = random.Random(4)
    for _ in range(300):
        torn = bytearray(data)
        torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(7)
        assert all(row in rows for row in parse_rows(bytes(torn)))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rank_00000", b'{"format": 2, "columns": [], "about": {}} 5eed'),
        ("rank_00000.jsonl", b'{"format":3,"since":0}'),
        ("rank_00000.jsonl", b'{"format":5}'),
    ],
)
def test_another_version_is_refused_until_a_run_resumes_there(tmp_path: Path, name: str, line: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / name).write_bytes(b"%08x %s" % (zlib.crc32(line), line))
    with pytest.raises(UsageError, match="its record has no whole row of format 4, which this allranks reads"):
        read_record(tmp_path)
    train(tmp_path, range(5, 7))
    assert [row.step for row in rows_of(tmp_path)] == [5, 6]


def test_a_record_that_nobody_may_read_is_none_of_another_version(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "rank_00000.jsonl").mkdir(parents=True)
    assert read_record(tmp_path) == {}


def test_a_directory_that_takes_nothing_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file, where the directory should be")
    train(tmp_path, range(3))
    assert read_record(tmp_path) == {}
    (tmp_path / FOLDER).unlink()
    train(tmp_path, range(3))
    assert len(rows_of(tmp_path)) == 3


def test_a_batch_that_cannot_be_read_costs_its_number_only(tmp_path: Path) -> None:
    trace = Trace(tmp_path, Membership.spread(0, 1), ABOUT)
    trace.note(0, {"model/w": 1}, is_sharded=True)
    trace.batch([Odd()])
    trace.flush()
    assert rows_of(tmp_path)[0].about["is_sharded"]
    assert "part/model" in rows_of(tmp_path)[0].numbers
    assert "batch" not in rows_of(tmp_path)[0].numbers
