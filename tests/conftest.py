"""What all tests share: a clean environment, and how a test runs allranks for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FOREIGN = ("SLURM", "OMPI_", "PMI", "MPI_", "MV2_", "TORCHELASTIC", "ALLRANKS", "PET_", "NCCL_", "GLOO_", "ROLE_")
NAMES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES",
}  # fmt: skip


def clean_env(env: Mapping[str, str], **more: str) -> dict[str, str]:
    """The environment without anything that a launcher, a profile or another test may have left."""
    kept = {name: value for name, value in env.items() if name not in NAMES and not name.startswith(FOREIGN)}
    return kept | more


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_env(os.environ)):
        monkeypatch.delenv(name)


Allranks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def allranks(tmp_path: Path) -> Allranks:
    """Run the `allranks` command in `tmp_path` and return what it did; a hang fails the test."""

    def run(
        *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            allranks_command(*arguments),
            cwd=tmp_path,
            env=clean_env(os.environ, **(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = 40) -> Any:
    """Wait for something that must come, and return it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, f"{what}: not in {timeout_s} s"
        time.sleep(0.005)
    return found


def allranks_command(*arguments: str | Path) -> Sequence[str]:
    """The command line of the allranks under test."""
    return [sys.executable, "-m", "allranks", *map(str, arguments)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; what starts torch comes last."""
    items.sort(key=lambda item: item.get_closest_marker("torch") is not None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of the lab, which wait for SLURM while the others compute. (No group: xdist 3.8 gives
    its name to an attribute that pytest 9.2 no longer has.)"""
    from xdist.scheduler import LoadScopeScheduling

    class OneLab(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "lab" if nodeid.startswith("tests/lab/") else nodeid

    return OneLab(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("scontrol") and shutil.which("scontrol") is None:
        if os.environ.get("ALLRANKS_REQUIRE_LAB"):
            pytest.fail("scontrol is not on PATH; apt-get install slurm-client")
        pytest.skip("scontrol is not on PATH; apt-get install slurm-client")
    if item.get_closest_marker("gpu") and not Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("no NVIDIA GPU here")
