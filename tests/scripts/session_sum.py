"""A script that uses the session: says who it is, sums over all ranks, and says it again after a barrier."""

import sys

import torch
import torch.distributed as dist

import allranks

with allranks.session() as s:
    assert (dist.get_rank(), dist.get_world_size()) == (s.rank, s.world_size)
    total = torch.tensor([s.rank + 1], device=s.device)
    dist.all_reduce(total)
    s.barrier()
    sys.stdout.write(f"rank {s.rank} of {s.world_size} local {s.local_rank} of {s.local_world_size} on {s.node} ")
    sys.stdout.write(f"sum {total.item()} {s.backend} {s.device} {'leads' if s.is_leader else 'follows'}\n")
assert not dist.is_initialized()
