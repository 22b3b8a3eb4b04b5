"""Do the verbs for jobs work against a real SLURM?"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env

from .conftest import SIX_NODE, TestLab, lab_command

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(600)]

TRAIN = """\
import os, sys, time
token = os.environ.get("HF_TOKEN", "")
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "token", len(token), flush=True)
time.sleep(float(sys.argv[1]))
if os.environ["RANK"] == sys.argv[2]:
    raise RuntimeError("boom")
"""
CANARY = "canary-4711-do-not-print"
LoginNode = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def login(six_nodes: TestLab, tmp_path: Path) -> Iterator[LoginNode]:
    """`allranks VERB ...` on master-node, in `tmp_path`; no job is left behind."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = lab_command("exec", "--name", six_nodes.name, "master-node", "--", *allranks_command(*arguments))
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=clean_env(os.environ, **env),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    yield run
    six_nodes.on("master-node", "scancel", "--full", "--user", "root")


WITHOUT_TORCH = "--no-standby"
"""Else a standby imports torch on each node, which the script does not: most of the time of such a job."""


def submit(login: LoginNode, *arguments: str, **env: str) -> str:
    result = login("submit", "--json", *arguments, **env)
    assert result.returncode == 0, result.stderr
    return str(json.loads(result.stdout)["job"])


@pytest.mark.healthy
def test_a_job_from_submission_to_its_end(login: LoginNode, tmp_path: Path) -> None:
    job = submit(login, "--nodes", "6", "--env", "HF_TOKEN", "train.py", "2", "-", HF_TOKEN=CANARY, OTHER_TOKEN=CANARY)
    assert re.search(rf"^{job} +train ", login("list").stdout, re.MULTILINE)
    followed = login("logs", "-f", job)
    said = {line.partition("] ")[2] for line in followed.stdout.splitlines() if "] rank" in line}
    assert said == {f"rank {rank} of 6 token {len(CANARY)}" for rank in range(6)}, followed.stderr
    (report,) = json.loads(login("status", "--json", job).stdout)
    assert (report["slurm"]["state"], report["slurm"]["exit_code"], report["attempt"]) == ("COMPLETED", 0, 0)
    assert login("logs", "--rank", "3", job).stdout == f"rank 3 of 6 token {len(CANARY)}\n"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


def test_three_tasks_of_an_array_do_not_meet(login: LoginNode) -> None:
    job = submit(login, "--nodes", "2", WITHOUT_TORCH, "--array", "0-2", "train.py", "1", "1")
    followed = login("logs", "-f", job)
    for task in range(3):
        assert f"[{job}_{task}] " in followed.stdout
    reports = json.loads(login("status", "--json", job).stdout)
    assert [report["job"] for report in reports] == [f"{job}_{task}" for task in range(3)]
    for report in reports:
        assert report["slurm"]["state"] == "FAILED"
        assert report["verdict"]["findings"][0]["ranks"] == [1]


def test_cancel_ends_a_job_and_its_ranks(login: LoginNode) -> None:
    job = submit(login, "--nodes", "2", WITHOUT_TORCH, "train.py", "300", "-")
    while login("logs", job).stdout.count("] rank") != 2:
        time.sleep(0.5)
    assert login("cancel", job).stdout == f"cancelling job {job}; its state was RUNNING\n"
    assert login("logs", "-f", job).returncode == 0
    (report,) = json.loads(login("status", "--json", job).stdout)
    assert report["slurm"]["state"] == "CANCELLED"
    assert login("cancel", job).stdout == f"job {job} had already ended: CANCELLED\n"


def test_a_node_out_of_service_is_reported_with_slurm_s_reason(login: LoginNode, six_nodes: TestLab) -> None:
    # Not `down`: a slurmd that registers again ends that.
    six_nodes.on("master-node", "scontrol", "update", "nodename=node03", "state=drain", "reason=bad NIC, see T-12")
    try:
        result = login("submit", "--nodes", "6", "train.py", "1", "-")
        assert "node03 drained: bad NIC, see T-12" in result.stderr
        job = result.stdout.split()[1]
        assert "  nodes     node03 drained: bad NIC, see T-12\n" in login("status", job).stdout
        assert login("cancel", job).stdout == f"cancelling job {job}; its state was PENDING\n"
    finally:
        six_nodes.on("master-node", "scontrol", "update", "nodename=node03", "state=resume")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--partition", "nope"), 2, "invalid partition specified: nope"),
        (("--nodelist", "node99"), 2, "Invalid node name specified"),
        (("--gpus-per-node", "9"), 78, "Requested node configuration is not available"),
        (("--sbatch-option", "--foo=1"), 2, "unrecognized option '--foo=1'"),
    ],
)
def test_refusals_are_one_line(arguments: tuple[str, ...], code: int, words: str, login: LoginNode) -> None:
    result = login("submit", *arguments, "train.py")
    assert result.returncode == code
    assert result.stderr.startswith("error: sbatch: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_requeued_job_has_a_second_attempt(login: LoginNode, six_nodes: TestLab) -> None:
    job = submit(login, "--nodes", "2", WITHOUT_TORCH, "--requeue", "train.py", "0", "-")
    login("logs", "-f", job)
    six_nodes.on("master-node", "scontrol", "requeue", job)
    six_nodes.on("master-node", "scontrol", "update", f"JobId={job}", "StartTime=now+2")
    followed = login("logs", "-f", job)
    assert followed.stdout.count("] rank 0 of 2") == 2, "the second attempt is appended"
    (report,) = json.loads(login("status", "--json", job).stdout)
    assert (report["slurm"]["restarts"], report["attempt"]) == (1, 1)


@pytest.mark.parametrize(("backend", "state", "exit_code"), [("gloo", "COMPLETED", 0), ("nccl", "FAILED", 78)])
def test_the_owners_scripts_run(
    backend: str, state: str, exit_code: int, login: LoginNode, six_nodes: TestLab, tmp_path: Path
) -> None:
    # From the directory above, as from the root of a clone: the script finds what lies beside it.
    beside = tmp_path / "six node"
    beside.mkdir()
    for path in SIX_NODE.parent.iterdir():
        if path.is_file():
            shutil.copy(path, beside)
    script = f"six node/run_{backend}.slurm"
    printed = six_nodes.on("master-node", "env", "-C", str(tmp_path), "sbatch", "--parsable", script)
    job = printed.strip()
    login("logs", "-f", job)
    (report,) = json.loads(login("status", "--json", job).stdout)
    assert (report["slurm"]["state"], report["slurm"]["exit_code"]) == (state, exit_code)
    output, error = (tmp_path / f"{backend}_{job}.{kind}" for kind in ("out", "err"))
    if backend == "gloo":
        assert "held-out accuracy 0.76" in output.read_text()
        assert report["verdict"]["findings"] == []
    else:
        assert len(re.findall(r"AR111 backend-device-mismatch", error.read_text())) == 1
        (finding,) = report["verdict"]["findings"]
        assert finding["node"] == "master-node,node[01-05]"
        assert finding["evidence"][0]["seen"] == "master-node,node[01-05]: 0 GPUs for 1 rank, although SLURM says 1"
