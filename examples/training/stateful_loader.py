"""torchdata's StatefulDataLoader: its own state goes into the checkpoint, for each rank. pip install torchdata

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/stateful_loader.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(2048, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = s.ddp(layers.to(s.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shares = DistributedSampler(dataset, num_replicas=s.world_size, rank=s.rank, seed=1)
    loader = StatefulDataLoader(dataset, batch_size=16, sampler=shares, num_workers=2)
    state = s.track(model=model, optimizer=optimizer)
    for step in state.steps(loader, total=100):  # calls shares.set_epoch
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
