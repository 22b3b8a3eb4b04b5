"""Worker of the group tests, as anybody would write it for torchrun: exits non-zero where an all-reduce is wrong.

sum_ranks.py [NUMBER]     each rank gives NUMBER (default 1) times its rank plus one
"""

import os
import sys

import torch
import torch.distributed as dist

number = int(sys.argv[1]) if len(sys.argv) > 1 else 1
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
total = torch.tensor([number * (rank + 1)])
dist.all_reduce(total)
expected = number * world_size * (world_size + 1) // 2
dist.destroy_process_group()
print(f"rank {rank} of {world_size} sum {total.item()}")
sys.exit(0 if total.item() == expected else f"sum {total.item()}, expected {expected}")
