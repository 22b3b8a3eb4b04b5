"""Is the login node where SLURM's controller and its users are, and no part of the cluster that runs jobs?"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import wait_until

from .conftest import RELEASE_FLAGS, SIX_NODE, TestLab, unique
from .test_lab import NODES

pytestmark = pytest.mark.lab

UP = ("--cluster", SIX_NODE, "--login", *RELEASE_FLAGS)


@pytest.fixture(scope="module")
def with_login() -> Iterator[TestLab]:
    lab = TestLab(unique("login"))
    try:
        said = lab.run("up", *UP).stderr
        assert "6 nodes ready after" in said
        assert said.endswith(f"try: allranks lab exec --name {lab.name} login -- sinfo\n")
        yield lab
    finally:
        lab.run("down")


def test_jobs_start_from_the_login_node_and_never_run_on_it(with_login: TestLab, tmp_path: Path) -> None:
    assert with_login.on("login", "sinfo", "-h", "-p", "main", "-o", "%D %t") == "6 idle\n"
    assert sorted(with_login.on("login", "srun", "-N6", "hostname").split()) == NODES
    assert sorted(with_login.on("login", "salloc", "--quiet", "-N6", "srun", "hostname").split()) == NODES
    out = tmp_path / "out"
    with_login.on("login", "sbatch", "--wait", "-N2", "-o", str(out), "--wrap", "srun hostname; hostname")
    assert len(words := out.read_text().split()) == 3
    assert {*words} <= {*NODES}


def test_the_login_node_is_on_the_management_network_only_and_all_know_its_name(with_login: TestLab) -> None:
    status = json.loads(with_login.run("status", "--json").stdout)
    login = status["nodes"][-1]
    assert (login["name"], login["is_login"], login["slurm_state"]) == ("login", True, None)
    assert [link["name"] for link in login["interfaces"] if not link["name"].startswith("veth")] == [
        "lo", "eno1", "docker0",
    ]  # fmt: skip
    assert {"munged", "slurmctld"} <= login["daemon_pids"].keys()
    assert "slurmd" not in login["daemon_pids"]
    assert [node["daemon_pids"].keys() for node in status["nodes"][:-1]] == [{"slurmd"}] * 6
    assert with_login.on("node05", "getent", "ahostsv4", "login").split()[0] == "10.77.0.7"
    assert "login   login node   " in with_login.run("status").stdout


def test_a_step_outlives_the_first_node_and_so_does_slurm(with_login: TestLab, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    wait_for_it = f"touch {there}/$SLURMD_NODENAME; until [ -e {tmp_path}/go ]; do sleep 0.1; done; hostname"
    step = with_login.start("exec", "login", "--", "srun", "-N6", "--no-kill", "-K0", "sh", "-c", wait_for_it)
    wait_until(lambda: len(list(there.iterdir())) == 6, "six tasks")
    os.kill(with_login.lab.find_init("master-node"), signal.SIGKILL)
    assert with_login.on("login", "squeue", "-h", "-o", "%D %T") == "6 RUNNING\n"
    (tmp_path / "go").touch()
    output, said = step.communicate(timeout=120)
    assert sorted(output.split()) == NODES[1:], said
    with_login.run("up", *UP)
    assert sorted(with_login.on("login", "srun", "-N6", "hostname").split()) == NODES


def test_a_lab_is_not_changed_into_one_with_a_login_node(with_login: TestLab) -> None:
    done = with_login.run("up", "--cluster", SIX_NODE, *RELEASE_FLAGS, must_work=False)
    assert done.returncode == 2
    assert "or other options" in done.stderr


def test_up_mends_the_login_node(with_login: TestLab) -> None:
    os.kill(with_login.lab.find_init("login"), signal.SIGKILL)
    with_login.run("up", *UP)
    assert sorted(with_login.on("login", "srun", "-N6", "hostname").split()) == NODES
