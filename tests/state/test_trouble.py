"""The file system fails, the writer dies, the disk hangs: training goes on, it is said once, old checkpoints stay."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.saved import checkpoint, commit
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.saved.commit import Attempt, AttemptFailedError, gather_parts, write_part
from allranks.state.saved.manifest import part_name
from conftest import wait_until
from state.conftest import kill, writers_of

pytestmark = pytest.mark.torch

ON_A_SMALL_DISK = """
import json, subprocess, sys, torch
from allranks.state.saved.checkpoint import Checkpointer

directory, said, found = sys.argv[1] + "/checkpoints", [], {}
small, large = {"w": torch.ones(100_000)}, {"w": torch.ones(2_000_000)}

def mount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", sys.argv[1]], check=True)

with Checkpointer(directory, say=said.append) as checkpoints:
    checkpoints.save(1, small, wait=True)
    checkpoints.save(2, small, wait=True)
    checkpoints.save(3, large, wait=True)
    found["after full"] = [checkpoints.last_complete, checkpoints.load().step]
    found["left"] = sorted(path.name for path in checkpoints.directory.glob("step_*"))
    checkpoints.save(4, small, wait=True)
    found["after room"] = [checkpoints.last_complete, checkpoints.load().step]
    mount("ro")
    checkpoints.save(5, small, wait=True)
    found["while read-only"] = [checkpoints.last_complete, checkpoints.load().step]
    mount("rw")
    checkpoints.save(6, small, wait=True)
    found["after read-only"] = [checkpoints.last_complete, checkpoints.load().step]
