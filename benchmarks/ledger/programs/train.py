"""A training with planted losses, as a user writes it; it measures them with its own clock, and writes what it saw.

    allranks run --nproc-per-node 3 train.py --dir DIR --steps 150 --plant slow-rank=2 --plant slow-loader=1

Compute is a sleep, gradients are averaged by a blocking all-reduce. Each rank writes DIR/truth_<rank>.json at its end:
seconds of what it did after its first step, when it called each all-reduce, when it called init_process_group, and when
its first step ended. All times are of CLOCK_MONOTONIC, which the ranks of a machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

COMPUTE_S, LOAD_S = 0.04, 0.004
SLOW_S, SLOW_LOAD_S = 0.02, 0.03
EVAL_EVERY, EVAL_BATCHES, EVAL_BATCH_S = 25, 12, 0.06
SAVE_EVERY, SAVE_WRITES, SAVE_WRITE_S = 30, 8, 0.01
LATE_S = 3.0
PLANTS = ("slow-rank", "slow-loader", "slow-disk", "evaluation", "late-start")


class Clock:
    """Sums what parts of the training take, from the end of the first step on."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.first_step_s: float | None = None

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        if self.first_step_s is not None:
            self.seconds[what] += time.monotonic() - began_s


class Numbers(Dataset[torch.Tensor]):
    """Batches that take some time to load."""

    def __init__(self, length: int, load_s: float) -> None:
        self.length, self.load_s = length, load_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.load_s)
        return torch.ones(8)


class SlowFile:
    """A file on a disk that takes its time for each write."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: bytes) -> int:
        time.sleep(SAVE_WRITE_S)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--plant", action="append", default=[], help="what=rank")
    options = parser.parse_args()
    planted = {what: int(rank) for what, rank in (text.split("=") for text in options.plant)}
    assert planted.keys() <= {*PLANTS}
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if planted.get("late-start") == rank:
        time.sleep(LATE_S)
    arrived_s = time.monotonic()
    dist.init_process_group("gloo")
    clock, calls = Clock(), list[float]()
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    load_s = LOAD_S + SLOW_LOAD_S * (planted.get("slow-loader") == rank)
    compute_s = COMPUTE_S + SLOW_S * (planted.get("slow-rank") == rank)
    batches = iter(DataLoader(Numbers(options.steps, load_s), batch_size=1))
    for step in range(1, options.steps + 1):
        with clock.time("data"):
            batch = next(batches)
        with clock.time("compute"):
            time.sleep(compute_s)
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        calls.append(time.monotonic())
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        clock.first_step_s = clock.first_step_s or time.monotonic()
        if step % SAVE_EVERY == 0 and planted.get("slow-disk") == rank:
            with clock.time("save"):
                torch.save({f"part {part}": torch.ones(64) for part in range(SAVE_WRITES)}, SlowFile(options.dir / "c"))
        if step % EVAL_EVERY == 0 and step < options.steps and planted.get("evaluation") == rank:
            with clock.time("eval"), torch.no_grad():
                for held_out in DataLoader(Numbers(EVAL_BATCHES, 0.0), batch_size=1):
                    model(held_out)
                    time.sleep(EVAL_BATCH_S)
    truth = {
        "arrived_s": arrived_s, "first_step_s": clock.first_step_s, "seconds": dict(clock.seconds), "calls": calls
    }  # fmt: skip
    (options.dir / f"truth_{rank}.json").write_text(json.dumps(truth))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
