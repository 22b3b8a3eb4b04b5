"""Do list, status and why agree on a run that restarted, and say what a killed agent cannot: when, what, who?"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest

from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.report.remains import MAX_TEXT, last_words
from allranks.report.rundir import RunDir, is_own_file
from conftest import Tell
from fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401  (a fixture)

RUN = "20261123-040000-42"
DEAD = Finding(
    cause="AR407 dead-rank",
    severity=Severity.WARN,
    confidence=Confidence.CERTAIN,
    node="node03",
    ranks=(2,),
    message="killed by SIGKILL (signal 9), not by allranks",
)
AGAIN = "1 of 1 restart used (AR407, rank 2, 1:12 lost)"


@pytest.fixture
def run_dir(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two ranks on node03, this machine, whose agent is no more; SLURM knows nothing of it."""
    monkeypatch.setenv("SLURMD_NODENAME", "node03")
    run_dir = RunDir(tmp_path / "runs", RUN)
    begin(run_dir)
    return run_dir


def begin(run_dir: RunDir) -> None:
    run_dir.create()
    run_dir.create_attempt(None)
    about = {"command": ["python", "train.py"], "cwd": "/home/ada", "max_restarts": 1}
    run_dir.add_event("started", generation=0, members=["node03"], pid=4194305, **about)
    made = run_dir.create_node("node03").path
    run_dir.write_settings("node03", [])
    for rank in (0, 1):
        (made / f"rank_{rank}.out").write_text(f"step 119\nstep 120 of rank {rank}\n\n")
        (made / f"rank_{rank}.err").write_text("")


def restart(run_dir: RunDir) -> None:
    fields = {name: getattr(DEAD, name) for name in ("cause", "cause_id", "node", "ranks", "confidence", "message")}
    run_dir.add_event("verdict", generation=0, **fields)
    run_dir.add_event("restarting", generation=1, leader="node03", checkpoint=100, lost_s=72.4, is_tracked=True)


def test_a_run_that_restarted_and_succeeded_has_one_truth(run_dir: RunDir, tell: Tell) -> None:
    restart(run_dir)
    run_dir.write_verdict(Verdict(job=RUN, attempt=0, exit_code=0, findings=(DEAD,)), node="node03")
    row = tell("list").out.splitlines()[1]
    assert f"  COMPLETED  1      -     1         -        {AGAIN}, ended " in row
    told = tell("status").out
    assert "COMPLETED, exit code 0 on 1 node (node03), ended " in told
    assert f"\n  restarts  {AGAIN}\n  verdict   all ranks succeeded, exit code 0\n" in told
    assert "⚠" not in told
    answer = tell("why")
    assert answer.code == 0
    assert f"AR599 healthy   all ranks succeeded, according to the job's own verdict; {AGAIN}" in answer.out
    (told_json,) = json.loads(tell("status", "--json").out)
    assert told_json["worker_restarts"][0]["lost_s"] == 72.4


def test_a_run_that_used_its_restarts_up_says_so(run_dir: RunDir, tell: Tell) -> None:
    restart(run_dir)
    last = Finding(cause="AR590 user-code-error", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="x")
    run_dir.write_verdict(Verdict(job=RUN, attempt=0, exit_code=1, findings=(last, DEAD)), node="node03")
    assert f"exit code 1, AR590 user-code-error, {AGAIN}, ended " in tell("list").out
    told = tell("status").out
    assert f"\n  restarts  {AGAIN}\n" in told
    assert "AR590 user-code-error" in told
    assert "AR407 dead-rank" not in told
    answer = tell("why")
    assert (answer.code, f"\nrestarts: {AGAIN}\n" in answer.out) == (1, True)
    assert json.loads(tell("why", "--json").out)["restarts"] == AGAIN


