"""`allranks check --checkpoints DIR` says whether the directory holds checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Allranks, write

pytestmark = pytest.mark.torch


def test_a_directory_that_works_is_left_as_it_was(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("check", "--checkpoints", tmp_path / "new", "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr
    assert [(step["name"], step["is_fine"]) for step in found["steps"]] == [
        ("write", True),
        ("kill", True),
        ("load", True),
        ("alter", True),
    ]
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_written_is_refused_with_the_systems_words(allranks: Allranks) -> None:
    result = allranks("check", "--checkpoints", "/proc/checkpoints")
    assert result.returncode == 1
    assert "x write  No such file or directory (/proc/checkpoints)" in result.stdout.replace("✗", "x")
    assert "/proc/checkpoints: not fit for checkpoints" in result.stdout


def test_the_users_files_are_not_imported_in_place_of_torchs(allranks: Allranks, tmp_path: Path) -> None:
    write(tmp_path / "cuda.py", "raise RuntimeError('torch imports cuda, if there is one')\n")
    assert allranks("check", "--checkpoints", "new").returncode == 0
