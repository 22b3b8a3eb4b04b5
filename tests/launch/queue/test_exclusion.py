"""Does a job remember its faulty nodes, and leave out as many as it can do without?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.launch.queue.scheduler import (
    CULPRITS,
    NodeAtFault,
    plan_requeue,
    read_culprits,
    remember,
)
from allranks.report.rundir import RunDir

NODES = [f"n{number}" for number in range(1, 7)]


def run_of(path: Path) -> RunDir:
    return RunDir(path.parent, path.name)


def culprit(node: str, *attempts: int) -> NodeAtFault:
    return NodeAtFault(node=node, cause="AR012 node-failure", attempts=attempts)


def test_a_run_blames_a_node_once_however_often_it_restarts(tmp_path: Path) -> None:
    once = remember(run_of(tmp_path), ["n3"], cause="AR012 node-failure", attempt=0)
    assert remember(run_of(tmp_path), ["n3"], cause="AR012 node-failure", attempt=0) == once == (culprit("n3", 0),)


def test_the_third_run_with_the_same_culprit_is_the_last(tmp_path: Path) -> None:
    known: tuple[NodeAtFault, ...] = ()
    verdicts = []
    for attempt in range(3):
        known = remember(run_of(tmp_path), ["n3", "n5"][: attempt + 1], cause="x", attempt=attempt)
        verdicts.append(known[0].is_hopeless)
    assert verdicts == [False, False, True]
    assert [(each.node, each.is_hopeless) for each in known] == [("n3", True), ("n5", False)]


def test_the_latest_cause_is_kept(tmp_path: Path) -> None:
    remember(run_of(tmp_path), ["n3"], cause="AR012 node-failure", attempt=0)
    known = remember(run_of(tmp_path), ["n3"], cause="AR210 link-down", attempt=2)
    assert known == (NodeAtFault(node="n3", cause="AR210 link-down", attempts=(0, 2)),)


@pytest.mark.parametrize(
    ("needed", "excluded", "line"),
    [
        (6, None, "n[2,4,3] is not excluded, because the job needs 6 of 6 nodes"),
        (5, "n2", "without n2, on 5 nodes instead of 6, n[4,3] is not excluded, because the job needs 5 of 6 nodes"),
        (
            4,
            "n[2,4]",
            "without n[2,4], on 4 nodes instead of 6, n3 is not excluded, because the job needs 4 of 6 nodes",
        ),
        (1, "n[2-4]", "without n[2-4], on 3 nodes instead of 6"),
    ],
)
def test_the_worst_and_the_latest_are_left_out_first(needed: int, excluded: str | None, line: str) -> None:
    known = [culprit("n3", 0), culprit("n4", 2), culprit("n2", 0, 1), culprit("elsewhere", 1)]
    state, job = JobState(id="12", state="RUNNING", num_nodes=6), OwnJob("12", 0, 6, is_heterogeneous=False)
    values, said = plan_requeue(state, job=job, culprits=known, partition=NODES, min_nodes=needed)
    assert (values.get("ExcNodeList"), said) == (excluded, line)


def test_the_memory_lasts(tmp_path: Path) -> None:
    assert read_culprits(run_of(tmp_path)) == ()
    for attempt, node in enumerate(["n3", "n5", "n3"]):
        remember(run_of(tmp_path), [node], cause="AR012 node-failure", attempt=attempt)
    assert read_culprits(run_of(tmp_path)) == (culprit("n3", 0, 2), culprit("n5", 1))
    assert [path.name for path in tmp_path.iterdir()] == [CULPRITS]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"node": "n3"}]', "null"])
def test_a_torn_memory_is_no_memory(text: str, tmp_path: Path) -> None:
    (tmp_path / CULPRITS).write_text(text)
    assert read_culprits(run_of(tmp_path)) == ()


def test_a_directory_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    assert remember(RunDir(tmp_path, "gone"), ["n3"], cause="AR012 node-failure", attempt=0) == (culprit("n3", 0),)
