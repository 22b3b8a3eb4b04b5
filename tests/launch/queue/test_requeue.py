"""Does a job go back into the queue once, without its faulty nodes, and asking for what it can get?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob, own_job
from allranks.launch.queue.scheduler import CLAIM, PREEMPTED, NodeAtFault, Scheduler, plan_requeue, read_culprits
from allranks.report.rundir import RunDir
from fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401  (a fixture)

JOB = OwnJob("12", 0, 3, is_heterogeneous=False)
F = "\x1f"
SIX = [f"n{number}" for number in range(1, 7)]


def culprit(node: str, *attempts: int) -> NodeAtFault:
    return NodeAtFault(node=node, cause="AR012 node-failure", attempts=attempts)


@pytest.mark.parametrize(
    ("state", "culprits", "min_nodes", "values", "line"),
    [
        ({}, [], 3, {}, ""),
        ({}, [culprit("n3", 0)], 3, {"ExcNodeList": "n3"}, "without n3"),
        ({"excluded_nodes": "n1"}, [culprit("n3", 0)], 3, {"ExcNodeList": "n[1,3]"}, "without n3"),
        ({"excluded_nodes": "n3"}, [culprit("n3", 0)], 3, {}, "without n3"),
        # What the user leaves out is nobody's replacement.
        ({"excluded_nodes": "n[4-6]"}, [culprit("n3", 0)], 3, {},
         "n3 is not excluded, because the job needs 3 of 3 nodes"),
        ({"excluded_nodes": "n[4-6]"}, [culprit("n3", 0)], 2,
         {"ExcNodeList": "n[4-6,3]", "NumNodes": "2"}, "without n3, on 2 nodes instead of 3"),
        # SLURM has taken the lost node away: the job would ask for one less from then on.
        ({"num_nodes": 2}, [culprit("n3", 0)], 3, {"ExcNodeList": "n3", "NumNodes": "3"}, "without n3"),
        ({"num_nodes": 2, "excluded_nodes": "n[4-6]"}, [culprit("n3", 0)], 2,
         {"ExcNodeList": "n[4-6,3]", "NumNodes": "2"}, "without n3, on 2 nodes instead of 3"),
        # With --ntasks-per-node, the number of tasks asks for nodes, too.
        ({"num_tasks": 6, "excluded_nodes": "n[4-6]"}, [culprit("n3", 0)], 2,
         {"ExcNodeList": "n[4-6,3]", "NumNodes": "2", "NumTasks": "4"}, "without n3, on 2 nodes instead of 3"),
        # Named by the user, and all of them needed.
        ({"asked_nodes": "n[1-3]"}, [culprit("n3", 0)], 3, {},
         "n3 is not excluded, because the job needs 3 of 3 nodes"),
        ({"asked_nodes": "n[1-3]"}, [culprit("n3", 0)], 2,
         {"ExcNodeList": "n3", "ReqNodeList": "n[1-2]", "NumNodes": "2"}, "without n3, on 2 nodes instead of 3"),
        # Only some are named: the others are SLURM's choice.
        ({"asked_nodes": "n3"}, [culprit("n3", 0)], 3, {"ExcNodeList": "n3", "ReqNodeList": ""}, "without n3"),
        ({}, [culprit("n1", 0), culprit("n2", 0), culprit("n3", 1), culprit("n4", 2)], 3,
         {"ExcNodeList": "n[1,3-4]"}, "without n[1,3-4], n2 is not excluded, because the job needs 3 of 6 nodes"),
    ],
)  # fmt: skip
def test_what_a_waiting_job_asks_for(
    state: dict[str, object], culprits: list[NodeAtFault], min_nodes: int, values: dict[str, str], line: str
) -> None:
    seen = JobState(**({"id": "12", "state": "RUNNING", "num_nodes": 3} | state))  # type: ignore[arg-type]
    assert plan_requeue(seen, job=JOB, culprits=culprits, partition=SIX, min_nodes=min_nodes) == (values, line)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "attempt_0").mkdir()
    return tmp_path


@pytest.fixture
def partition(slurm: FakeSlurm) -> FakeSlurm:
    slurm.answer("sinfo", out="".join(f"{name}{F}mixed{F}none{F}main*{F}(null)\n" for name in SIX))
    slurm.answer("scontrol", "show job 12", out=show_job(nodes="n[1-2]"))
    slurm.answer("scontrol", "requeue", out="")
    slurm.answer("scontrol", "update", out="")
    return slurm


def scheduler(run_dir: Path, say: Callable[[str], None], *, attempt: int = 0, restarts: int = 0) -> Scheduler:
    env = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "3", "SLURM_RESTART_COUNT": str(restarts)}
    job, files = own_job(env), RunDir(run_dir.parent, run_dir.name)
    assert job is not None
    files.attempt = attempt
    return Scheduler(job, env, files, min_nodes=3, say=say)


def commands(slurm: FakeSlurm) -> list[list[str]]:
    return [call["argv"] for call in slurm.calls("scontrol") if call["argv"][0] in ("requeue", "update")]  # type: ignore


def test_one_agent_puts_the_job_back_without_its_culprit(partition: FakeSlurm, run_dir: Path) -> None:
    said: list[str] = []
    codes = [scheduler(run_dir, said.append).requeue(["n3"], cause="AR012 node-failure") for _ in range(3)]
    assert codes == [75, 75, 75]
    assert said == ["job 12 goes back into the queue, without n3; it resumes in its next run"]
    assert commands(partition) == [["requeue", "12"], ["update", "JobId=12", "ExcNodeList=n3", "NumNodes=3"]]
    assert read_culprits(RunDir(run_dir.parent, run_dir.name)) == (culprit("n3", 0),)
    assert (run_dir / "attempt_0" / CLAIM).exists()


def test_at_the_time_limit_nobody_is_left_out(partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer("scontrol", "show job 12", out=show_job(nodes="n[1-3]").replace("NumNodes=2", "NumNodes=3"))
    assert scheduler(run_dir, lambda _: None).requeue() == 0
    assert commands(partition) == [["requeue", "12"]]


def test_the_same_culprit_for_the_third_time_ends_the_job(partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer(
        "scontrol", "show job 12", out=show_job().replace("ReqNodeList=(null)", "ReqNodeList=node[01-02],n3")
    )
    said: list[str] = []
    codes = []
    for attempt in range(3):
        (run_dir / f"attempt_{attempt}").mkdir(exist_ok=True)
        codes.append(scheduler(run_dir, said.append, attempt=attempt).requeue(["n3"], cause="AR3 x"))
    assert codes == [75, 75, 78]
    assert said[0] == (
        "job 12 goes back into the queue, n3 is not excluded, because the job needs 3 of 3 nodes; "
        "it resumes in its next run"
    )
    assert said[2] == "job 12 ends: n3 was at fault in 3 runs and cannot be replaced; AR3 x"


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (show_job().replace("BatchFlag=1", "BatchFlag=0"), "only jobs with a batch script"),
        (show_job().replace("Requeue=1", "Requeue=0"), "it was submitted with --no-requeue"),
    ],
)
def test_a_job_that_cannot_go_back_says_why(shown: str, words: str, partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer("scontrol", "show job 12", out=shown)
    said: list[str] = []
    assert scheduler(run_dir, said.append).requeue(["n3"], cause="x") == 75
    assert words in said[0]
    assert commands(partition) == []


def test_what_slurm_refuses_is_said_with_the_command_for_it(partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer("scontrol", "requeue", err="Requested operation is presently disabled for job 12\n", code=1)
    said: list[str] = []
    assert scheduler(run_dir, said.append).requeue() == 0
    assert said[1] == (
        "job 12: scontrol: Requested operation is presently disabled for job 12; to do it by hand: scontrol requeue 12"
    )


def test_a_job_that_somebody_else_has_put_back_is_left_alone(partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer("scontrol", "show job 12", out=show_job(state="PENDING"))
    assert scheduler(run_dir, lambda _: None).requeue(["n3"], cause="x") == 75
    assert commands(partition) == []


def test_a_run_directory_that_cannot_be_written_stops_nobody(partition: FakeSlurm, tmp_path: Path) -> None:
    assert scheduler(tmp_path / "gone", lambda _: None).requeue() == 0
    assert commands(partition)[0] == ["requeue", "12"]


def test_a_preempted_job_stays_until_slurm_ends_it(slurm: FakeSlurm, run_dir: Path) -> None:
    preempted = show_job().replace("Power=", "PreemptEligibleTime=x PreemptTime=2026-11-22T00:02:54\n   Power=")
    slurm.answer("scontrol", "show partition", out="PartitionName=main\n   GraceTime=10 Hidden=NO\n")
    slurm.answer("scontrol", "show job 12", out=show_job(state="COMPLETING"))
    slurm.answer_once("scontrol", "show job 12", out=preempted)
    said: list[str] = []
    scheduler(run_dir, said.append).outlast_preemption()
    assert said == [
        "preempted: waiting for SLURM to end this run of job 12, grace period 10 s since 2026-11-22T00:02:54"
    ]


def test_a_warning_that_was_a_preemption_leaves_the_job_to_slurm(partition: FakeSlurm, run_dir: Path) -> None:
    preempted = show_job().replace("Power=", "PreemptEligibleTime=x PreemptTime=2026-11-22T00:02:54\n   Power=")
    partition.answer("scontrol", "show partition", out="PartitionName=main\n   GraceTime=10 Hidden=NO\n")
    partition.answer("scontrol", "show job 12", out=show_job(state="PENDING"))
    partition.answer_once("scontrol", "show job 12", out=preempted)
    assert scheduler(run_dir, lambda _: None).requeue() == 0
    assert commands(partition) == []


def test_a_job_that_was_preempted_once_ends_when_it_has_succeeded(partition: FakeSlurm, run_dir: Path) -> None:
    # SLURM 24.11.5 would run it again and again.
    partition.answer("scontrol", "update JobId=12", out="")
    again = scheduler(run_dir, pytest.fail, restarts=1)
    again.stay_complete()
    assert commands(partition) == [], "it was never preempted"
    (run_dir / PREEMPTED).touch()
    scheduler(run_dir, pytest.fail).stay_complete()
    assert commands(partition) == [], "its first run"
    again.stay_complete()
    assert commands(partition) == [["update", "JobId=12", "Requeue=0"]]


def test_a_job_that_slurm_may_run_again_says_how_to_end_it(partition: FakeSlurm, run_dir: Path) -> None:
    partition.answer("scontrol", "update JobId=12", err="slurm_update error: Access/permission denied\n", code=1)
    (run_dir / PREEMPTED).touch()
    said: list[str] = []
    scheduler(run_dir, said.append, restarts=1).stay_complete()
    assert said == [
        "job 12: scontrol: slurm_update error: Access/permission denied; "
        "if SLURM runs it again, end it by hand: scancel 12"
    ]


def test_a_cancelled_job_is_not_waited_for(slurm: FakeSlurm, run_dir: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(state="CANCELLED"))
    scheduler(run_dir, pytest.fail).outlast_preemption()
    assert not (run_dir / PREEMPTED).exists()
