"""Are runs that SLURM knows nothing of jobs for list, status, logs, why and cancel, by their id and as `latest`?"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from allranks.model.errors import UsageError
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.job_status import JobStatus, write_status
from allranks.model.ledger import Category, Ledger, LostTime, RestartCost
from allranks.report.rundir import RunDir
from allranks.report.runs import find_run, list_runs
from conftest import Allranks, allranks_command, clean_env, wait_until, write
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm, show_job  # noqa: F401  (a fixture)

OLD, NEW = "20261123-031500-41", "20261123-040000-42"
HERE = {"SLURMD_NODENAME": "node07"}
BOOM = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\nValueError: boom\n'
FINDING = Finding(
    cause="AR590 user-code-error",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node07",
    ranks=(1,),
    message="ValueError: boom",
)


LEDGER = Ledger(
    begun_s=1.0,
    until_s=8041.0,
    rank_s=1000.0,
    seconds={"step": 910.0, "wait": 90.0},
    is_steps_seen=True,
    losses=(LostTime(category=Category.WAIT, rank_s=90.0, ranks=(1,), nodes=("node07",)),),
    restarts=(RestartCost(generation=1, restart_s=5.0),),
)


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    return allranks_here


def leave_run(
    folder: Path, name: str = NEW, *, exit_code: int | None = 0, node: str = "node07", pid: int = 2**22 + 1
) -> Path:
    """What a run of two ranks leaves behind; without an exit code it has no verdict."""
    run_dir = RunDir(folder / "runs", name)
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", generation=0, job=name, command=["python", "dir/train.py"], members=[node], pid=pid)
    made = run_dir.create_node(node).path
    for rank in (0, 1):
        (made / f"rank_{rank}.out").write_text(f"hello {rank} of {name}\n")
        (made / f"rank_{rank}.err").write_text(BOOM if rank and exit_code else "")
    if exit_code is not None:
        findings = (FINDING,) if exit_code == 1 else ()
        run_dir.write_verdict(Verdict(job=name, attempt=0, exit_code=exit_code, findings=findings), node=node)
    return run_dir.path


@pytest.fixture
def runs(tmp_path: Path, slurm: FakeSlurm) -> Path:
    """Two runs: an old one that ended well and a new one that failed. SLURM is there and knows neither."""
    leave_run(tmp_path, OLD)
    os.utime(tmp_path / "runs" / OLD / "attempt_0/events.jsonl", (0, 0))
    leave_run(tmp_path, NEW, exit_code=1)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", [NEW, "latest", f"runs/{NEW}", "runs/latest"])
def test_a_run_is_told_by_its_id_by_latest_and_by_its_path(
    name: str, runs: Path, slurm: FakeSlurm, allranks: Allranks
) -> None:
    result = allranks("status", name)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"run {NEW}   train.py   FAILED, exit code 1 on 1 node (node07), ended ")
    assert lines[1] == f"  run       runs/{NEW} (attempt 0)"
    assert allranks("status").stdout == result.stdout
    assert "AR590 user-code-error" in result.stdout
    logs = allranks("logs", name)
    assert "[node07 r1] hello 1 of " + NEW in logs.stdout
    assert "[node07 r1] ValueError: boom" in logs.stderr
    assert OLD not in logs.stdout
    assert allranks("logs", "--rank", "0", name).stdout == f"hello 0 of {NEW}\n"
    assert slurm.calls() == []


@pytest.mark.parametrize("words", [(), ("latest",), (NEW,), ("runs",)], ids=" ".join)
def test_why_explains_the_newest_run(words: tuple[str, ...], runs: Path, allranks: Allranks) -> None:
    result = allranks("why", "--json", *words)
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    assert document["findings"][0]["cause"] == "AR590 user-code-error"
    assert {source["path"].split("/")[1] for source in document["sources"]} == {NEW}
    said = {
        (): f"reading runs/{NEW}, the newest run",
        ("latest",): f"reading runs/{NEW}, the newest run",
        (NEW,): f"reading runs/{NEW}",
        ("runs",): f"runs has 2 runs; reading the newest, runs/{NEW}; the previous one is runs/{OLD}",
    }
    assert result.stderr == f"allranks: {said[words]}\n"


def test_why_says_that_it_explains_the_newest_run_and_not_what_is_piped_into_it(runs: Path) -> None:
    result = subprocess.run(
        allranks_command("why"),
        cwd=runs.parent,
        env=clean_env(os.environ),
        input="ValueError: another job\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "standard input is not read; to explain it: allranks why -\n" in result.stderr
    assert "ValueError: boom" in result.stdout


def test_why_shows_of_a_killed_rank_its_own_last_words_and_none_of_its_victims(
    allranks: Allranks, tmp_path: Path
) -> None:
    run = leave_run(tmp_path, exit_code=137)
    tail = Evidence(seen="step 50 of rank 1", source=f"runs/{NEW}/attempt_0/node07/rank_1.err")
    dead = Finding(
        cause="AR407 dead-rank",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node="node07",
        ranks=(1,),
        message="killed by SIGKILL (signal 9), not by allranks",
        evidence=(tail,),
        victims=(0,),
    )
    verdict = Verdict(job=NEW, attempt=0, exit_code=137, findings=(dead,))
    (run / "attempt_0/verdict.json").write_bytes(verdict.to_json())
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:46991: Connection reset by peer"
    (run / "attempt_0/node07/rank_0.err").write_text(f"Traceback (most recent call last):\n{lost}\n")
    (run / "attempt_0/node07/rank_0.error.json").write_text(json.dumps({"message": {"message": lost}}))
    result = allranks("why")
    assert f"\n  seen step 50 of rank 1\n  log  {tail.source}\n" in result.stdout
    assert "Connection reset by peer" not in result.stdout
    assert '"message"' not in allranks("why", "--all").stdout


def test_stack_of_a_slurm_job_that_has_ended_says_where_to_look_where_there_is_no_slurm(
    runs: Path, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    slurm.answer("scontrol", err="scontrol: fatal: Could not establish a configuration source\n", code=1)
    leave_run(tmp_path, "12")
    leave_run(tmp_path, "13", exit_code=None)
    for name in ("12", "runs/12"):
        result = allranks("stack", name)
        words = "error: job 12 has ended; to see what happened: allranks why 12\n"
        assert (result.returncode, result.stderr) == (3, words)
    assert "no slurm.conf on this machine" in allranks("stack", "latest").stderr


@pytest.mark.parametrize("exit_code", [1, 130])
def test_why_does_not_offer_a_broken_connection_where_a_rank_raised_or_a_person_ended_the_run(
    exit_code: int, allranks: Allranks, tmp_path: Path
) -> None:
    run = leave_run(tmp_path, exit_code=exit_code)
    if exit_code == 130:
        ended = Verdict(job=NEW, attempt=0, exit_code=130)
        (run / "attempt_0/verdict.json").write_bytes(ended.to_json())
        (run / "attempt_0/node07/rank_1.err").write_text("")
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7061. This is"
    (run / "attempt_0/node07/rank_0.err").write_text(f"Traceback (most recent call last):\n{lost} typically\n")
    for words in ((), ("--all",)):
        result = allranks("why", *words)
        assert result.stdout.startswith("\u2717 AR590" if exit_code == 1 else "\u2717 AR508"), result.stdout
        assert "AR215" not in result.stdout
        assert "more finding" not in result.stdout
    for path in run.rglob("verdict.json"):
        path.unlink()
    (run / "attempt_0/node07/rank_1.err").write_text("")
    assert "AR215" in allranks("why").stdout


@pytest.mark.parametrize("words", [(), ("latest",), (NEW,), (f"runs/{NEW}",), ("--json",)], ids=" ".join)
def test_why_of_a_run_that_still_runs_says_so_first(
    words: tuple[str, ...], stand_in: int, allranks: Allranks, tmp_path: Path
) -> None:
    leave_run(tmp_path, exit_code=None, pid=stand_in)
    result = allranks("why", *words, env=HERE)
    assert result.returncode == 3
    assert "AR599" not in result.stdout
    if words == ("--json",):
        assert json.loads(result.stdout)["running"] == NEW
    else:
        assert result.stdout.startswith(f"{NEW} is still RUNNING; to see where its ranks are: allranks stack {NEW}\n\n")


def test_why_explains_an_older_run_by_its_id(runs: Path, allranks: Allranks) -> None:
    document = json.loads(allranks("why", "--json", OLD).stdout)
    assert [finding["cause"] for finding in document["findings"]] == ["AR599 healthy"]


def test_why_reads_all_of_a_torchrun_log_directory(allranks: Allranks, tmp_path: Path) -> None:
    """Each node has a directory of its own there, with attempt_0 in it: they are one run."""
    for node, text in {"none_a": "", "none_b": BOOM}.items():
        folder = tmp_path / "logs" / node / "attempt_0" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    result = allranks("why", "--json", "logs")
    assert result.stderr == ""
    assert len(json.loads(result.stdout)["sources"]) == 2


def test_stack_of_a_run_that_has_ended_says_where_to_look(runs: Path, allranks: Allranks) -> None:
    result = allranks("stack", "latest")
    assert (result.returncode, result.stderr) == (
        3,
        f"error: run {NEW} has ended; to see what happened: allranks why {NEW}\n",
    )


def test_list_shows_jobs_of_slurm_and_runs(runs: Path, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    leave_run(tmp_path, "12", exit_code=None)  # of a job that SLURM lists itself
    (tmp_path / "runs" / "13").mkdir()
    (tmp_path / "runs" / "13" / "submission.sh").touch()  # has not begun
    row = ["12", "RUNNING", "None", "2", "n[1-2]", "main", "ada", "s", "N/A", "2:00:00", "0:02", "/h", "gpt"]
    slurm.answer("squeue", out="\x1f".join(row) + "\n")
    for name in ("12", OLD):
        (tmp_path / "runs" / name / "goodput.json").write_bytes(msgspec.json.encode(LEDGER))
    newer = msgspec.structs.replace(
        LEDGER, until_s=8099.0, seconds={"step": 870.0, "wait": 130.0}
    )  # its leader is gone
    status = JobStatus(job=OLD, written_s=9.0, started_s=1.0, phase="running", ledger=newer)
    (tmp_path / "runs" / OLD / "status.json").write_bytes(write_status(status))
    lines = [line.split() for line in allranks("list").stdout.splitlines()]
    assert lines[1] == ["12", "gpt", "RUNNING", "2", "-", "1", "91", "%", "n[1-2]"]
    assert lines[2][:-1] == [
        NEW,
        "train.py",
        "FAILED",
        "1",
        "-",
        "0",
        "-",
        "exit",
        "code",
        "1,",
        "AR590",
        "user-code-error,",
        "ended",
    ]
    assert lines[3][:-1] == [OLD, "train.py", "COMPLETED", "1", "-", "1", "87", "%", "ended"]
    assert len(lines) == 4
    found = json.loads(allranks("list", "--json").stdout)
    assert [(each["id"], each["state"]) for each in found] == [
        ("12", "RUNNING"), (NEW, "FAILED"), (OLD, "COMPLETED"),
    ]  # fmt: skip
    assert found[1]["cause"] == "AR590 user-code-error"
    assert found[1]["run_dir"] == f"runs/{NEW}"
    assert [each.get("goodput") for each in found] == [None, None, 0.87]


def test_list_shows_a_finished_job_with_its_name_in_slurm_and_its_nodes(
    runs: Path, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    """Also one that ended before its ranks were started."""
    script = allranks("render", "--nodes", "6", "--job-name", "my loop", "loop.py").stdout
    slurm.answer("squeue", out="")
    ended = leave_run(tmp_path, "12")
    failed = leave_run(tmp_path, "13", exit_code=78)
    for path in (ended, failed):
        (path / "submission.sh").write_text(script)
    (failed / "attempt_0/events.jsonl").unlink()
    cards = {str(index): {"host": f"node{7 + index:02}"} for index in range(6)}
    (failed / "attempt_0/roll_call.json").write_text(json.dumps({"cards": cards}))
    found = {each["id"]: each for each in json.loads(allranks("list", "--json").stdout)}
    assert {each["name"] for each in (found["12"], found["13"])} == {"my loop"}
    assert (found["12"]["num_nodes"], found["13"]["num_nodes"], found["13"]["nodes"]) == (1, 6, "node[07-12]")
    (failed / "attempt_0/roll_call.json").unlink()
    found = {each["id"]: each for each in json.loads(allranks("list", "--json").stdout)}
    assert (found["13"]["num_nodes"], found["13"]["nodes"]) == (1, "node07")


def test_list_shows_runs_where_there_is_no_slurm(runs: Path, allranks: Allranks) -> None:
    result = allranks("list", env={"PATH": "/nowhere"})
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["JOB", NEW, OLD]


def test_list_without_a_slurm_conf_shows_runs_and_says_that_jobs_are_missing(
    runs: Path, slurm: FakeSlurm, allranks: Allranks
) -> None:
    slurm.answer("squeue", err="squeue: fatal: Could not establish a configuration source\n", code=1)
    result = allranks("list")
    words = "SLURM was not asked (squeue: no slurm.conf on this machine), so its pending and running jobs are missing"
    assert (result.returncode, result.stderr) == (0, f"allranks: {words} here\n")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["JOB", NEW, OLD]


def test_list_says_once_that_the_controller_does_not_answer(runs: Path, slurm: FakeSlurm, allranks: Allranks) -> None:
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.answer("squeue", err=words + "\n", code=1)
    result = allranks("list")
    assert (result.returncode, result.stderr) == (0, f"allranks: cannot list SLURM jobs: squeue: {words}\n")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["JOB", NEW, OLD]


@pytest.mark.parametrize(
    ("exit_code", "node", "state", "line"),
    [
        (143, "node07", "CANCELLED", "CANCELLED, exit code 143 on 1 node (node07), ended "),
        (
            None,
            "node07",
            "LOST",
            "LOST: its agent (process 4194305 on node07) was killed: it is gone without a verdict",
        ),
        (None, "node08", "UNKNOWN", "UNKNOWN: it has no verdict yet, and its agent on 1 node (node08) is not visible"),
    ],
)
def test_a_run_without_a_verdict_is_not_called_running(
    exit_code: int | None, node: str, state: str, line: str, allranks: Allranks, tmp_path: Path
) -> None:
    leave_run(tmp_path, exit_code=exit_code, node=node)
    assert line in allranks("status", "latest", env=HERE).stdout
    (found,) = json.loads(allranks("status", "--json", "latest", env=HERE).stdout)
    assert found["local"]["state"] == state


def test_a_run_that_started_no_ranks_says_only_when_it_ended(allranks: Allranks, tmp_path: Path) -> None:
    run = leave_run(tmp_path, exit_code=78)
    (run / "attempt_0/events.jsonl").unlink()
    line = allranks("status", "latest", env=HERE).stdout.splitlines()[0]
    assert line.startswith(f"run {NEW}   FAILED, exit code 78 on 1 node (node07), ended 20")
    assert " after " not in line


@pytest.mark.parametrize(("exit_code", "name"), [(130, "SIGINT"), (143, "SIGTERM"), (129, "SIGHUP")])
def test_a_run_that_a_person_ended_has_one_cause_everywhere(
    exit_code: int, name: str, allranks: Allranks, tmp_path: Path
) -> None:
    leave_run(tmp_path, exit_code=exit_code, node="node07")
    words = f"  verdict   no failure, ended from outside by {name}, exit code {exit_code}\n"
    assert words in allranks("status", "latest", env=HERE).stdout
    row = f"CANCELLED  1      -     0         -        exit code {exit_code}, AR508 cancelled, ended "
    assert row in allranks("list", env=HERE).stdout
    (found,) = json.loads(allranks("why", "--json").stdout)["findings"]
    assert found["cause"] == "AR508 cancelled"


def test_a_process_id_that_was_given_again_is_not_the_agent(stand_in: int, allranks: Allranks, tmp_path: Path) -> None:
    """The process is younger than the run's start; the run is of a version that did not record when its agent began."""
    path = leave_run(tmp_path, exit_code=None, pid=stand_in)
    events = path / "attempt_0/events.jsonl"
    event = json.loads(events.read_text())
    assert "RUNNING" in allranks("status", NEW, env=HERE).stdout
    events.write_text(json.dumps(event | {"time_s": 1000.0}) + "\n")
    assert "LOST" in allranks("status", NEW, env=HERE).stdout
    assert allranks("cancel", NEW, env=HERE).stdout == (
        f"run {NEW} had already ended: LOST; process {stand_in} is another one (it began later than the run), and got "
        "no signal\n"
    )


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("20261123-05", "no such run in runs; expected the id of a run (allranks list prints them), latest, or the id"),
        ("..", "no such run in runs"),
        ("runs", "no such run in runs"),
    ],
)
def test_what_is_no_run_is_refused(verb: str, name: str, words: str, runs: Path, allranks: Allranks) -> None:
    result = allranks(verb, name)
    assert result.returncode == 2
    assert_one_line(result.stderr)
    assert words in result.stderr


