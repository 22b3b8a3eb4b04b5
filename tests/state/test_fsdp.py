"""FSDP2 at four ranks: killed, and resumed at four and at three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forked import fork_ranks

pytestmark = pytest.mark.torch

TRAIN = """
import os
import shutil
import signal
import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import allranks

where = sys.argv[1 + int(os.environ["EXACT_LIFE"])]
with allranks.session(backend="gloo") as s:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 7), torch.nn.Linear(7, 1))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    sampler = s.sampler(60, global_batch_size=12)
    loader = DataLoader(torch.arange(360.0).reshape(60, 6) / 360, batch_sampler=sampler)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    state = s.track(**parts, checkpoint_dir=where, checkpoint_every=100)
    begun = state.step
    for step in state.steps(loader, total=12):
        with step as batch:
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if where == "cut" and begun == 0 and state.step == 5:
            assert state.save()
            if s.is_leader:
                shutil.copytree("cut/step_5", "three/step_5")
        if where == "cut" and begun == 0 and state.step == 7 and s.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    whole = {name: weights.full_tensor().detach() for name, weights in model.state_dict().items()}
    if s.is_leader:
        torch.save({"begun": begun, "world_size": s.world_size, "model": whole}, f"{where}.pt")
"""


def test_a_killed_run_ends_with_the_same_bits_at_four_ranks_and_to_rounding_at_three(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = fork_ranks(tmp_path, "4,4,4,3", "train.py", "cut", "cut", "undisturbed", "three")
    codes = [f"codes {codes}" for codes in ([1, 1, -9, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0])]
    assert done.stdout.splitlines() == codes, done.stderr
    ended = {where: torch.load(tmp_path / f"{where}.pt") for where in ("undisturbed", "cut", "three")}
    assert [(each["begun"], each["world_size"]) for each in ended.values()] == [(0, 4), (5, 4), (5, 3)]
    for name, weights in ended["undisturbed"]["model"].items():
        assert ended["cut"]["model"][name].equal(weights), name
        assert torch.allclose(ended["three"]["model"][name], weights, rtol=1e-5, atol=1e-5), name
