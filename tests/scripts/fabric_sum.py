"""Lightning Fabric as its manual shows it; the launcher is found from the environment."""

import time

import torch
from lightning_fabric import Fabric


def train(fabric: Fabric) -> None:
    total = fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0]), reduce_op="sum")
    assert total.item() == 3.0, total
    layer = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


fabric = Fabric(accelerator="cpu", devices=2, num_nodes=1, strategy="ddp")
fabric.launch()
train(fabric)
environment = type(fabric.strategy.cluster_environment).__name__
print(f"rank {fabric.global_rank} of {fabric.world_size} summed by {environment}")
torch.distributed.destroy_process_group()
time.sleep(0.5)  # for the reason in train_ddp.py
