"""Plain steps of 100 ms until DIR/stop is there; one rank may be late in each of them.

    allranks run plain.py --dir DIR [--late 3] [--late-ms 10] [--steps 400] [--step-ms 100]

DIR/steps_<rank>.txt has a line for each step that has ended: attempt, step, seconds since the epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--late", type=int, default=-1, metavar="RANK")
    parser.add_argument("--late-ms", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ.get("SLURM_RESTART_COUNT") or "0"
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compute_s = (options.step_ms + (options.late_ms if rank == options.late else 0.0)) / 1e3
    stop, is_over = options.dir / "stop", torch.zeros(1)
    with (options.dir / f"steps_{rank}.txt").open("a", buffering=1) as file:
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            time.sleep(compute_s)
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            file.write(f"{attempt} {step} {time.time()}\n")
            if step % 10 == 0:
                is_over.fill_(float(rank == 0 and stop.exists()))
                dist.broadcast(is_over, 0)
                if is_over.item():
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
