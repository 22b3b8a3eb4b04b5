"""benchmarks/slow_network.py goes on where it was interrupted, and keeps whole sets only."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SETS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "slow_network_sets.py"))


def round_of(number: int, *, nodes: int = 2, rate: int = 100) -> list[dict[str, Any]]:
    return [{"nodes": nodes, "rate": rate, "round": number, "method": name, "ms": 1.0} for name in ("torch", "bf16")]


def test_a_set_is_complete_with_its_last_round(tmp_path: Path) -> None:
    sets = SETS["Sets"](tmp_path / "kept" / "plain.json", "key", 2)
    sets.add(round_of(0))
    sets.add(round_of(0, rate=500))
    assert sets.complete(2, 100) == []
    sets.add(round_of(1))
    assert sets.complete(2, 100) == [*round_of(0), *round_of(1)]
    assert sets.complete(2, 500) == sets.complete(4, 100) == []


@pytest.mark.parametrize(("key", "goes_on"), [("key", True), ("other options or code", False)])
def test_what_was_interrupted_goes_on_with_the_same_options_and_code(key: str, goes_on: bool, tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    first = SETS["Sets"](path, "key", 2)
    first.tables[2, 100] = {"rows": []}
    first.add(round_of(0))
    again = SETS["Sets"](path, key, 2)
    assert [again.has(2, 100, number) for number in (0, 1)] == [goes_on, False]
    assert again.tables == ({(2, 100): {"rows": []}} if goes_on else {})
    again.add(round_of(1))
    assert bool(again.complete(2, 100)) is goes_on
    again.finish()
    assert not path.exists()


def test_a_set_takes_the_place_of_an_older_one_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps([*round_of(0), *round_of(0, rate=500), *round_of(0, nodes=4)]))
    fresh = round_of(7)
    SETS["replace_set"](path, fresh, "nodes", "rate")
    assert json.loads(path.read_text()) == [*round_of(0, rate=500), *round_of(0, nodes=4), *fresh]
    assert [found.name for found in tmp_path.iterdir()] == ["figures.json"]
