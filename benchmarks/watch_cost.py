"""What does `allranks watch` cost the job that it watches?

python benchmarks/watch_cost.py [--pairs 60] [--half-s 3]     steps of 2 ranks (Gloo), with and without a watcher
python benchmarks/watch_cost.py --ranks 64                     one look at as many processes, forks of one

The job runs all the time. In each pair the watcher looks 4 times a second in one half, and waits in the other; which
comes first is drawn. Steps are counted by the ranks themselves. The interval of the median is the one that the 2.5 and
97.5 percent quantiles of the binomial distribution give, so it assumes nothing of how the differences are spread.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import random
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from allranks.host.job_processes import WantedStacks
from allranks.watch.node import NodeWatcher

EVERY_S = 0.25
TRAIN = """\
import mmap, struct, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
with open(sys.argv[1], "r+b") as file:
    counts = mmap.mmap(file.fileno(), 16)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    struct.pack_into("=q", counts, 8 * dist.get_rank(), step + 1)
"""
FORKS = """\
import os, sys, time
pids = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        time.sleep(600)
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--half-s", type=float, default=3.0, help="seconds of each half of a pair")
    parser.add_argument("--ranks", type=int, default=0, help="measure one look at so many processes instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watcher", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watcher:
        watch_when_told(arguments.watcher)
        return
    told = measure_look(arguments.ranks) if arguments.ranks else measure_steps(arguments.pairs, arguments.half_s)
    print(json.dumps(told) if arguments.json else "\n".join(f"{name}: {value}" for name, value in told.items()))


def watch_when_told(job: str) -> None:
    """Look while the last line of standard input was `on`; told `off`, say what it has cost so far."""
    watcher = NodeWatcher(WantedStacks(job=job), node="here")
    is_on = False
    while True:
        if select.select([sys.stdin], [], [], 0 if is_on else None)[0]:
            is_on = sys.stdin.readline() == "on\n"
            print(sum(os.times()[:4]), flush=True)
        if is_on:
            watcher.look(time.monotonic())
            watcher.wait(EVERY_S)


def measure_steps(num_pairs: int, half_s: float) -> dict[str, object]:
    ratios, cpu_s, on_s = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        script, counts = Path(folder, "train.py"), Path(folder, "counts")
        script.write_text(TRAIN)
        counts.write_bytes(bytes(16))
        job = f"watch-cost-{os.getpid()}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        env |= {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": job}
        command = [sys.executable, str(script), str(counts)]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.DEVNULL) for rank in range(2)
        ]
        command = [sys.executable, __file__, "--watcher", job]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        watcher = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]

        def tell(word: str) -> float:
            watcher.stdin.write(f"{word}\n")
            return float(json.loads(watcher.stdout.readline()))

        with counts.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 16)
        while struct.unpack_from("=q", shared)[0] < 100:
            time.sleep(0.1)
        tell("on")
        time.sleep(3.0)  # its first look, and the first stacks
        tell("off")
        for _ in range(num_pairs):
            rates = {}
            for is_on in random.sample([True, False], 2):
                before_cpu_s = tell("on" if is_on else "off")
                began_s, began = time.monotonic(), struct.unpack_from("=q", shared)[0]
                time.sleep(half_s)
                rates[is_on] = (struct.unpack_from("=q", shared)[0] - began) / (time.monotonic() - began_s)
                if is_on:
                    on_s += time.monotonic() - began_s
                    cpu_s += tell("off") - before_cpu_s
            ratios.append(100 * (rates[False] / rates[True] - 1))
        for process in (watcher, *ranks):
            process.send_signal(signal.SIGKILL)
            process.wait()
    ratios.sort()
    at = _median_interval(num_pairs)
    return {
        "pairs": num_pairs,
        "steps slower, percent, median": round(statistics.median(ratios), 2),
        "95 % interval of the median": [round(ratios[at], 2), round(ratios[-1 - at], 2)],
        "percent of a core for each rank, py-spy included": round(100 * cpu_s / on_s / 2, 2),
    }


def measure_look(num_ranks: int) -> dict[str, object]:
    parent = subprocess.Popen([sys.executable, "-c", FORKS, str(num_ranks)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = tuple(map(int, parent.stdout.readline().split()))
    watcher = NodeWatcher(WantedStacks(pids=pids), node="here")
    began_s, began_cpu_s = time.monotonic(), sum(os.times()[:4])
    looks_s, all_read_s = [], 0.0
    while time.monotonic() - began_s < 30.0:
        at_s = time.monotonic()
        look = watcher.look(at_s)
        looks_s.append(time.monotonic() - at_s)
        if not all_read_s and all(process.stack for process in look.processes):
            all_read_s = time.monotonic() - began_s
        watcher.wait(EVERY_S)
    used_s, took_s = sum(os.times()[:4]) - began_cpu_s, time.monotonic() - began_s
    watcher.close()
    parent.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return {
        "processes": len(look.processes),
        "first look, s": round(looks_s[0], 3),
        "longest later look, s": round(max(looks_s[1:]), 3),
        "median look, s": round(statistics.median(looks_s), 3),
        "all have a stack after, s": round(all_read_s, 2),
        "percent of a core for each process, all of them still": round(100 * used_s / took_s / num_ranks, 2),
    }


def _median_interval(count: int) -> int:
    """Return how many of the smallest and of the largest values lie outside the 95 % interval of the median."""
    outside, below = 0, 0.5**count
    while below <= 0.025 and outside < count // 2:
        outside += 1
        below += math.comb(count, outside) * 0.5**count
    return max(0, outside - 1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