def test_a_run_whose_agent_was_killed_tells_when_what_and_who(run_dir: RunDir, tell: Tell) -> None:
    last_s = 1_795_000_000.0
    for path in [run_dir.attempt_path / "events.jsonl", *run_dir.node_path("node03").iterdir()]:
        os.utime(path, (last_s, last_s))
    when = r"2026-1\d-\d\dT\d\d:\d\d:40"
    told = tell("status")
    assert told.code == 0
    agent = (
        "its agent (process 4194305 on node03) was killed: it is gone without a verdict, while the machine stayed up"
    )
    assert f"LOST: {agent}; to see more: allranks why {RUN}\n" in told.out
    assert re.search(rf"\n  alive     last at {when}\n  said      rank 0: step 120 of rank 0\n", told.out)
    assert re.search(rf"  LOST +1 +- +0 +- +last alive {when}\n", tell("list").out)
    answer = tell("why")
    assert answer.code == 1
    first, second, *rest = answer.out.splitlines()
    assert re.match(r"✗ AR012 node-failure   node03 +certain", first)
    assert re.fullmatch(rf"  {re.escape(agent)}; last alive {when}", second)
    assert rest[:2] == ["  seen rank 0: step 120 of rank 0", f"  log  runs/{RUN}/attempt_0/node03/rank_0.out"]
    document = json.loads(tell("why", "--json").out)
    assert {path.rpartition("/")[2] for path in (each["path"] for each in document["sources"])} == {
        "rank_0.out", "rank_0.err", "rank_1.out", "rank_1.err",
    }  # fmt: skip


def test_a_machine_that_was_restarted_meanwhile_is_named_as_the_reason(
    run_dir: RunDir, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "boot_time", lambda: 4_000_000_000.0)
    assert "LOST: the machine node03 was restarted while its agent (process 4194305" in tell("status").out
    assert "the machine node03 was restarted while its agent (process 4194305" in tell("why").out


@pytest.mark.parametrize(("age_s", "is_lost"), [(5.0, False), (3600.0, True)])
def test_an_agent_on_another_machine_is_lost_if_its_files_stay_untouched(
    age_s: float, is_lost: bool, run_dir: RunDir, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "login1")
    seen_s = (run_dir.attempt_path / "events.jsonl").stat().st_mtime - age_s
    for path in [run_dir.attempt_path / "events.jsonl", *run_dir.node_path("node03").iterdir()]:
        os.utime(path, (seen_s, seen_s))
    assert "UNKNOWN: it has no verdict yet" in tell("status").out
    answer = tell("why").out
    assert ("its agent on node03 or that host was killed: a sign of life is due every 10 s" in answer) is is_lost


