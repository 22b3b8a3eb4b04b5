"""One rank of benchmarks/slow_network.py: the same model with each way to reduce its gradients, one after the other.

    allranks run slow_network_worker.py --methods compute torch equal s.ddp bf16 --steps 8 --interface ens1f1

The model computes nothing: forward and backward passes sleep, layer by layer, so that two cores serve six ranks and the
network decides. Rank 0 prints a line of JSON for each method: milliseconds of a step, bytes that its interface sent.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allranks

LAYERS = 8
TENSORS = 4  # of a layer
ROWS, COLUMNS = 13_100_000 // 4 // (LAYERS * TENSORS * 256), 256  # of a tensor, fp32
PARAMETERS = LAYERS * TENSORS * ROWS * COLUMNS
FORWARD_S, BACKWARD_S = 0.050, 0.100
WARM_UP = 2  # steps: DDP rebuilds its buckets after the first
WARM_UP_POWERSGD = 12  # the first ten are plain ones
FORMATS = ("bf16", "int8", "powersgd")


class Layer(nn.Module):
    """Four matrices whose gradients appear after a sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, *self.weights)  # type: ignore[no-any-return]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        time.sleep(FORWARD_S / LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        time.sleep(BACKWARD_S / LAYERS)
        return (grad, *(weight * 1e-3 for weight in ctx.saved_tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=8, help="measured for each method")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with allranks.session() as s:
        for method in options.methods:
            torch.manual_seed(0)
            measure(s, method, options.steps)


def measure(s: allranks.Session, method: str, steps: int) -> None:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    ddp = wrap(s, model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    warm_up = WARM_UP_POWERSGD if method == "powersgd" else WARM_UP
    for number in range(warm_up + steps):
        if number == warm_up:
            s.barrier()
            sent, began_s = count_sent(), time.perf_counter()
        optimizer.zero_grad()
        ddp(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()
    took_s = time.perf_counter() - began_s
    if s.is_leader:
        millions = (count_sent() - sent) / steps / 1e6
        said = {"method": method, "ms": round(took_s / steps * 1e3, 1), "sent_mb": round(millions, 2)}
        print("measured " + json.dumps(said), flush=True)
    s.barrier()


def wrap(s: allranks.Session, model: nn.Module, method: str) -> nn.Module:
    if method == "compute":
        return model
    if method == "torch":
        return DistributedDataParallel(model)
    if method == "equal":
        return DistributedDataParallel(model, bucket_cap_mb=1)
    return s.ddp(model, **({"compress": method} if method in FORMATS else {}))


def count_sent() -> int:
    """Bytes that this machine has sent on all interfaces whose names look like cables of data."""
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("ens*/statistics/tx_bytes"))


if __name__ == "__main__":
    main()
