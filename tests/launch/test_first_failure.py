"""Of several ranks that raise, is the one named that raised first, and not the one whose process ended first?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from allranks.model.finding import Verdict
from conftest import agents_in_background, allranks_command, clean_env, free_port, is_alive, wait_until

SCRIPT = """
import atexit, os, pathlib, time

rank = os.environ["RANK"]
here = pathlib.Path.cwd()

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def leave():
    record = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text()
    (here / f"record{rank}").write_text(record)
    (here / f"raised{rank}").touch()
    wait_for(f"end{rank}")

atexit.register(leave)
(here / f"pid{rank}.new").write_text(str(os.getpid()))
(here / f"pid{rank}.new").rename(here / f"pid{rank}")
wait_for(f"go{rank}")
raise ValueError(f"rank {rank}")
"""


def test_the_rank_that_raised_first_is_named_though_its_process_ended_last(tmp_path: Path) -> None:
    """The agent stands still meanwhile, so it learns of both ends at once, the later failure first."""
    (tmp_path / "train.py").write_text(SCRIPT)
    agent = subprocess.Popen(
        allranks_command("run", "--nproc-per-node", "2", "train.py"),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = {}
        for rank in range(2):
            path = tmp_path / f"pid{rank}"
            wait_until(path.exists, f"rank {rank}")
            pids[rank] = int(path.read_text())
        agent.send_signal(signal.SIGSTOP)
        for rank in (0, 1):
            told_s = time.time()
            (tmp_path / f"go{rank}").touch()
            wait_until((tmp_path / f"raised{rank}").exists, f"the exception of rank {rank}")
            record = json.loads((tmp_path / f"record{rank}").read_text())
            assert told_s - 0.1 <= record["message"]["extraInfo"]["time_s"] <= time.time()
        for rank in (1, 0):
            (tmp_path / f"end{rank}").touch()
            wait_until(lambda rank=rank: not is_alive(pids[rank]), f"the end of rank {rank}")
        agent.send_signal(signal.SIGCONT)
        _, said = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == 1, said
    verdict = Verdict.from_json(next((tmp_path / "runs/latest/").rglob("verdict.json")).read_bytes())
    assert (verdict.findings[0].ranks, verdict.findings[0].message.partition(" (")[0]) == ((0, 1), "ValueError: rank 0")


def test_the_node_whose_rank_raised_first_is_named_though_the_leader_heard_of_it_last(tmp_path: Path) -> None:
    """Both agents stand still meanwhile, and the leader's own goes on last: only the times tell."""
    (tmp_path / "train.py").write_text(SCRIPT)
    endpoint = f"127.0.0.1:{free_port()}"
    with agents_in_background() as begin:
        agents = [
            begin(
                tmp_path, "--nnodes", 2, "--node-rank", node, "--rdzv-id", "job", "--rdzv-endpoint", endpoint,
                "train.py", SLURMD_NODENAME=f"n{node}",
            )
            for node in range(2)
        ]  # fmt: skip
        pids = {}
        for rank in range(2):
            wait_until((tmp_path / f"pid{rank}").exists, f"rank {rank}")
            pids[rank] = int((tmp_path / f"pid{rank}").read_text())
        for agent in agents:
            agent.send_signal(signal.SIGSTOP)
        for rank in range(2):
            (tmp_path / f"go{rank}").touch()
            wait_until((tmp_path / f"raised{rank}").exists, f"the exception of rank {rank}")
            time.sleep(0.5)  # on a busy machine the two clocks are known no better
        for rank in range(2):
            (tmp_path / f"end{rank}").touch()
            wait_until(lambda rank=rank: not is_alive(pids[rank]), f"the end of rank {rank}")
        agents[1].send_signal(signal.SIGCONT)
        wait_until(lambda: not Path(f"/proc/{pids[1]}").exists(), "its agent to collect rank 1")
        time.sleep(0.3)  # until it has told the leader
        agents[0].send_signal(signal.SIGCONT)
        _, said = agents[0].communicate(timeout=60)
        assert agents[0].returncode == 1, said
    verdict = Verdict.from_json((tmp_path / "runs/job/attempt_0/verdict.json").read_bytes())
    assert (verdict.findings[0].ranks, verdict.findings[0].message.partition(" (")[0]) == ((0, 1), "ValueError: rank 0")
