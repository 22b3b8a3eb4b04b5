"""The job of a drill, unmodified: plain DDP as users write it, without a line for allranks."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from orders import Orders
from torch.nn.parallel import DistributedDataParallel

WIDTH = 384
"""Two layers of 0.6 MB each: an all-reduce loads the links, and is short compared with a step."""


def main() -> None:
    """Train until an order ends the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--mix", type=int, metavar="SEED", help="mix in slow steps and evaluations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chance = torch.Generator().manual_seed(rank)
    orders = Orders(arguments.dir, rank=rank, seed=arguments.mix)
    for step in itertools.count(1):
        orders.obey(step)
        batch = torch.randn(16, WIDTH, generator=chance)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        orders.reduce(loss)
        orders.write(step)
        if orders.is_last():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
