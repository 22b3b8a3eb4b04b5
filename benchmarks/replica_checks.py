"""What does it cost a training to compare its replicas, and to look at its gradients before each step?

    python benchmarks/replica_checks.py [--ranks 2] [--width 768] [--steps 60]

First one fingerprint of 300 M numbers, on 1 and 2 threads, beside one sum of them, which is what memory allows. Then a
GPT on the CPU, trained by a session on several ranks. Rank 0 takes the time of all that is done for checks (numbers of
all bits, and what follows from them; without the talk, which is there anyway), of the record that `allranks diff`
reads, and of the look at gradients before each step, beside that of all steps. With one rank nothing is compared, and
the numbers are computed for the record alone. The first checks, at each boundary, are given apart: a run has them once.

On a machine that does other things, too, the shares of the processor's time say more than those of the clock: they
leave out what others took, and count no waiting for the other ranks among the steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

TOKENS, LAYERS = 256, 12
FORK = Path(__file__).parents[1] / "tests/scripts/fork_ranks.py"


class Clock:
    """Adds up the time in methods, by the clock and of the processor."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.spent = np.zeros(3)  # and the number of calls
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            began = now()
            try:
                return method(*arguments, **more)
            finally:
                self.spent += [*(now() - began), 1]

        return call


def now() -> Any:
    """Return the clock, and what this thread has computed."""
    return np.array([time.perf_counter(), time.thread_time()])


def time_fingerprints() -> None:
    """Print what one fingerprint of 300 M numbers takes, the shortest of 7."""
    from allranks.state.truth.fingerprint import fingerprint

    made = [torch.randn(1_000_000) for _ in range(300)]
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        took = list[tuple[float, float, float]]()
        for _ in range(7):
            begin = time.perf_counter(), time.process_time()
            fingerprint(made)
            middle = time.perf_counter(), time.process_time()
            [own.sum() for own in made]
            end = time.perf_counter()
            took.append((middle[0] - begin[0], middle[1] - begin[1], end - middle[0]))
        wall_s, cpu_s, sum_s = map(min, zip(*took, strict=True))
        print(
            f"fingerprint of 300 M numbers on {num_threads} threads: {1000 * wall_s:.0f} ms, {1000 * cpu_s:.0f} ms of "
            f"processors; sum: {1000 * sum_s:.0f} ms",
            flush=True,
        )


def train(width: int, steps: int) -> None:
    """One rank."""
    import allranks
    from allranks.state.truth import comparing
    from allranks.state.truth.finite import Finiteness
    from allranks.state.truth.trace import Trace

    checks, looks = Clock((comparing.Comparing, "_words_now")), Clock((Finiteness, "look"))
    following = Clock((comparing.Comparing, "heard"))
    records = Clock((Trace, "note"), (Trace, "batch"), (Trace, "flush"))
    with allranks.session() as s:
        torch.manual_seed(1)
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0) for _ in range(LAYERS)]
        net = torch.nn.Sequential(torch.nn.Embedding(50_000 * width // 1536, width), *blocks, torch.nn.Linear(width, 8))
        model = s.ddp(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        data = torch.randint(0, 1000, (4096, TOKENS))
        sampler = s.sampler(data, global_batch_size=s.world_size)
        where: dict[str, Any] = {"checkpoint_dir": "replica_checks", "checkpoint_every": 10**6}
        state = s.track(model=model, optimizer=optimizer, sampler=sampler, **where)
        marks = list[tuple[Any, ...]]()
        for step in state.steps(DataLoader(data, batch_sampler=sampler), total=steps):
            marks.append((now(), *(clock.spent.copy() for clock in (checks, following, records, looks))))
            with step as batch:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if s.is_leader:
            numbers, num_steps = sum(own.numel() for own in net.parameters()), len(marks) - 1 - comparing.FIRST_CHECKS
            first, last = marks[comparing.FIRST_CHECKS], marks[-1]
            whole, check, follow, record, look = (late - early for early, late in zip(first, last, strict=True))
            print(f"{numbers / 1e6:.0f} M parameters, {whole[0] / num_steps:.2f} s a step")
            told = {f"checks ({check[2]:.0f} in {num_steps} steps)": check + follow}
            told |= {"record (where it is part of a check, there, too)": record, "gradient sums": look}
            for name, (wall_s, cpu_s, _) in told.items():
                shares = 100 * wall_s / whole[0], 100 * cpu_s / whole[1]
                print(f"{name}: {shares[0]:.2f} % of the time, {shares[1]:.2f} % of the processor's")
            print(f"first checks: {first[1][0]:.2f} s, once", flush=True)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=60)
    told = parser.parse_args()
    if "RANK" in os.environ:
        train(int(os.environ["BENCH_WIDTH"]), int(os.environ["BENCH_STEPS"]))
        return
    time_fingerprints()
    env = {**os.environ, "BENCH_WIDTH": str(told.width), "BENCH_STEPS": str(told.steps)}
    subprocess.run([sys.executable, str(FORK), str(told.ranks), __file__], env=env, check=True)


if __name__ == "__main__":
    main()
