"""What has been altered is refused, wherever and however, and the one before it is taken."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from allranks.state.saved import tidy
from allranks.state.saved.checkpoint import Checkpointer, CheckpointError, Loaded
from allranks.state.saved.manifest import MANIFEST, Manifest, Part
from allranks.state.saved.parts import PartReader
from conftest import wait_until
from state.conftest import Zygote, writers_of
from state.zygote import is_of

pytestmark = pytest.mark.torch
FILES = (MANIFEST, "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="session")
def original(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 3 of two ranks."""
    directory = tmp_path_factory.mktemp("checkpoints") / "original"
    for rank in range(2):
        zygote.start(directory, rank=rank, world_size=2, steps=3, size=8)
    wait_until(lambda: (directory / "step_3").exists() and not writers_of(directory), "three checkpoints")
    # The trainers let the directory go after their writers have ended.
    wait_until(lambda: not list(directory.glob("*owner.json*")), "a directory that nobody holds")
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def load(directory: Path) -> tuple[Loaded | None, list[str]]:
    """What is taken, and what is said about those that are passed over."""
    said: list[str] = []
    with Checkpointer(directory, say=said.append) as checkpoints:
        return checkpoints.load(), said


def assert_refused(directory: Path, file: str) -> str:
    """Step 3 is passed over for this file's sake, and step 2 is whole; returns why."""
    loaded, said = load(directory)
    assert loaded is not None
    assert loaded.step == 2
    assert is_of(2, loaded.common)
    (line,) = said
    before, _, after = line.partition(" is passed over: ")
    why, _, instead = after.partition("; ")
    assert (before, instead) == (f"checkpoint {directory / 'step_3'}", "going on from step_2")
    assert file in why
    return why


