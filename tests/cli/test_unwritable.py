"""What does `allranks` do where its output cannot be written: one line, and no traceback?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env

VERBS = (("list",), ("explain", "--json", "AR407"))
FULL = Path("/dev/full")


def start(words: tuple[str, ...], folder: Path, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a shell's redirection of its output."""
    line = f'"$@" {redirection}'
    env = clean_env(os.environ, PATH="/usr/bin:/bin", ALLRANKS_LAB_DIR="/nowhere")
    return subprocess.run(
        ["/bin/bash", "-c", line, "bash", *allranks_command(*words)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_full_disk_is_told_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    result = start(words, tmp_path, "> /dev/full")
    said = [line for line in result.stderr.splitlines() if not line.startswith("allranks: ")]
    expected = [] if words == ("list",) else ["error: the output cannot be written: no space left on device"]
    assert (result.returncode, said) == (3 if expected else 0, expected)  # without runs, `list` prints nothing there


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
@pytest.mark.parametrize("redirection", ["| true; exit ${PIPESTATUS[0]}", ">&-", ">&- 2>&- <&-", "2>&-"])
def test_a_reader_that_has_left_and_closed_streams_are_no_error(
    words: tuple[str, ...], redirection: str, tmp_path: Path
) -> None:
    result = start(words, tmp_path, redirection)
    assert (result.returncode, "Error" in result.stderr) == (0, False)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    assert start(("status", "nonsense"), tmp_path, "2> /dev/full").returncode == 2


@pytest.mark.parametrize("words", [("status", "latest"), ("run", "train.py")], ids=" ".join)
def test_a_directory_that_is_gone_is_told_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    result = start(words, tmp_path, '> /dev/null; mkdir gone; cd gone; rmdir "$PWD"; "$@"')
    assert result.stderr.splitlines()[-1:] == [
        "error: the current directory is gone: removed, or unmounted; cd to another one"
    ]
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
