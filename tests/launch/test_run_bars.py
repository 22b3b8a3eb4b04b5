"""Is one bar redrawn on a terminal, when several ranks run tqdm?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env, without_waiting

TRAIN = """
import os, time
from pathlib import Path
from tqdm import tqdm
rank = os.environ["RANK"]
for step in tqdm(range(20), desc="train"):
    time.sleep(0.05 + 0.02 * (rank == "1"))
    if step == 10:
        while not Path("shown").exists():  # the bars of all ranks at the same time
            time.sleep(0.02)
    if step == 10 and rank == "0":
        print("halfway", flush=True)
print("done")
"""


@pytest.mark.torch
def test_a_terminal_shows_one_bar_for_all_ranks(tmp_path: Path):
    pytest.importorskip("tqdm")
    (tmp_path / "train.py").write_text(TRAIN)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown = b""
    bars = rb"\x1b\[K\S+ 0:\d\d:\d\d[^\r\n]*  \[\S+ r\d\] train: [^\r\n]* \+2 (alike|ranks: [^\r\n]*%)"
    with subprocess.Popen(
        allranks_command("run", "--master-port", "0", "--nproc-per-node", "3", "train.py"),
        cwd=tmp_path,
        env=clean_env(os.environ, TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as agent:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while data := os.read(ours, 1 << 16):
                shown += data
                if re.search(bars, shown):
                    (tmp_path / "shown").touch()
        assert agent.wait(60) == 0
    text = without_waiting(shown.decode().replace("\r\n", "\n"))
    assert re.search(bars, shown)
    lines = [re.sub(r".*\x1b\[K", "", line) for line in text.split("\n") if line]
    ended = [line for line in lines if "train: 100%" in line]
    alike = [int(found[1]) for line in ended if (found := re.search(r" \+(\d) alike$", line))]
    assert len(ended) + sum(alike) == 3
    assert [re.sub(r"\[\S+ r(\d)\]", r"r\1", line) for line in lines if "halfway" in line] == ["r0 halfway"]
    assert sum(line.endswith("] done") for line in lines) == 3
    assert lines[-1].startswith("allranks: train.py succeeded: 3 ranks, ")
