"""What does the guard cost inside a worker: processor time of the beat thread, time with the GIL, and wall time?

python benchmarks/beat_cost.py [--pairs 20] [--device cuda]

One rank trains in steps of 10 ms (DDP on a small model, and a collective from Python). Blocks of 2 s with and without
the guard alternate, in random order within each pair. The ratio of their median steps has a 95 % confidence interval
over the pairs; processor time and time with the GIL are the beat thread's own.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import allranks
from allranks.guard.inside.cell import Cell

SITE = Path(allranks.__file__).parent / "join" / "site"
STEP_S = 0.010
BLOCK_S = 2.0
WARM_UP_STEPS = 2500
"""More than the recorder keeps: its dumps are then as long as they get."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cuda: NCCL, and kernels on the GPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments.pairs, arguments.device)
        return
    cell = Cell.create()
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ, "ALLRANKS_CELL_FD": str(cell.fd), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": "0",
        "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, __file__, "--inside", "--pairs", str(arguments.pairs), "--device", arguments.device]
    sys.exit(subprocess.run(command, env=env, pass_fds=(cell.fd,), check=False).returncode)


def measure(num_pairs: int, device: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    has_gpu = device != "cpu"
    dist.init_process_group("nccl" if has_gpu else "gloo")
    inside = sys.modules["_allranks_inside.entry"]
    beat_module = sys.modules["_allranks_inside.beat"]
    cell, flight = inside._teller.cell, inside._teller.flight
    inside._beat.end()
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    width = 2048 if has_gpu else 256
    batch, matrix = torch.ones(8, 64, device=device), torch.ones(width, width, device=device)

    def step() -> float:
        began_s = time.perf_counter()
        model(batch).sum().backward()
        dist.all_reduce(batch[0])
        for _ in range(num_products):
            matrix @ matrix
        if has_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    num_products = 1
    while statistics.median(step() for _ in range(20)) < STEP_S:
        num_products += 1
    for _ in range(WARM_UP_STEPS):
        dist.all_reduce(batch[0])

    spans_ns: list[int] = []
    cpu_ns, on_s = 0, 0.0
    told_lags: dict[str, int] = {}
    dump_in_ns = 0

    def block(is_on: bool) -> float:
        nonlocal cpu_ns, on_s, dump_in_ns
        inside._teller.cell = cell if is_on else None
        beat = beat_module.Beat(cell, flight)
        if is_on:
            # It is one beat for the whole run; time without it does not count.
            beat._told_lags, beat._next_dump_ns = told_lags, time.monotonic_ns() + dump_in_ns
            tell = beat._tell

            def timed() -> None:
                began_ns = time.perf_counter_ns()
                tell()
                spans_ns.append(time.perf_counter_ns() - began_ns)

            beat._tell = timed
            beat.start()
        began_s, times = time.perf_counter(), []
        while time.perf_counter() - began_s < BLOCK_S:
            times.append(step())
        if is_on:
            clock = time.pthread_getcpuclockid(beat._thread.ident)
            cpu_ns += int(time.clock_gettime(clock) * 1e9)
            on_s += time.perf_counter() - began_s
            beat.end()
            dump_in_ns = beat._next_dump_ns - time.monotonic_ns()
        return statistics.mean(times)

    ratios = []
    for _ in range(num_pairs):
        order = [True, False]
        random.shuffle(order)
        seen = {is_on: block(is_on) for is_on in order}
        ratios.append(math.log(seen[True] / seen[False]))
    middle, spread = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(num_pairs)
    low, high = (100 * (math.exp(middle + sign * 1.96 * spread) - 1) for sign in (-1, 1))
    calls_ns = cost_of_a_call(dist, batch[0], inside._teller, cell)
    blocks = f"{num_pairs} pairs of blocks of {BLOCK_S:.0f} s"
    print(f"steps of {1000 * STEP_S:.0f} ms, {blocks}, beats every {beat_module.EVERY_S} s")
    print(f"  beat thread, processor time   {100 * cpu_ns / 1e9 / on_s:6.3f} % of a core")
    print(f"  beat thread, with the GIL     {100 * sum(spans_ns) / 1e9 / on_s:6.3f} % of the time (at most)")
    spans_ns.sort()
    median_us, longest_ms = spans_ns[len(spans_ns) // 2] / 1000, spans_ns[-1] / 1e6
    print(f"  one beat                      {median_us:6.0f} us, longest {longest_ms:.1f} ms")
    print(f"  one collective from Python    {calls_ns / 1000:6.1f} us more than without")
    wall = f"{100 * (math.exp(middle) - 1):+6.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %"
    print(f"  wall time of a step           {wall}")


def cost_of_a_call(dist: object, tensor: object, teller: object, cell: object) -> float:
    times: dict[bool, list[int]] = {True: [], False: []}
    for number in range(4000):
        is_on = bool(number % 2)
        teller.cell = cell if is_on else None  # type: ignore[attr-defined]
        began_ns = time.perf_counter_ns()
        dist.all_reduce(tensor)  # type: ignore[attr-defined]
        times[is_on].append(time.perf_counter_ns() - began_ns)
    return statistics.median(times[True]) - statistics.median(times[False])


if __name__ == "__main__":
    main()
