"""`allranks check` and `allranks init` on a real SLURM: from the login node, in an allocation, with a link down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.config.file import read_cluster
from conftest import clean_env, without_waiting

from .conftest import SIX_NODE, TestLab, lab_command

pytestmark = pytest.mark.lab

ALLRANKS = (sys.executable, "-m", "allranks")
CHECK = (*ALLRANKS, "check", "--cluster", str(SIX_NODE))
NODES = [f"node0{i}" for i in range(1, 6)]
EXPECTED = read_cluster(SIX_NODE).cluster


def on(lab: TestLab, node: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        lab_command("exec", "--name", lab.name, node, "--", *command),
        cwd=cwd,
        env=clean_env(os.environ),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def is_quiet(lab: TestLab) -> bool:
    """No job, no member, no listener of ours is left; SLURM needs a moment to notice the end of a job."""
    commands = ("squeue", "--noheader"), ("ss", "-Hltn", "sport >= :29500 and sport < :29516")
    end_s = time.monotonic() + 60
    while is_busy := any(lab.ask(*command).strip() for command in commands):
        if time.monotonic() > end_s:
            break
        time.sleep(0.1)
    return not is_busy


@pytest.fixture(autouse=True)
def nothing_is_left(six_nodes: TestLab, tmp_path: Path) -> Iterator[None]:
    yield
    assert is_quiet(six_nodes)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "before",
    [(), ("salloc", "--quiet", "--nodes=6"), ("srun", "--nodes=6", "--ntasks-per-node=1")],
    ids=["from the login node", "in an allocation", "as a step of its own"],
)
def test_a_healthy_cluster_has_nothing_against_it(six_nodes: TestLab, tmp_path: Path, before: tuple[str, ...]) -> None:
    flags = () if before else ("--nodes", "6")
    done = on(six_nodes, "master-node", *before, *CHECK, *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["findings"] == []
    assert [each["name"] for each in found["nodes"]] == ["master-node", *NODES]
    pairs = {each["status"] for each in found["results"] if each["cause"] == "AR204 mtu-blackhole"}
    assert pairs == {"pass"}


def test_a_deep_check_reduces_between_pairs_of_a_healthy_cluster(six_nodes: TestLab, tmp_path: Path) -> None:
    done = on(six_nodes, "master-node", *CHECK, "--nodes", "6", "--deep", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["findings"] == []
    gloo = {each["node"]: each["status"] for each in found["results"] if each["cause"] == "AR403 gloo-timeout"}
    assert gloo == dict.fromkeys(["master-node", *NODES], "pass")
    assert [(each["backend"], each["round"]) for each in found["figures"]] == [("gloo", 1)] * 3 + [("gloo", 2)] * 3
    assert {node for each in found["figures"][:3] for node in each["nodes"]} == {"master-node", *NODES}


def test_a_link_that_is_down_is_named_and_excluded(six_nodes: TestLab, tmp_path: Path) -> None:
    six_nodes.on("node03", "ip", "link", "set", "ens1f1", "down")
    try:
        shown = on(six_nodes, "master-node", *CHECK, "--nodes", "6", cwd=tmp_path)
        listed = on(six_nodes, "master-node", *CHECK, "--nodes", "6", "--exclude-list", cwd=tmp_path)
        without = on(six_nodes, "master-node", *CHECK, "--nodelist", "node[01-02,04]", cwd=tmp_path)
    finally:
        six_nodes.on("node03", "ip", "link", "set", "ens1f1", "up")
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert "\u2717 AR210 link-down   fail      node03" in lines or "x AR210 link-down   fail      node03" in lines
    assert lines[-1].startswith("6 nodes: 1 problem that would stop a job (node03); ")
    assert (listed.stdout, listed.returncode) == ("node03\n", 1)
    assert without.returncode == 0, without.stdout


def test_a_silent_node_is_named_at_the_deadline(six_nodes: TestLab, tmp_path: Path) -> None:
    nodes = json.loads(six_nodes.run("status", "--json").stdout)["nodes"]
    pid = next(node["daemon_pids"]["slurmd"] for node in nodes if node["name"] == "node04")
    hold = f"touch {tmp_path}/ready; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; "
    command = ("salloc", "--quiet", "--nodes=6", "sh", "-c", f"{hold} exec {' '.join(CHECK)} --timeout 15 --json")
    process = subprocess.Popen(
        lab_command("exec", "--name", six_nodes.name, "master-node", "--", *command),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=150)
    finally:
        os.kill(pid, signal.SIGCONT)
        process.kill()
    found = json.loads(out)
    assert process.returncode == 1
    assert [(each["cause"], each["node"]) for each in found["findings"]] == [("AR001 node-silent", "node04")]
    assert found["findings"][0]["message"] == "the node's agent did not join within 15 s; 5 of 6 nodes joined"
    assert found["elapsed_s"] < 100
    assert re.search(r"still waiting for node04 after \d+ s; 5 of 6 nodes have answered", err)


def test_with_no_place_to_write_it_works(six_nodes: TestLab) -> None:
    # Nobody can make a file in /proc, neither here nor on the nodes.
    found = on(
        six_nodes, "master-node", "env", "HOME=/proc", *CHECK, "--nodes", "3", "--ignore", "AR005", cwd=Path("/proc")
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "no run directory was checked" in found.stdout


def test_a_wrong_node_name_is_one_line(six_nodes: TestLab, tmp_path: Path) -> None:
    done = on(six_nodes, "master-node", *CHECK, "--nodelist", "node09", cwd=tmp_path)
    assert (done.returncode, done.stdout, without_waiting(done.stderr)) == (
        2,
        "",
        "error: node09: SLURM says: Invalid node name specified; sinfo -N lists the nodes\n",
    )
    done = on(six_nodes, "master-node", "salloc", "--quiet", "--nodes=2", *CHECK, "--nodelist", "node05", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].endswith("which has master-node,node01, not node05 (--nodelist)")


def test_ctrl_c_ends_what_waits_in_the_queue(six_nodes: TestLab, tmp_path: Path) -> None:
    process = subprocess.Popen(
        lab_command("exec", "--name", six_nodes.name, "master-node", "--", *CHECK, "--nodes", "7"),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "still waiting for SLURM to start 7 nodes after " in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode == 130


def test_init_finds_the_cluster_as_its_owners_describe_it(six_nodes: TestLab, tmp_path: Path) -> None:
    done = on(six_nodes, "master-node", *ALLRANKS, "init", "--timeout", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert without_waiting(done.stderr).splitlines() == [
        "allranks: examining master-node,node[01-05]",
        "allranks: cluster.toml written: 6 nodes, data network 192.168.20.0/24; next: allranks check",
    ]
    found = read_cluster(tmp_path / "cluster.toml").cluster
    assert (found.network.data, found.network.infiniband, found.slurm.partition) == ("192.168.20.0/24", False, "main")
    expected = [(node.name, node.address, node.interface) for node in EXPECTED.node]
    assert [(node.name, node.address, node.interface) for node in found.node] == expected
    text = (tmp_path / "cluster.toml").read_text()
    assert "host names lead to 10.77.0.0/24, so that one is for management (no speeds to compare)" in text
    assert text.count("# the driver shows none, SLURM configures 1") == 6
