"""`allranks run` without flags in a pod's environment: it becomes one job, or one line says what is missing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import HANG_S, Allranks, agents_in_background, free_port

Agent = subprocess.Popen[str]
SAY = 'import os; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)\n'


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Start `allranks run say.py` as in a pod: a directory of its own, nothing but its environment."""
    with agents_in_background() as begin:

        def start_agent(pod: str, *flags: str, **env: str) -> Agent:
            directory = tmp_path / pod
            directory.mkdir()
            (directory / "say.py").write_text(SAY)
            env |= {"SLURMD_NODENAME": pod, "ALLRANKS_SECRET": "of this test"}
            return begin(directory, *flags, "say.py", **env)

        yield start_agent


def ends(agents: list[Agent]) -> tuple[list[int], str, str]:
    told = [agent.communicate(timeout=HANG_S) for agent in agents]
    return [agent.returncode for agent in agents], "".join(out for out, _ in told), "".join(err for _, err in told)


def pods(launcher: str, index: int, port: int) -> dict[str, str]:
    """The second pod's and the first pod's variables, where node 0 is this machine."""
    own = {
        "leaderworkerset": {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"},
        "aihc": {"RANK": str(index), "WORLD_SIZE": "4", "AIHC_JOB_NAME": "gpt", "MASTER_ADDR": "localhost"}
        | {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "2"},
        "indexed-job": {"JOB_COMPLETION_INDEX": str(index), "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"},
    }[launcher]
    # `localhost` is refused where it would be each pod itself; this machine's own name is not.
    address = os.uname().nodename
    own = {name: value.replace("localhost", address) for name, value in own.items()}
    return own | {"MASTER_PORT": str(port), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [("leaderworkerset", ["--nproc-per-node", "2"]), ("aihc", []), ("indexed-job", ["--nproc-per-node", "2"])],
)
def test_two_pods_become_one_job(launcher: str, flags: list[str], start) -> None:
    port = free_port()
    codes, out, err = ends([start(f"pod-{i}", *flags, **pods(launcher, i, port)) for i in (1, 0)])
    assert codes == [0, 0], err
    assert sorted(line[line.index("rank") :] for line in out.splitlines()) == [f"rank {i} of 4" for i in range(4)]


def test_two_pods_with_one_index_are_told_apart_by_name(start) -> None:
    port = free_port()
    leader = start("pod-0", **pods("indexed-job", 0, port) | {"PET_NNODES": "3"})
    first = start("pod-1", **pods("indexed-job", 1, port) | {"PET_NNODES": "3"})
    twin = start("twin-1", **pods("indexed-job", 1, port) | {"PET_NNODES": "3"})
    while first.poll() is None and twin.poll() is None:
        pass
    refused = first if first.poll() is not None else twin
    _, err = refused.communicate(timeout=HANG_S)
    assert refused.returncode == 78
    line = next(line for line in err.splitlines() if "has already joined" in line)
    assert "node rank 1 has already joined (pod-1, pid" in line or "(twin-1, pid" in line
    assert "one replicated Job with replicas: 1" in line
    leader.terminate()


def test_a_bare_indexed_job_does_not_train_alone(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    bare = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    ended = allranks("run", "say.py", env=bare)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "nothing says the number of nodes and the address of node 0" in ended.stderr
    assert '{name: PET_NNODES, value: "NODES"}, {name: PET_MASTER_ADDR, value: train-0.SERVICE}' in ended.stderr
    alone = allranks("run", "--standalone", "say.py", env=bare)
    assert alone.returncode == 0
    assert "rank 0 of 1" in alone.stdout


def test_a_killed_rank_of_a_pod_sends_nobody_to_the_log_of_a_kernel(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    ended = allranks("run", "--standalone", "dies.py", env={"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert ended.returncode == 137, ended.stderr
    assert "shows whether it was OOMKilled: give it more memory, or use less\n" in ended.stderr
    assert f"fix  kubectl describe pod {os.uname().nodename.partition('.')[0]} " in ended.stderr
    assert "dmesg" not in ended.stderr


def test_a_check_in_a_pod_looks_at_that_pod(allranks: Allranks) -> None:
    for pod in ({"JOB_COMPLETION_INDEX": "2"}, pods("aihc", 1, 29500)):
        ended = allranks("check", "--select", "AR002", env=pod)
        assert ended.returncode in (0, 1), ended.stderr
        assert "error" not in ended.stderr


def test_the_plan_of_a_pod_says_where_each_value_comes_from(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    pod = {"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
    planned = allranks("run", "--dry-run", "say.py", env=pod | {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456"})
    assert planned.returncode == 0, planned.stderr
    shown = {line.split()[0]: line.split() for line in planned.stdout.splitlines() if line.strip()}
    assert shown["node_index"][1:] == ["1", "pytorchjob", "started", "this", "process", "(RANK)"]
    assert shown["num_nodes"][1] == "2"
    assert shown["num_workers"][1] == "8"
    assert shown["master"][1] == "gpt-master-0:23456"
    assert shown["port"][1] == "23456"
