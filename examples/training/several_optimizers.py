"""Two optimizers, each with a schedule: every one is a part of its own, under a name that you choose.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/several_optimizers.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    body, head = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)
    model = s.ddp(torch.nn.Sequential(body, torch.nn.ReLU(), head).to(s.device))
    adam = torch.optim.AdamW(body.parameters(), lr=1e-3)
    sgd = torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9)
    cosine = CosineAnnealingLR(adam, T_max=100)
    drops = MultiStepLR(sgd, milestones=[40, 80])
    sampler = s.sampler(dataset, global_batch_size=32, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, adam=adam, sgd=sgd, cosine=cosine, drops=drops, sampler=sampler)
    for step in state.steps(loader, total=100):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            for each in (adam, sgd, cosine, drops):
                each.step()
            model.zero_grad()
            step.log(loss=loss)
