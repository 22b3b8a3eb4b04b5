"""Ranks that repeat each other's batches: several trainings in one process group. Each prints what came of it, by rank.

With two lives more, CASES is "raises" (f raises for one batch) or "leaves" (a rank ends in the middle of a replay).
"""

import hashlib
import os
import random
import sys

import numpy
import torch
from torch.utils.data import DataLoader

import allranks
from allranks.state.truth import comparing

comparing.SHARE = 1e-9  # after the first checks there are no more
torch.set_num_threads(1)
STEPS, AT = 12, 8
CASES = os.environ["CASES"].split()[int(os.environ["EXACT_LIFE"])].split(",")


class Sample:
    """What a batch may hold besides tensors."""

    def __init__(self, ids, rank):
        self.ids, self.rank = ids, rank


class Outer(torch.nn.Module):
    """Has DDP inside of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Net(torch.nn.Module):
    """Statistics of each rank, random numbers, a counter that is no buffer."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))
        self.head, self.calls, self.mean = torch.nn.Linear(8, 1), 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.5 + x.mean() * (self.calls + random.random() + numpy.random.random())
        return self.head(self.body(x)) * (1 + self.mean)


def train(s, case):
    """Return what came of one training."""
    torch.set_num_threads(2 if case == "nested" and s.rank == 2 else 1)  # with which it computes other bits
    torch.manual_seed(1)
    random.seed(s.rank)
    numpy.random.seed(s.rank)
    data = [(index, torch.arange(4.0) + index) for index in range(103)]  # the last batch has 3, 2 and 2 samples
    net, seen, own = Net(), set(), set()
    model = Outer(torch.nn.parallel.DistributedDataParallel(net)) if case == "nested" else s.ddp(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sampler = s.sampler(96 if case == "outside" else len(data), global_batch_size=12)
    elsewhere = torch.Generator().manual_seed(s.rank)

    def collate(samples):
        ids, x = zip(*samples, strict=True)
        return {"x": (torch.stack(x) / 103,), "who": Sample(ids, s.rank)}

    def f(batch):
        (x,), who = batch.pop("x"), batch.pop("who")  # the batch is the script's own
        seen.update(who.ids)
        if case == "raises" and state.step == AT and who.rank == 2:
            raise ValueError("a sample of rank 2")
        if case == "leaves" and state.step == AT and s.rank == 2:
            os._exit(3)
        loss = model(x).square().mean()
        if case == "random":
            loss = loss * torch.rand((), generator=elsewhere)
        if case == "unlike" and state.step >= AT:
            loss = loss * (1 + s.rank)
        if case == "by_rank" and s.rank == 2:
            loss = loss * 2
        if case == "talks":
            torch.distributed.all_reduce(loss.detach())
        scaler.scale(loss).backward()
        if case != "replayed":
            return
        scaler.unscale_(optimizer)

    def step_of(batch):
        (x,), own_of_rank = batch["x"], batch["who"].ids
        own.update(own_of_rank)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    def err(gradient):
        gradient = gradient.clone()
        if state.step >= AT:
            gradient.view(torch.int32)[0, 3] ^= 1
        return gradient

    if case.startswith("wrong") and s.rank == int(case[-1]):
        net.head.weight.register_hook(err)
    asked = {} if case == "plain" else {"replay": f, "replay_every": 1 if case in ("raises", "leaves", "nested") else 2}
    parts = {"model": net if case == "outside" else model, "optimizer": optimizer, "sampler": sampler, "scaler": scaler}
    state = s.track(**parts, **asked, checkpoint_dir=f"{case}_{s.world_size}", checkpoint_every=10**6)
    for step in state.steps(DataLoader(data, batch_sampler=sampler, collate_fn=collate)):
        with step as batch:
            step_of(batch)
            if case == "flipped" and s.rank == 2 and step.number == AT:
                net.head.weight.data.view(torch.int32)[0, 3] ^= 1
        if step.number == STEPS - 1:
            break  # without a save
    bits = [own.numpy().tobytes() for own in (*net.state_dict().values(), net.mean, torch.rand(3))]
    bits += [repr((net.calls, random.random(), numpy.random.random(), scaler.state_dict())).encode()]
    return f"{hashlib.sha256(b''.join(bits)).hexdigest()[:12]} repeated {len(seen - own) > 0} own {len(seen & own) > 0}"


with allranks.session(timeout_s=10) as s:
    for case in CASES:
        try:
            said = train(s, case)
        except SystemExit as exc:
            said = f"{exc.code} {exc}"
            if case == "leaves":
                print(f"{case} {s.rank} {said}\n", end="", flush=True)
                sys.exit(exc.code)
        print(f"{case} {s.rank} {said}\n", end="", flush=True)
    os._exit(0)  # leaving the session would save what a case has left unsaved
