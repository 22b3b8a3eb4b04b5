"""Are two groups of workers that train at the same time found, and are none found where there was one after another?"""

from __future__ import annotations

from allranks.lab.faults.running.target import Saved, StepDone
from allranks.lab.running.rivals import find_rivals


def steps(*times_s: float, generation: int, attempt: int = 0, node: str = "n", pid: int = 7) -> list[StepDone]:
    who = {"attempt": attempt, "generation": generation, "rank": 0, "world": 6, "node": node, "pid": pid}
    return [StepDone(step=10 + number, time_s=time_s, **who) for number, time_s in enumerate(times_s)]  # type: ignore[arg-type]


def test_workers_that_follow_each_other_are_no_rivals() -> None:
    one_after_another = [
        *steps(1, 2, 3, generation=0),
        *steps(9, 10, generation=1),
        *steps(20, generation=0, attempt=1),
    ]
    saved = [
        Saved(step=1, run="a", time_s=2.0),
        Saved(step=2, run="a", time_s=8.9),
        Saved(step=4, run="b", time_s=10.5),
    ]
    assert find_rivals(one_after_another, saved) == []


def test_a_step_of_workers_that_are_over_is_found() -> None:
    found = find_rivals([*steps(1, 9.5, generation=0, node="n1"), *steps(9, 10, generation=1, node="n2")])
    assert found == ["n1 did step 11 0.50 s after the first of later workers"]
    assert find_rivals([*steps(1, 9.5, generation=3), *steps(9, generation=0, attempt=1)]) != []


def test_two_groups_with_the_same_generation_are_found() -> None:
    both = [*steps(9, 10, generation=1, node="n1"), *steps(9, 10, generation=1, node="n2", pid=8)]
    assert find_rivals(both) == ["rank 0 of generation 1 trained on n1 and n2"]


def test_a_checkpoint_of_workers_that_are_over_is_found() -> None:
    saved = [
        Saved(step=1, run="a", time_s=2.0),
        Saved(step=3, run="a", time_s=9.25),
        Saved(step=2, run="b", time_s=9.5),
    ]
    found = find_rivals([*steps(1, 2, 3, generation=0), *steps(9, 10, generation=1)], saved)
    assert found == ["checkpoint 3 was completed 0.25 s after the first step of later workers"]


def test_many_signs_are_counted() -> None:
    found = find_rivals([*steps(*range(20, 30), generation=0), *steps(15, generation=1)])
    assert (len(found), found[-1]) == (4, "7 more like this")