def test_a_run_that_this_user_may_not_read_is_refused_and_hides_no_other(without_root: Path) -> None:
    for job in ("4711", "4712"):
        write(without_root / job / "attempt_0/events.jsonl", "")
    (without_root / "4712").chmod(0)
    (without_root / "latest").symlink_to("4712")
    assert [path.name for path in list_runs(without_root)] == ["4711"]
    for name in ("4712", "latest", f"{without_root}/4712"):
        with pytest.raises(UsageError, match=r"4712: permission denied$"):
            find_run(name, without_root)
    (without_root / "4712").chmod(0o700)


def test_without_a_run_there_is_no_latest(allranks: Allranks) -> None:
    for verb in ("status", "logs", "cancel", "why"):
        result = allranks(verb, "latest")
        assert (result.returncode, result.stderr) == (2, "error: latest: there is no run in runs yet\n")
    assert "there is no run in runs yet" in allranks("why").stderr
    result = allranks("status")
    assert (result.returncode, result.stderr) == (2, "error: latest: there is no run in runs yet\n")


def test_after_submit_latest_is_the_job_that_was_submitted(
    runs: Path, slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert allranks("submit", "--nodes", "2", "train.py").returncode == 0
    pending = show_job(state="PENDING", reason="Resources", nodes="", start="Unknown", work=tmp_path)
    slurm.answer("scontrol", "show job 12", out=pending)
    assert allranks("status", "latest").stdout.startswith("job 12   train   PENDING for 2 nodes: Resources; ")
    for words in ((), ("latest",)):
        why = allranks("why", *words)
        assert (why.returncode, why.stderr.splitlines()[-1]) == (
            2,
            "error: job 12 has not started (Resources), so it has no log yet; see allranks status 12",
        )
    assert "has not started (Resources)" in allranks("logs", "latest").stderr
    slurm.answer("scontrol", "show job 12", out=pending.replace("Resources", "DependencyNeverSatisfied"))
    assert "job 12 cannot start: a job that it depends on has failed" in allranks("why").stderr
    allranks("cancel", "latest")
    assert [call["argv"] for call in slurm.calls("scancel")] == [["12"]]
    assert not list(tmp_path.glob("runs/12/**/cancel.log"))  # it has no attempt yet
    (tmp_path / "runs/12/attempt_0").mkdir()
    allranks("cancel", "latest")
    assert (tmp_path / "runs/12/attempt_0/cancel.log").read_text().endswith(" cancelled the job\n")


WAITS = """\
import os, pathlib, time
print("begun", os.environ["RANK"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("gone", os.environ["RANK"], flush=True)
time.sleep(600)
"""


def test_a_run_that_runs_is_listed_followed_and_cancelled(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    command = allranks_command("run", "--ignore", "AR011", "--nproc-per-node", "2", "train.py")
    env = clean_env(os.environ, **HERE)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **quiet) as agent:  # type: ignore[call-overload]
        try:
            wait_until(
                lambda: len([f for f in tmp_path.glob("runs/latest/*/*/rank_*.out") if f.read_text()]) == 2, "ranks"
            )
            name = (tmp_path / "runs/latest").readlink().name
            assert "RUNNING on 1 node (node07), since " in allranks("status", name, env=HERE).stdout
            assert f"{name}  train.py  RUNNING" in allranks("list", env=HERE).stdout
            with subprocess.Popen(
                allranks_command("logs", "-f", name), cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
            ) as follower:
                assert follower.stdout is not None
                assert {follower.stdout.readline() for _ in range(2)} == {
                    "[node07 r0] begun 0\n",
                    "[node07 r1] begun 1\n",
                }
                (tmp_path / "go").touch()
                assert {follower.stdout.readline() for _ in range(2)} == {
                    "[node07 r0] gone 0\n",
                    "[node07 r1] gone 1\n",
                }
                told = allranks("cancel", name, env=HERE)
                assert told.stdout == f"cancelling run {name}: sent SIGTERM to its agent, process {agent.pid}\n"
                assert agent.wait(60) == 143
                assert follower.wait(60) == 0
        finally:
            agent.terminate()
    assert "CANCELLED, exit code 143 on 1 node (node07)" in allranks("status", name, env=HERE).stdout
    (found,) = json.loads(allranks("why", "--json").stdout)["findings"]
    assert (found["cause"], found["confidence"]) == ("AR508 cancelled", "certain")
    assert found["evidence"][0]["source"] == f"runs/{name}/attempt_0/cancel.log:1"
    assert " allranks cancel: " in found["evidence"][0]["seen"]
