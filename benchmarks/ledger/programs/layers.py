"""DDP whose compute is a sleep, in layers; each rank measures what it waited for communication, by its own clock.

    allranks run layers.py --dir DIR --steps 60 [--late 1 --late-ms 30]

The gradients of a layer appear after a sleep, so DDP sends its buckets beside the backward pass, and blocks at its end:
from the last gradient, which a hook sees, to the end of `backward()`. The same without communication (`no_sync`), in
every fifth step, is what of that is no communication. DIR/truth_<rank>.json has sums of the time from the end of the
first step on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, ROWS, COLUMNS = 8, 512, 256
"""4.2 MB of gradients."""
FORWARD_S, BACKWARD_S = 0.030, 0.060
ALONE_EVERY = 5


class Sleep(torch.autograd.Function):
    """A layer that takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(FORWARD_S / LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        time.sleep(BACKWARD_S / LAYERS)
        return gradient, ctx.saved_tensors[0] * 1e-3


class Layer(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--late", type=int, default=-1, metavar="RANK")
    parser.add_argument("--late-ms", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*(Layer() for _ in range(LAYERS))), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    last_s = [0.0]

    def note(_: Tensor) -> None:
        last_s[0] = time.monotonic()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    tails: dict[bool, list[float]] = {True: [], False: []}
    first_s = ended_s = 0.0
    for step in range(options.steps):
        is_alone = step % ALONE_EVERY == ALONE_EVERY - 1
        time.sleep(options.late_ms / 1e3 if rank == options.late else 0.0)
        with model.no_sync() if is_alone else nullcontext():
            model(torch.ones(1, requires_grad=True)).sum().backward()
        tail_s = time.monotonic() - last_s[0]
        optimizer.step()
        optimizer.zero_grad()
        ended_s = time.monotonic()
        if step:
            tails[is_alone].append(tail_s)
        first_s = first_s or ended_s
    own_s = statistics.median(tails[True])
    blocked_s = sum(tail_s - own_s for tail_s in tails[False])
    truth = {"blocked_s": blocked_s, "passed_s": ended_s - first_s, "own_ms": 1e3 * own_s}
    (options.dir / f"truth_{rank}.json").write_text(json.dumps(truth))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
