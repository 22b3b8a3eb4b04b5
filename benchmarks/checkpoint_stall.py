"""How long does a checkpoint hold up the training: ours, torch.save, and DCP's async_save, alternating in one run?

python benchmarks/checkpoint_stall.py [--rounds 15] [--parameters 100_000_000] [--directory DIR] [--device cuda]

Each round saves the same fp32 parameters once in each way, in an order that changes, and waits until it is on disk
before the next; so nobody writes while another is timed. The first save of each is left out. The stall is the time
until the parameters may change again: until the call returns, or, where DCP copies them from the GPU in the background
(DefaultStager, its best there), until that copy is there.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from allranks.state.saved.checkpoint import Checkpointer


def parameters(count: int, device: str) -> dict[str, torch.Tensor]:
    """As in a transformer: many matrices of some million elements, and small vectors beside them."""
    width, made, total = 2048, {}, 0
    while total < count:
        rows = min(4 * width, (count - total) // width) or 1
        name = f"layers.{len(made) // 2}"
        made[f"{name}.weight"] = torch.randn(rows, width, device=device)
        made[f"{name}.bias"] = torch.randn(rows, device=device)
        total += rows * (width + 1)
    return made


def kept_stager(*, has_gpu: bool) -> Any:
    """DCP's stager with pinned memory that lasts from save to save; in torch 2.11 it gives it back after each."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(use_pinned_memory=has_gpu, use_non_blocking_copy=has_gpu))
    stager._state_dict_stager.close = lambda: None
    return stager


class Ways:
    """Each saves the state and returns the stall; afterwards everything is on disk."""

    def __init__(self, directory: Path, state: dict[str, torch.Tensor]) -> None:
        self.directory, self.state, self.count = directory, state, 0
        self.checkpoints = Checkpointer(directory / "ours", keep=2)
        self.stager: Any = None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ours(self) -> float:
        began_s = time.perf_counter()
        self.checkpoints.save(self.count, self.state)
        stall_s = time.perf_counter() - began_s
        assert self.checkpoints.wait()
        return stall_s

    def torch_save(self) -> float:
        path = self.directory / f"torch-{self.count}.pt"
        began_s = time.perf_counter()
        torch.save(self.state, path)
        stall_s = time.perf_counter() - began_s
        path.unlink()
        return stall_s

    def dcp_async_save(self) -> float:
        path = self.directory / f"dcp-{self.count}"
        began_s = time.perf_counter()
        saving = dcp.async_save(self.state, checkpoint_id=path)
        stall_s = time.perf_counter() - began_s
        saving.result()
        shutil.rmtree(path)
        return stall_s

    def dcp_staged(self) -> float:
        path = self.directory / f"staged-{self.count}"
        if self.stager is None:
            self.stager = kept_stager(has_gpu=next(iter(self.state.values())).is_cuda)
        began_s = time.perf_counter()
        saving = dcp.async_save(self.state, checkpoint_id=path, async_stager=self.stager)
        saving.staging_completion.result()
        stall_s = time.perf_counter() - began_s
        saving.upload_completion.result()
        shutil.rmtree(path)
        return stall_s

    def close(self) -> None:
        self.checkpoints.close()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--device", default="cpu", help="where the parameters are: cpu, cuda")
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    state, chance = parameters(told.parameters, told.device), random.Random(0)
    with tempfile.TemporaryDirectory(dir=told.directory) as directory:
        ways = Ways(Path(directory), state)
        order: list[tuple[str, Callable[[], float]]] = [
            ("allranks", ways.ours),
            ("torch.save", ways.torch_save),
            ("DCP async_save", ways.dcp_async_save),
            ("DCP staged", ways.dcp_staged),
        ]
        stalls: dict[str, list[float]] = {name: [] for name, _ in order}
        for ways.count in range(told.rounds + 1):
            for name, save in chance.sample(order, len(order)):
                os.sync()
                if told.device != "cpu":
                    torch.cuda.synchronize()
                stalls[name].append(save())
        ways.close()
    counted = sum(tensor.numel() for tensor in state.values())
    print(f"{counted / 1e6:.0f} M fp32 parameters, {told.rounds} alternating rounds after the first; milliseconds")
    for name, values in stalls.items():
        low, median, high = (value * 1000 for value in statistics.quantiles(values[1:], n=4))
        print(
            f"  {name:<15} median {median:6.1f}   quartiles {low:6.1f} to {high:6.1f}   first {values[0] * 1000:6.1f}"
        )
    for name in [name for name in stalls if name != "allranks"]:
        ratios = [ours / theirs for ours, theirs in zip(stalls["allranks"][1:], stalls[name][1:], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(stalls["allranks"][1:]) / statistics.median(stalls[name][1:])
        print(f"  allranks / {name:<15} {ratio:.3f}   quartiles of the rounds {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
