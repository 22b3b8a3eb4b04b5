"""Does a measurement count wrong elements, and go on where torch lacks a collective? One rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allranks.join.collectives import list_cases, measure

pytestmark = pytest.mark.torch


@pytest.fixture
def dist() -> Iterator[Any]:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed
    distributed.destroy_process_group()


def lines_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def agree(what: str, mine: dict[str, Any], by_s: float, decide: Any) -> dict[str, Any]:
        assert "error" not in mine
        return dict(decide([mine]))

    lines: list[dict[str, Any]] = []
    work = {"backend": "gloo", "rank": 0, "names": ["n1"], "cases": cases, "budget_s": 5.0, "repeat": [2, 2]}
    measure(work, agree, lines.append, timeout_s=5.0)
    return lines


def test_wrong_elements_are_counted_in_all_that_are_in_flight(dist: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def spoil(tensor: Any, **options: Any) -> Any:
        tensor[:3] += 1
        return real(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", spoil)
    cases = list_cases(bucket_sizes=[400], collectives=["broadcast"], sizes=[400])
    rows = [line["row"] for line in lines_of(cases)]
    assert [(row["collective"], row["in_flight"], row["wrong"]) for row in rows] == [
        ("all_reduce", 1, 3), ("all_reduce", 8, 24), ("broadcast", 1, 0), ("barrier", 1, None),
    ]  # fmt: skip


def test_a_collective_that_torch_lacks_is_skipped_with_its_words(dist: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*tensors: Any, **options: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support _reduce_scatter_base")

    monkeypatch.setattr(dist, "reduce_scatter_tensor", lack)
    cases = list_cases(bucket_sizes=[], collectives=["reduce_scatter", "broadcast"], sizes=[400])
    skipped, *rows = lines_of(cases)
    assert skipped == {"skipped": cases[0], "why": "ProcessGroupGloo does not support _reduce_scatter_base"}
    assert [line["row"]["collective"] for line in rows] == ["broadcast", "barrier"]
