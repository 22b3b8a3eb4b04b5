"""Does `allranks run` do in a real SLURM step what it promises, also when a node or its network breaks?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import clean_env, wait_until

from .conftest import SIX_NODE, Make, TestLab

EXAMPLE = SIX_NODE.with_name("py_exe.py")
AGENT = (sys.executable, "-m", "allranks", "run", "--cluster", str(SIX_NODE))
SHOW = """\
import os
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")
print("show", *(os.environ[name] for name in names), flush=True)
"""
PEERS = """\
import subprocess, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
rank = dist.get_rank()
lines = subprocess.run(["ss", "-Htnp"], capture_output=True, text=True, check=True).stdout.splitlines()
mine = [line.split() for line in lines if "python" in line and "192.168.20." in line]
print("peers", rank, *sorted({words[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for words in mine}))
dist.barrier()
dist.destroy_process_group()
"""
LONG = """\
import time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
Path("up").touch()
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


def srun(lab: TestLab, folder: Path, *command: str | Path, flags: tuple[str, ...] = ("-N6",)) -> subprocess.Popen[str]:
    """Start a step on the lab's nodes, in a directory that they share."""
    words = ["lab", "exec", "--name", lab.name, "master-node", "--", "srun", "--no-kill", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "allranks", *words, "--ntasks-per-node=1", *map(str, command)],
        cwd=folder,
        env=clean_env(os.environ, PYTHONIOENCODING="utf-8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(step: subprocess.Popen[str], *, within_s: float = 200) -> tuple[int, str, str]:
    try:
        stdout, stderr = step.communicate(timeout=within_s)
    finally:
        step.kill()
    return step.returncode, stdout, stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("show.py", SHOW), ("peers.py", PEERS), ("long.py", LONG)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.lab
def test_without_a_cluster_file_the_first_node_says_which_network_was_taken(six_nodes: TestLab, folder: Path) -> None:
    code, stdout, stderr = end(srun(six_nodes, folder, sys.executable, "-m", "allranks", "run", "--no-python", "true"))
    assert code == 0, stdout + stderr
    said = [line for line in stderr.splitlines() if "gradients go over " in line]
    assert len(said) == 1, stderr
    assert "no cluster.toml names the data network" in said[0]
    assert 'write data = "192.168.20.0/24" under [network] in cluster.toml' in said[0]
    code, _, stderr = end(srun(six_nodes, folder, *AGENT, "show.py"))
    assert (code, "gradients go over " in stderr) == (0, False)


@pytest.mark.lab
def test_each_rank_gets_its_own_nodes_interface(six_nodes: TestLab, folder: Path) -> None:
    code, stdout, stderr = end(srun(six_nodes, folder, *AGENT, "show.py"))
    assert code == 0, stderr
    assert sorted(re.findall(r"\[(\S+) r\d\] show (.*)", stdout)) == [
        ("master-node", "0 6 192.168.20.15 ens1f1 =ens1f1 1"),
        ("node01", "1 6 192.168.20.15 ens1f1 =ens1f1 1"),
        ("node02", "2 6 192.168.20.15 ens1f0np0 =ens1f0np0 1"),
        ("node03", "3 6 192.168.20.15 ens1f1 =ens1f1 1"),
        ("node04", "4 6 192.168.20.15 ens1f0 =ens1f0 1"),
        ("node05", "5 6 192.168.20.15 ens1f0np0 =ens1f0np0 1"),
    ]
    assert "6 ranks on 6 nodes (master-node,node[01-05]), gloo over 192.168.20.0/24" in stderr


@pytest.mark.lab
def test_two_workers_a_node_and_an_uneven_group(six_nodes: TestLab, folder: Path) -> None:
    # Without standbys: several ranks on a node have one, which imports torch, and the script does not.
    agent = (*AGENT, "--no-standby")
    code, stdout, stderr = end(srun(six_nodes, folder, *agent, "--nproc-per-node", "2", "show.py"))
    assert code == 0, stderr
    assert stdout.count(" 12 192.168.20.15 ") == 12
    uneven = " ".join([*agent, "--nproc-per-node", "$((3 - SLURM_NODEID))", "show.py"])
    code, stdout, stderr = end(srun(six_nodes, folder, "bash", "-c", uneven, flags=("-N3",)))
    assert code == 0, stderr
    found = re.findall(r"\[(\S+) r(\d)\] show \d 6 ", stdout)
    assert sorted(found) == [
        ("master-node", "0"),
        ("master-node", "1"),
        ("master-node", "2"),
        ("node01", "3"),
        ("node01", "4"),
        ("node02", "5"),
    ]


@pytest.mark.lab
def test_two_agents_on_a_node_are_refused_with_the_right_line(six_nodes: TestLab, folder: Path) -> None:
    code, _, stderr = end(srun(six_nodes, folder, *AGENT, "show.py", flags=("-N1", "--overcommit", "-n2")))
    assert code == 2
    assert "srun --ntasks-per-node=1 --nodes=1 --ntasks=1 allranks run" in stderr


@pytest.mark.lab
def test_a_node_without_its_data_interface_is_named_and_all_end_alike(make_lab: Make, folder: Path) -> None:
    lab = make_lab("nic")
    lab.run("up", "--cluster", SIX_NODE)
    lab.on("node02", "ip", "link", "set", "ens1f0np0", "down")
    code, _, stderr = end(srun(lab, folder, *AGENT, "show.py"))
    assert code == 78
    assert stderr.count("✗ AR210 link-down   node02 · ens1f0np0 ") == 1
    assert "the data interface of node02 is down: ens1f0np0 192.168.20.17 (down)" in stderr
    assert stderr.count("Exited with exit code 78") == 6


@pytest.mark.lab
def test_nccl_is_refused_where_slurm_counts_gpus_that_are_not_there(six_nodes: TestLab, folder: Path) -> None:
    step = srun(six_nodes, folder, *AGENT, "--backend", "nccl", "show.py", flags=("-N6", "--gpus-per-node=1"))
    code, _, stderr = end(step)
    assert code == 78
    assert "AR111 backend-device-mismatch   master-node,node[01-05]" in stderr
    assert "master-node,node[01-05]: 0 GPUs for 1 rank, although SLURM says 1" in stderr
    assert stderr.count("backend nccl needs a GPU for each rank") == 1


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.healthy
def test_gradients_travel_on_each_nodes_data_interface(six_nodes: TestLab, folder: Path) -> None:
    code, stdout, stderr = end(srun(six_nodes, folder, *AGENT, "peers.py"))
    assert code == 0, stderr
    found = dict(re.findall(r"peers (\d) (.*)", stdout))
    assert found == {str(rank): f"192.168.20.{15 + rank}" for rank in range(6)}


@pytest.mark.lab
@pytest.mark.torch
def test_the_example_trains_on_six_nodes_and_proves_its_result(six_nodes: TestLab, folder: Path) -> None:
    code, stdout, stderr = end(srun(six_nodes, folder, *AGENT, EXAMPLE, "--batch-size", "8", "--check"))
    assert code == 0, stderr
    assert "held-out accuracy 0.76 on 88 patients" in stdout
    assert "same weights as one process: largest difference" in stdout


@pytest.mark.lab
@pytest.mark.torch
def test_the_example_runs_under_plain_srun(six_nodes: TestLab, folder: Path) -> None:
    # What the owners write by hand: the master's address, and each node's own interface.
    script = (
        "export MASTER_ADDR=192.168.20.15 MASTER_PORT=29500 "
        "GLOO_SOCKET_IFNAME=$(ip -o -4 addr show to 192.168.20.0/24 | awk '{print $2}'); "
        f"exec {sys.executable} {EXAMPLE} --batch-size 8 --backend gloo"
    )
    code, stdout, stderr = end(srun(six_nodes, folder, "bash", "-c", script))
    assert code == 0, stderr
    assert "held-out accuracy 0.76 on 88 patients" in stdout


@pytest.mark.lab
@pytest.mark.torch
def test_a_node_that_dies_is_named_and_the_job_is_worth_a_requeue(make_lab: Make, folder: Path) -> None:
    lab = make_lab("dies")
    lab.run("up", "--cluster", SIX_NODE)
    step = srun(lab, folder, *AGENT, "long.py")
    verdict = folder / "runs/latest/attempt_0/verdict.json"
    try:
        wait_until((folder / "up").exists, "the job")
        os.kill(init_of(lab, "node03"), signal.SIGKILL)
        died_s = time.monotonic()
        wait_until(verdict.exists, "the verdict")
        assert time.monotonic() - died_s < 100
    finally:
        step.kill()
        step.communicate(timeout=60)
    said = json.loads(verdict.read_text())
    assert said["exit_code"] == 75
    assert [(finding["cause"], finding["node"]) for finding in said["findings"]] == [("AR012 node-failure", "node03")]


def init_of(lab: TestLab, node: str) -> int:
    status = json.loads(lab.run("status", "--json").stdout)
    return next(int(each["init_pid"]) for each in status["nodes"] if each["name"] == node)
