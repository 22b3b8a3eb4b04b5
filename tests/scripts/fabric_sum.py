"""Lightning Fabric as its manual shows it; the launcher is found from the environment."""

import torch
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, num_nodes=1, strategy="ddp")
fabric.launch()
total = fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0]), reduce_op="sum")
assert total.item() == 3.0, total
model, optimizer = fabric.setup(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(torch.nn.Linear(2, 1)))
fabric.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
environment = type(fabric.strategy.cluster_environment).__name__
print(f"rank {fabric.global_rank} of {fabric.world_size} sum {total.item()} by {environment}")
