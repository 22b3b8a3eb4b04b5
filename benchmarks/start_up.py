"""How long does `allranks` itself take to start: the agent starts on every node, from a network file system?

python benchmarks/start_up.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "allranks --help": ["-m", "allranks", "--help"],
    "allranks env": ["-m", "allranks", "env"],
    "allranks run --help": ["-m", "allranks", "run", "--help"],
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(RUNS + 1):
        for name, arguments in COMMANDS.items():
            started_s = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, timeout=60)
            if run:  # the first warms the file cache
                times[name].append(time.perf_counter() - started_s)
    print(f"{RUNS} alternating runs; milliseconds, start to exit")
    for name, values in times.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"  {name:<20} median {median * 1000:5.0f}   {low * 1000:4.0f} to {high * 1000:4.0f}")


if __name__ == "__main__":
    main()
