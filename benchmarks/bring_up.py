"""How long does bring-up take: `allranks run` against torchrun, start to exit of a script that only forms a group?

    python benchmarks/bring_up.py --workers 6 --pairs 7
    python benchmarks/bring_up.py --workers 6 --pairs 7 --other ../before/.venv/bin/allranks    against other code

Both run alternately in the same minutes, so that a noisy machine disturbs both alike; the ratio is taken pair by pair.
`import torch` is most of both and is measured apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
DEADLINE_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--other", help="the command allranks of another environment, instead of torchrun")
    options = parser.parse_args()
    other = "other code" if options.other else "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "form_group.py").write_text(SCRIPT)
        workers = ["--nproc-per-node", str(options.workers), "form_group.py"]
        commands = {
            "allranks run": [sys.executable, "-m", "allranks", "run", *workers],
            other: [*([options.other, "run"] if options.other else torchrun), *workers],
            "import torch": [sys.executable, "-c", "import torch"],
        }
        for command in commands.values():  # warms the file cache; not counted
            seconds_of(command, folder)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for pair in range(options.pairs):
            # Whoever goes first alternates too.
            order = list(commands.items()) if pair % 2 == 0 else list(reversed(commands.items()))
            for name, command in order:
                times[name].append(seconds_of(command, folder))
    print(
        f"{options.workers} workers, {os.cpu_count()} cores, {options.pairs} alternating pairs; seconds, start to exit"
    )
    for name, values in times.items():
        print(f"  {name:<14} median {statistics.median(values):6.2f}   {min(values):6.2f} to {max(values):6.2f}")
    ratios = [ours / theirs for ours, theirs in zip(times["allranks run"], times[other], strict=True)]
    low, high = min(ratios), max(ratios)
    print(f"  allranks run / {other}, pair by pair: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


def seconds_of(command: list[str], folder: str) -> float:
    """Wall time of one whole run in seconds; a failing run ends the benchmark."""
    started_s = time.perf_counter()
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    took_s = time.perf_counter() - started_s
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return took_s


if __name__ == "__main__":
    main()
