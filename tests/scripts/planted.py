"""A training for `allranks diff --replay`: planted.py STEPS [DIFFERENCE]. See tests/cli/test_diff_rerun.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import allranks

FROM = 3
"""The first step that differs; 0 for what is made before the steps."""


class Net(nn.Module):
    """Sums each sample's hidden values by a scatter, and drops some."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant, self.step = plant, 0
        self.inner, self.outer = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256)), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        is_struck = self.step >= FROM
        with torch.autocast("cpu", torch.bfloat16, enabled=is_struck and self.plant == "dtype"):
            hidden = self.inner(x).float()
        order = [*range(256)][:: -1 if is_struck and self.plant == "scatter" else 1]
        places = torch.tensor([place % 8 for place in order])
        summed = torch.zeros(len(x), 8).index_add(1, places, hidden[:, order])
        return self.outer(self.drop(summed))


def main(steps: int, plant: str = "") -> None:
    with allranks.session() as s:
        torch.manual_seed(2 if plant == "seed" else 1)
        net = Net(plant)
        more: dict[str, Any] = {"bucket_cap_mb": 0.01} if plant == "buckets" else {}
        model = s.ddp(net, **more)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        data = torch.randn(96, 128, generator=torch.Generator().manual_seed(5))
        sampler = s.sampler(data, global_batch_size=12, seed=8 if plant == "order" else 7)
        state = s.track(model=model, optimizer=optimizer, sampler=sampler)
        torch.manual_seed(100 + s.rank)
        for step in state.steps(DataLoader(data, batch_sampler=sampler), total=steps):
            with step as batch:
                net.step = step.number
                if plant in ("draw", "break-draw") and step.number == FROM and s.rank == 1:
                    torch.rand(1)
                if plant == "chance" and step.number == FROM:
                    torch.seed()
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if plant.startswith("break") and step.number == FROM:
                break


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
