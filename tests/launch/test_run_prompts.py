"""A script of several ranks that asks somebody at a terminal: the question is seen before the answer."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from pathlib import Path

import pytest

from allranks.launch.bars import TerminalLines
from conftest import allranks_command, clean_env

ASKS = """
import os, time
if os.environ["RANK"] == "0":
    print("answer", input("which one? "))
"""


def read_until(fd: int, words: bytes) -> bytes:
    """Return what has come up to these words, or in a minute."""
    seen, end_s = b"", time.monotonic() + 60
    while words not in seen and time.monotonic() < end_s:
        seen += os.read(fd, 1 << 12)
    return seen


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_prompt_is_shown_while_the_rank_waits_for_the_answer(term: str, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    ours, theirs = pty.openpty()
    command = allranks_command("run", "--nproc-per-node", "2", "asks.py")
    env = clean_env(os.environ, SLURMD_NODENAME="n1", TERM=term)
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as job:
        try:
            assert b"[n1 r0] which one? \r\n" in read_until(ours, b"which one? \r\n")
            os.write(ours, b"seven\n")
            assert b"[n1 r0] answer seven\r\n" in read_until(ours, b"answer seven\r\n")
            read_until(ours, b"asks.py succeeded: ")
            assert job.wait(60) == 0
        finally:
            job.kill()
            os.close(ours)
            os.close(theirs)


def test_where_nobody_can_answer_lines_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time\nprint('epoch', os.environ['RANK'] + ':', end=' ', flush=True)\ntime.sleep(2)\nprint('done')\n"
    )
    command = allranks_command("run", "--nproc-per-node", "2", "waits.py")
    env = clean_env(os.environ, SLURMD_NODENAME="n1")
    out = subprocess.run(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert sorted(out.stdout.splitlines()) == [b"[n1 r0] epoch 0: done", b"[n1 r1] epoch 1: done"]


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        (b"which one? ", True),
        (b"go on [y/n]:", True),
        (b"Overwrite? [y/N] ", True),
        (b"Are you sure you want to continue connecting (yes/no)? ", True),
        (b"overwrite it (yes/no) ", True),
        (b"Press Enter to continue...", True),
        (b"> /job/train.py(7)<module>()\n-> loss.backward()\n(Pdb) ", True),
        (b"ipdb> ", True),
        (b"\x1b[1;32mname?\x1b[0m ", True),
        (b"name: \x1b[0m", True),
        (b"", False),
        (b"Epoch 1: ", False),
        (b"speedy/no", False),
        (b"[INFO] ", False),
        (b"....", False),
        (b"what now?\n", False),
        (b"\r  0%| | 0/9 [00:00<?, ?it/s] loss: ", False),
    ],
)
def test_a_line_that_has_not_ended_asks_by_its_end(text: bytes, asks: bool) -> None:
    lines = TerminalLines()
    lines.feed(text)
    assert lines.is_prompt == asks
