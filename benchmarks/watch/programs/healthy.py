"""Jobs that are well and look ill: `torchrun --nproc-per-node 3 healthy.py KIND SECONDS`. Each ends well by itself.

Whoever judges by silence alone is wrong about each: one rank is busy for long and the others wait for it, ranks are in
different calls, or nobody has begun yet.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

EVALUATION_S, SAVE_S, LATE_S = 60.0, 40.0, 8.0
CHUNK = 1 << 20


def do_steps(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    for step in range(1_000_000):
        is_over = torch.tensor(float(time.monotonic() > end_s))
        dist.broadcast(is_over, src=0)
        if is_over:
            return
        grads = torch.randn(4096) + step
        dist.all_reduce(grads)
        time.sleep(0.01)


def evaluate(rank: int) -> None:
    """Rank 0 evaluates for a minute, the others wait in the next collective."""
    if rank == 0:
        end_s, batch = time.monotonic() + EVALUATION_S, 0
        while time.monotonic() < end_s:
            torch.randn(128, 128) @ torch.randn(128, 128)
            batch += 1
    dist.barrier()


def save(rank: int) -> None:
    """Rank 0 writes for 40 s to a slow file system, the others are in a barrier."""
    if rank == 0:
        end_s, state = time.monotonic() + SAVE_S, os.urandom(CHUNK)
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end_s:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.5)
    dist.barrier()


def pipeline(rank: int) -> None:
    """Microbatches pass the ranks one after the other; the middle one takes seconds for each."""
    last, batch = dist.get_world_size() - 1, torch.zeros(1024)
    for _ in range(4):
        if rank:
            dist.recv(batch, src=rank - 1)
        if rank == 1:
            time.sleep(4)
        if rank < last:
            dist.send(batch, dst=rank + 1)


def two_groups() -> Callable[[int], None]:
    """Rank 1 is in both groups; while it works with one of them, the other waits."""
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])

    def work(rank: int) -> None:
        values = torch.ones(64)
        for _ in range(3):
            if rank < 2:
                dist.all_reduce(values, group=left)
            if rank == 1:
                time.sleep(4)
            if rank > 0:
                dist.broadcast(values, src=1, group=right)

    return work


def main(kind: str, seconds: float) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if kind == "importtime":  # imports take long, and differently on each rank
        time.sleep(LATE_S * rank)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    kinds = {"evaluation": evaluate, "save": save, "pipeline": pipeline}
    work = two_groups() if kind == "groups" else kinds.get(kind)
    is_over, end_s = torch.tensor(0.0), time.monotonic() + seconds
    while not is_over:
        do_steps(5)
        if work is not None:
            work(rank)
        is_over.fill_(float(time.monotonic() > end_s))
        dist.broadcast(is_over, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
