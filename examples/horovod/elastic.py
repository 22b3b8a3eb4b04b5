"""A training with elastic Horovod; session.py is the same one moved to allranks.

allranks horovod --min-np 2 --max-np 3 examples/horovod/elastic.py SEEN       inside a SLURM job

SEEN gets a line for each batch of each worker: the step, and which samples. An argument makes a worker fail once:
RANK:STEP.
"""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

SEEN, STRIKE = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 960, 8, 2, 5

hvd.init()
torch.manual_seed(1)
inputs = torch.randn(SAMPLES, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        for number, (x, y, index) in enumerate(loader):
            if f"{hvd.rank()}:{state.step}" == STRIKE and not SEEN.with_suffix(".struck").exists():
                SEEN.with_suffix(".struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with SEEN.open("a") as file:
                file.write(f"{state.epoch} {state.step} {hvd.rank()} {','.join(map(str, index.tolist()))}\n")
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.sampler.record_batch(number, BATCH)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0))
