"""What every script of the suite begins with: which device, which backend, and how several ranks share one GPU.

    from rank import device, form_group, tell

NCCL refuses a GPU that two ranks of one host use: "Duplicate GPU detected", where hash of the host and bus id are alike
(NCCL 2.28.9, src/init.cc:903). The hash is that of NCCL_HOSTID where that is set (src/misc/utils.cc:87), so with one of
its own each rank is a host of its own, and they talk over sockets.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

is_rehearsal = os.environ.get("GPU_SUITE_REHEARSAL") == "1"
device = torch.device("cpu") if is_rehearsal else torch.device("cuda", 0)
backend = "gloo" if is_rehearsal else "nccl"
rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))

Path(f"{rank}.pid").write_text(str(os.getpid()))
if os.environ.get("GPU_SUITE_SAME_HOST") != "1":
    os.environ.setdefault("NCCL_HOSTID", f"host-{rank}")
if not is_rehearsal:
    torch.cuda.set_device(device)


def form_group(chosen: str | None = backend, *, timeout_s: float = 60) -> None:
    """Form the group and have one collective done, which makes NCCL's communicator; say `READY`."""
    # allranks refuses NCCL where a node has fewer GPUs than ranks, and rightly so; here it is what is tried.
    os.environ.pop("ALLRANKS_NODE_GPUS", None)
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))
    add_up()
    print("READY", flush=True)


def add_up(number: float = 1.0) -> float:
    """An all-reduce of one number, with the result brought back from the device."""
    total = torch.full((1024,), number, device=device)
    dist.all_reduce(total)
    return float(total[0].item())


def flight() -> Any:
    """The reader of torch's flight recorder that the guard put into this process."""
    return sys.modules["_allranks_inside.entry"]._teller.flight


def synchronize() -> None:
    """Wait for the device."""
    if not is_rehearsal:
        torch.cuda.synchronize()


def tell(**facts: Any) -> None:
    """Leave facts for the test."""
    draft = Path(f"{rank}.json.draft")
    draft.write_text(json.dumps(facts))
    draft.rename(f"{rank}.json")
