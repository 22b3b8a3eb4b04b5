"""Whatever its workers print, and whoever reads it, the agent stays small: all floods at once, in one job."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env

MOST_MB = 80
"""Peak of an agent that has 37 MB when nothing is printed; what it may have is 150 MB."""
FLOODS = """
import os, sys, time
kind, size = sys.argv[1 + int(os.environ["RANK"])], 1 << 20
trace = b'Traceback (most recent call last):\\n  File "a.py", line 3, in f\\nValueError: x\\n'
lines = b"x" * 99 + b"\\n"

def flood(fd, unit, megabytes):
    piece = unit * (size // 4 // len(unit) + 1)
    for _ in range(int(4 * megabytes)):
        os.write(fd, piece)

if kind == "stderr":            # one traceback, and then anything
    os.write(2, trace)
    flood(2, lines, 25)
elif kind == "tracebacks":
    flood(2, trace, 25)
elif kind == "endless":         # a line without an end, and one that redraws itself without an end
    flood(1, b"x", 10)
    os.write(1, b"\\n\\r")
    flood(1, b"y", 10)
elif kind == "cursor":          # far down, far right, up, and sequences that do not end
    digits = b"\\x1b[" + b"9" * 50000 + b"A"
    for unit in (b"\\x1b[999999999B", b"\\x1b[99999C", b"\\r%d%%\\n", b"\\x1b[9A\\r\\x1b[K", digits):
        flood(1, unit, 0.25)
    os.write(1, b"\\x1b[" + b"1;" * 5 * size)
elif kind == "binary":
    flood(1, bytes(size), 10)
    flood(1, os.urandom(1000) + bytes(1000), 1)
    flood(2, b"\\n", 5)
elif kind == "sparse":
    os.ftruncate(1, 1 << 40)
    os.ftruncate(2, 1 << 39)
    os.write(2, b"behind the hole\\n")
"""


def peak_mb(pid: int) -> float:
    """Peak of a process's resident memory until now; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


@pytest.mark.parametrize("reader", ["left", pytest.param("stopped", marks=pytest.mark.by_hand)])
def test_floods_from_all_ranks_do_not_grow_the_agent(tmp_path: Path, reader: str):
    """Standard output is a pipe that nobody reads, or whose reader has left; standard error is a file."""
    (tmp_path / "flood.py").write_text(FLOODS)
    kinds = ["stderr"] * 4 + ["tracebacks"] * 2 + ["endless", "cursor", "binary", "sparse"]
    arguments = ["--master-port", "0", "--ignore", "AR011", "--nproc-per-node", str(len(kinds)), "flood.py", *kinds]
    ours, theirs = os.pipe()
    began_s, peak = time.monotonic(), 0.0
    with (tmp_path / "screen").open("wb") as screen:
        agent = subprocess.Popen(
            allranks_command("run", *arguments),
            cwd=tmp_path,
            env=clean_env(os.environ, ALLRANKS_HOOK="0", SLURMD_NODENAME="a"),
            stdout=theirs,
            stderr=screen,
        )
    os.close(theirs)
    if reader == "left":
        os.read(ours, 10)
        os.close(ours)
    try:
        while agent.poll() is None and time.monotonic() < began_s + 60:
            peak = max(peak, peak_mb(agent.pid))
            time.sleep(0.01)
    finally:
        agent.kill()
        agent.wait(60)
    shown = (tmp_path / "screen").read_bytes()
    assert agent.returncode == 0
    assert 20 < peak < MOST_MB
    assert b"behind the hole" in shown
    assert b"after a traceback are not shown; see rank_" in shown
