"""Three ranks that train, and are healed: in the second life, one bit of one rank is flipped after each of FLIPS steps.

Prints, on rank 0, which flips were not named at the next check, and a hash of the state at the end.
"""

import hashlib
import os
import random

import torch
from torch.utils.data import DataLoader

import allranks
from allranks.state.truth import comparing

LEARNING = 6
comparing.SHARE = 1e9  # a check at each step
torch.set_num_threads(1)
life, num_steps = os.environ["EXACT_LIFE"], int(os.environ["FLIPS"])
num_flips = num_steps if life == "1" else 0


class Net(torch.nn.Module):
    """Weights of float32 and bfloat16, and some that are not trained."""

    def __init__(self):
        super().__init__()
        self.wide, self.short = torch.nn.Linear(16, 24), torch.nn.Linear(16, 24, dtype=torch.bfloat16)
        self.frozen = torch.nn.Linear(24, 1, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.frozen(torch.tanh(self.wide(x) + self.short(x.bfloat16()).float()))


with allranks.session(timeout_s=60) as s:
    torch.manual_seed(1)
    model = s.ddp(Net())
    optimizer = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=1e-3)
    sampler = s.sampler(96, global_batch_size=12, seed=1)
    loader = DataLoader(torch.randn(96, 16), batch_sampler=sampler)
    where = {"checkpoint_dir": f"life_{life}", "checkpoint_every": 10**6}
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, on_corruption="heal", **where)
    draw, made = random.Random(7), []
    for step in state.steps(loader, total=LEARNING + num_steps):
        with step as batch:
            model(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if LEARNING <= step.number < LEARNING + num_flips:
                tensors = state._comparing._contents.tensors
                name, rank = draw.choice(sorted(tensors)), draw.randrange(s.world_size)
                data = tensors[name].view(-1).view({2: torch.int16, 4: torch.int32}[tensors[name].element_size()])
                place, bit = draw.randrange(len(data)), draw.randrange(8 * data.element_size())
                made.append({"step": step.number + 1, "names": [name], "ranks": [rank]})
                if rank == s.rank:
                    data[place] ^= (1 << bit) - ((1 << bit + 1) if bit == 8 * data.element_size() - 1 else 0)
    if s.rank == 0:
        kinds = {"/exp_avg" in own["names"][0] or own["names"][0].rpartition(".")[0] for own in made}
        digest = hashlib.sha256(repr(sorted(state._comparing.numbers.items())).encode()).hexdigest()
        missed = [own for own in made if own not in state._comparing.healed]
        print(f"flips {len(made)} of {len(kinds)} kinds, missed {missed}")
        print(f"named {len(state._comparing.healed)}, state {digest}")
