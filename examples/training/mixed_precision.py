"""Mixed precision: autocast, and a GradScaler whose scale goes on after a restart.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/mixed_precision.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = s.ddp(layers.to(s.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(s.device.type)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            with torch.autocast(s.device.type):  # float16 on a GPU, bfloat16 on a CPU
                loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step.log(loss=loss)