def alterations(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Every byte with one bit flipped; bursts, lengths, zeroes."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    for _ in range(50):
        at, length = chance.randrange(len(data)), chance.randrange(1, 64)
        burst = chance.randbytes(len(data[at : at + length]))
        if burst != data[at : at + length]:
            yield data[:at] + burst + data[at + length :]
    for length in range(0, len(data), 7):
        yield data[:length]
    yield from (data + b"\0", data + data, bytes(len(data)), data[::-1])


@pytest.mark.parametrize("file", FILES)
def test_every_alteration_is_refused(directory: Path, file: str) -> None:
    path = directory / "step_3" / file
    data, count = path.read_bytes(), 0
    for altered in alterations(data, random.Random(7)):
        path.write_bytes(altered)
        assert_refused(directory, file)
        count += 1
    assert count > len(data)
    path.write_bytes(data)
    loaded, said = load(directory)
    assert loaded is not None
    assert (loaded.step, said) == (3, [])


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(directory: Path, file: str) -> None:
    (directory / "step_3" / file).unlink()
    assert assert_refused(directory, file) == f"rank 0 reads {file}: is not there"


def test_a_part_of_another_step_is_refused(directory: Path) -> None:
    shutil.copy(directory / "step_2" / FILES[1], directory / "step_3" / FILES[1])
    assert "does not match its checksum" in assert_refused(directory, FILES[1])


def test_a_directory_under_another_name_is_refused(directory: Path) -> None:
    shutil.copytree(directory / "step_1", directory / "step_9")
    loaded, said = load(directory)
    assert loaded is not None
    assert loaded.step == 3
    assert "passed over: rank 0 reads MANIFEST.json: is of step 1, the directory is step_9" in said[0]


def test_a_truncation_says_how_much_is_there(directory: Path) -> None:
    os.truncate(directory / "step_3" / FILES[1], 100)
    size_bytes = (directory / "step_2" / FILES[1]).stat().st_size
    assert assert_refused(directory, FILES[1]) == (
        f"rank 0 reads rank_00000.safetensors: 100 bytes are there, {size_bytes} were written"
    )


def test_where_none_is_whole_nobody_begins_anew_in_silence(directory: Path) -> None:
    for step in (1, 2, 3):
        (directory / f"step_{step}" / MANIFEST).unlink()
    none = r"^allranks: AR601 checkpoint-corrupt: none of the 3 checkpoints in .* is whole, the newest: .*MANIFEST"
    with pytest.raises(CheckpointError, match=none):
        load(directory)


def test_a_checkpoint_of_an_older_format_is_refused_by_name(directory: Path) -> None:
    """Its parts have other names, too; nobody takes the directory for an empty one."""
    for step in (1, 2, 3):
        for rank in (0, 1):
            (directory / f"step_{step}" / FILES[1 + rank]).rename(directory / f"step_{step}" / f"rank_0000{rank}.state")
        path = directory / f"step_{step}" / MANIFEST
        line = path.read_bytes().partition(b"\n")[0].replace(b'"format": 4', b'"format": 3')
        line = line.replace(b".safetensors", b".state") + b"\n"
        path.write_bytes(line + b"%08x\n" % zlib.crc32(line))
    with pytest.raises(CheckpointError, match=r"MANIFEST.json: format 3, this allranks reads format 4; move them away"):
        load(directory)


def test_what_is_passed_over_is_said_aloud(directory: Path) -> None:
    (directory / "step_3" / FILES[1]).unlink()
    said: list[str] = []
    with Checkpointer(directory, say=said.append) as checkpoints:
        checkpoints.load()
    why = "rank 0 reads rank_00000.safetensors: is not there"
    assert said == [f"checkpoint {directory}/step_3 is passed over: {why}; going on from step_2"]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def torch_file(path: Path, value: object) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_part_that_is_a_pickle_is_refused_and_not_run(directory: Path, tmp_path: Path, kind: str) -> None:
    bomb, went_off = Bomb(tmp_path / "went off"), tmp_path / "went off"
    data = pickle.dumps(bomb) if kind == "pickle" else torch_file(tmp_path / "bomb.pt", bomb)
    name = FILES[1]
    (directory / "step_3" / name).write_bytes(data)
    manifest = Manifest.from_bytes((directory / "step_3" / MANIFEST).read_bytes())
    forged = Manifest(
        step=3,
        world_size=2,
        attempt=manifest.attempt,
        torch=manifest.torch,
        saved_s=manifest.saved_s,
        parts=(Part(name, len(data), (zlib.crc32(data),)), manifest.parts[1]),
    )
    (directory / "step_3" / MANIFEST).write_bytes(forged.to_bytes())
    assert assert_refused(directory, name).startswith("rank 0 reads rank_00000.safetensors: is no state of ours")
    assert not went_off.exists()


def test_retention_keeps_the_newest_two_that_are_whole(directory: Path) -> None:
    for step in (2, 3):
        with (directory / f"step_{step}" / FILES[1]).open("r+b") as file:
            file.seek(200)
            file.write(b"altered")
    with Checkpointer(directory, keep=2) as checkpoints:
        checkpoints.save(4, {"step": 4}, wait=True)
    assert {path.name for path in directory.iterdir()} == {"step_1", "step_2", "step_3", "step_4"}
    with Checkpointer(directory, keep=2) as checkpoints:
        checkpoints.save(5, {"step": 5}, wait=True)
    assert {path.name for path in directory.iterdir()} == {"step_4", "step_5"}


def test_tidying_reads_only_what_was_touched_since_its_writer_verified_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"step": step}, wait=True)

    class Watched(PartReader):
        def __init__(self, directory: Path, part: Part) -> None:
            opened.append(f"{directory.name}/{part.name}")
            super().__init__(directory, part)

    monkeypatch.setattr(tidy, "PartReader", Watched)
    keeper = tidy.Keeper(tmp_path, keep=3)
    keeper.retain(lambda: False)
    assert opened == []
    os.utime(tmp_path / "step_2" / FILES[1])
    keeper.retain(lambda: False)
    keeper.retain(lambda: False)
    assert opened == [f"step_2/{FILES[1]}"]
    (tmp_path / "step_3" / FILES[1]).unlink()
    tidy.Keeper(tmp_path, keep=2).retain(lambda: False)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2", "step_3"}


def test_a_step_that_is_saved_again_lies_beside_the_first(directory: Path) -> None:
    (directory / "step_3" / FILES[1]).unlink()
    with Checkpointer(directory, keep=9) as checkpoints:
        checkpoints.save(3, {"step": "again"}, wait=True)
    loaded, _ = load(directory)
    assert loaded is not None
    assert (loaded.directory.name, loaded.common) == ("step_3.2", {"step": "again"})
