"""Does a job go on, end, and end when told to, while nobody reads what it prints?"""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env, free_port, wait_until

NUM_LINES = 50_000
PRINT = f"""
import sys, time
from pathlib import Path
for number in range({NUM_LINES}):
    print(f"{{number:06d}} " + "x" * 57)
sys.stdout.flush()
Path("printed").touch()
if "stay" in sys.argv:
    time.sleep(300)
"""
"""3 MB from each rank: 50 times what a pipe holds."""

Agent = subprocess.Popen[bytes]
Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `allranks run ARGUMENTS` in a directory of its own, both streams in one pipe that nobody reads yet."""
    agents: list[Agent] = []
    (tmp_path / "train.py").write_text(PRINT)

    def start_agent(node: str, *arguments: object) -> Agent:
        (tmp_path / node).mkdir()
        agents.append(
            subprocess.Popen(
                allranks_command("run", "--ignore", "AR011", *map(str, arguments)),
                cwd=tmp_path / node,
                env=clean_env(os.environ, SLURMD_NODENAME=node),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.kill()
        agent.communicate(timeout=60)


@pytest.mark.parametrize(
    ("streams", "exit_code"),
    [
        ("<&- >&- 2>&-", 0),
        ("2>&1 | :", 0),  # a line is printed before the job begins: one flag has no effect
        ("2>/dev/full broken", 2),
    ],
)
def test_closed_and_broken_streams_change_neither_the_job_nor_its_exit_code(
    tmp_path: Path, streams: str, exit_code: int
):
    script = "nothing.py" if streams.endswith("broken") else "train.py"
    (tmp_path / "train.py").write_text("import sys\nprint('trained')\nprint('warned', file=sys.stderr)\n")
    words = shlex.join(allranks_command("run", "--monitor-interval", "1", "--master-port", "0", script))
    line = f"set -o pipefail; {words} {streams.removesuffix(' broken')}"
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=clean_env(os.environ), timeout=100, check=False)
    assert ended.returncode == exit_code
    if exit_code == 0:
        (output,) = tmp_path.glob("runs/latest/attempt_0/*/rank_0.out")
        assert output.read_text() == "trained\n"
        assert output.with_suffix(".err").read_text() == "warned\n"


@pytest.mark.torch
def test_a_job_that_ignores_hangups_goes_on_without_its_terminal(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import time\nfrom pathlib import Path\nprint('begun', flush=True)\n"
        "while not Path('gone').exists():\n    time.sleep(0.01)\nprint('trained')\n"
    )
    words = shlex.join(allranks_command("run", "--master-port", "0", "train.py"))
    ours, theirs = pty.openpty()
    agent = subprocess.Popen(
        ["sh", "-c", f"trap '' HUP; exec {words}"],
        cwd=tmp_path,
        env=clean_env(os.environ, TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    wait_until(lambda: list(tmp_path.glob("runs/latest/attempt_0/*/rank_0.out")), "the worker has begun")
    os.close(ours)
    (tmp_path / "gone").touch()
    assert agent.wait(60) == 0
    (path,) = tmp_path.glob("runs/latest/attempt_0/*/rank_0.out")
    assert path.read_text() == "begun\ntrained\n"


def is_full(agent: Agent) -> bool:
    """Whether its pipe holds about as much as it can; pages that are not filled to their end count."""
    assert agent.stdout is not None
    fd = agent.stdout.fileno()
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    return bool(waiting > 0.75 * fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ))


def numbers(path: Path) -> list[int]:
    return [int(line.split()[0]) for line in path.read_text().splitlines()]


def test_a_healthy_job_on_two_nodes_ends_well(start: Start, tmp_path: Path):
    meeting = ("--nnodes", 2, "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j")
    script = tmp_path / "train.py"
    agents = [start(node, *meeting, "--node-rank", rank, script) for rank, node in enumerate("ab")]
    assert [agent.wait(100) for agent in agents] == [0, 0]  # not 75: so the other agent leaves a silent leader
    assert all(map(is_full, agents))
    assert numbers(tmp_path / "a/runs/j/attempt_0/a/rank_0.out") == list(range(NUM_LINES))
    assert numbers(tmp_path / "b/runs/j/attempt_0/b/rank_1.out") == list(range(NUM_LINES))


def test_sigterm_ends_it_in_seconds(start: Start, tmp_path: Path):
    agent = start("a", "--master-port", 0, "--nproc-per-node", 2, tmp_path / "train.py", "stay")
    wait_until((tmp_path / "a/printed").exists, "all is printed")
    wait_until(lambda: is_full(agent), "the pipe is full")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 143


def test_who_reads_late_gets_every_line(start: Start, tmp_path: Path):
    agent = start("a", "--master-port", 0, "--nproc-per-node", 2, tmp_path / "train.py")
    wait_until((tmp_path / "a/printed").exists, "all is printed")
    wait_until(lambda: is_full(agent), "the pipe is full")
    shown = agent.communicate(timeout=100)[0].decode().splitlines()
    assert agent.returncode == 0
    for rank in (0, 1):
        prefix = f"[a r{rank}] "
        mine = [int(line.removeprefix(prefix).split()[0]) for line in shown if line.startswith(prefix)]
        assert mine == list(range(NUM_LINES))