print(json.dumps({"said": said, **found}))
"""


def test_training_goes_on_beside_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=4m tmpfs {disk} && exec {sys.executable} -c "$0" {disk}'
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, ON_A_SMALL_DISK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in result.stderr:
        pytest.skip(f"no mounts of our own here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    full, read_only = found.pop("said")
    assert full.startswith(
        f"the checkpoint of step 3 is not written: No space left on device ({disk}/checkpoints), 3 MB are free; "
        "the checkpoint of step 2 is complete"
    )
    assert read_only == (
        f"the checkpoint of step 5 is not written: Read-only file system ({disk}/checkpoints); "
        "the checkpoint of step 4 is complete"
    )
    assert found == {
        "after full": [2, 2],
        "left": ["step_1", "step_2"],
        "after room": [4, 4],
        "while read-only": [4, 4],
        "after read-only": [6, 6],
    }


def test_a_file_where_the_directory_should_be_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with Checkpointer(tmp_path / "file" / "checkpoints", say=said.append) as checkpoints:
        checkpoints.save(1, {}, wait=True)
    path = tmp_path / "file" / "checkpoints"
    assert said == [f"the checkpoint of step 1 is not written: Not a directory ({path}); no checkpoint is complete"]


def test_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    with Checkpointer(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(1, {"step": 1}, wait=True)
        [writer] = writers_of(tmp_path)
        kill(writer)
        # Not until its name is gone: the kernel takes that away before it closes its connection.
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
        checkpoints.save(2, {"step": 2}, wait=True)
        assert checkpoints.last_complete == 2
    assert said == [f"the writer of rank 0's checkpoints (pid {writer}) has been killed"]


def test_a_save_is_left_out_where_the_one_before_it_hangs(tmp_path: Path) -> None:
    said: list[str] = []
    with Checkpointer(tmp_path, say=said.append, skip_after_s=0.3) as checkpoints:
        checkpoints.save(1, {"step": 1}, wait=True)
        [writer] = writers_of(tmp_path)
        os.kill(writer, signal.SIGSTOP)
        checkpoints.save(2, {"step": 2})
        stall = checkpoints.save(3, {"step": 3})
        os.kill(writer, signal.SIGCONT)
        assert 0.3 <= stall.waited_s < 30
        assert not checkpoints.wait()  # for the last one, which was given up
        assert checkpoints.last_complete == 2
        checkpoints.save(4, {"step": 4}, wait=True)
        assert checkpoints.last_complete == 4
    assert said == [
        f"the checkpoint of step 3 is not written: the one before is not on disk after 0.3 s: does {tmp_path} hang?; "
        "the checkpoint of step 1 is complete"
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2", "step_4"}


@pytest.mark.parametrize(
    ("waits", "stopped", "whom"),
    [
        (1, 1, "rank 1 after _ s; its part of the checkpoint of step 2 is not on disk: does {} hang?"),
        (1, 0, "rank 0 after _ s; it completes the checkpoint of step 2"),
        (0, 1, "other ranks after _ s; their parts of the checkpoint of step 2 are not all on disk"),
    ],
)
def test_a_long_wait_for_the_last_save_names_whom_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: int, stopped: int, whom: str
) -> None:
    monkeypatch.setattr(checkpoint, "_numbers", itertools.repeat(0))  # both are the first of their process
    store, said = HashStore(), ([], [])
    ranks = [Checkpointer(tmp_path, Membership.spread(rank, 2), store=store, say=said[rank].append) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        ranks[0].save(1, {})
        wait_until(lambda: len(writers_of(tmp_path)) == 1, "the writer of rank 0")
        writers = writers_of(tmp_path)
        ranks[1].save(1, {})
        wait_until(lambda: len(writers_of(tmp_path)) == 2, "the writer of rank 1")
        writers += set(writers_of(tmp_path)) - set(writers)
        assert all(rank.wait() for rank in ranks)
        os.kill(writers[stopped], signal.SIGSTOP)
        monkeypatch.setattr(checkpoint, "NOTICE_S", 0.2)
        for rank in ranks:
            rank.save(2, {})
        assert not ranks[waits].wait(timeout_s=2.0)
        lines = [re.sub(r"after \d+ s", "after _ s", line) for line in said[waits]]
        os.kill(writers[stopped], signal.SIGCONT)
        assert all(rank.wait() for rank in ranks)
    assert lines[-1] == f"still waiting for {whom.format(tmp_path)}"
    assert 2 <= len(lines) <= 4  # after 0.2, 0.4, 0.8 and 1.6 s


def test_a_part_that_fails_is_said_by_the_coordinator_alone(tmp_path: Path) -> None:
    for rank, expected in ((0, FileExistsError), (1, AttemptFailedError)):
        attempt = Attempt(root=tmp_path, step=5, name="abcd-1", rank=rank, world_size=2)
        attempt.directory.mkdir(exist_ok=True)
        (attempt.directory / part_name(rank)).write_text("in the way")
        with pytest.raises(expected) as failed:
            write_part(attempt, memoryview(b"state"))
    assert str(failed.value) == ""
    attempt = Attempt(root=tmp_path, step=5, name="abcd-1", rank=0, world_size=2)
    with pytest.raises(AttemptFailedError, match="rank 0: File exists"):
        gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: False)


def test_a_part_that_never_comes_holds_up_the_next_save_for_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "ORPHANED_PATIENCE_S", 0.2)
    attempt = Attempt(root=tmp_path, step=5, name="abcd-1", rank=0, world_size=2)
    write_part(attempt, memoryview(b"state"))
    with pytest.raises(AttemptFailedError, match="no part of rank 1 has come to"):
        gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: True)


def test_a_writer_ignores_what_ends_a_job(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"step": 1}, wait=True)
        [writer] = writers_of(tmp_path)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(writer, signum)
        checkpoints.save(2, {"step": 2}, wait=True)
        assert writers_of(tmp_path) == [writer]
        assert checkpoints.last_complete == 2
    assert not writers_of(tmp_path)


def test_the_second_save_copies_into_memory_that_is_there(tmp_path: Path) -> None:
    state = {"w": torch.ones(5_000_000)}
    with Checkpointer(tmp_path) as checkpoints:
        stalls = [checkpoints.save(step, state, wait=True) for step in range(4)]
    assert min(stall.copy_s for stall in stalls[1:]) < stalls[0].copy_s


def leave_behind(directory: Path, name: str, *, owner: dict[str, object] | None, age_s: float = 0) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    if owner:
        (path / "rank_00000.json").write_text(json.dumps({"state": "writing", "owner": owner}))
    for touched in (*path.iterdir(), path):
        os.utime(touched, (time.time() - age_s,) * 2)
    return path


def test_only_what_dead_writers_left_is_swept_up(tmp_path: Path) -> None:
    me = {
        "host": os.uname().nodename,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "started": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
    }
    stay = [
        leave_behind(tmp_path, "step_1.tmp.aaaa-1", owner=me, age_s=9000),
        leave_behind(tmp_path, "step_2.tmp.aaaa-2", owner=me | {"host": "another"}),
        leave_behind(tmp_path, "step_3.tmp.aaaa-3", owner=me | {"pid_namespace": "pid:[1]", "pid": 1}),
        leave_behind(tmp_path, "step_4.tmp.aaaa-4", owner=None),
        leave_behind(tmp_path, "step_5.tmp", owner=None, age_s=9000),
        leave_behind(tmp_path, "mine", owner=None, age_s=9000),
    ]
    leave_behind(tmp_path, "step_1.tmp.bbbb-1", owner=me | {"started": 1})
    leave_behind(tmp_path, "step_2.tmp.bbbb-2", owner=me | {"boot": "an earlier one"})
    leave_behind(tmp_path, "step_3.tmp.bbbb-3", owner=me | {"host": "another"}, age_s=9000)
    leave_behind(tmp_path, "step_4.tmp.bbbb-4", owner=None, age_s=9000)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {}, wait=True)
    assert set(tmp_path.iterdir()) == {*stay, tmp_path / "step_7"}


def test_several_ranks_need_a_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a checkpointer for 2 ranks needs the store of their process group"):
        Checkpointer(tmp_path, Membership.spread(0, 2))
