"""`allranks watch` names what was planted in jobs that allranks did not start: ten faults, spread over five launchers.

Several faults share a job where they can be undone, so that the ten need five jobs. `python -m benchmarks.watch` plays
each fault under each launcher.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.watch.faults import FAULTS, Named
from benchmarks.watch.jobs import LAUNCHERS
from benchmarks.watch.score import Truth, judge
from benchmarks.watch.stage import Result, play_apart

from allranks.lab.lab import check_machine
from allranks.model.errors import SetupError

SPREAD = {
    "torchrun": ("store-stopped", "stopped", "holds-gil"),  # the last one ends late by itself
    "mp.spawn": ("reads", "loops", "exits"),
    "ray-like": ("regex",),
    "deepspeed": ("packets-dropped", "broadcast"),
    "srun": ("killed",),
}


def say_wrong(results: list[Result]) -> list[str]:
    """How long it took is the benchmark's to judge: here other tests run beside it."""
    return [
        f"{result.launcher}, {result.fault}: {line} (load {result.load:.0f}; {result.said})"
        for result in results
        for line in (*result.planted, *result.wrong)
        if not line.startswith("it took ")
    ]


def test_the_ten_faults_are_spread_over_the_five_launchers() -> None:
    planted = [fault for faults in SPREAD.values() for fault in faults]
    twins = {"aborted", "packets-unsent"}  # not of the ten: its victim dies first; the same fault at the other end
    assert sorted(planted) == sorted(set(FAULTS) - twins)
    assert set(SPREAD) == set(LAUNCHERS)


@pytest.mark.torch
@pytest.mark.healthy
def test_planted_faults_are_named_whoever_started_the_job(tmp_path: Path) -> None:
    """The jobs run at the same time, each in namespaces of its own: most of it is waiting."""
    try:
        check_machine()  # namespaces need root
    except SetupError as exc:
        pytest.skip(str(exc))
    local = [launcher for launcher in SPREAD if launcher != "srun"]
    with ThreadPoolExecutor(len(local)) as pool:
        drills = pool.map(lambda launcher: play_apart(launcher, SPREAD[launcher], tmp_path / launcher), local)
        assert [line for results in drills for line in say_wrong(results)] == []


def test_a_verdict_on_a_bystander_is_wrong_and_a_state_is_no_verdict() -> None:
    def verdict(rank: int) -> dict[str, object]:
        return {"verdicts": [{"ranks": [rank], "confidence": "certain", "message": f"rank {rank} died"}]}

    state = {"states": [{"text": "rank 2 has been elsewhere", "ranks": [2], "place": "data.py:22"}]}
    truth = Truth(ranks=frozenset({2}), is_verdict=True, within_s=3.0)
    assert judge([(9.0, verdict(1)), (11.0, verdict(2))], truth, 10.0).wrong == ()
    assert judge([(11.0, verdict(2)), (12.0, verdict(1))], truth, 10.0).wrong == (
        "verdict on somebody else: rank 1 died",
    )
    assert judge([(13.5, verdict(2))], truth, 10.0).wrong == ("it took 3.5 s, at most 3 s are allowed",)
    assert judge([(11.0, state)], truth, 10.0).wrong == ("nobody was named",)
    likely = Truth(ranks=frozenset({2}), is_verdict=False, place="data.py:22", within_s=6.0)
    assert judge([(15.0, state)], likely, 10.0).named_s == 5.0
    assert judge([(15.0, {"states": [state["states"][0] | {"place": "data.py:9"}]})], likely, 10.0).named_s is None
    assert judge([(11.0, verdict(2)), (15.0, state)], likely, 10.0).wrong == ("verdict on somebody else: rank 2 died",)


def test_each_place_of_a_fault_is_one_line_of_its_program() -> None:
    for fault in FAULTS.values():
        has_place = fault.named is Named.RANK and not fault.is_proven
        assert bool(fault.line()) == has_place, fault.name
