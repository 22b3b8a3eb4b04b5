"""Does the suite itself hold: what a shell leaves to it, what it may skip, which tests a command runs?"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import clean_env

ROOT = Path(__file__).parents[1]
IGNORE = (
    "import os, signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3)]; os.execv(sys.argv[1], sys.argv[1:])"
)
"""What `nohup make test &` in a script does."""


def run_pytest(*arguments: str, before: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=clean_env(os.environ, **env),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_program_that_a_test_starts_can_be_interrupted() -> None:
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    ignored = int(re.search(r"^SigIgn:\s*(\w+)$", status, re.M)[1], 16)  # type: ignore[index]
    assert [number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if ignored >> number - 1 & 1] == []


def test_so_it_can_where_the_shell_ignores_the_signals() -> None:
    this = f"{__file__}::{test_a_program_that_a_test_starts_can_be_interrupted.__name__}"
    result = run_pytest(this, before=[sys.executable, "-c", IGNORE])
    assert result.stdout.splitlines()[-1].startswith("1 passed"), result.stdout


SKIPPED = """
import pytest

@pytest.mark.lab
def test_that_needs_a_lab():
    pytest.skip("slurmctld is not here")

@pytest.mark.program("sh", "dash")
def test_that_needs_a_program():
    pytest.skip("it does not answer")

@pytest.mark.program("no-such-program", "none")
def test_that_needs_a_program_that_is_missing():
    pass

@pytest.mark.torch
def test_that_needs_something_else():
    pytest.skip("no network")
"""


@pytest.mark.parametrize(
    ("is_required", "last_line"), [("1", "2 failed, 1 skipped, 1 error in "), ("", "4 skipped in ")]
)
def test_a_skipped_test_of_the_lab_has_failed_where_a_lab_is_required(
    tmp_path: Path, is_required: str, last_line: str
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(SKIPPED)
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "conftest")
    env = {"ALLRANKS_REQUIRE_LAB": is_required, "PYTHONPATH": str(ROOT / "tests"), "PATH": os.environ["PATH"]}
    result = run_pytest(*config, str(test), **env)
    assert result.stdout.splitlines()[-1].startswith(last_line), result.stdout + result.stderr
    for reason in ("slurmctld is not here", "it does not answer", "apt-get install none"):
        assert reason in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.program("srun", "slurm-client")
def test_the_script_of_ci_hides_slurm_from_one_command_only() -> None:
    hidden = "! command -v srun ip && ! test -e /etc/slurm && test -s /etc/passwd && getent hosts localhost"
    subprocess.run([ROOT / ".ci/without-slurm", "sh", "-c", hidden], check=True, timeout=60, capture_output=True)
    assert shutil.which("srun") is not None


def test_a_job_of_each_kind_is_in_the_quick_tests() -> None:
    files = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    marked = [path for path in files if "pytest.mark.healthy" in path.read_text()]
    assert sorted(str(path.relative_to(ROOT / "tests")) for path in marked) == [
        "lab/test_jobs.py",  # submit, in the lab
        "lab/test_run.py",  # run, on six nodes of the lab
        "lab/test_watch.py",  # watch, a job of srun
        "launch/test_frameworks.py",  # run, on this machine
        "state/truth/test_flips.py",  # session: replicas whose bits are flipped
        "test_session_track.py",  # session: save, leave, resume
        "test_wheel.py",  # run, from what is installed
        "watch/test_planted.py",  # watch, jobs of other launchers
    ]
