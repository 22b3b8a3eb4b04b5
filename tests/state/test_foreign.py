"""A directory of checkpoints in which others have left, damaged or forged something."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.state.saved.commit import identify_process
from allranks.state.saved.manifest import FORMAT, MANIFEST, Damaged, Manifest, report_name, temp_name
from allranks.state.saved.parts import list_checkpoints, read_manifest
from allranks.state.saved.tidy import Keeper, look_at_writers, sweep

TEMP = temp_name(9, "aaaa-1")
REPORT = report_name(0)


def in_temp(write: Callable[[Path], object], name: str = REPORT) -> Callable[[Path], object]:
    """Return what puts something into a directory in which a checkpoint seems to be written."""

    def leave(root: Path) -> None:
        (root / TEMP).mkdir()
        write(root / TEMP / name)

    return leave


def report_of(**owner: Any) -> Callable[[Path], object]:
    return in_temp(lambda path: path.write_text(json.dumps({"owner": identify_process() | owner})))


LEFT: dict[str, tuple[Callable[[Path], object], bool | None]] = {
    # what lies there                                                              whether somebody can still finish it
    "a file of that name": (lambda root: (root / TEMP).write_text(""), False),
    "a named pipe of that name": (lambda root: os.mkfifo(root / TEMP), False),
    "a link to nothing": (lambda root: (root / TEMP).symlink_to("nothing"), False),
    "a link to itself": (lambda root: (root / TEMP).symlink_to(TEMP), None),
    "a pid as text": (report_of(pid="x"), None),
    "a pid with a fraction": (report_of(pid=1.5), None),
    "no start time, of nobody": (report_of(pid=4_000_000_000, started=None), None),
    "a pid beyond all bounds": (report_of(pid=10**30), False),
    "a pid below zero": (report_of(pid=-1), False),
    "its own process": (report_of(), True),
    "a report that is a named pipe": (in_temp(os.mkfifo), None),
    "a report that never ends": (in_temp(lambda path: path.symlink_to("/dev/zero")), None),
    "a report that is a directory": (in_temp(Path.mkdir), None),
    "a report nested 100,000 deep": (in_temp(lambda path: path.write_text("[" * 100_000)), None),
    "a report of other bytes": (in_temp(lambda path: path.write_bytes(b"\xff\x00{")), None),
    "an owner that is a list": (in_temp(lambda path: path.write_text('{"owner": [1]}')), None),
}


@pytest.mark.parametrize("left", LEFT)
def test_whatever_bears_the_name_of_an_unfinished_checkpoint_stops_nobody(tmp_path: Path, left: str) -> None:
    leave, lives = LEFT[left]
    leave(tmp_path)
    assert look_at_writers(tmp_path / TEMP)[0] is lives
    sweep(tmp_path, run="bbbb", below=1)
    assert list_checkpoints(tmp_path) == []


MANIFESTS: dict[str, dict[str, Any]] = {
    "a size beyond all memory": {"world_size": 10**15},
    "a size as text": {"world_size": "1"},
    "a step that is true": {"step": True, "world_size": 0},
    "parts of no number": {"parts": None},
    "a part of endless size": {"parts": [{"name": "rank_00000.safetensors", "size_bytes": float("inf")}]},
    "a field too many": {"more": 1},
}


@pytest.mark.parametrize("forged", MANIFESTS)
def test_a_forged_manifest_is_damaged_and_no_crash(forged: str) -> None:
    fields: dict[str, Any] = {"format": FORMAT, "step": 1, "world_size": 0, "attempt": "a", "torch": "2", "saved_s": 1}
    line = json.dumps({**fields, "parts": [], **MANIFESTS[forged]}).encode() + b"\n"
    with pytest.raises(Damaged, match=r"is no manifest of ours|its parts are not those"):
        Manifest.from_bytes(line + b"%08x\n" % zlib.crc32(line))


def test_a_manifest_that_is_a_named_pipe_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    os.mkfifo(tmp_path / "step_1" / MANIFEST)
    with pytest.raises(Damaged, match=r"^MANIFEST.json: not a regular file$"):
        read_manifest(tmp_path / "step_1")


def whole(root: Path, step: int) -> None:
    (root / f"step_{step}").mkdir()
    (root / f"step_{step}" / MANIFEST).write_bytes(Manifest(step, 0, "aaaa-1", "2", 1.0, ()).to_bytes())


def test_tidying_deletes_no_directory_of_another_program(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        whole(tmp_path, step)
    for name in ("step_1", "step_2", "step_6"):  # as accelerate's examples name theirs
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_text("")
    Keeper(tmp_path, keep=2).retain(bool)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2", "step_4", "step_5", "step_6"}


def test_what_a_killed_deletion_leaves_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (3, 4, 5):
        whole(tmp_path, step)
    monkeypatch.setattr("shutil.rmtree", lambda _: None)
    Keeper(tmp_path, keep=2).retain(bool)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_5", "step_4"]
    monkeypatch.undo()
    [left] = tmp_path.glob("step_3.tmp.*")
    os.utime(left, (1.0, 1.0))
    for path in left.iterdir():
        os.utime(path, (1.0, 1.0))
    sweep(tmp_path, run="bbbb", below=1)
    assert not left.exists()
