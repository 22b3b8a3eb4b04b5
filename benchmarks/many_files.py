"""From 4,096 files and 2 GB to the one rank that ended the job: how long does `allranks why` take, and how much memory?

    python benchmarks/many_files.py                   # writes the job below this directory, removes it afterwards
    python benchmarks/many_files.py --files 64 --size 1e8 --rounds 3

The job is `synthetic_logs.write_job`: one rank's GPU has an ECC error, the watchdogs of all others give up ten minutes
later. In each round everyone reads it once, from start to exit, in changing order: `allranks why` on all cores and on
one, and `rg -c -f` with the same patterns on all cores. The files are in the page cache, as far as they fit. It fails
where the culprit is not named. Memory is what the processes have together, shared pages counted once. A first round is
not timed: there memory is sampled, which takes 0.2 s, and Python's bytecode is written, which an installed program has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from log_scan import write_patterns
from synthetic_logs import write_job

from allranks.causes.book import all_causes
from allranks.why.logs.log_events import list_patterns

DEADLINE_S = 600
SAMPLE_S = 0.2


@dataclass(frozen=True)
class Run:
    """What one command took and said."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--size", type=float, default=2e9, help="bytes of all files together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the job is written, for a while")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = Path(folder, "job")
        node, rank = write_job(job, num_files=options.files, size_bytes=int(options.size))
        print(f"{options.files} files, {options.size / 1e9:.2f} GB, rank {rank} on {node} did it")
        why = [sys.executable, "-m", "allranks", "why", str(job), "--json"]
        commands = {f"ours, {len(cores)} cores": (why, cores), "ours, one core": (why, cores[-1:])}
        if shutil.which("rg"):
            patterns = write_patterns(Path(folder, "patterns"), [each.scan for each in list_patterns(all_causes())])
            commands["rg, all cores"] = (["rg", "-c", "-a", "--no-unicode", "-f", str(patterns), str(job)], cores)
        else:
            print("  rg is not on PATH: left out")
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name in list(commands)[:: 1 if turn % 2 == 0 else -1]:
                run = measure(*commands[name], sample_s=SAMPLE_S if turn == 0 else DEADLINE_S)
                if name.startswith("ours") and not names(run.answer, node=node, rank=rank):
                    sys.exit(f"the culprit is not named:\n{run.answer[:2000]}")
                runs[name].append(run)
    print(f"  {options.rounds} alternating rounds, median (least to most)")
    for name, (first, *each) in runs.items():
        walls = [run.wall_s for run in each]
        wall_s = statistics.median(walls)
        spread = f"{wall_s:6.2f} s ({min(walls):.2f} to {max(walls):.2f}), {options.size / wall_s / 1e9:.2f} GB/s"
        cpu_s = statistics.median(run.cpu_s for run in each)
        print(f"  {name:<14} {spread}, CPU {cpu_s:.2f} s, peak {first.peak_mib:.0f} MiB")


def measure(command: Sequence[str], cores: Sequence[int], *, sample_s: float) -> Run:
    """Run a command on these cores, from start to exit; `sample_s`: seconds between two samples of its memory."""
    with tempfile.TemporaryFile() as answer:
        began_s = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=answer, stderr=sys.stderr, env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
            preexec_fn=lambda: begin(cores), start_new_session=True,
        )  # fmt: skip
        peak = Peak(process.pid, sample_s)
        peak.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began_s
        peak.end()
        process.returncode = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        said = answer.read().decode(errors="replace")
    return Run(wall_s, usage.ru_utime + usage.ru_stime, max(peak.mib, usage.ru_maxrss / 1024), said)


def begin(cores: Sequence[int]) -> None:
    import signal  # in the child, between fork and exec

    os.sched_setaffinity(0, cores)
    signal.alarm(DEADLINE_S)


class Peak(threading.Thread):
    """The most memory that the processes of a session have had at once."""

    def __init__(self, session: int, sample_s: float) -> None:
        super().__init__()
        self.mib = 0.0
        self._session, self._sample_s = session, sample_s
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(self._sample_s):
            self.mib = max(self.mib, sum(map(self._proportional_mib, Path("/proc").glob("[0-9]*"))))

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def _proportional_mib(self, process: Path) -> float:
        try:
            if os.getsid(int(process.name)) != self._session:
                return 0.0
            found = re.search(r"^Pss: +(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
        except OSError:  # gone
            return 0.0
        return int(found[1]) / 1024 if found else 0.0


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
