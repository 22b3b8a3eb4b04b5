"""The training of elastic.py, moved to `allranks.session()`.

allranks run --nproc-per-node 3 --max-restarts 3 examples/horovod/session.py SEEN

SEEN gets a line for each batch of each rank: the step, and which samples. An argument makes a rank fail once:
RANK:STEP.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import allranks

SEEN, STRIKE = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 960, 8, 2, 5

with allranks.session() as s:
    torch.manual_seed(1)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
    model = s.ddp(torch.nn.Linear(8, 1).to(s.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = s.sampler(dataset, global_batch_size=BATCH * 3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_every=SAVE_EVERY)
    for step in state.steps(loader, epochs=EPOCHS):
        with step as (x, y, index):
            if f"{s.rank}:{state.step}" == STRIKE and not SEEN.with_suffix(".struck").exists():
                SEEN.with_suffix(".struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with SEEN.open("a") as file:
                file.write(f"{sampler.epoch} {state.step} {s.rank} {','.join(map(str, index.tolist()))}\n")
            loss = mse_loss(model(x.to(s.device)), y.to(s.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
