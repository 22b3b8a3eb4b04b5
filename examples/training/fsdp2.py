"""FSDP2: parameters and optimizer state are sharded over the ranks; every rank writes and reads its own shards.

The ranks must share each batch evenly: a multiple of their number as global_batch_size, and drop_last.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/fsdp2.py
"""

import torch
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(s.device)
    mesh = init_device_mesh(s.device.type, (s.world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
