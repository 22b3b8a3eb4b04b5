"""How much slower is a step whose operations are recorded for `allranks diff --replay`?

    python benchmarks/recorded_step.py [--threads 1] [--steps 10] [--device cuda]

Two GPTs of examples/ in DistributedDataParallel, alone in their group: the tiny one of char_gpt, whose operations take
microseconds, so that it is the worst case, and the one of gpt at its default size. Medians over the steps, plain and
recorded ones in turn; a recorded step includes the lines of its file. On a CPU it is the processor's time, which other
programs change less than the clock's.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from allranks.state.truth.ops import OpRecorder

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    """Import an example's script."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(name: str, model: torch.nn.Module, take: Callable[[], tuple[Tensor, Tensor]], steps: int) -> None:
    """Print the times of plain and of recorded steps."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        ddp(*take()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    plain, recorded, num_ops, size = list[float](), list[float](), 0, 0
    for number in range(2 * steps + 4):
        began_s = clock()
        if number % 2:
            with OpRecorder(lambda: dict(model.named_modules())) as recorder:
                step()
            num_ops, size = len(recorder.ops), len(msgspec.json.encode(recorder.ops))
        else:
            step()
        if number >= 4:
            (recorded if number % 2 else plain).append(clock() - began_s)
    times = statistics.median(plain), statistics.median(recorded)
    numbers = sum(own.numel() for own in model.parameters()) / 1e6
    print(
        f"{name:<9} {numbers:6.2f} M parameters: {1e3 * times[0]:8.1f} ms, recorded {1e3 * times[1]:8.1f} ms: "
        f"{times[1] / times[0]:.1f} times; {num_ops} operations, {size / 1e6:.2f} MB",
        flush=True,
    )


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    dist.init_process_group("cpu:gloo,cuda:nccl" if told.device == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                            world_size=1)  # fmt: skip
    tiny, small = load("char_gpt"), load("gpt")
    for name, model, shape in (
        ("char_gpt", tiny.GPT(64), (tiny.BATCH, tiny.CONTEXT)),
        ("gpt", small.GPT(6, 6, 384, 256), (8, 256)),
    ):
        text = torch.randint(0, 64, shape, device=told.device)
        measure(name, model.to(told.device), lambda: (text, text), told.steps)  # noqa: B023
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
