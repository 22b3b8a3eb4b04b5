"""From 4,096 files and 2 GB to the one rank that ended the job: how long does `allranks why` take, and how much memory?

    python benchmarks/many_files.py                   # writes the job below this directory, removes it afterwards
    python benchmarks/many_files.py --files 64 --size 1e8 --rounds 3

The job is `synthetic_logs.write_job`: one rank's GPU has an ECC error, the watchdogs of all others give up ten minutes
later. The files are in the page cache, as far as they fit. It fails where the culprit is not named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from synthetic_logs import write_job

DEADLINE_S = 600


@dataclass(frozen=True)
class Run:
    """What one call of `allranks why` took and said."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    exit_code: int
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--size", type=float, default=2e9, help="bytes of all files together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path(), help="where the job is written, for a while")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        node, rank = write_job(Path(folder), num_files=options.files, size_bytes=int(options.size))
        print(f"{options.files} files, {options.size / 1e9:.2f} GB, rank {rank} on {node} did it; core {options.core}")
        runs = [run_why(Path(folder)) for _ in range(options.rounds)]
    for run in runs:
        if not names(run.answer, node=node, rank=rank):
            sys.exit(f"the culprit is not named (exit code {run.exit_code}):\n{run.answer[:2000]}")
    walls = [run.wall_s for run in runs]
    median_s = statistics.median(walls)
    print(f"  wall {median_s:.2f} s ({min(walls):.2f} to {max(walls):.2f}), {options.size / median_s / 1e9:.2f} GB/s")
    print(
        f"  CPU {statistics.median(run.cpu_s for run in runs):.2f} s, peak {max(run.peak_mib for run in runs):.0f} MiB"
    )


def run_why(folder: Path) -> Run:
    """Run `allranks why FOLDER --json` from start to exit."""
    with tempfile.TemporaryFile() as answer:
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", "why", str(folder), "--json"],
            stdout=answer,
            stderr=sys.stderr,
            preexec_fn=lambda: signal_after(DEADLINE_S),
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        return Run(
            wall_s=wall_s,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mib=usage.ru_maxrss / 1024,
            exit_code=process.returncode,
            answer=answer.read().decode(errors="replace"),
        )


def signal_after(deadline_s: int) -> None:
    import signal  # in the child, between fork and exec

    signal.alarm(deadline_s)


def names(answer: str, *, node: str, rank: int) -> bool:
    """Whether the first finding of an answer in JSON blames this rank or node for its GPU."""
    try:
        said = json.loads(answer)
    except ValueError:
        return False
    findings = said.get("findings", []) if isinstance(said, dict) else said
    first = findings[0] if findings else {}
    cause = re.search(r"gpu-hardware|uncorrectable", str(first.get("cause", "")))
    return bool(cause) and (first.get("node") == node or rank in first.get("ranks", ()))


if __name__ == "__main__":
    main()
