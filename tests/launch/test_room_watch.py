"""Does an agent see how much room its run directory has, and keep some of it?"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from allranks.launch import room as room_module
from allranks.launch.room import RoomWatch
from allranks.model.room import Room
from allranks.report.rundir import RunDir

MIB = 1 << 20


def make_run(root: Path) -> RunDir:
    run_dir = RunDir(root / "runs", "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    return run_dir


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def look(rooms: RoomWatch) -> Room:
    room = rooms.look(10.0)
    assert room is not None
    return room


def test_a_full_disk_gets_the_ballast_back_and_an_emptied_one_has_it_again(small_disk: Path) -> None:
    run_dir = make_run(small_disk)
    with RoomWatch(run_dir) as rooms:
        assert rooms.seen() is None
        rooms.begin(run_dir.create_node("a"), ["a"], 0)
        assert (look(rooms).kept_bytes, look(rooms).freed_bytes, look(rooms).full_ago_s) == (MIB, 0, None)
        subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/fill", "bs=64k"], capture_output=True, check=False)
        room = look(rooms)
        assert (room.kept_bytes, room.freed_bytes, room.is_full) == (0, MIB, False)
        assert room.free_bytes >= MIB
        assert room.was_full(within_s=60)
        (small_disk / "fill").unlink()
        room = look(rooms)
        assert (room.kept_bytes, room.freed_bytes, room.is_short()) == (MIB, 0, False)
    assert rooms.look(1e9) is not None  # nobody waits for a thread that has ended


def test_a_write_that_found_no_room_frees_the_ballast_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quota, of which the file system's figures tell nothing: it is full until a block can be written."""
    run_dir, over_quota = make_run(tmp_path), OSError(errno.EDQUOT, "Disk quota exceeded")
    with RoomWatch(run_dir) as rooms:
        rooms.begin(run_dir.create_node("a"), ["a"], 0)
        kept = look(rooms).kept_bytes
        assert kept > 0
        with monkeypatch.context() as patch:
            patch.setattr(room_module, "try_to_write", Mock(side_effect=over_quota))
            run_dir.last_files.on_error(over_quota)
            room = rooms.seen()
            assert room is not None
            assert (room.kept_bytes, room.freed_bytes, room.is_full) == (0, kept, True)
            assert look(rooms).problem == "EDQUOT: Disk quota exceeded"
        room = look(rooms)
        assert (room.kept_bytes, room.freed_bytes, room.problem, room.was_full()) == (kept, 0, None, True)


def test_a_directory_that_is_removed_is_noticed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    with RoomWatch(run_dir) as rooms:
        rooms.begin(run_dir.create_node("a"), ["a"], 0)
        assert not look(rooms).is_gone
        shutil.rmtree(run_dir.path)
        assert look(rooms).is_gone
        rooms.begin(run_dir.create_node("a"), ["a"], 0)  # the next generation makes it anew
        assert not look(rooms).is_gone


@pytest.mark.parametrize(("beside", "is_shared"), [(["a"], False), (["a", "b"], True)])
def test_a_directory_is_shared_where_that_of_another_node_is_there(
    tmp_path: Path, beside: list[str], is_shared: bool
) -> None:
    run_dir = make_run(tmp_path)
    for node in beside:
        run_dir.create_node(node)
    with RoomWatch(run_dir) as rooms:
        rooms.begin(run_dir.create_node("a"), ["a", "b", "c"], 0)
        assert look(rooms).is_shared is is_shared
        assert look(rooms).kept_bytes == 0  # not before the others' directories had the time to be there


def test_a_file_system_that_hangs_is_told_and_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, really_look = threading.Event(), room_module.look

    def hang(path: Path | int) -> Room:
        answers.wait(120)
        return really_look(path)

    monkeypatch.setattr(room_module, "look", hang)
    monkeypatch.setattr(room_module, "HANG_S", 0.05)
    run_dir, began_s = make_run(tmp_path), time.monotonic()
    with RoomWatch(run_dir) as rooms:
        rooms.begin(run_dir.create_node("a"), ["a"], 0)
        rooms.look(0.1)
        room = rooms.look(0.1)  # does not even wait for that
        assert room is not None
        assert (room.problem or "").startswith("ETIMEDOUT: no answer")
    assert time.monotonic() - began_s < 60  # it hangs for twice as long
    answers.set()


def test_a_look_that_has_begun_before_is_not_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a write that found no room would be tried again before the ballast is given back."""
    began = threading.Semaphore(0)
    numbers = iter(range(1, 100))

    def look_slowly(_: Path | int) -> Room:
        number = next(numbers)
        began.release()
        time.sleep(0.2)
        return Room(free_bytes=number)

    run_dir = make_run(tmp_path)
    with RoomWatch(run_dir) as rooms:
        monkeypatch.setattr(room_module, "look", look_slowly)
        rooms.begin(run_dir.create_node("a"), ["a"], 0)
        assert began.acquire(timeout=60)
        assert look(rooms).free_bytes == 2
