"""An exponential moving average of the weights: torch's AveragedModel, tracked like any other part.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/ema.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(s.device)
    model = s.ddp(layers)
    ema = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, ema=ema, optimizer=optimizer, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(layers)
            step.log(loss=loss)
