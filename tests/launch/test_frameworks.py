"""Do scripts of the frameworks, unmodified, become one group under `allranks run`?"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Allranks

pytestmark = pytest.mark.torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("train_ddp.py", "rank {0} local rank {0} weights agree", marks=pytest.mark.healthy),
        pytest.param("fabric_sum.py", "rank {0} of 2 summed by TorchElasticEnvironment", marks=pytest.mark.by_hand),
        pytest.param("accelerate_gather.py", "rank {0} of 2 gathered [1, 2]", marks=pytest.mark.by_hand),
    ],
)
def test_a_script_of_a_framework_runs_unmodified(allranks: Allranks, script: str, said: str):
    result = allranks("run", "--nproc-per-node", "2", SCRIPTS / script, env={"SLURMD_NODENAME": "node07"})
    assert result.returncode == 0, result.stderr
    assert {f"[node07 r{rank}] {said.format(rank)}" for rank in (0, 1)} <= set(result.stdout.splitlines())
    assert "all 2 ranks are up" in result.stderr
