"""How long does a rank take that prints 100 MB: below `allranks run`, below torchrun, and alone?

    python benchmarks/printing.py --ranks 1 --pairs 7
    python benchmarks/printing.py --ranks 4 --pairs 10 --other ../before/.venv/bin/allranks    against other code

All run alternately in the same minutes; ratios are taken pair by pair. Standard output is a pipe to a reader that keeps
up, as `| tee log` does, or a file (--reader file). Measured are the whole run, start to exit, with everything shown,
and the printing as the slowest rank sees it. Every line must have come.
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
import os, sys, time
megabytes, rank = int(sys.argv[1]), int(os.environ.get("RANK", "0"))
began_s = time.perf_counter()
for number in range(megabytes * 10_000):
    print(f"{number:09d} " + "x" * 89)
sys.stdout.flush()
with open(f"took_{rank}", "w") as file:
    file.write(str(time.perf_counter() - began_s))
"""
DEADLINE_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=100, help="of each rank")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--reader", choices=["pipe", "file"], default="pipe")
    parser.add_argument("--other", help="the command allranks of another environment, instead of torchrun")
    options = parser.parse_args()
    other = "other code" if options.other else "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["print_lines.py", str(options.megabytes)]
    workers = ["--nproc-per-node", str(options.ranks), *script]
    commands = {
        "allranks run": [sys.executable, "-m", "allranks", "run", "--master-port", "0", *workers],
        other: [*([options.other, "run", "--master-port", "0"] if options.other else torchrun), *workers],
        "python alone": [sys.executable, *script],
    }
    whole: dict[str, list[float]] = {name: [] for name in commands}
    printing: dict[str, list[float]] = {name: [] for name in commands}
    for pair in range(options.pairs):
        # Whoever goes first alternates too.
        order = list(commands.items()) if pair % 2 == 0 else list(reversed(commands.items()))
        for name, command in order:
            num_lines = options.megabytes * 10_000 * (1 if name == "python alone" else options.ranks)
            whole_s, printing_s = run(command, num_lines, reader=options.reader)
            whole[name].append(whole_s)
            printing[name].append(printing_s)
    load = os.getloadavg()[0]
    print(
        f"{options.ranks} ranks, {options.megabytes} MB each to a {options.reader}, {options.pairs} alternating pairs"
    )
    print(f"{os.cpu_count()} cores, load {load:.1f} at the end; seconds")
    for what, times in {"whole run": whole, "printing": printing}.items():
        for name, values in times.items():
            line = f"median {statistics.median(values):6.2f}   {min(values):6.2f} to {max(values):6.2f}"
            print(f"  {what + ', ' + name:<26} {line}")
        ratios = [ours / theirs for ours, theirs in zip(times["allranks run"], times[other], strict=True)]
        low, high = min(ratios), max(ratios)
        print(f"  {what}, allranks run / {other}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


def run(command: list[str], num_lines: int, *, reader: str) -> tuple[float, float]:
    """Return the wall time of one run and the longest time that a rank printed; lines that are missing end it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "print_lines.py").write_text(SCRIPT)
        screen = Path(folder, "screen")
        began_s = time.perf_counter()
        with screen.open("wb") as file:
            out = subprocess.PIPE if reader == "pipe" else file
            job = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.DEVNULL)
            if job.stdout is not None:
                while data := os.read(job.stdout.fileno(), 1 << 20):
                    file.write(data)
            exit_code = job.wait(DEADLINE_S)
        took_s = time.perf_counter() - began_s
        num_shown = sum(line.endswith(b"xxx\n") for line in screen.open("rb"))
        if exit_code or num_shown != num_lines:
            sys.exit(f"{' '.join(command)} ended with {exit_code} and showed {num_shown} of {num_lines} lines")
        return took_s, max(float(path.read_text()) for path in Path(folder).glob("took_*"))


if __name__ == "__main__":
    main()
