"""A program written for one machine: it starts all its ranks itself, so once on every node of a SLURM step."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, world_size: int) -> None:
    """Run one rank of the world that the program expects on one machine."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(os.environ.get("SLURM_NTASKS", "2"))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, args=(world_size,), nprocs=world_size)
