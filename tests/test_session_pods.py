"""`allranks.session()` in a pod: ranks hold the roll call, workers take their agent's group, and none is alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HANG_S, Allranks, clean_env, free_port

SUM = """\
import torch
import torch.distributed as dist
import allranks
with allranks.session(backend="gloo") as s:
    value = torch.tensor([float(s.rank + 1)])
    dist.all_reduce(value)
    print(s.rank, s.world_size, s.local_rank, int(value), flush=True)
"""
BARE = "import allranks\nwith allranks.session(): print('began')\n"


def start(tmp_path: Path, script: str, env: dict[str, str]) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=clean_env(os.environ) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.torch
def test_pods_with_one_process_each_hold_the_roll_call(tmp_path: Path) -> None:
    pod = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": os.uname().nodename, "MASTER_PORT": str(free_port())}
    ranks = [start(tmp_path, SUM, pod | {"LWS_WORKER_INDEX": str(index)}) for index in range(2)]
    told = [rank.communicate(timeout=HANG_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert [out.split() for out, _ in told] == [["0", "2", "0", "3"], ["1", "2", "0", "3"]]


@pytest.mark.torch
def test_a_worker_in_a_pod_takes_its_agents_group(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SUM)
    pod = {"RANK": "0", "WORLD_SIZE": "2", "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    ended = allranks("run", "train.py", env=pod | {"MASTER_ADDR": "localhost", "JOB_COMPLETION_INDEX": "0"})
    assert ended.returncode == 0, ended.stderr
    assert sorted(line.split()[-4:] for line in ended.stdout.splitlines()) == [list("0203"), list("1213")]


@pytest.mark.torch
def test_a_pod_of_one_is_a_world_of_one(tmp_path: Path) -> None:
    rank = start(tmp_path, SUM, {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"})
    out, err = rank.communicate(timeout=HANG_S)
    assert (rank.returncode, out) == (0, "0 1 0 1\n"), err


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2 (JobSet, Indexed Job) but nothing says the number of"),
        (
            {"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
            | {"MASTER_ADDR": "gpt-master-0"},
            "pytorchjob starts one process a node and asks for PET_NPROC_PER_NODE=8",
        ),
    ],
    ids=["bare-indexed-job", "one-of-eight-processes"],
)
def test_a_rank_that_would_be_alone_is_refused(tmp_path: Path, env: dict[str, str], said: str) -> None:
    rank = start(tmp_path, BARE, env)
    out, err = rank.communicate(timeout=HANG_S)
    assert (rank.returncode, out) == (2, "")
    assert said in err
