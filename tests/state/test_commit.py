"""Is everything on disk before the next step of the protocol relies on it? What a power cut leaves, not only a kill."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from allranks.state.saved.commit import (
    GIVEN_UP,
    Attempt,
    AttemptFailedError,
    gather_parts,
    give_up,
    seal,
    watch_outcome,
    write_part,
)
from allranks.state.saved.manifest import MANIFEST, part_name, report_name
from allranks.state.saved.parts import read_manifest
from allranks.state.saved.tidy import look_at_writers, sweep

CONTENT = bytes(range(256)) * 40


class Disk:
    """Notes what every fsync was told to put on disk, and what could be seen of the checkpoint at that moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: list[tuple[str, object]] = []
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_directory = path.is_dir()
        what = sorted(each.name for each in path.iterdir()) if is_directory else path.stat().st_size
        self.seen.append((str(path.relative_to(self.root.parent)), what))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "checkpoints")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    return disk


def test_a_checkpoint_is_on_disk_before_it_has_its_name(disk: Disk) -> None:
    attempt = Attempt(root=disk.root, step=7, name="abc-1", rank=0, world_size=1)
    part = write_part(attempt, memoryview(CONTENT))
    work = f"checkpoints/{attempt.directory.name}"
    assert disk.seen == [
        (f"{work}/{part_name(0)}", len(CONTENT)),  # the part, all of it
        (work, sorted([part_name(0), report_name(0)])),  # then its name, and that of the report that vouches for it
    ]
    disk.seen.clear()
    final = seal(attempt, gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: False), torch="2.13.0")
    manifest_bytes = (final / MANIFEST).stat().st_size
    assert disk.seen == [
        (f"{work}/{MANIFEST}", manifest_bytes),
        (work, sorted([MANIFEST, part_name(0), report_name(0)])),
        ("checkpoints", ["step_7"]),  # then the name under which it is a checkpoint
    ]
    assert read_manifest(final).parts == (part,)


def attempt_of(root: Path, *, rank: int = 0, world_size: int = 2, name: str = "abc-1") -> Attempt:
    return Attempt(root=root, step=7, name=name, rank=rank, world_size=world_size)


def test_a_part_counts_only_when_all_of_its_bytes_are_seen(tmp_path: Path) -> None:
    """A file server may show the report before the last bytes."""
    for rank in range(2):
        write_part(attempt_of(tmp_path, rank=rank), memoryview(CONTENT))
    path = attempt_of(tmp_path).directory / part_name(1)
    path.write_bytes(CONTENT[:-1])

    def come_late() -> bool:
        path.write_bytes(CONTENT)
        return False

    gather_parts(attempt_of(tmp_path), is_orphaned=come_late, is_next_due=lambda: False)
    assert path.read_bytes() == CONTENT  # it was asked again: the short part was not taken


def test_a_rank_that_could_not_write_its_part_ends_the_attempt(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = disk.root
    write_part(attempt_of(root), memoryview(CONTENT))

    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(AttemptFailedError):
        write_part(attempt_of(root, rank=1), memoryview(CONTENT))

    def fail() -> bool:
        pytest.fail("it waits for a part that will not come")

    with pytest.raises(AttemptFailedError, match=r"rank 1: .*[Nn]o space left"):
        gather_parts(attempt_of(root), is_orphaned=fail, is_next_due=fail)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_rank_that_comes_after_the_end_of_the_attempt_does_not_go_on_with_it(tmp_path: Path) -> None:
    """It would make the directory again, and wait in it for a coordinator that is done."""
    first, late = (attempt_of(tmp_path, rank=rank, name="0123abcd-1") for rank in range(2))
    write_part(first, memoryview(CONTENT))
    give_up(first)
    with pytest.raises(AttemptFailedError):
        write_part(late, memoryview(CONTENT))
    assert names_in(late.directory) == [GIVEN_UP]
    assert look_at_writers(late.directory)[0] is False
    sweep(tmp_path, run="4567cdef", below=1)  # the next run's
    assert names_in(tmp_path) == []


def test_a_rank_learns_that_its_attempt_is_given_up(tmp_path: Path) -> None:
    write_part(attempt_of(tmp_path, rank=1), memoryview(CONTENT))
    give_up(attempt_of(tmp_path))
    (attempt_of(tmp_path).directory / part_name(1)).write_bytes(CONTENT)  # at the same time

    def fail() -> bool:
        pytest.fail("it waits for an outcome that is known")

    assert watch_outcome(attempt_of(tmp_path, rank=1), fail) is False
    assert names_in(attempt_of(tmp_path).directory) == [GIVEN_UP]


def test_a_rank_for_whose_reason_there_is_no_room_ends_the_attempt_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(attempt_of(tmp_path), memoryview(CONTENT))

    def is_full(*_: object, **more: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", is_full)
    with pytest.raises(OSError, match="No space left"):
        write_part(attempt_of(tmp_path, rank=1), memoryview(CONTENT))
    with pytest.raises(AttemptFailedError, match="neither its part nor why"):
        gather_parts(attempt_of(tmp_path), is_orphaned=lambda: False, is_next_due=lambda: False)


def test_a_part_that_reads_back_as_something_else_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(tmp_path, world_size=1)

    def lose_a_byte(descriptor: int, *_: int) -> None:
        os.pwrite(descriptor, b"?", 5)

    monkeypatch.setattr(os, "posix_fadvise", lose_a_byte)
    with pytest.raises(OSError, match=r"read back after writing, rank_00000.safetensors: block 1 of 1 does not match"):
        write_part(attempt, memoryview(CONTENT))
    with pytest.raises(AttemptFailedError, match="rank 0: read back after writing"):
        gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: False)


def test_a_part_is_not_read_back_where_the_next_save_waits(tmp_path: Path) -> None:
    attempt, told = attempt_of(tmp_path, world_size=1), []
    part = write_part(
        attempt, memoryview(CONTENT), written=lambda: told.append("written"), should_stop=lambda: bool(told)
    )
    assert (part.verified_ns, told) == (0, ["written"])


def test_a_step_that_is_saved_again_lies_beside_the_first(tmp_path: Path) -> None:
    for name in ("abc-1", "def-1"):
        attempt = attempt_of(tmp_path, world_size=1, name=name)
        write_part(attempt, memoryview(CONTENT))
        seal(attempt, gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: False), torch="2.13.0")
    assert {read_manifest(path).attempt: path.name for path in tmp_path.iterdir()} == {
        "abc-1": "step_7",
        "def-1": "step_7.2",
    }
