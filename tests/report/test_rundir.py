"""The run directory: safe paths for any name, and nothing secret in it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.errors import UsageError
from allranks.model.finding import Verdict
from allranks.model.setting import Setting
from allranks.report import rundir
from allranks.report.rundir import (
    EventWriter,
    RunDir,
    SignOfLife,
    as_file_name,
    read_shared_members,
)
from conftest import wait_until


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("4711", "4711"),
        ("4711_12.1", "4711_12.1"),
        ("my run/7", "my_run_7"),
        ("../../etc/passwd", ".._.._etc_passwd"),
        ("..", "_.."),
        (".", "_."),
        ("", "_"),
        ("a\nb", "a_b"),
        ("a\x00b", "a_b"),
        ("/", "_"),
        ("node01-29500", "node01-29500"),
        ("fd00::1-29500", "fd00_1-29500"),
        ("\u5b9f\u9a13", "_"),
        ('it\'s "quoted"; rm -rf ~', "it_s_quoted_rm_-rf_"),
        ("x" * 300, "x" * 128),
    ],
)
def test_nasty_names_become_safe_paths(name, path):
    assert as_file_name(name) == path


def test_the_events_of_a_run_that_is_alive_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "ALIVE_S", 0.01)
    run_dir = RunDir(tmp_path, "7")
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started")
    events = run_dir.attempt_path / "events.jsonl"
    os.utime(events, (0, 0))
    alive = SignOfLife(run_dir)
    wait_until(lambda: events.stat().st_mtime > 0, "a sign of life")
    alive.end()
    events.unlink()  # a file server that fails ends nothing


@given(st.text())
def test_any_name_stays_one_entry_of_its_directory(name):
    safe = as_file_name(name)
    assert safe not in ("", ".", "..")
    assert "/" not in safe
    assert safe.isascii()
    assert len(safe) <= 129


@pytest.mark.parametrize("job", ["my run/7", "..", "a\nb", ""])
def test_a_job_with_a_nasty_name_stays_in_the_log_directory(tmp_path, job):
    root = tmp_path / "my runs"
    run_dir = RunDir(root, job)
    run_dir.create()
    run_dir.create_attempt(None)
    made = run_dir.create_node("../node 01").path
    assert made.resolve().is_relative_to(root)
    assert made.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my runs"]


def test_latest_points_to_the_newest_job(tmp_path):
    for job in ("4711", "4712"):
        RunDir(tmp_path, job).create()
    assert (tmp_path / "latest").readlink() == Path("4712")
    RunDir(tmp_path, "4711").create()
    assert (tmp_path / "latest").readlink() == Path("4711")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4711", "4712", "latest"]


def test_latest_of_a_job_with_spaces_leads_there(tmp_path):
    run_dir = RunDir(tmp_path, "my run/7")
    run_dir.create()
    assert (tmp_path / "latest").resolve() == run_dir.path


def test_a_log_directory_that_cannot_be_made_names_the_flag(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError) as refused:
        RunDir(tmp_path / "runs", "4711").create()
    assert str(refused.value) == (
        f"{tmp_path}/runs/4711: Not a directory; logs and verdicts go there; choose another directory with --log-dir"
    )


def test_attempts_are_numbered_where_nobody_counts(tmp_path):
    names = []
    for _ in range(3):
        run_dir = RunDir(tmp_path, "exp7")
        run_dir.create()
        run_dir.create_attempt(None)
        names.append((run_dir.attempt, run_dir.attempt_path.name))
    assert names == [(0, "attempt_0"), (1, "attempt_1"), (2, "attempt_2")]


def test_the_schedulers_count_is_kept(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    for attempt in (2, 2, 0):
        run_dir.create_attempt(attempt)
        assert run_dir.attempt_path == tmp_path / "4711" / f"attempt_{attempt}"
        assert run_dir.attempt_path.is_dir()


def test_an_attempt_without_its_job_names_the_flag(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    with pytest.raises(
        UsageError, match="attempt_0: No such file or directory; choose another directory with --log-dir"
    ):
        run_dir.create_attempt(None)


def test_a_node_has_a_directory_of_its_own(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.attempt = 1
    assert run_dir.create_node("node01.0").path == tmp_path / "4711" / "attempt_1" / "node01.0"
    again = RunDir(tmp_path, "4711")
    again.attempt = 1
    assert again.create_node("node01.0").path.is_dir()  # other nodes of a shared file system may be first


def test_env_json_says_what_was_set_and_why_without_secrets(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create_node("node 01")
    run_dir.write_settings(
        "node 01",
        [
            Setting("OMP_NUM_THREADS", "4", reason="8 cores for 2 ranks", source="allranks"),
            Setting("HF_TOKEN", "hf_swordfish", reason="already set in the environment; kept", source="environment"),
        ],
    )
    path = tmp_path / "4711" / "attempt_0" / "node_01" / "env.json"
    assert json.loads(path.read_text()) == [
        {"name": "OMP_NUM_THREADS", "value": "4", "reason": "8 cores for 2 ranks", "source": "allranks"},
        {
            "name": "HF_TOKEN",
            "value": "(hidden)",
            "reason": "already set in the environment; kept",
            "source": "environment",
        },
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["env.json"]


def test_the_verdict_is_read_back(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    verdict = Verdict(job="4711", attempt=0, exit_code=1)
    run_dir.write_verdict(verdict, node="node01")
    path = tmp_path / "4711" / "attempt_0"
    assert Verdict.from_json((path / "verdict.json").read_bytes()) == verdict
    assert Verdict.from_json((path / "node01" / "verdict.json").read_bytes()) == verdict
    assert sorted(entry.name for entry in path.iterdir()) == ["node01", "verdict.json"]
    assert [entry.name for entry in (path / "node01").iterdir()] == ["verdict.json"]


def test_members_are_in_a_file_where_they_are_too_long_for_a_variable(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    run_dir.create_node("node01")
    long = ",".join(f"node{i}={i}+1" for i in range(8192))
    path = tmp_path / "4711" / "attempt_0" / "node01" / "members"
    assert run_dir.share_members("node01", "node01=0+2") == "node01=0+2"
    assert not path.exists()
    assert run_dir.share_members("node01", long) == f"@{path}"
    assert read_shared_members(f"@{path}") == long
    assert read_shared_members("node01=0+2") == "node01=0+2"
    assert read_shared_members(f"@{path}.gone") == ""


def test_events_are_a_line_each(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    run_dir.add_event("joined", node="node\n02", pid=812)
    run_dir.add_event("ended", exit_code=1)
    lines = (tmp_path / "4711" / "attempt_0" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [{name: event[name] for name in event if name != "time_s"} for event in events] == [
        {"event": "joined", "node": "node\n02", "pid": 812},
        {"event": "ended", "exit_code": 1},
    ]
    assert all(isinstance(event["time_s"], float) for event in events)
    assert run_dir.read_events() == events[1:]  # nothing reads who joined


class Stuck(RunDir):
    """Its file server answers once `answers` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "4711")
        self.answers, self.told = threading.Event(), ""
        self.last_files.append = self.append

    def append(self, lines: str) -> None:
        self.answers.wait()
        self.told += lines


