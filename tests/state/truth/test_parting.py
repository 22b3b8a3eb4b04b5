"""Where two records part: the interval, what is named, and what is not compared."""

from __future__ import annotations

from typing import Any

from allranks.state.truth.parting import Differing, Parting, Record, find_parting, find_unlike
from allranks.state.truth.trace_file import TraceRow

STEPS = (0, 1, 2, 4, 8, 16)


def record(num_ranks: int = 3, *, steps: tuple[int, ...] = STEPS, **about: Any) -> dict[int, list[TraceRow]]:
    about = {"world_size": num_ranks, **about}
    own = {rank: {"batch": 10 + rank, "generator/torch": 20 + rank} for rank in range(num_ranks)}
    own[0]["part/model"] = 30
    return {
        rank: [TraceRow(step, {name: number + step for name, number in own[rank].items()}, about) for step in steps]
        for rank in range(num_ranks)
    }


def struck(found: dict[int, list[TraceRow]], column: str, *, rank: int = 0, since: int = 0) -> Record:
    changed = [
        TraceRow(row.step, {**row.numbers, column: row.numbers.get(column, 0) + (row.step >= since)}, row.about)
        for row in found[rank]
    ]
    return {**found, rank: changed}


def part(first: Record, second: Record) -> Parting:
    found = find_parting(first, second)
    assert (found.until, found.since) == (find_parting(second, first).until, find_parting(second, first).since)
    return found


def test_equal_records_have_no_difference_and_say_how_far() -> None:
    found = part(record(), record())
    assert (found.until, found.last, found.num_steps) == (None, 16, 6)


def test_ranks_without_rows_are_told_as_not_compared() -> None:
    whole, torn = record(), record()
    torn[1], torn[2] = torn[1][:4], []
    found = part(whole, torn)
    assert (found.until, found.num_steps) == (None, 6)
    assert found.left_out == "generators and batches of ranks 1-2, at steps without a row of theirs"


def test_the_interval_and_the_part_are_named() -> None:
    found = part(record(), struck(record(), "part/model", since=3))
    assert (found.since, found.until) == (2, 4)
    assert found.differing == (Differing("part/model", (0,)),)


def test_a_generator_that_moved_on_is_named_with_its_rank() -> None:
    found = part(record(), struck(record(), "generator/torch", rank=2, since=8))
    assert (found.since, found.until, found.differing) == (4, 8, (Differing("generator/torch", (2,)),))
    assert found.differing[0].describe(3) == "generator torch (rank 2)"


def test_a_generator_that_begins_elsewhere_is_named_once_something_else_differs() -> None:
    unseeded = struck(record(), "generator/torch")
    found = part(record(), unseeded)
    assert (found.until, found.differing) == (None, (Differing("generator/torch", (0,)),))
    found = part(record(), struck(dict(unseeded), "part/model", since=4))
    assert [own.column for own in found.differing] == ["generator/torch", "part/model"]


def test_a_generator_that_never_moves_is_not_compared() -> None:
    records = [
        {0: [TraceRow(step, {"part/model": step, "generator/python": number}, {"world_size": 1}) for step in STEPS]}
        for number in (1, 2)
    ]
    assert part(*records) == Parting(num_steps=6, last=16, num_ranks=1)


def test_only_common_steps_are_compared() -> None:
    found = part(record(steps=(0, 1, 2, 64, 96)), struck(record(steps=(0, 32, 64, 80)), "batch", rank=1, since=32))
    assert (found.since, found.until, found.num_steps) == (0, 64, 2)
    assert part(record(steps=(1, 3)), record(steps=(2, 4))).num_steps == 0


def test_of_another_number_of_ranks_only_parts_are_compared() -> None:
    found = part(record(2), struck(record(3), "batch"))
    assert (found.until, found.last) == (None, 16)
    assert "only parts are compared" in found.left_out
    assert part(record(2), struck(record(3), "part/model", since=9)).until == 16
    assert part(record(2, is_sharded=True), record(3, is_sharded=True)).num_steps == 0
    resumed = {rank: [*record(2)[rank][:3], *record(3)[rank][3:]] for rank in (0, 1)}
    found = part(record(2), struck(resumed, "part/model", since=2))
    assert (found.since, found.until) == (1, 2)


def test_rows_of_ranks_that_a_smaller_run_left_behind_do_not_count() -> None:
    small = record(2)
    small[2] = record(3)[2]
    assert part(small, struck({**record(2), 2: record(3)[2]}, "batch", rank=2)).until is None


def test_what_else_differs_is_named() -> None:
    first = record(2, torch="2.12.0", environment={"NCCL_ALGO": "Ring"}, hardware="H100")
    second = record(2, torch="2.13.0", environment={}, hardware="H100")
    assert find_unlike(first, second) == [("NCCL_ALGO", "Ring", "unset"), ("torch", "2.12.0", "2.13.0")]
    second = {**first, 1: record(2, hardware="A100", torch="2.12.0")[1]}
    assert find_unlike(first, second) == [("hardware of rank 1", "H100", "A100")]


def test_of_a_resumed_run_what_differs_is_that_of_the_process_in_which_the_runs_parted() -> None:
    first = record(1, arguments="--lr 1")
    second = {0: [*record(1, steps=(0, 4), arguments="--lr 2")[0], *record(1, steps=(8, 16), arguments="--lr 1")[0]]}
    assert find_unlike(first, second, 4) == [("arguments", "--lr 1", "--lr 2")]
    assert find_unlike(first, second, 8) == find_unlike(first, second) == []
