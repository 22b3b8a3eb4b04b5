"""torch.compile around DDP: checkpoints hold the names of the plain model, so they load without torch.compile, too.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/compiled.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = torch.compile(s.ddp(layers.to(s.device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
