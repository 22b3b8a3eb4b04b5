"""Does `allranks clean` delete the old runs that were meant, after a look at them, and never one that may be alive?"""

from __future__ import annotations

import json
import os
import pwd
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.launch.batch.clean import GONE_S, JUST_NOW_S, Candidate, choose
from allranks.model.finding import Verdict
from allranks.model.setting import Setting
from allranks.report.rundir import RunDir
from allranks.report.runs import BEING_DELETED, list_runs
from allranks.state.saved.owner import OWNER, identify, to_bytes
from conftest import Tell
from fake_slurm import FakeSlurm, fake_slurm  # noqa: F401  (a fixture)

DAY_S = 86400.0
OLD, MIDDLE, NEW = "20261101-000000-1", "20261110-000000-2", "20261123-000000-3"
LINE = "{}\x1fRUNNING\x1fNone\x1f2\x1fn[1-2]\x1fmain\x1fada\x1fs\x1fN/A\x1f2:00\x1f0:02\x1f/h\x1fgpt\n"


def leave(folder: Path, name: str, *, days: float, exit_code: int | None = 0, node: str = "node03") -> RunDir:
    """A run that ended, or was last alive, so many days ago."""
    run_dir = RunDir(folder / "runs", name)
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", generation=0, command=["python", "train.py"], members=[node], pid=4194305)
    (run_dir.create_node(node).path / "rank_0.out").write_text("step 120\n")
    if exit_code is not None:
        run_dir.write_verdict(Verdict(job=name, attempt=0, exit_code=exit_code), node=node)
    then_s = time.time() - days * DAY_S
    events = run_dir.attempt_path / "events.jsonl"
    event = json.loads(events.read_text())
    events.write_text(json.dumps(event | {"time_s": then_s - 60}) + "\n")
    for path in run_dir.path.rglob("*"):
        os.utime(path, (then_s, then_s))
    return run_dir