@pytest.mark.parametrize(("state", "is_lost"), [("NODE_FAIL", True), ("COMPLETED", False), ("RUNNING", False)])
def test_a_job_of_slurm_whose_agents_left_no_verdict_says_so(
    state: str, is_lost: bool, tmp_path: Path, slurm: FakeSlurm, tell: Tell
) -> None:
    slurm.answer("scontrol", out=show_job(state=state, work=tmp_path))
    begin(RunDir(tmp_path / "runs", "12"))
    assert ("  said      rank 0: step 120 of rank 0\n" in tell("status", "12").out) is is_lost
    answer = tell("why", "12").out
    assert ("the job is NODE_FAIL in SLURM, and its agents ended without a verdict; last alive" in answer) is is_lost


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"signal": 9, "oom_kills": 1, "is_oom": True}, "SIGKILL, out of memory"),
        ({"signal": 9, "oom_kills": 2, "is_oom": False}, "SIGKILL (2 out-of-memory kills there since it began)"),
        ({"signal": 11, "oom_kills": 0}, "SIGSEGV"),
        ({"signal": None, "oom_kills": 0}, "a signal"),
    ],
)
@pytest.mark.parametrize("seen_from", ["node03", "login1"])
def test_what_the_process_beside_the_agent_has_seen_is_told_from_everywhere(
    fields: dict[str, object], words: str, seen_from: str, run_dir: RunDir, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.add_event("agent_ended", node="node02", signal=15)  # of another node: the job went on
    run_dir.add_event("agent_ended", node="node03", pid=4194305, **fields)
    monkeypatch.setenv("SLURMD_NODENAME", seen_from)
    agent = f"its agent (process 4194305 on node03) was killed by {words}, and left no verdict"
    assert f"LOST: {agent}; to see more: " in tell("status").out
    assert f"  {agent}; last alive " in tell("why").out


def test_the_newest_attempt_counts_also_where_an_older_one_has_a_verdict(run_dir: RunDir, tell: Tell) -> None:
    before = Finding(cause="AR590 user-code-error", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="x")
    run_dir.write_verdict(Verdict(job=RUN, attempt=0, exit_code=1, findings=(before,)), node="node03")
    begin(run_dir)  # attempt 1, whose agent was killed
    assert "LOST: its agent" in tell("status").out
    answer = tell("why").out
    assert answer.startswith("✗ AR012 node-failure   node03")
    assert "AR590" in tell("why", "--all").out


def test_an_agent_that_was_succeeded_ends_no_run(run_dir: RunDir, tell: Tell) -> None:
    run_dir.add_event("agent_ended", node="node03", pid=4194305, signal=9)
    run_dir.add_event("took_over", leader="node04", generation=0, after="node03")
    assert "UNKNOWN: it has no verdict yet" in tell("status").out
    run_dir.add_event("agent_ended", node="node04", pid=7, signal=9)
    assert "LOST: its agent (node04) was killed by SIGKILL, and left no verdict" in tell("status").out


def test_the_job_of_another_leader_is_not_lost_with_the_first_ones_agent(run_dir: RunDir, tell: Tell) -> None:
    run_dir.add_event("took_over", leader="node04", generation=0, after="node03")
    assert "UNKNOWN: it has no verdict yet" in tell("status").out


def test_the_last_line_of_a_rank_is_the_newest_short_and_without_secrets(run_dir: RunDir) -> None:
    node = run_dir.node_path("node03")
    (node / "rank_0.err").write_bytes(
        b"HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 \x1b[31m" + b"x" * 9000 + b"\r  \r\n"
    )
    os.utime(node / "rank_0.err", (2e9, 2e9))
    (node / "rank_1.out").write_text("10 %\r20 %\r30 %")
    first, second = last_words(run_dir.attempt_path)
    assert (len(first.text), first.path.name) == (MAX_TEXT, "rank_0.err")
    assert (second.text, second.path.name) == ("30 %", "rank_1.out")


@pytest.mark.parametrize("name", ["events.jsonl", "roll_call.json", "node03/env.json"])
def test_a_file_of_the_runs_own_is_refused_as_a_log(name: str, run_dir: RunDir, tell: Tell) -> None:
    run_dir.write_roll_call({})
    path = f"runs/{RUN}/attempt_0/{name}"
    told = tell("why", path)
    words = f"error: {path}: this is a run's own file and no log; name the run's directory\n"
    assert (told.code, told.out, told.err) == (2, "", words)


def test_what_a_run_keeps_is_told_from_files_of_the_same_names(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.share_members("node03", "x" * (1 << 17))
    (run_dir.path / "secret").touch()
    own = ("events.jsonl", "verdict.json", "exit_code", "requeued", "hosts", "curves.jsonl")
    own += ("node03/members", "node03/growth", "node03/book.bin")
    for name in (*(f"attempt_0/{name}" for name in own), "secret", "preempted", "status.json", "goodput.json"):
        assert is_own_file(run_dir.path / name), name
    for name in ("attempt_0/cancel.log", "attempt_0/node03/rank_0.out", "attempt_0/node03/rank_0.error.json"):
        assert not is_own_file(run_dir.path / name), name
    for name in ("events.jsonl", "logs/verdict.json", "secret", "logs/members", "logs/hosts", "status.json"):
        assert not is_own_file(tmp_path / name), name
