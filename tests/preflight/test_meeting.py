"""What the agents leave for each other in the run directory: who may read the key, and whose key is taken."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from allranks.model.errors import SetupError
from allranks.preflight.meeting import ensure_secret, find_announcement, read_secret
from allranks.report.rundir import RunDir


def run_of(path: Path) -> RunDir:
    return RunDir(path.parent, path.name)


def job(root: Path, name: str) -> RunDir:
    run_dir = RunDir(root, name)
    run_dir.create()
    return run_dir


def test_the_file_is_readable_by_its_owner_only(tmp_path):
    ensure_secret(run_of(tmp_path))
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_what_the_leader_wrote_the_agents_read(tmp_path):
    path = tmp_path / "my_runs" / "secret"
    path.parent.mkdir()
    written = ensure_secret(run_of(path.parent))
    assert read_secret(run_of(path.parent)) == written
    assert written.source == str(path)
    assert len(written.key) == 64


def test_a_requeued_job_keeps_its_key(tmp_path):
    first = ensure_secret(run_of(tmp_path))
    assert ensure_secret(run_of(tmp_path)) == first


def test_each_job_has_a_key_of_its_own(tmp_path):
    assert ensure_secret(job(tmp_path, "4711")).key != ensure_secret(job(tmp_path, "4712")).key


def test_the_leader_does_not_take_a_key_that_others_could_know(tmp_path):
    ensure_secret(run_of(tmp_path))
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(SetupError, match=rf"mode 644; expected owner {os.geteuid()}, mode 0600"):
        ensure_secret(run_of(tmp_path))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_could_read_or_replace_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    ensure_secret(run_of(tmp_path))
    path.chmod(mode)
    with pytest.raises(SetupError) as refused:
        read_secret(run_of(tmp_path))
    owner = path.stat().st_uid
    assert str(refused.value) == f"{path}: owner {owner}, mode {mode:o}; expected owner {os.geteuid()}, mode 0600"


def test_a_file_that_is_not_there_yet_is_no_error(tmp_path):
    assert read_secret(run_of(tmp_path)) is None
    assert read_secret(run_of(tmp_path / "no such run")) is None


def test_a_run_directory_that_cannot_be_written_names_the_flag(tmp_path):
    with pytest.raises(SetupError, match="the run directory must be writable; choose another one with --log-dir"):
        ensure_secret(run_of(tmp_path / "missing"))


def test_no_announcement_yet_is_none(tmp_path):
    assert find_announcement(run_of(tmp_path)) is None
    assert find_announcement(run_of(tmp_path / "not made yet")) is None
