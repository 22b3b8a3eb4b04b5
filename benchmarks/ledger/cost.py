"""What do live line, status file and books cost the leader and the agent, and marks the training thread?

One job of eight ranks on this machine, whose agent leads it and has a terminal. Inside of it, all three are switched on
and off by turns (programs/switched.py); each pair of halves gives one difference of processor time, in points of a core
(1 point is 1 % of a core). Beside that: the processor time inside of their functions, which other programs change less.
Marks are measured by calling them (benchmarks/marks_cost.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from .jobs import PROGRAMS, ROOT, Check, MeasurementError, Part, clean_env, read_json_lines

RANKS = 8
PAIRS, HALF_S = 7, 10.0
MOST_POINTS = 0.5
MOST_US = {"step": 2.0, "collective": 1.0}
START_S = 60.0


def measure(directory: Path, *, ranks: int, pairs: int, half_s: float) -> Part:
    """Measure both."""
    part = Part()
    measure_files(part, directory, ranks, pairs, half_s)
    command = [sys.executable, str(ROOT / "benchmarks" / "marks_cost.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_env(), check=False)
    if done.returncode:
        raise MeasurementError(f"marks_cost.py: exit code {done.returncode}\n{done.stderr}")
    for kind, (low, middle, high) in json.loads(done.stdout).items():
        note = f"median of 201 rounds; quartiles {low:.2f} to {high:.2f}"
        part.add(Check(f"marks of a {kind}", 0, middle, MOST_US[kind], unit="us", at_most=True, note=note))
    return part


def measure_files(part: Part, directory: Path, ranks: int, pairs: int, half_s: float) -> None:
    """Run the job, and compare its halves."""
    directory.mkdir(parents=True, exist_ok=True)
    notes = directory / "notes.jsonl"
    command = [
        *(sys.executable, str(PROGRAMS / "switched.py"), str(notes), str(half_s)),
        *("run", "--nproc-per-node", str(ranks), "--master-port", "0", "--ignore", "AR011"),
        *("--log-dir", str(directory / "runs"), str(PROGRAMS / "plain.py"), "--dir", str(directory)),
    ]
    leader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    shown = bytearray()
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=directory, env=clean_env(TERM="xterm-256color"),
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    threading.Thread(target=_read, args=(leader, shown), daemon=True).start()
    until_s = time.monotonic() + START_S + 2 * pairs * (half_s + 1.0)
    while len(halves := read_json_lines(notes)) < 2 * pairs and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.5)
    (directory / "stop").touch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    if process.poll() is None:
        process.terminate()
        process.wait(60)
    if len(halves) < 2 * pairs or process.returncode:
        said = bytes(shown[-3000:]).decode(errors="replace")
        raise MeasurementError(f"{len(halves)} of {2 * pairs} halves, exit code {process.returncode}\n{said}")
    points = [100 * half["cpu_s"] / half["s"] for half in halves[: 2 * pairs]]
    is_on = [half["is_on"] for half in halves[: 2 * pairs]]
    differences = [(points[at] - points[at + 1]) * (1 if is_on[at] else -1) for at in range(0, 2 * pairs, 2)]
    with_s = statistics.median(point for point, on in zip(points, is_on, strict=True) if on)
    rows = bytes(shown).count(b"it/s")
    if not rows:
        raise MeasurementError("the terminal has shown no live line")
    note = f"median of {pairs} pairs ({min(differences):.2f} to {max(differences):.2f}); {ranks} ranks, in all "
    note += f"{with_s:.2f} points; {rows} rows drawn"
    inside = [100 * half["inside_s"] / half["s"] for half in halves if half["is_on"]]
    part.add(Check("their functions", 0, statistics.median(inside), MOST_POINTS, unit="points", at_most=True,
                   note="processor time of the threads inside of them"))  # fmt: skip
    middle = statistics.median(differences)
    part.add(Check("live line, status, books", 0, middle, MOST_POINTS, unit="points", at_most=True, note=note))


def _read(fd: int, shown: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(fd, 65536):
            shown += data
