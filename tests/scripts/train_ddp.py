"""An unmodified DDP script in torchrun's style: three steps on data that differs between the ranks."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    torch.manual_seed(dist.get_rank())  # other weights and data on every rank; DDP makes the weights one
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for function in (DistributedDataParallel.__init__, DistributedDataParallel.forward):
        assert function.__code__.co_filename == torch.nn.parallel.distributed.__file__, "torch's class was changed"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    weights = model.module.weight.detach()
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    assert all(torch.equal(weights, other) for other in others), "the ranks have different weights"


dist.init_process_group()
train()
print(f"rank {dist.get_rank()} local rank {os.environ['LOCAL_RANK']} weights agree")
dist.destroy_process_group()
# An interpreter that ends right after a backward pass aborts now and then ("terminate called without an active
# exception"; torch 2.13 on CPU, seen as often under torchrun).
time.sleep(0.5)
