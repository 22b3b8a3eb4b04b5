"""What do status, logs, cancel and list say of jobs that wait, run, have ended, or are forgotten?"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from allranks.host.slurm import JobState
from allranks.launch.batch.follow import JobReport, describe
from allranks.launch.batch.local_run import show_duration
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.model.job_status import JobStatus, Stuck, write_status
from allranks.model.ledger import Category, Ledger, LostTime
from allranks.report.text import Style
from conftest import Allranks, Tell, wait_until
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm, show_job  # noqa: F401  (a fixture)

F = "\x1f"
FINDING = Finding(
    cause="AR590 user-code-error",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node02",
    ranks=(1,),
    message="RuntimeError: boom",
)


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    return allranks_here


def leave_run_dir(folder: Path, job: str = "12", attempt: int = 0, findings: tuple[Finding, ...] = (FINDING,)) -> Path:
    path = folder / "runs" / job / f"attempt_{attempt}"
    for rank in (0, 1):
        node = path / f"node0{rank + 1}"
        node.mkdir(parents=True)
        (node / f"rank_{rank}.out").write_text(f"hello {rank} of attempt {attempt}\n")
        (node / f"rank_{rank}.err").write_text("")
    verdict = Verdict(job=job, attempt=attempt, exit_code=1 if findings else 0, findings=findings)
    (path / "verdict.json").write_bytes(verdict.to_json())
    return path


def test_a_pending_job_says_why_and_when(slurm: FakeSlurm, allranks: Allranks) -> None:
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="Resources", nodes="", start="2026-11-22T08:00:00"))
    result = allranks("status", "12")
    assert result.stdout == "job 12   train   PENDING for 2 nodes: Resources; expected to start 2026-11-22T08:00:00\n"


def test_a_job_that_waits_for_a_node_names_it(slurm: FakeSlurm, allranks: Allranks) -> None:
    reason = "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions"
    slurm.answer("scontrol", out=show_job(state="PENDING", reason=reason, nodes="", start="Unknown"))
    out = allranks("status", "12").stdout
    assert "Nodes required for job are DOWN, DRAINED or reserved" in out
    assert "  nodes     node02 down: bad NIC, see T-12\n" in out


def test_a_running_job_says_where_and_how_long(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    slurm.answer("scontrol", out=show_job(work=tmp_path))
    lines = allranks("status", "12").stdout.splitlines()
    assert lines[0].startswith("job 12   train   RUNNING on 2 nodes (node[01-02]), since 2026-11-21T03:16:18")
    assert lines[1] == f"  output    {tmp_path}/slurm-12.out"
    assert lines[2] == f"  run       {tmp_path}/runs/12 (attempt 0)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (7190.9, "1:59:50"), (86400, "1-0:00:00"), (176390, "2-0:59:50")]
)
def test_durations_read_as_slurm_prints_them(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


LEDGER = Ledger(
    begun_s=1.0,
    until_s=61.0,
    rank_s=1000.0,
    seconds={"step": 910.0, "wait": 90.0},
    is_steps_seen=True,
    losses=(LostTime(category=Category.WAIT, rank_s=90.0, ranks=(1,), nodes=("node02",)),),
)


def running(**changes: object) -> JobReport:
    """What is known of a job that runs."""
    slurm = JobState(id="12", state="RUNNING", name="train", num_nodes=2, start="2026-11-21T03:16:18")
    return JobReport(job="12", slurm=slurm, **changes)  # type: ignore[arg-type]


def describe_at(report: JobReport, now_s: float) -> list[str]:
    style = Style(is_unicode=False, has_colour=True, width=80)
    return [line.strip() for line in describe(report, now=datetime.fromtimestamp(now_s), style=style)[1:]]


def test_a_running_job_says_what_it_does_now_and_where_its_time_goes() -> None:
    seen = JobStatus(job="12", written_s=1061.0, started_s=1000.0, phase="running", num_ranks=2, num_up=2, step=7)
    time = "time      goodput 91 % in 1 min; lost: 9.0 % waiting, most for rank 1 on node02"
    assert describe_at(running(status=seen, ledger=LEDGER), 1065.0) == [
        "now       > 0:01:01 - 2/2 ranks - step 7",
        time,
    ]
    assert describe_at(running(status=seen, ledger=LEDGER), 1000.0)[0].startswith("now       > ")  # the clocks differ
    old, *rest = describe_at(running(status=seen, ledger=LEDGER), 1121.0)
    assert old.startswith("now       not told for 1m: status.json is of ")
    assert rest == [time]
    stuck = msgspec.structs.replace(seen, stuck=Stuck(op="all_reduce", for_s=9.0, num_waiting=1, ranks=(1,)))
    assert describe_at(running(status=stuck), 1065.0)[0].endswith("for r1 - allranks stack 12")


def test_of_a_job_that_is_over_only_its_time_is_told() -> None:
    seen = JobStatus(job="12", written_s=1061.0, started_s=1000.0, phase="over")
    newer = msgspec.structs.replace(LEDGER, until_s=121.0)
    verdict = Verdict(job="12", attempt=0, exit_code=0)
    assert describe_at(running(status=seen, ledger=newer, verdict=verdict), 1062.0) == [
        "time      goodput 91 % in 2 min; lost: 9.0 % waiting, most for rank 1 on node02"
    ]


def test_the_status_of_a_job_is_in_its_json(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (leave_run_dir(tmp_path) / "verdict.json").unlink()
    seen = JobStatus(job="12", written_s=time.time(), started_s=0.0, phase="running", step=7)
    (tmp_path / "runs/12/status.json").write_bytes(write_status(seen))
    (tmp_path / "runs/12/goodput.json").write_bytes(b'{"begun_s": -1}')
    slurm.answer("scontrol", out=show_job(work=tmp_path))
    (found,) = json.loads(allranks("status", "--json", "12").stdout)
    assert (found["status"]["step"], found["status"]["phase"], found["ledger"]) == (7, "running", None)


def test_a_failed_job_says_its_verdict(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    slurm.answer("scontrol", out=show_job(state="FAILED", reason="NonZeroExitCode", code="1:0", work=tmp_path))
    result = allranks("status", "12")
    assert result.returncode == 0
    assert "FAILED, exit code 1 on 2 nodes (node[01-02]), ended 2026-11-21T05:16:18 after 00:00:02\n" in result.stdout
    assert "AR590 user-code-error" in result.stdout
    assert "RuntimeError: boom" in result.stdout


def test_a_requeued_job_has_no_verdict_yet(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    slurm.answer("scontrol", out=show_job(state="RUNNING", restarts=1, work=tmp_path))
    out = allranks("status", "12").stdout
    assert "requeued 1 time" in out
    assert "AR590" not in out


def test_a_forgotten_job_is_told_from_accounting(slurm: FakeSlurm, allranks: Allranks) -> None:
    row = ["12", "CANCELLED by 1000", "0:15", "2", "n[1-2]", "s", "e", "00:01:20", "2:00:00", "main", "ada", "/h", "t"]
    slurm.answer("sacct", out=F.join(row) + "\n")
    out = allranks("status", "12").stdout
    assert out.startswith("job 12   t   CANCELLED, signal 15, by 1000 on 2 nodes (n[1-2]), ended e after 00:01:20\n")


def test_a_vanished_job_is_told_from_its_run_directory(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    result = allranks("status", "12")
    assert result.returncode == 0
    assert result.stdout.startswith(
        "job 12: SLURM no longer knows it; its output is in its run directory\n  run       runs/12 (attempt 0)\n"
    )
    assert "RuntimeError: boom" in result.stdout


def test_a_job_that_nobody_knows_is_said_and_could_not_be_told(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("status", "99")
    assert result.returncode == 3
    assert result.stdout.startswith("job 99: SLURM does not know it, or not any more")


def test_an_array_has_a_line_a_task(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path, "6_1", findings=())
    tasks = [show_job("6 ArrayJobId=6 ArrayTaskId=2"), show_job("7 ArrayJobId=6 ArrayTaskId=1", work=tmp_path)]
    slurm.answer("scontrol", "6", out="".join(tasks))
    found = json.loads(allranks("status", "--json", "6").stdout)
    assert [report["job"] for report in found] == ["6_1", "6_2"]
    assert found[0]["run_dir"] == f"{tmp_path}/runs/6_1"
    assert [report["attempt"] for report in found] == [0, None]


def test_vanished_tasks_are_found(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "runs" / "6").mkdir(parents=True)
    for task in ("6_10", "6_9"):
        leave_run_dir(tmp_path, task, findings=())
    assert [report["job"] for report in json.loads(allranks("status", "--json", "6").stdout)] == ["6_9", "6_10"]


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("job", ["latest", "12;north", "--help-me", "12_", "-1", "1 2", ""])
def test_what_is_no_job_is_refused(verb: str, job: str, slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks(verb, job)
    assert result.returncode == 2
    assert_one_line(result.stderr)
    assert slurm.calls() == []


def test_logs_show_the_job_s_own_output(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    (tmp_path / "slurm-12.out").write_text("[node01 r0] hello\n")
    slurm.answer("scontrol", out=show_job(state="COMPLETED", work=tmp_path))
    assert allranks("logs", "12").stdout == "[node01 r0] hello\n"


def test_logs_show_a_rank_of_the_newest_attempt(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    for attempt in (0, 9, 10):
        leave_run_dir(tmp_path, attempt=attempt)
    assert allranks("logs", "--rank", "1", "12").stdout == "hello 1 of attempt 10\n"
    both = allranks("logs", "--rank", "1", "--rank", "0", "12").stdout
    assert both == "[node01 r0] hello 0 of attempt 10\n[node02 r1] hello 1 of attempt 10\n"


def test_logs_of_a_rank_that_has_printed_nothing_say_so(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    for path in tmp_path.glob("runs/12/attempt_*/*/rank_1.*"):
        path.write_text("")
    result = allranks("logs", "--rank", "1", "12")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.startswith("allranks: nothing has been printed")


def test_logs_of_a_vanished_job_are_found_where_it_was(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run_dir(tmp_path)
    (tmp_path / "gloo_12.out").write_text("out\n")
    (tmp_path / "gloo_12.err").write_text("err\n")
    (tmp_path / "gloo_112.out").write_text("not mine\n")
    result = allranks("logs", "12")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_logs_of_ranks_stand_in_where_the_job_s_own_are_out_of_reach(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    leave_run_dir(tmp_path)
    slurm.answer("scontrol", out=show_job(state="COMPLETED", work=tmp_path))
    assert "[node02 r1] hello 1 of attempt 0\n" in allranks("logs", "12").stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("12",), "has not started (Resources); -f waits for it"),
        (("--rank", "7", "12"), "has not started"),
    ],
)
def test_logs_of_a_waiting_job_say_so(
    arguments: tuple[str, ...], line: str, slurm: FakeSlurm, allranks: Allranks
) -> None:
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="Resources", nodes=""))
    result = allranks("logs", *arguments)
    assert result.returncode == 2
    assert_one_line(result.stderr)
    assert line in result.stderr


def test_logs_follow_until_the_job_ends(
    slurm: FakeSlurm, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launch.batch.logs.LOOK_S", 0.1)
    output = tmp_path / "slurm-12.out"
    slurm.answer("scontrol", out=show_job(state="PENDING", reason="Priority", nodes="", work=tmp_path))

    def live() -> None:
        # The second look begins when the answer to the first was read.
        wait_until(lambda: len(slurm.calls("scontrol")) > 1, "two looks at the waiting job")
        output.write_text("first\n")
        slurm.answer("scontrol", out=show_job(work=tmp_path))
        seen = len(slurm.calls("scontrol"))
        wait_until(lambda: len(slurm.calls("scontrol")) > seen + 1, "a look at the running job")
        with output.open("a") as file:
            file.write("last")
        slurm.answer("scontrol", out=show_job(state="COMPLETED", work=tmp_path))

    job = threading.Thread(target=live)
    job.start()
    told = tell("logs", "-f", "12")
    job.join()
    assert told == (0, "first\nlast", "allranks: job 12 waits: Priority\n")


def test_cancel_ends_what_runs(slurm: FakeSlurm, allranks: Allranks) -> None:
    slurm.answer("scontrol", out=show_job())
    result = allranks("cancel", "12")
    assert result.stdout == "cancelling job 12; its state was RUNNING\n"
    assert [call["argv"] for call in slurm.calls("scancel")] == [["12"]]


def test_cancel_says_what_has_ended_and_what_is_unknown(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("cancel", "99")
    assert (result.returncode, result.stderr) == (
        2,
        "error: job 99: SLURM knows no such job; allranks list prints your jobs\n",
    )
    slurm.answer("scontrol", out=show_job(state="COMPLETED"))
    assert allranks("cancel", "12").stdout == "job 12 had already ended: COMPLETED\n"
    assert slurm.calls("scancel") == []


def test_cancel_keeps_slurm_s_words(slurm: FakeSlurm, allranks: Allranks) -> None:
    slurm.answer("scontrol", out=show_job())
    slurm.answer("scancel", err="scancel: error: Kill job error on job id 12: Access/permission denied\n")
    result = allranks("cancel", "12")
    assert result.returncode == 78
    assert result.stderr == "error: scancel: Kill job error on job id 12: Access/permission denied\n"


def test_list_shows_what_waits_and_runs(slurm: FakeSlurm, allranks: Allranks) -> None:
    def row(job: str, state: str, reason: str, nodes: str, start: str) -> str:
        fields = [job, state, reason, "2", nodes, "main", "ada", start, "N/A", "2:00:00", "0:02", "/h", "a | b"]
        return F.join(fields) + "\n"

    slurm.answer(
        "squeue", out=row("7", "PENDING", "Resources", "", "N/A") + row("6_1", "RUNNING", "None", "n[1-2]", "s")
    )
    assert allranks("list").stdout == (
        "JOB  NAME   STATE    NODES  LEFT     RESTARTS  GOODPUT  WHERE OR WHY\n"
        "7    a | b  PENDING  2      2:00:00  -         -        Resources\n"
        "6_1  a | b  RUNNING  2      -        -         -        n[1-2]\n"
    )
    assert [job["id"] for job in json.loads(allranks("list", "--json").stdout)] == ["7", "6_1"]


def test_list_of_nothing_says_so(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("list")
    assert (result.stdout, result.stderr) == ("", "allranks: you have no pending or running job, and runs has no run\n")


@pytest.mark.parametrize("arguments", [("status", "12"), ("logs", "12"), ("cancel", "12")])
def test_without_slurm_each_verb_says_so_in_one_line(arguments: tuple[str, ...], allranks: Allranks) -> None:
    result = allranks(*arguments, env={"PATH": "/nowhere"})
    assert result.returncode == 78
    assert_one_line(result.stderr)
    assert "not found on this machine" in result.stderr


def test_the_verbs_do_not_import_jinja2() -> None:
    code = "import sys, allranks.cli.jobs; print('jinja2' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "False False\n"
