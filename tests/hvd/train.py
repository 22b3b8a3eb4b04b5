"""A training as Horovod's documentation writes it: https://horovod.readthedocs.io/en/stable/elastic_include.html

train.py BATCHES SECONDS_A_BATCH [own]        own: with the state of allranks
"""

import sys
import time

import horovod.torch as hvd
import torch

BATCHES, PAUSE_S, STATE = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]

hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
if STATE == ["own"]:
    from allranks.horovod.state import TorchState
else:
    from horovod.torch.elastic import TorchState
state = TorchState(model=model, optimizer=optimizer, batch=0)


@hvd.elastic.run
def train(state):
    while state.batch < BATCHES:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.ones(4, 8)), torch.ones(4, 1)).backward()
        optimizer.step()
        time.sleep(PAUSE_S)
        state.batch += 1
        if hvd.rank() == 0:
            print(f"batch {state.batch} of {BATCHES} with {hvd.size()} workers", flush=True)
        state.commit()


print("a worker is ready", flush=True)
train(state)
if hvd.rank() == 0:
    print("trained", flush=True)