def test_events_of_a_writer_wait_for_the_file_server_and_nobody_for_them(tmp_path):
    run_dir = Stuck(tmp_path)
    with EventWriter(run_dir) as events:
        for number in range(1000):
            events.add("joined", node=f"node{number}")
        assert run_dir.told == ""
        run_dir.answers.set()
    assert len(run_dir.told.splitlines()) == 1000


def test_a_writer_whose_file_server_hangs_is_left_behind(tmp_path):
    run_dir = Stuck(tmp_path)
    began_s = time.monotonic()
    with EventWriter(run_dir) as events:
        events.add("joined", node="node02")
    assert 1.9 < time.monotonic() - began_s < 10
    run_dir.answers.set()  # let the thread go


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    assert run_dir.read_events() == []
    run_dir.create()
    run_dir.create_attempt(0)
    run_dir.add_event("ended", exit_code=1)
    with (run_dir.attempt_path / "events.jsonl").open("a") as file:
        file.write('{"time_s": 1.5, "event": "end')
    assert [event["event"] for event in run_dir.read_events()] == ["ended"]


def test_a_directory_that_may_not_be_written_is_said_so(without_root):
    without_root.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied; logs and verdicts go there"):
        RunDir(without_root, "4711").create()


def test_a_directory_that_is_gone_does_not_stop_the_job(tmp_path):
    run_dir = RunDir(tmp_path, "4711")  # never made, as when somebody cleans up during the job
    run_dir.add_event("ended", exit_code=0)
    run_dir.write_verdict(Verdict(job="4711", attempt=0, exit_code=0), node="node01")
    run_dir.write_settings("node01", [])
    # The verdict alone is worth a new directory: a follower whose run directory is not shared has never made one.
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert made == [
        "4711/attempt_0/node01/env.json",
        "4711/attempt_0/node01/verdict.json",
        "4711/attempt_0/verdict.json",
    ]


def test_a_job_named_latest_is_not_its_own_link(tmp_path):
    for job in ("night", "latest"):
        run_dir = RunDir(tmp_path, job)
        run_dir.create()
        run_dir.create_attempt(None)
    assert (tmp_path / "_latest" / "attempt_0").is_dir()
    assert (tmp_path / "latest").readlink() == Path("_latest")


def test_no_event_is_written_with_a_secret(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    command = ["python", "train.py", "--hf-token", "swordfish", "--api-key=swordfish", "--db=pg://ada:swordfish@db"]
    run_dir.add_event("started", command=command, members=["node01"])
    with EventWriter(run_dir) as events:
        events.add("node_lost", node="node01", reason="it said: password=swordfish")
    text = (run_dir.attempt_path / "events.jsonl").read_text()
    assert "swordfish" not in text
    assert [event["event"] for event in run_dir.read_events()] == ["started", "node_lost"]


def test_events_that_wait_for_a_file_server_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "MAX_QUEUED", 100)
    run_dir = RunDir(tmp_path, "j")
    run_dir.create()
    run_dir.create_attempt(0)
    events = EventWriter(run_dir)
    for number in range(1000):
        events.add("stranger", number=number)
    with events:  # only now does the file server answer
        pass
    told = [json.loads(line) for line in (run_dir.attempt_path / "events.jsonl").read_text().splitlines()]
    assert [each["number"] for each in told] == [*range(100), 900]
    assert told[-1]["event"] == "events_lost"
