"""A training of N steps that resumes: says which steps it takes."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import allranks

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 4))
with allranks.session() as s:
    model = s.ddp(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = s.sampler(data, global_batch_size=2, seed=0)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(DataLoader(data, batch_sampler=sampler), total=int(sys.argv[1])):
        with step as (batch,):
            model(batch).mean().backward()
            optimizer.step()
            time.sleep(0.1)
        if s.rank == 0:
            print("step", step.number, flush=True)
