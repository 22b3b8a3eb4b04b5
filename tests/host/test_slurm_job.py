"""Does a job know itself, its end, and how to go back into the queue?"""

from __future__ import annotations

import time

import pytest

from allranks.host.slurm_job import (
    OwnJob,
    TimeLimit,
    change_waiting,
    find_eligible_s,
    find_job,
    own_job,
    parse_end_s,
    requeue,
)
from allranks.model.errors import SetupError
from fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401  (a fixture)

ENV = {"SLURM_JOB_ID": "13", "SLURM_JOB_NUM_NODES": "6"}


def test_outside_of_slurm_there_is_no_job() -> None:
    assert own_job({}) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, OwnJob("13", 0, 6, is_heterogeneous=False)),
        ({"SLURM_RESTART_COUNT": "2"}, OwnJob("13", 2, 6, is_heterogeneous=False)),
        ({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4"}, OwnJob("12_4", 0, 6, is_heterogeneous=False)),
        ({"SLURM_HET_SIZE": "2"}, OwnJob("13", 0, 6, is_heterogeneous=True)),
    ],
)
def test_a_job_knows_itself(more: dict[str, str], expected: OwnJob) -> None:
    assert own_job(ENV | more) == expected


def test_the_end_is_in_the_environment_where_slurm_sets_it(slurm: FakeSlurm) -> None:
    limit = TimeLimit(OwnJob("13", 0, 6, is_heterogeneous=False), {"SLURM_JOB_END_TIME": "1700000100"})
    assert limit.left_s(1700000000.0) == 100.0
    assert slurm.calls() == []


def test_else_squeue_is_asked_once(slurm: FakeSlurm) -> None:
    end_s = time.mktime((2026, 11, 22, 2, 5, 20, 0, 0, -1))
    slurm.answer("squeue", "-j 12_4 -o %e", out="Welcome to site X\n2026-11-22T02:05:20\n")
    limit = TimeLimit(OwnJob("12_4", 0, 6, is_heterogeneous=False), {})
    assert [limit.left_s(end_s - 90), limit.left_s(end_s - 30)] == [90, 30]
    assert len(slurm.calls("squeue")) == 1


def test_a_controller_that_does_not_answer_is_not_asked_again(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    limit = TimeLimit(OwnJob("13", 0, 6, is_heterogeneous=False), {})
    assert [limit.left_s(0.0), limit.left_s(1.0)] == [None, None]
    assert len(slurm.calls("squeue")) == 1


@pytest.mark.parametrize("text", ["", "NONE\n", "N/A\n", "slurm_load_jobs error\n"])
def test_no_limit_is_no_end(text: str) -> None:
    assert parse_end_s(text) is None


def test_show_job_tells_what_a_requeue_must_know(slurm: FakeSlurm) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job())
    job = find_job("12")
    assert job is not None
    assert (job.is_batch, job.may_requeue, job.excluded_nodes, job.preempted_at) == (True, True, "", "")
    assert find_job("13") is None


def test_since_when_a_job_could_have_begun(slurm: FakeSlurm) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(start="2026-11-21T04:00:00"))
    assert find_eligible_s("12") == time.mktime((2026, 11, 21, 3, 16, 18, 0, 0, -1))
    assert find_eligible_s("13") is None
    unknown = show_job("14").replace("EligibleTime=2026-11-21T03:16:18", "EligibleTime=Unknown")
    slurm.answer("scontrol", "show job 14", out=unknown)
    assert find_eligible_s("14") is None


def test_a_refusal_is_slurm_s_own_words(slurm: FakeSlurm) -> None:
    slurm.answer("scontrol", "requeue", err="Requested operation is presently disabled for job 12\n", code=1)
    with pytest.raises(SetupError, match="scontrol: Requested operation is presently disabled for job 12"):
        requeue("12")


def test_a_job_that_was_just_put_back_is_asked_again(slurm: FakeSlurm) -> None:
    again = "Job update not available right now, the DB index is being set, try again in a bit for job 12\n"
    slurm.answer("scontrol", "update", out="")
    slurm.answer_once("scontrol", "update", err=again, code=1)
    change_waiting("12", ExcNodeList="node[03,05]", NumNodes="4")
    calls = [call["argv"] for call in slurm.calls("scontrol")]
    assert calls == [["update", "JobId=12", "ExcNodeList=node[03,05]", "NumNodes=4"]] * 2
