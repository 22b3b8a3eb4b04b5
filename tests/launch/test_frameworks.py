"""Do scripts of the frameworks, unmodified, become one group under `allranks run`?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conftest import Allranks, allranks_command, clean_env

pytestmark = pytest.mark.torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"


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


@pytest.mark.by_hand
def test_a_trainer_of_transformers_saves_when_it_is_told_to_stop(tmp_path: Path):
    text = (EXAMPLES / "hf_trainer" / "train.py").read_text()
    changed = text.replace("            seed=1,\n", "            seed=1,\n            enable_jit_checkpoint=True,\n")
    assert changed != text
    (tmp_path / "train.py").write_text(changed)
    long = ("--steps", "4000", "--save-every", "1000", "--step-s", "0.2")
    agent = subprocess.Popen(
        allranks_command("run", "--nproc-per-node", "2", "--master-port", "0", "train.py", *long),
        cwd=tmp_path, env=clean_env(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert agent.stdout is not None
        while "'loss'" not in (line := agent.stdout.readline()):
            assert line, "it ended"
        agent.terminate()
        said, _ = agent.communicate(timeout=100)
    finally:
        agent.kill()
    assert agent.returncode == 143, said
    (saved,) = (tmp_path / "checkpoints").glob("checkpoint-*")
    assert (saved / "trainer_state.json").exists()
    assert not (saved / "checkpoint-is-incomplete.txt").exists()
