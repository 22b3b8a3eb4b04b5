"""A DataLoader whose workers augment samples and run ahead: `s.seeded` gives each sample a random seed of its own.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/loader_workers.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import allranks


class Noisy(Dataset):
    """Points with a little noise, which is new in each epoch."""

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 16) * index / 2048
        return x + 0.01 * torch.randn(16), x.square().mean().reshape(1)


with allranks.session() as s:
    torch.manual_seed(1)
    dataset = s.seeded(Noisy())
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = s.ddp(layers.to(s.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=4)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
