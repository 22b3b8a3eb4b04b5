"""Gradients that accumulate over four steps: with `accumulates=True`, checkpoints between them hold `.grad`.

To split one step because of memory, take `s.sampler(..., micro_batch_size=...)` instead: there `.grad` is not saved.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/accumulation.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import allranks

EVERY = 4

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = s.ddp(layers.to(s.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, accumulates=True)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            (loss / EVERY).backward()
            if step.number % EVERY == EVERY - 1:
                optimizer.step()
                optimizer.zero_grad()
            step.log(loss=loss)
