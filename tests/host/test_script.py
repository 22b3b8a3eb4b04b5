"""Hashes of the script and what lies beside it: the same on equal trees, bounded on any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.host import script
from allranks.host.script import read_code
from allranks.model.card import MAX_CODE_FILES

TRAIN = "print('training')\n"
TRAIN_SHA256 = "1cef8e8030c1ce6c"


def write_tree(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in {"train": TRAIN, **files}.items():
        (directory / f"{name}.py").write_text(text)
    return directory / "train.py"


def test_a_script_and_its_neighbours_are_hashed_in_the_order_of_their_names(tmp_path):
    path = write_tree(tmp_path, model="a = 1\n", data="b = 2\n")
    (tmp_path / "notes.txt").write_text("no code")
    code = read_code(path)
    assert (code.script, code.digest) == (str(path), TRAIN_SHA256)
    assert list(code.beside) == ["data.py", "model.py"]


def test_equal_trees_have_equal_hashes_wherever_they_are(tmp_path):
    one, two = (read_code(write_tree(tmp_path / name, model="a = 1\n")) for name in ("a", "b"))
    other = read_code(write_tree(tmp_path / "c", model="a = 2\n"))
    assert (one.digest, one.beside) == (two.digest, two.beside)
    assert one.digest == other.digest
    assert one.beside != other.beside


def test_a_script_in_this_directory_needs_no_directory(tmp_path, monkeypatch):
    write_tree(tmp_path, model="a = 1\n")
    monkeypatch.chdir(tmp_path)
    assert list(read_code(Path("train.py")).beside) == ["model.py"]


def test_what_is_no_file_is_passed_over(tmp_path):
    path = write_tree(tmp_path)
    (tmp_path / "package.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert read_code(path).beside == {}


def test_files_beyond_the_bounds_are_named_and_not_read(tmp_path, monkeypatch):
    path = write_tree(tmp_path, a="x" * 40, b="x" * 90, c="x" * 10)
    monkeypatch.setattr(script, "MAX_CODE_BYTES", len(TRAIN) + 60)
    found = read_code(path).beside
    assert {name: digest is not None for name, digest in found.items()} == {"a.py": True, "b.py": False, "c.py": True}


def test_the_first_files_by_name_are_taken(tmp_path):
    path = write_tree(tmp_path, **{f"m{number:03}": "" for number in range(MAX_CODE_FILES + 50)})
    assert list(read_code(path).beside)[-1] == f"m{MAX_CODE_FILES - 1:03}.py"


def test_an_unreadable_neighbour_is_named(tmp_path):
    path = write_tree(tmp_path)
    (tmp_path / "model.py").symlink_to("/proc/self/mem")  # EIO, for root, too
    assert read_code(path).beside == {"model.py": None}


def test_a_script_that_is_not_there_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_code(tmp_path / "train.py")


def test_the_main_script_is_what_python_was_started_with(tmp_path):
    ask = "from allranks.host.script import find_main_script; print(find_main_script())"
    script = tmp_path / "train.py"
    script.write_text(ask)
    for arguments, told in (([str(script)], str(script)), (["-c", ask], "None")):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"{told}\n"
