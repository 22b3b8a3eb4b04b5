"""Whom does `submit --exclude-suspects` leave out of a partition?"""

from __future__ import annotations

import pytest

from allranks.launch.batch.exclusion import choose_exclusion
from allranks.why.fleet.suspects import Suspect


def suspect(node: str) -> Suspect:
    return Suspect(
        node=node, culprit_in=7, failed=9, jobs=31, causes=(("AR105 gpu-hardware", 5), ("AR210 link-down", 2)),
        last_s=0.0, last_job="12", well_since=3, chance=1e-9,
    )  # fmt: skip


def nodes(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("size", "suspects", "least", "chosen"),
    [
        (40, ["n7", "n9"], 8, ("n7", "n9")),
        (6, ["n3"], 5, ("n3",)),
        (6, ["n3", "n4"], 2, ("n3",)),
        (20, ["n3", "n4", "n5"], 2, ("n3", "n4")),
        (6, ["n3"], 6, ()),
        (1, ["n1"], 1, ()),
        (40, ["m7"], 1, ()),
        (40, [], 1, ()),
    ],
    ids=["both", "one of six", "at most one of six", "at most a tenth", "all are needed", "the only node",
         "of another partition", "nobody is suspect"],
)  # fmt: skip
def test_a_small_share_is_left_out_and_the_job_still_fits(
    size: int, suspects: list[str], least: int, chosen: tuple[str, ...]
) -> None:
    exclusion = choose_exclusion(
        [suspect(node) for node in suspects], partition=nodes(size), available=nodes(size), least=least
    )
    assert exclusion.nodes == chosen


def test_nodes_that_are_out_of_service_leave_less_room() -> None:
    given = {"partition": nodes(6), "available": nodes(5), "excluded": ["n2"], "least": 4}
    assert choose_exclusion([suspect("n3")], **given).nodes == ()  # type: ignore[arg-type]
    assert choose_exclusion([suspect("n3")], **given | {"least": 3}).nodes == ("n3",)  # type: ignore[arg-type]
    assert choose_exclusion([suspect("n6")], **given | {"least": 3}).lines == ()  # type: ignore[arg-type]


def test_each_suspect_is_told_with_its_reason() -> None:
    said = choose_exclusion(
        [suspect("n3"), suspect("n4"), suspect("n5")], partition=nodes(6), available=nodes(6), least=2, wanted=["n5"]
    ).lines
    assert said == (
        "excluded n3: culprit in 7 of 9 failures, AR105 gpu-hardware in 5",
        "n4 is suspect and not excluded (at most 1 of the 6 nodes of the partition are excluded): "
        "culprit in 7 of 9 failures, AR105 gpu-hardware in 5",
        "n5 is suspect and not excluded (--nodelist asks for it): culprit in 7 of 9 failures, AR105 gpu-hardware in 5",
    )
