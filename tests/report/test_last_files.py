"""Are the verdict, the exit code and the events there after a disk was full, and is told what is not?"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.model.finding import Verdict
from allranks.report.rundir import RunDir
from allranks.report.runs import read_run, read_verdict

MIB = 1 << 20


def read_names(run_dir: RunDir) -> list[str]:
    """Names of all events that are in the file."""
    path = run_dir.attempt_path / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def make_run(root: Path) -> RunDir:
    run_dir = RunDir(root, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    return run_dir


def fill(root: Path) -> None:
    """Take all blocks, and all inodes."""
    with (root / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    for number in range(100):
        try:
            (root / f"fill{number}").touch()
        except OSError:
            return


def empty(root: Path) -> None:
    for path in root.glob("fill*"):
        path.unlink()


def verdict_of(size: int, exit_code: int = 0) -> Verdict:
    return Verdict(job="x" * size, attempt=0, exit_code=exit_code)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=24", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_without_a_block_and_an_inode_still_takes_the_last_files(small_disk: Path) -> None:
    run_dir = make_run(small_disk)
    run_dir.add_event("started")
    run_dir.last_files.keep()
    fill(small_disk)
    for number in range(500):
        run_dir.add_event("worker_ended", rank=number, text="x" * 50)
    assert run_dir.write_verdict(verdict_of(60_000, 75), node="a")
    run_dir.write_exit_code(75)
    assert run_dir.last_files.close() == ""
    assert len(read_names(run_dir)) == 501
    assert read_verdict(run_dir.attempt_path / "verdict.json") == verdict_of(60_000, 75)
    assert (run_dir.attempt_path / "exit_code").read_text() == "75\n"


def test_a_verdict_that_does_not_fit_is_no_verdict_and_said(small_disk: Path) -> None:
    """Of no size, of zeros, or of a half: readers must not take it for one."""
    run_dir = make_run(small_disk)
    fill(small_disk)
    assert run_dir.write_verdict(verdict_of(90_000), node="a")
    run_dir.write_verdict(verdict_of(90_000), node="a", is_of_all=False)
    assert list(run_dir.attempt_path.iterdir()) == []
    assert read_run(run_dir.path).verdict is None
    said = run_dir.last_files.close()
    assert said == "not written to the run directory (No space left on device): verdict.json"


def test_what_did_not_fit_is_written_when_there_is_room(small_disk: Path) -> None:
    run_dir = make_run(small_disk)
    fill(small_disk)
    run_dir.add_event("first")
    run_dir.add_event("second")
    assert read_names(run_dir) == []
    empty(small_disk)
    run_dir.last_files.keep()  # as the agent's thread does
    run_dir.add_event("third")
    assert read_names(run_dir) == ["first", "second", "third"]
    assert run_dir.last_files.close() == ""


def test_a_write_that_finds_no_room_asks_for_some_and_tries_again(small_disk: Path) -> None:
    run_dir, asked = make_run(small_disk), list[int | None]()

    def make_room(exc: OSError) -> None:
        asked.append(exc.errno)
        empty(small_disk)

    run_dir.last_files.on_error = make_room
    fill(small_disk)
    run_dir.add_event("started")
    fill(small_disk)
    run_dir.write_verdict(verdict_of(90_000), node="a")
    assert asked == [errno.ENOSPC] * 2
    assert run_dir.read_events()
    assert (run_dir.attempt_path / "verdict.json").read_bytes() == verdict_of(90_000).to_json()


def test_what_is_lost_with_the_directory_is_counted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    run_dir.add_event("started")
    shutil.rmtree(run_dir.path)
    for _ in range(3):
        run_dir.add_event("worker_ended")
    assert run_dir.last_files.close() == "not written to the run directory (No such file or directory): 3 events"


def test_events_that_wait_for_room_are_bounded(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    shutil.rmtree(run_dir.path)
    for _ in range(40):
        run_dir.add_event("worker_ended", text="x" * 100_000)
    assert "40 events" in run_dir.last_files.close()
    assert len(run_dir.last_files._pending) <= MIB


@pytest.mark.parametrize("is_kept", [False, True])
def test_of_two_agents_without_a_leader_the_first_one_writes_the_verdict(tmp_path: Path, is_kept: bool) -> None:
    runs = [make_run(tmp_path), RunDir(tmp_path, "4711")]
    for run_dir in runs if is_kept else []:
        run_dir.last_files.keep()
    told: list[Any] = [
        run_dir.write_verdict(verdict_of(10, code), node=node, is_of_all=False)
        for run_dir, node, code in zip(runs, "ab", (1, 2), strict=True)
    ]
    assert told == [True, False]
    assert read_verdict(runs[0].attempt_path / "verdict.json") == verdict_of(10, 1)
    assert runs[1].write_verdict(verdict_of(10, 3), node="b")
    assert read_verdict(runs[0].attempt_path / "verdict.json") == verdict_of(10, 3)
    assert {path.name for path in runs[0].attempt_path.iterdir()} == {"a", "b", "verdict.json"}
