"""Blocks that are kept back: how many, and that they are real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.model.room import GIB, MIB, Room
from allranks.report import ballast
from allranks.report.ballast import Ballast, Draft, choose_size, keep_behind, look

KIB = 1 << 10


def disk(size: int, free: int) -> Room:
    return Room(free_bytes=free, size_bytes=size, free_inodes=10**6)


@pytest.mark.parametrize(
    ("room", "sharers", "position", "in_memory", "size"),
    [
        (disk(100 * GIB, 50 * GIB), 1, 0, False, 64 * MIB),
        (disk(100 * GIB, 50 * GIB), 16, 3, False, 64 * MIB),
        # 1 GiB at most for all nodes of a shared file system.
        (disk(100 << 40, 50 << 40), 64, 63, False, 16 * MIB),
        (disk(100 << 40, 50 << 40), 1000, 999, False, GIB // 1000),
        (disk(100 << 40, 50 << 40), 10_000, 4095, False, 256 * KIB),
        (disk(100 << 40, 50 << 40), 10_000, 4096, False, 0),
        # A small disk, and one with little left.
        (disk(100 * MIB, 100 * MIB), 1, 0, False, 100 * MIB // 32),
        (disk(4 * GIB, 450 * MIB), 1, 0, False, 450 * MIB // 8),
        (disk(100 * GIB, 900 * MIB), 1, 0, False, 0),
        (disk(4 * MIB, 4 * MIB), 1, 0, False, 0),
        # Memory.
        (disk(100 * GIB, 50 * GIB), 1, 0, True, 4 * MIB),
        (disk(100 * MIB, 100 * MIB), 1, 0, True, 100 * MIB // 32),
        (Room(problem="EROFS: Read-only file system", free_bytes=GIB, size_bytes=GIB), 1, 0, False, 0),
        (Room(), 1, 0, False, 0),
    ],
)
def test_a_ballast_is_bounded_by_the_disk_and_by_who_shares_it(
    room: Room, sharers: int, position: int, in_memory: bool, size: int
) -> None:
    assert choose_size(room, sharers=sharers, position=position, is_in_memory=in_memory) == size


@pytest.mark.parametrize("num_nodes", [1, 2, 15, 17, 100, 1000, 4097, 20_000])
def test_all_nodes_of_a_shared_directory_together_keep_a_gibibyte_at_most(num_nodes: int) -> None:
    huge = disk(1 << 50, 1 << 49)
    sizes = [choose_size(huge, sharers=num_nodes, position=position) for position in range(num_nodes)]
    assert sum(sizes) <= GIB
    assert sizes[0] >= 256 * KIB


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_ballast_has_blocks_and_no_name_and_gives_them_back(folder: int, tmp_path: Path) -> None:
    before = look(tmp_path).free_bytes
    kept = Ballast.keep(folder, 32 * MIB)
    assert (kept.size_bytes, list(tmp_path.iterdir())) == (32 * MIB, [])
    assert look(tmp_path).free_bytes < before - 16 * MIB  # others use this disk, too
    assert (kept.free(), kept.size_bytes, kept.free()) == (32 * MIB, 0, 0)


def test_where_files_need_a_name_and_blocks_must_be_written_it_is_smaller(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS 3 and ZFS: no O_TMPFILE, no fallocate; the blocks are real all the same."""
    monkeypatch.setattr(ballast, "_allocate", lambda *_, **__: False)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel that does not know the flag sees: EISDIR
    kept = Ballast.keep(folder, 64 * MIB)
    assert (kept.size_bytes, list(tmp_path.iterdir())) == (8 * MIB, [])
    kept.free()
    draft = Draft.keep(folder, 64 * KIB)
    [path] = tmp_path.iterdir()
    assert path.name.startswith(".draft.")
    assert path.stat().st_blocks >= 128
    assert draft.publish(b"{}", "verdict.json", replaces=False)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"verdict.json": b"{}"}


@pytest.mark.parametrize("has_name", [False, True])
def test_the_first_one_to_publish_a_name_wins_unless_it_is_to_be_replaced(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_name: bool
) -> None:
    if has_name:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    first, second, third, unused = (Draft.keep(folder, 64 * KIB) for _ in range(4))
    assert first.publish(b"first", "verdict.json", replaces=False)
    assert not second.publish(b"second", "verdict.json", replaces=False)
    assert (tmp_path / "verdict.json").read_bytes() == b"first"
    assert third.publish(b"x" * 100_000, "verdict.json", replaces=True)
    unused.drop()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"verdict.json": b"x" * 100_000}


def test_a_directory_that_is_gone_or_refuses_keeps_nothing(folder: int, tmp_path: Path) -> None:
    tmp_path.rmdir()
    assert Ballast.keep(folder, MIB).size_bytes == 0
    with pytest.raises(OSError, match=r"not permitted|No such"):
        Draft.keep(folder, MIB)
    assert look(tmp_path) == Room(problem="ENOENT: No such file or directory")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB with 16 inodes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=16", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_still_takes_the_verdict_and_events(small_disk: Path) -> None:
    fd = os.open(small_disk, os.O_DIRECTORY)
    kept, draft = Ballast.keep(fd, MIB), Draft.keep(fd, 64 * KIB)
    with (small_disk / "events.jsonl").open("ab", buffering=0) as events:
        assert keep_behind(events.fileno(), 64 * KIB)
        with pytest.raises(OSError, match="No space"):
            fill(small_disk / "other")
        for name in range(look(fd).free_inodes or 0):
            (small_disk / str(name)).touch()
        assert (look(fd).free_bytes, look(fd).free_inodes, look(fd).is_full) == (0, 0, True)
        assert draft.publish(b"v" * 60_000, "verdict.json", replaces=True)
        assert events.write(b"e" * 60_000) == 60_000
    assert (small_disk / "verdict.json").read_bytes() == b"v" * 60_000
    kept.free()
    assert look(fd).free_bytes >= MIB
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_killed_process_leaves_no_ballast(small_disk: Path) -> None:
    code = "import os, sys; from allranks.report.ballast import *; f = os.open(sys.argv[1], os.O_DIRECTORY)\n"
    code += (
        "b, d = Ballast.keep(f, 1 << 20), Draft.keep(f, 1 << 16); print(look(f).free_bytes); os.kill(os.getpid(), 9)"
    )
    told = subprocess.run([sys.executable, "-uc", code, small_disk], capture_output=True, text=True, check=False)
    assert int(told.stdout) == 3 * MIB - 64 * KIB
    assert (look(small_disk).free_bytes, list(small_disk.iterdir())) == (4 * MIB, [])


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
