"""How long does a checkpoint hold up the training: ours, and DCP's async_save in each way, alternating in one run?

python benchmarks/checkpoint_stall.py [--rounds 9] [--parameters 100_000_000] [--directory DIR] [--device cuda]

Each round saves the same fp32 parameters with their AdamW state once in each way, in an order that changes, and waits
until it is on disk before the next; so nobody writes while another is timed. The stall is the time until the parameters
may change again: until the call returns, or, where DCP stages in the background, until staging is complete. DCP keeps
its staging memory from save to save, where torch lets it (the stager is the caller's). The first save, which makes the
memory, is reported apart. DCP's best is the way with the lowest median of this run.
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from allranks.state.saved.checkpoint import Checkpointer

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
KEEPS_STAGER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""DefaultStager of 2.11 closes itself after one save, and its memory with it; 2.12 was not looked at."""


def training_state(count: int, device: str) -> dict[str, Any]:
    """As of a transformer: many matrices of some million elements, small vectors beside them, AdamW's state of each."""
    width, layers, total = 2048, torch.nn.ModuleList(), 0
    while total < count:
        rows = min(4 * width, (count - total) // width) or 1
        layers.append(torch.nn.Linear(width, rows, device=device))
        total += rows * (width + 1)
    optimizer = torch.optim.AdamW(layers.parameters())
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}


class Ours:
    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self.state, self.checkpoints, self.count = state, Checkpointer(directory / "ours", keep=2), 0

    def __call__(self) -> float:
        self.count += 1
        began_s = time.perf_counter()
        self.checkpoints.save(self.count, self.state)
        stall_s = time.perf_counter() - began_s
        assert self.checkpoints.wait()
        return stall_s

    def close(self) -> None:
        self.checkpoints.close()


class Dcp:
    def __init__(self, directory: Path, state: dict[str, Any], *, writer: Any, shared: bool, background: bool) -> None:
        has_gpu = next(iter(state["model"].values())).is_cuda
        self.state, self.directory, self.writer = state, directory / "dcp", writer
        self.options = StagingOptions(
            use_pinned_memory=has_gpu,
            use_shared_memory=shared,
            use_async_staging=background,
            use_non_blocking_copy=has_gpu,
        )
        self.stager = DefaultStager(self.options)

    def __call__(self) -> float:
        if not KEEPS_STAGER:
            self.stager.close()
            self.stager = DefaultStager(self.options)
        began_s = time.perf_counter()
        saving: Any = dcp.async_save(
            self.state, checkpoint_id=self.directory, async_checkpointer_type=self.writer, async_stager=self.stager
        )
        if hasattr(saving, "staging_completion"):
            saving.staging_completion.result()
        stall_s = time.perf_counter() - began_s
        getattr(saving, "upload_completion", saving).result()
        shutil.rmtree(self.directory)
        return stall_s

    def close(self) -> None:
        self.stager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--device", default="cpu", help="where the parameters are: cpu, cuda")
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    state, chance = training_state(told.parameters, told.device), random.Random(0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=told.directory) as name:
        directory = Path(name)
        ways: dict[str, Callable[[], float]] = {
            "allranks": Ours(directory, state),
            "DCP shared, thread": Dcp(directory, state, writer=THREAD, shared=True, background=False),
            "DCP shared, thread, staged behind": Dcp(directory, state, writer=THREAD, shared=True, background=True),
            "DCP shared, process": Dcp(directory, state, writer=PROCESS, shared=True, background=False),
            "DCP shared, process, staged behind": Dcp(directory, state, writer=PROCESS, shared=True, background=True),
            "DCP unshared, thread": Dcp(directory, state, writer=THREAD, shared=False, background=False),
        }
        stalls: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(told.rounds + 1):
            for way in chance.sample(list(ways), len(ways)):
                os.sync()
                if told.device != "cpu":
                    torch.cuda.synchronize()
                stalls[way].append(ways[way]())
        for saver in ways.values():
            saver.close()
    dist.destroy_process_group()
    report(stalls, sum(tensor.numel() for tensor in state["model"].values()))


def report(stalls: dict[str, list[float]], count: int) -> None:
    first = {way: values.pop(0) for way, values in stalls.items()}
    rounds = len(stalls["allranks"])
    print(f"{count / 1e6:.0f} M fp32 parameters and AdamW's state, {rounds} alternating rounds; stall in milliseconds")
    for way, values in stalls.items():
        low, median, high = (value * 1000 for value in statistics.quantiles(values, n=4))
        print(
            f"  {way:<35} median {median:7.1f}   quartiles {low:7.1f} to {high:7.1f}   first {first[way] * 1000:7.1f}"
        )
    others = [way for way in stalls if way != "allranks"]
    best = min(others, key=lambda way: statistics.median(stalls[way]))
    for way in others:
        ratios = [ours / theirs for ours, theirs in zip(stalls["allranks"], stalls[way], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(stalls["allranks"]) / statistics.median(stalls[way])
        mark = "   <- DCP's best" if way == best else ""
        print(f"  allranks / {way:<35} {ratio:.3f}   quartiles of the rounds {low:.3f} to {high:.3f}{mark}")


if __name__ == "__main__":
    main()
