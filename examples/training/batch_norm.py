"""BatchNorm, and a validation after each epoch; the checkpoint with the smallest loss stays, linked as `best`.

allranks run --nproc-per-node 2 --max-restarts 3 examples/training/batch_norm.py
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset, random_split

import allranks

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    training, held_out = random_split(dataset, [401, 111])
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    model = s.ddp(layers.to(s.device))  # sends the running statistics of rank 0 to all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = s.sampler(training, global_batch_size=32, seed=1, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, keep_best=("loss", "min"))

    def measure(batch):
        x, y = batch
        return {"loss": mse_loss(model(x.to(s.device)), y.to(s.device), reduction="sum")}

    def after_epoch(epoch):
        sums = s.validate(model, held_out, measure, batch_size=16)
        state.save(loss=sums["loss"] / len(held_out))

    for step in state.steps(loader, epochs=8, after_epoch=after_epoch):
        with step as (x, y):
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
