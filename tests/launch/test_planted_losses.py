"""Does the account of a real job have the losses that were planted in it, and name the right ranks?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import clean_env

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not (ROOT / "benchmarks/ledger").exists(), reason="no checkout: the measurement is not here"),
]


def test_three_losses_of_a_job_have_their_size_and_their_ranks(tmp_path: Path) -> None:
    """What its ranks measure by their own clock; on a busy machine some collectives stand for the others."""
    plants = "slow-rank=2,slow-loader=2,late-start=1"
    command = [sys.executable, "-m", "benchmarks.ledger", "losses", "--plants", plants, "--together", "--no-page"]
    command += ["--steps", "30", "--within", "0.2", "--keep", str(tmp_path / "job")]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(os.environ), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == [
        "ok    slow rank", "ok    slow loader", "ok    late start",
    ]  # fmt: skip
    assert done.stdout.count("; rank 2 named") == 2
    assert done.stdout.count("; rank 1 named") == 1
