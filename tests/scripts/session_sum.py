"""A script that uses the session: says who it is, sums over all ranks, and says it again after a barrier."""

import torch
import torch.distributed as dist

import allranks

with allranks.session() as s:
    assert (dist.get_rank(), dist.get_world_size()) == (s.rank, s.world_size)
    total = torch.tensor([s.rank + 1], device=s.device)
    dist.all_reduce(total)
    s.barrier()
    place = f"local {s.local_rank} of {s.local_world_size} on {s.node}"
    role = "leads" if s.is_leader else "follows"
    # One write, so that lines of several ranks on one pipe stay whole.
    print(f"rank {s.rank} of {s.world_size} {place} sum {total.item()} {s.backend} {s.device} {role}\n", end="")
assert not dist.is_initialized()
