"""Whom does the history of a cluster accuse? The cases are in cases.txt, to be read from top to bottom."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.model.finding import Confidence
from allranks.why.fleet.job_end import JobEnd, NodeFault
from allranks.why.fleet.suspects import MAX_CHANCE, WINDOW_S, accuses_its_node, find_suspects, tail

NOW_S = 1_795_858_874.0
DAY_S = 86400.0
LABELS = {
    "AR105": "AR105 gpu-hardware",
    "AR109": "AR109 cuda-oom",
    "AR204": "AR204 mtu-blackhole",
    "AR210": "AR210 link-down",
    "AR414": "AR414 store-lost",
    "AR590": "AR590 user-code-error",
    "AR999": "AR999 not-yet-known",
}
LINE = re.compile(
    r"(?P<count>\d+) x (?P<nodes>\S+): (?:(?P<end>well|failed)|(?P<culprit>\S+) (?P<cause>AR\d+) (?P<sure>\w+))"
    r"(?P<one> in one job)?(?: (?P<days>\d+) days ago)?"
)


def ends_of(lines: list[str]) -> Iterator[JobEnd]:
    ids = itertools.count(100)
    for line in lines:
        told = LINE.fullmatch(line)
        assert told, line
        first = next(ids)
        for number in range(int(told["count"])):
            fault = told["culprit"] and NodeFault(
                cause=LABELS[told["cause"]], node=told["culprit"], confidence=Confidence(told["sure"])
            )
            yield JobEnd(
                version=1,
                time_s=NOW_S - DAY_S * int(told["days"] or 2) + number,
                job=f"{first}_{number}" if told["one"] else str(next(ids)),
                nodes=told["nodes"],
                is_failed=told["end"] != "well",
                faults=(fault,) if fault else (),
            )


def read_cases() -> list[object]:
    text = (Path(__file__).parent / "cases.txt").read_text()
    cases = [case.strip().splitlines() for case in text.split("\n== ")[1:]]
    return [pytest.param(lines[:-1], lines[-1].removeprefix("=> "), id=title) for title, *lines in cases]


@pytest.mark.parametrize(("lines", "expected"), read_cases())
def test_who_is_accused(lines: list[str], expected: str) -> None:
    ends = list(ends_of(lines))
    random.Random(7).shuffle(ends)  # files of several nodes are in no order
    suspects = find_suspects(ends, now_s=NOW_S).suspects
    told = ", ".join(f"{suspect.node} {suspect.culprit_in} of {suspect.failed}" for suspect in suspects)
    assert (told or "nobody") == expected


def test_a_suspect_has_what_a_person_decides_by() -> None:
    lines = ["30 x n[1-6]: well 3 days ago", "4 x n[1-6]: n3 AR105 certain", "1 x n[1-6]: n3 AR210 likely 2 days ago"]
    (suspect,) = find_suspects(ends_of([*lines, "2 x n[1-6]: well 1 days ago"]), now_s=NOW_S).suspects
    assert suspect.causes == (("AR105 gpu-hardware", 4), ("AR210 link-down", 1))
    assert (suspect.jobs, suspect.failed, suspect.well_since) == (37, 5, 2)
    assert suspect.last_s == NOW_S - 2 * DAY_S + 3
    assert 0 < suspect.chance < MAX_CHANCE


def test_a_longer_window_counts_more() -> None:
    lines = ["40 x n[1-8]: well", "9 x n[1-8]: n3 AR105 certain 31 days ago"]
    assert find_suspects(ends_of(lines), now_s=NOW_S).suspects == ()
    (suspect,) = find_suspects(ends_of(lines), now_s=NOW_S, window_s=WINDOW_S + 2 * DAY_S).suspects
    assert suspect.culprit_in == 9


def test_a_cluster_of_nodes_that_are_alike_names_one_in_fewer_than_one_of_a_hundred_looks() -> None:
    chance, named, looks = random.Random(1), 0, 300
    nodes = [f"n{number}" for number in range(1, 13)]
    for _ in range(looks):
        ends = []
        for job in range(60):
            own = chance.sample(nodes, 4)
            fault = NodeFault(cause="AR105 gpu-hardware", node=own[0], confidence=Confidence.CERTAIN)
            is_failed = chance.random() < 0.3
            faults = (fault,) if is_failed else ()
            ends.append(JobEnd(version=1, time_s=NOW_S, job=str(job), nodes=",".join(own), faults=faults))
        named += bool(find_suspects(ends, now_s=NOW_S).suspects)
    assert named / looks < MAX_CHANCE


def test_no_job_at_all_accuses_nobody() -> None:
    fleet = find_suspects([], now_s=NOW_S)
    assert (fleet.suspects, fleet.jobs, fleet.nodes, fleet.failed) == ((), 0, 0, 0)


@pytest.mark.parametrize(
    ("cause", "is_accused"),
    [
        ("AR105 gpu-hardware", True),
        ("AR005 disk-full", True),
        ("AR590 user-code-error", False),
        ("AR109 cuda-oom", False),
        ("AR414 store-lost", False),
        ("", False),
    ],
)
def test_only_faults_that_leaving_the_node_out_cures_accuse_it(cause: str, is_accused: bool) -> None:
    assert accuses_its_node(cause) == is_accused


def test_the_tail_is_the_binomial_one_also_for_thousands() -> None:
    exact = sum(math.comb(20, hits) * 0.3**hits * 0.7 ** (20 - hits) for hits in range(9, 21))
    assert tail(9, of=20, share=0.3) == pytest.approx(exact)
    assert tail(1000, of=5000, share=0.2) == pytest.approx(0.5, abs=0.02)
