"""Is a step as long as `allranks advise` predicts? Jobs of the lab, and what `allranks bench` measured before them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import pytest

from allranks.comm.advise import StepProfile, advise
from allranks.comm.bench_table import BenchTable

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
STEP = StepProfile(
    tensor_bytes=(4 * 399 * 256,) * 32,
    forward_s=0.050,
    backward_s=0.100,
    low_rank_bytes=4 * 4 * (399 + 256) * 32,
    has_vectors=False,
)
"""Of benchmarks/slow_network_worker.py, as `allranks advise --measure` reads it."""
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
    found = advise(table, replace(STEP, other_s=compute_ms / 1e3 - STEP.compute_s))
    return {each.method.name: each.step_s * 1e3 for each in (*found.offered, *found.refused)}


@pytest.mark.parametrize(("nodes", "rate"), TABLES)
def test_a_step_takes_as_long_as_predicted(nodes: int, rate: int) -> None:
    truth = measured(nodes, rate)
    found = predicted(nodes, rate, truth.pop("compute"))
    off = {method: found[method] / ms for method, ms in truth.items()}
    assert {"torch", "equal", "s.ddp", "bf16", "int8", "powersgd"} == off.keys()
    assert {method: ratio for method, ratio in off.items() if abs(ratio - 1) > bound(rate, method)} == {}


@pytest.mark.parametrize(("nodes", "rate"), [each for each in TABLES if each[1] in IN_ORDER])
def test_methods_that_are_a_tenth_apart_come_in_the_measured_order(nodes: int, rate: int) -> None:
    truth = measured(nodes, rate)
    found = predicted(nodes, rate, truth.pop("compute"))
    apart = [(a, b) for a, a_ms in truth.items() for b, b_ms in truth.items() if 1.1 * a_ms <= b_ms]
    assert apart
    assert [(a, b) for a, b in apart if found[a] >= found[b]] == []
