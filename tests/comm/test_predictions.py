"""Is a step as long as `allranks advise` predicts? Jobs of the lab, and what `allranks bench` measured before them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec
import pytest

from allranks.cli.advise import guess_step
from allranks.comm.advise import advise
from allranks.comm.bench_table import BenchTable

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
PARAMETERS, FORWARD_MS, BACKWARD_MS = 13_100_000 // 4, 50.0, 100.0
"""Of the model of benchmarks/slow_network_worker.py."""
TABLES = {(each["nodes"], each["rate"]): each["table"] for each in json.loads(
    (EVIDENCE / "slow_network_tables.json").read_text()
)}  # fmt: skip
BOUNDS = """
Mbit/s        method   predicted step time is off by at most
   100             *   10 %
   500             *   10 %
  1000          bf16   15 %
  1000             *   10 %
     0             *   25 %      the links are as fast as two cores make them
"""
IN_ORDER = (100, 500)
"""Mbit/s at which methods that are a tenth apart must come in the measured order."""


def bound(rate: int, method: str) -> float:
    lines = [line.split() for line in BOUNDS.strip().splitlines()[1:]]
    return next(int(words[2]) / 100 for words in lines if int(words[0]) == rate and words[1] in (method, "*"))


def measured(nodes: int, rate: int) -> dict[str, float]:
    """Milliseconds of a step, the median of the rounds, by method."""
    times = defaultdict(list)
    for each in json.loads((EVIDENCE / "slow_network.json").read_text()):
        if (each["nodes"], each["rate"], each["switches"], each["two"]) == (nodes, rate, 1, False):
            times[each["method"]].append(each["ms"])
    return {method: median(values) for method, values in times.items()}


def predicted(nodes: int, rate: int, compute_ms: float) -> dict[str, float]:
    table = msgspec.convert(TABLES[nodes, rate], BenchTable)
    found = advise(table, guess_step(PARAMETERS, compute_ms, FORWARD_MS, BACKWARD_MS))
    return {each.method.name: each.step_s * 1e3 for each in (*found.offered, *found.refused)}


@pytest.mark.parametrize(("nodes", "rate"), TABLES)
def test_a_step_takes_as_long_as_predicted(nodes: int, rate: int) -> None:
    truth = measured(nodes, rate)
    found = predicted(nodes, rate, truth.pop("compute"))
    off = {method: round(found[method] / ms, 2) for method, ms in truth.items()}
    assert {"torch", "equal", "s.ddp", "bf16", "int8", "powersgd"} == off.keys()
    assert {method: ratio for method, ratio in off.items() if abs(ratio - 1) > bound(rate, method)} == {}


@pytest.mark.parametrize(("nodes", "rate"), [each for each in TABLES if each[1] in IN_ORDER])
def test_methods_that_are_a_tenth_apart_come_in_the_measured_order(nodes: int, rate: int) -> None:
    truth = measured(nodes, rate)
    found = predicted(nodes, rate, truth.pop("compute"))
    apart = [(a, b) for a, a_ms in truth.items() for b, b_ms in truth.items() if 1.1 * a_ms <= b_ms]
    assert apart
    assert [(a, b) for a, b in apart if found[a] >= found[b]] == []