@pytest.fixture
def runs(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs that have ended 40, 31 and 1 days ago on this machine, node03."""
    monkeypatch.setenv("SLURMD_NODENAME", "node03")
    for name, days in ((OLD, 40), (MIDDLE, 31), (NEW, 1)):
        leave(tmp_path, name, days=days)
    return tmp_path / "runs"


def names(runs: Path) -> list[str]:
    return [path.name for path in list_runs(runs)]


def test_it_deletes_nothing_before_it_was_seen_and_agreed_to(runs: Path, tell: Tell) -> None:
    checkpoint = runs / OLD / "checkpoints/step_000000120"
    checkpoint.mkdir(parents=True)
    (checkpoint / "a.safetensors").write_bytes(b"x" * 5_000_000)
    told = tell("clean", "--older", "30d")
    assert told.code == 0
    lines = [line.split() for line in told.out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[:3]] == [("RUN", "WHAT"), (MIDDLE, "delete"), (OLD, "delete")]
    assert "5.0 MB" in told.out
    assert "2 runs to delete, 5.0 MB\n" in told.out
    assert told.err == "allranks: nothing was deleted; to delete these runs, add --yes\n"
    assert names(runs) == [NEW, MIDDLE, OLD]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--older", "30d"), [NEW]),
        (("--older", "35d"), [NEW, MIDDLE]),
        (("--older", "90d"), [NEW, MIDDLE, OLD]),
        (("--keep", "1"), [NEW]),
        (("--keep", "0"), []),
        (("--older", "30d", "--keep", "2"), [NEW, MIDDLE]),
        ((MIDDLE, NEW), [OLD]),
        (("latest",), [MIDDLE, OLD]),
    ],
)
def test_it_deletes_the_runs_that_are_meant_and_latest_leads_to_one_that_is_there(
    words: tuple[str, ...], left: list[str], runs: Path, tell: Tell
) -> None:
    (runs / "mine").mkdir()
    assert tell("clean", "--yes", *words).code == 0
    assert names(runs) == left
    assert (runs / "mine").is_dir()
    assert (runs / "latest").is_symlink() is bool(left)
    assert not left or (runs / "latest").readlink() == Path(left[0])
    assert not list(runs.glob(f"{BEING_DELETED}*"))


def test_what_may_be_alive_is_kept_and_told_why(
    runs: Path, slurm: FakeSlurm, tell: Tell, tmp_path: Path, stand_in: int
) -> None:
    waits = leave(tmp_path, "12", days=50, exit_code=75)  # it failed, and waits in the queue again
    leave(tmp_path, "13_4", days=50)
    leave(tmp_path, "14", days=50)
    elsewhere = leave(tmp_path, "20261001-000000-7", days=GONE_S / DAY_S - 1, exit_code=None, node="node04")
    gone = leave(tmp_path, "20261001-000000-8", days=GONE_S / DAY_S + 1, exit_code=None, node="node04")
    killed = leave(tmp_path, "20261001-000000-9", days=0.9 * JUST_NOW_S / DAY_S, exit_code=None)
    running = leave(tmp_path, "20261001-000000-10", days=50, exit_code=None)
    events = running.attempt_path / "events.jsonl"
    events.write_text(json.dumps(json.loads(events.read_text()) | {"pid": stand_in, "time_s": time.time()}) + "\n")
    running.write_settings("node03", [Setting("ALLRANKS_CHECKPOINT_DIR", f"{runs}/{OLD}/x", reason="", source="")])
    slurm.answer("squeue", out=LINE.format("12") + LINE.format("13_[4-9%2]"))
    rows = {row["id"]: row for row in json.loads(tell("clean", "--keep", "0", "--yes", "--json").out)}
    assert {name: row["kept"] for name, row in rows.items() if row["kept"]} == {
        "12": "the job is still in SLURM",
        "13_4": "the job is still in SLURM",
        elsewhere.path.name: "it may be running on another machine",
        killed.path.name: "it was alive a moment ago",
        running.path.name: "it is running",
        OLD: f"run {running.path.name} has its checkpoints in it",
    }
    assert set(names(runs)) == {name for name, row in rows.items() if row["kept"]}
    assert rows[gone.path.name]["is_deleted"]
    assert waits.path.is_dir()
    owner = pwd.getpwuid(os.getuid()).pw_name
    assert slurm.calls("squeue")[0]["argv"][:3] == ["-h", "-u", owner]  # type: ignore[index]


def test_a_run_in_which_a_living_process_writes_checkpoints_is_kept(runs: Path, tell: Tell) -> None:
    me = replace(identify({}), job="x", since_s=0.0)
    for name, owner in ((OLD, me), (MIDDLE, replace(me, started=1))):
        (runs / name / "checkpoints").mkdir()
        (runs / name / "checkpoints" / OWNER).write_bytes(to_bytes(owner))
    rows = {row["id"]: row["kept"] for row in json.loads(tell("clean", "--keep", "0", "--yes", "--json").out)}
    assert rows[OLD].startswith(f"job x (pid {os.getpid()} on {me.host}, since 1970-01-0")
    assert rows[OLD].endswith(") writes checkpoints in it")
    assert names(runs) == [OLD]


def test_jobs_are_kept_where_slurm_cannot_be_asked(runs: Path, slurm: FakeSlurm, tell: Tell, tmp_path: Path) -> None:
    leave(tmp_path, "12", days=50)
    slurm.answer("squeue", err="squeue: fatal: Could not establish a configuration source\n", code=1)
    told = tell("clean", "--keep", "0", "--yes")
    assert "  kept: SLURM cannot be asked whether the job is over\n" in told.out
    assert names(runs) == ["12"]


def test_a_link_in_a_run_is_removed_and_not_followed(runs: Path, tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/model").touch()
    (runs / OLD / "checkpoints").symlink_to(tmp_path / "outside")
    assert tell("clean", OLD, "--yes").code == 0
    assert (tmp_path / "outside/model").exists()


def test_what_cannot_be_deleted_is_told_and_the_rest_goes(
    runs: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == OLD:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    told = tell("clean", "--older", "30d", "--yes")
    assert told.code == 3
    assert told.err.splitlines()[0].startswith("allranks: 1 run deleted, ")
    assert told.err.splitlines()[1] == f"allranks: not deleted: runs/{OLD}: Permission denied"
    assert names(runs) == [NEW, OLD]


def test_what_an_interrupted_deletion_has_left_is_no_run_and_goes_next_time(runs: Path, tell: Tell) -> None:
    (runs / OLD).rename(runs / f"{BEING_DELETED}{OLD}")
    assert names(runs) == [NEW, MIDDLE]
    assert tell("clean", "--older", "300d", "--yes").code == 0
    assert not (runs / f"{BEING_DELETED}{OLD}").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "clean: expected --older DURATION, --keep N, or runs, for example: allranks clean --older 30d"),
        (("--older", "soon"), "invalid value for '--older': 'soon': expected seconds, or a number with s, m, h or d"),
        (("nonsense",), "RUN 'nonsense': no such run in runs; allranks list --all prints them"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], error: str, runs: Path, tell: Tell) -> None:
    told = tell("clean", *words)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"error: {error}")


def test_age_counts_beyond_the_newest_runs() -> None:
    ages = {"a": 1, "b": 20, "c": 40, "d": 50}
    runs = [
        Candidate(id=name, path=Path(name), name="", state="COMPLETED", ended_s=-days * DAY_S)
        for name, days in ages.items()
    ]

    def chosen(**wanted: float | int | None) -> str:
        return "".join(run.id for run in choose(runs, now_s=0.0, **({"older_s": None, "keep": None} | wanted)))  # type: ignore[arg-type]

    assert chosen(keep=3) == "d"
    assert chosen(older_s=30 * DAY_S) == "cd"
    assert chosen(older_s=10 * DAY_S, keep=2) == "cd"
    assert chosen(older_s=45 * DAY_S, keep=1) == "d"


def test_list_shows_the_older_runs_where_all_are_wanted(tmp_path: Path, slurm: FakeSlurm, tell: Tell) -> None:
    for number in range(22):
        leave(tmp_path, f"20261101-000000-{number:02}", days=number)
    told = tell("list")
    assert len(told.out.splitlines()) == 21
    assert told.err == "allranks: runs has 2 older runs; to list them, too: allranks list --all\n"
    told = tell("list", "--all")
    assert (len(told.out.splitlines()), told.err) == (23, "")
