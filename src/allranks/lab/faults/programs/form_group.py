"""The job of a drill: form the group, run one all-reduce, end. The same under allranks and under torchrun."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1 << 20)
dist.all_reduce(total)
assert int(total[0]) == dist.get_world_size()
dist.destroy_process_group()
time.sleep(0.2)  # torch 2.13: a Gloo thread may still hold the last collective
