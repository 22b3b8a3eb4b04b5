"""How often a collective is repeated, what is skipped, and how the times of ranks become a row: pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allranks.comm.bench_table import COLLECTIVES, BenchRow
from allranks.join.collectives import (
    Limit,
    describe,
    estimate_s,
    find_obstacle,
    is_long,
    list_cases,
    to_row,
    weigh,
)  # fmt: skip

MIB = 1 << 20


def case(collective: str = "all_reduce", size_bytes: Any = MIB, in_flight: Any = 1) -> dict[str, Any]:
    return {"collective": collective, "size_bytes": size_bytes, "in_flight": in_flight}


def test_a_measurement_has_every_collective_and_all_reduces_as_ddp_makes_them() -> None:
    cases = list_cases(has_formats=True)
    assert {each["collective"] for each in cases} == {*COLLECTIVES}
    reduces = [(each["size_bytes"] / MIB, each["in_flight"]) for each in cases if each["collective"] == "all_reduce"]
    small, *others = reduces[:3], *reduces[3:]
    assert small == [(4 / 1024, 1), (64 / 1024, 1), (256 / 1024, 1)]  # as PowerSGD makes them
    exchanged = [each for each in cases if each["collective"] == "all_to_all" and each["in_flight"] > 1]
    assert exchanged == [case("all_to_all", MIB // 4, 8), case("all_to_all", MIB, 8)]  # as int8 makes them
    assert others == [(size, count) for count in (1, 8) for size in (0.5, 1, 2, 4, 8, 16, 32)]
    assert list_cases(bucket_sizes=[], collectives=["broadcast"], sizes=[8, 4]) == [
        case("broadcast", 4), case("broadcast", 8), case("barrier", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("took_s", "repetitions"), [(0.0, 100), (0.01, 50), (0.001, 100), (0.2, 2), (0.4, 2)], ids=str)
def test_a_case_is_repeated_for_its_share_of_the_time(took_s: float, repetitions: int) -> None:
    assert Limit(left_s=5.0, share=0.1, timeout_s=10.0, repeat=(2, 100)).choose_repetitions(took_s) == repetitions


@pytest.mark.parametrize(
    ("took_s", "left_s", "why"),
    [
        (0.3, 5.0, ""),
        (0.8, 5.0, "it takes about 2.4 s with its repetitions, and has 2 s"),
        (0.0, -1.0, ""),
        (0.001, -1.0, "it takes about 0.003 s with its repetitions, and has 0 s"),
        (2.0, 100.0, ""),
        (5.1, 100.0, "one takes about 5.1 s, and a collective times out after 10 s"),
    ],
    ids=["fits", "more than four shares", "unknown", "nothing is left", "long", "near its timeout"],
)
def test_what_takes_too_long_is_skipped_with_the_reason(took_s: float, left_s: float, why: str) -> None:
    assert Limit(left_s=left_s, share=0.1, timeout_s=10.0, repeat=(2, 100)).why_too_long(took_s) == why


def test_the_first_run_of_a_long_case_is_a_repetition() -> None:
    assert (is_long(0.9), is_long(1.1)) == (False, True)


def test_large_cases_get_more_of_the_time() -> None:
    assert [weigh(case(size_bytes=size, in_flight=count)) for size, count in ((1, 1), (4 * MIB, 1), (32 * MIB, 8))] == [
        1.0, 2.0, 16.0,
    ]  # fmt: skip


def row(collective: str, size_bytes: int, time_s: float, in_flight: int = 1) -> dict[str, Any]:
    return {"collective": collective, "size_bytes": size_bytes, "time_s": time_s, "in_flight": in_flight}


@pytest.mark.parametrize(
    ("rows", "estimated_s"),
    [
        ([], 0.0),
        ([row("all_gather", 4096, 0.01)], 0.0),
        ([row("all_gather", MIB, 0.01), row("all_gather", 2 * MIB, 0.015)], 0.06),
        ([row("all_reduce", MIB, 0.02), row("all_gather", 4096, 0.01)], 0.16),
        ([row("all_reduce", MIB, 0.02), row("all_gather", MIB, 0.03)], 0.24),
    ],
    ids=["nothing known", "small ones say nothing", "the fastest", "of another collective", "its own first"],
)
def test_the_time_of_a_case_is_estimated_by_rows_before(rows: list[dict[str, Any]], estimated_s: float) -> None:
    assert estimate_s(case("all_gather", 8 * MIB), rows) == pytest.approx(estimated_s)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (case("all_sum"), "no such collective: expected one of all_reduce, "),
        (case(size_bytes=3), "size_bytes = 3: expected at least 4, for 3 ranks"),
        (case("all_gather", 8), "size_bytes = 8: expected at least 12, for 3 ranks"),
        (case(size_bytes=-1), "size_bytes = -1: expected at least 4, for 3 ranks"),
        (case(size_bytes="1M"), "size_bytes = 1M: expected at least 4, for 3 ranks"),
        (case(in_flight=0), "in_flight = 0: expected at least 1"),
        (case("barrier", 0), ""),
        (case("all_gather", 12), ""),
    ],
    ids=str,
)
def test_a_case_that_no_group_can_run_is_told(wrong: dict[str, Any], why: str) -> None:
    found = find_obstacle(wrong, 3)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_send_and_receive_need_two_ranks() -> None:
    assert find_obstacle(case("send_recv"), 1) == "needs at least two ranks"


def test_each_repetition_counts_as_its_slowest_rank_saw_it() -> None:
    took_s = [[0.8, 0.2, 0.3, 0.4], [0.1, 0.6, 0.3, 0.2]]  # slowest: 0.8, 0.6, 0.3, 0.4
    found = msgspec.convert(to_row(case(in_flight=2), 2, took_s, 0), BenchRow)
    assert (found.time_s, found.p95_s, found.best_s, found.repetitions) == (0.25, 0.4, 0.15, 4)
    assert (found.size_bytes, found.count, found.redop, found.root, found.in_flight) == (MIB, MIB // 4, "sum", -1, 2)


@pytest.mark.parametrize(
    ("collective", "size_bytes", "count", "redop", "root"),
    [
        ("all_gather", 96, 8, "none", -1),
        ("reduce_scatter", 96, 8, "sum", -1),
        ("all_to_all", 96, 8, "none", -1),
        ("broadcast", 100, 25, "none", 0),
        ("send_recv", 100, 25, "none", -1),
        ("barrier", 0, 0, "none", -1),
    ],
)
def test_sizes_and_counts_are_those_of_nccl_tests(
    collective: str, size_bytes: int, count: int, redop: str, root: int
) -> None:
    size = 0 if collective == "barrier" else 100
    found = msgspec.convert(to_row(case(collective, size), 3, [[1.0]] * 3, None), BenchRow)
    assert (found.size_bytes, found.count, found.redop, found.root) == (size_bytes, count, redop, root)


def test_a_case_is_described_in_a_few_words() -> None:
    cases = (case(size_bytes=MIB // 2, in_flight=8), case("all_gather", 4096), case("broadcast", 4), case("barrier", 0))
    assert [describe(each) for each in cases] == [
        "8 x all_reduce of 0.5 MiB", "all_gather of 4 KiB", "broadcast of 4 B", "barrier",
    ]  # fmt: skip
