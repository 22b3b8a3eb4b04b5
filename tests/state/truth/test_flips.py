"""Real ranks, and bits that are flipped in one of them: is each named, and are the bits of the undisturbed run kept?"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from forked import fork_ranks

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.torch


def run_lives(folder: Path, sizes: str, script: Path, *, within_s: float = 200, **env: str) -> str:
    done = fork_ranks(folder, sizes, script, within_s=within_s, **env)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "flips", [pytest.param(100, marks=pytest.mark.healthy), pytest.param(1000, marks=pytest.mark.by_hand)]
)
def test_each_flip_is_named_at_the_next_check_and_healing_keeps_the_bits(tmp_path: Path, flips: int):
    said = run_lives(tmp_path, "3,3", SCRIPTS / "flipped.py", within_s=90 + flips, FLIPS=str(flips))
    states = re.findall(r"^named (\d+), state (\w+)$", said, re.M)
    assert f"flips {flips} of 6 kinds, missed []" in said, said
    assert [num for num, _ in states] == ["0", str(flips)]
    assert states[0][1] == states[1][1]


TRAIN = """
    import os
    import time
    import torch
    from torch.utils.data import DataLoader
    import allranks
    from allranks.state.truth import comparing

    comparing.SHARE = 1e-9  # after the first checks, only saves compare
    torch.manual_seed(1)
    life = int(os.environ["EXACT_LIFE"])
    with allranks.session(timeout_s=20) as s:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model = s.ddp(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sampler = s.sampler(96, global_batch_size=12)
        loader = DataLoader(torch.arange(384.0).reshape(96, 4) / 384, batch_sampler=sampler)
        where = {"checkpoint_dir": "whole" if life == 0 else "struck", "checkpoint_every": 10}
        state = s.track(model=model, optimizer=optimizer, sampler=sampler, **where)
        for step in state.steps(loader, total=40):
            with step as batch:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 29 and s.rank == 0 and life == 1:
                    while not os.path.exists("struck/step_20/MANIFEST.json"):
                        time.sleep(0.01)  # the save of step 20 goes on in the background
                    optimizer.state[net[0].weight]["exp_avg"].view(torch.int32)[3, 2] ^= 1 << 20
        print(f"rank {s.rank} {[own.detach().numpy().tobytes().hex() for own in net.parameters()]}\\n", end="")
"""


def test_after_a_roll_back_the_job_ends_with_the_bits_of_the_undisturbed_one(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    said = run_lives(tmp_path, "3,3,3", script)
    assert re.findall(r"^codes (.*)$", said, re.M) == ["[0, 0, 0]", "[75, 75, 75]", "[0, 0, 0]"], said
    assert " has other bits than 2 others, in optimizer/state/0.weight/exp_avg" in said
    assert "at step 30, equal at step 20; may go on from the checkpoint of step 20\n" in said
    assert "allranks: resumed at step 20 from " in said
    assert len({*re.findall(r"^rank \d (.*)$", said, re.M)}) == 1
