"""Two runs in one directory of checkpoints, and directories that fill up, cannot be written, or are gone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allranks
from allranks.session import SessionError
from allranks.state.saved.checkpoint import Checkpointer, CheckpointError
from allranks.state.saved.owner import OWNER, Owner
from allranks.state.saved.parts import list_checkpoints
from state.test_loops import tracked
from state.test_owner import other, put  # noqa: F401  (a fixture)

pytestmark = pytest.mark.torch

FIRST = (
    "{}: job 17 (pid {} on {}, since 1970-01-01 00:00:00, run directory /scratch/runs/17) writes its checkpoints there"
)


def first_line(directory: Path, found: Owner) -> str:
    return FIRST.format(directory, found.pid, found.host)


@pytest.fixture
def first(tmp_path: Path, other: Owner, monkeypatch: pytest.MonkeyPatch) -> Owner:  # noqa: F811
    """A run that lives, with a checkpoint."""
    monkeypatch.setenv("TZ", "UTC")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(40, {"w": torch.ones(2)}, wait=True)
    found = Owner(**{name: getattr(other, name) for name in Owner.__slots__} | {"since_s": 0.0})
    put(tmp_path, found, age_s=9000)
    return found


def test_a_second_run_that_would_train_is_refused_in_one_line_and_one_that_loads_is_not(
    tmp_path: Path, first: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load() is not None
    with tracked(tmp_path / "own", model=model) as state:
        for step in state.steps([0], total=1):
            with step:
                pass
    put(tmp_path / "own", first)
    with tracked(tmp_path / "own", model=model) as state:  # to evaluate it
        assert state.step == 1
        assert list(state.steps([0], total=1)) == []  # nothing is left to do
    capsys.readouterr()
    with tracked(tmp_path / "own", model=model) as state, pytest.raises(SessionError) as refused:
        next(state.steps([0], total=2))
    advice = "name another directory (--checkpoint-dir, ALLRANKS_CHECKPOINT_DIR), or end that run first (kill {} on {})"
    line = f"{first_line(tmp_path / 'own', first)}; {advice.format(first.pid, first.host)}"
    assert (refused.value.code, capsys.readouterr().err.splitlines()[-1]) == (
        78,
        f"error: {line}; to only read, use allranks.load_weights",
    )


def test_a_save_into_a_living_runs_directory_changes_nothing_there(tmp_path: Path, first: Owner) -> None:
    said: list[str] = []
    before = sorted(tmp_path.rglob("*"))
    with Checkpointer(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(40, {"w": torch.zeros(2)}, wait=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(said) == 1
    assert said[0].startswith(f"the checkpoint of step 40 is not written: {first_line(tmp_path, first)}; name another")


def test_who_has_lost_its_directory_completes_and_deletes_no_checkpoint_there(tmp_path: Path, first: Owner) -> None:
    said: list[str] = []
    (tmp_path / OWNER).unlink()
    with Checkpointer(tmp_path, say=said.append) as checkpoints:
        for step in (50, 60, 70):
            checkpoints.save(step, {"w": torch.zeros(2)}, wait=True)
        put(tmp_path, first)  # it was stopped for a minute, say, and taken for dead
        checkpoints.save(80, {"w": torch.zeros(2)}, wait=True)
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step_70", "step_60", "step_50"]
        (tmp_path / OWNER).unlink()
        checkpoints.save(90, {"w": torch.zeros(2)}, wait=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_90", "step_70", "step_60"]
    [line] = [line for line in said if line.startswith("the checkpoint of step 80 is not written")]
    assert f"{tmp_path} is job 17 (pid {first.pid} on {first.host}, " in line
    assert line.endswith("'s now; the checkpoint of step 70 is complete")


def test_a_session_that_an_exception_ends_holds_its_directory_no_more(tmp_path: Path) -> None:
    def life() -> None:
        with allranks.session(backend="gloo") as s:  # in a notebook, say
            for step in s.track(model=torch.nn.Linear(1, 1), checkpoint_dir=tmp_path).steps([0], total=1):
                with step:
                    assert (tmp_path / OWNER).exists()
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        life()
    assert not (tmp_path / OWNER).exists()


def test_a_directory_that_cannot_be_listed_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Checkpointer(tmp_path / "file") as checkpoints, pytest.raises(CheckpointError) as refused:
        checkpoints.load()
    assert str(refused.value) == f"the directory of checkpoints cannot be read: Not a directory ({tmp_path}/file)"


ON_MOUNTS = """
import json, os, subprocess, sys, torch
from pathlib import Path
from allranks.state.saved import holding
from allranks.state.saved.checkpoint import Checkpointer

disk, told = Path(sys.argv[1]), {}
state = {"w": torch.ones(10_000)}

def mount(*how):
    subprocess.run(["mount", *how, str(disk)], check=True)

def life(what, *, first, save=True):
    said = []
    with Checkpointer(disk / "c", say=said.append) as checkpoints:
        loaded = checkpoints.load()
        why = checkpoints.hold()
        if save:
            checkpoints.save(first, state, wait=True)
        told[what] = [loaded and loaded.step, why, checkpoints.last_complete, said]

mount("-t", "tmpfs", "-o", "size=2m,nr_inodes=40", "tmpfs")
life("room", first=1)
(disk / "fill").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
life("full", first=2)
(disk / "fill").unlink()
names = []
try:
    while True:
        (disk / f"n{len(names)}").touch()
        names.append(disk / f"n{len(names)}")
except OSError:
    pass
life("no inodes", first=3)
for name in names:
    name.unlink()
mount("-o", "remount,ro")
life("read-only", first=4)
mount("-o", "remount,rw")

holding.RENEW_S = 0.05
said = []
with Checkpointer(disk / "c", say=said.append) as checkpoints:
    checkpoints.save(5, state, wait=True)
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    checkpoints.save(6, state, wait=True)
    told["unmounted"] = [checkpoints.last_complete, os.listdir(disk), said]
print(json.dumps(told))
"""


def test_a_disk_that_is_full_read_only_or_gone_stops_no_load_and_is_filled_with_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", ON_MOUNTS, str(disk)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in result.stderr:
        pytest.skip(f"no mounts of our own here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    told, root = json.loads(result.stdout), disk / "c"
    not_held = f"{root}: no owner.json can be written (No space left on device), so another run there is not kept out"
    assert told["room"] == [None, "", 1, []]
    for what, step, room in (("full", 2, r"0 MB and \d\d inodes"), ("no inodes", 3, r"2 MB and \d inodes")):
        loaded, why, last, said = told[what]
        assert (loaded, why, last) == (1, "", 1)
        assert said[0] == not_held
        why = rf"the checkpoint of step {step} is not written: No space left on device \({root}\), {room} are free; "
        assert re.match(why, said[1]), said
        assert len(said) == 2
    loaded, why, last, said = told["read-only"]
    assert (loaded, why, last) == (1, "", 1)
    assert [line.partition("; ")[0] for line in said] == [
        f"the checkpoint of step 4 is not written: Read-only file system ({root})"
    ]
    last, names, said = told["unmounted"]
    assert (last, names) == (5, [])
    gone = "the file system of earlier checkpoints is gone: was it unmounted?"
    assert f"the checkpoint of step 6 is not written: {gone} ({root}); the checkpoint of step 5 is complete" in said
