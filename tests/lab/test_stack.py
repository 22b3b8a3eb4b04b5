"""`allranks stack` on a real SLURM: jobs that allranks did not start, and what it leaves of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from .conftest import TestLab

pytestmark = pytest.mark.lab

PLAIN = """\
import os, time

def read():
    time.sleep(600)

def step():
    time.sleep(600)

read() if os.environ["SLURM_PROCID"] == "3" else step()
"""
GROUP = """\
import time
import torch
import torch.distributed as dist

def read():
    time.sleep(600)

def step(tensor):
    dist.all_reduce(tensor)

dist.init_process_group("gloo")
read() if dist.get_rank() == 3 else step(torch.ones(1))
"""
NODES = "--nodes=6 --ntasks=6 --ntasks-per-node=1"


def submit(lab: TestLab, tmp_path: Path, command: str, *, gpus: int = 1) -> str:
    script = tmp_path / "job.slurm"
    script.write_text(f"#!/bin/bash\n#SBATCH {NODES} --gpus-per-node={gpus} --chdir={tmp_path}\n{command}\n")
    return lab.on("master-node", "sbatch", "--parsable", str(script)).strip()


def stack_until(lab: TestLab, job: str, *words: str, within_s: float = 120) -> str:
    """The job needs a moment until all its ranks are where they stay."""
    deadline_s = time.monotonic() + within_s
    while True:
        done = lab.run("exec", "master-node", "--", sys.executable, "-m", "allranks", "stack", job, must_work=False)
        if all(word in done.stdout for word in words):
            return done.stdout
        assert time.monotonic() < deadline_s, done.stdout + done.stderr
        time.sleep(0.5)


def test_a_plain_srun_job_is_read_in_seconds_and_left_as_it_was(six_nodes: TestLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    job = submit(six_nodes, tmp_path, f"srun --mem=0 {sys.executable} train.py")
    try:
        began = stack_until(six_nodes, job, "6 ranks on 6 nodes, 2 places", "read", "step")
        heads = [line for line in began.splitlines() if "train.py:" in line and not line.startswith(" ")]
        assert heads[0].startswith("rank 3   node03   pid ")
        assert "   sleep at train.py:4 read" in heads[0]
        assert heads[1].startswith("5 ranks (0-2,4-5)   master-node,node[01-02,04-05]   sleep at train.py:7 step")
        pid = heads[0].split("pid ")[1].split()[0]
        six_nodes.on("node03", "kill", "-STOP", pid)
        started_s = time.monotonic()
        text = stack_until(six_nodes, job, "rank 3   node03   pid", "stopped by a signal, sleep at train.py:4 read")
        assert time.monotonic() - started_s < 60
        assert "5 ranks" in text
        assert six_nodes.on("node03", "ps", "-o", "state=", "-p", pid).strip() == "T"
        six_nodes.on("node03", "kill", "-CONT", pid)
        steps = six_nodes.on("master-node", "squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").split()
        assert len(steps) == 2  # the job's own and the batch script; which number it has depends on who came first
        assert f"{job}.batch" in steps
        assert six_nodes.on("master-node", "squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING\n"
    finally:
        six_nodes.on("master-node", "scancel", job)


@pytest.mark.torch
def test_the_rank_for_which_torchrun_s_ranks_wait_is_the_first(six_nodes: TestLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROUP)
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=6 --nproc-per-node=1 --rdzv-backend=c10d"
    job = submit(six_nodes, tmp_path, f"srun --mem=0 {torchrun} --rdzv-endpoint=master-node:29511 train.py")
    try:
        text = stack_until(six_nodes, job, "all_reduce at", "sleep at", "6 ranks", "2 places")
        heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
        assert heads[0] == f"job {job}: 6 ranks on 6 nodes, 2 places"
        assert heads[1].startswith("rank 3   ")
        assert "   sleep at train.py:6 read" in heads[1]
        assert heads[2].startswith("5 ranks (0-2,4-5)   ")
        assert "   all_reduce at train.py:9 step" in heads[2]
        assert heads[3].startswith("launcher with the store master-node:")
        assert heads[4].startswith("5 launchers   node[01-05]   ")
    finally:
        six_nodes.on("master-node", "scancel", job)


def test_a_pending_and_an_unknown_job_are_refused(six_nodes: TestLab, tmp_path: Path) -> None:
    script = tmp_path / "held.slurm"
    script.write_text("#!/bin/bash\n#SBATCH --hold --nodes=1\ntrue\n")
    job = six_nodes.on("master-node", "sbatch", "--parsable", str(script)).strip()
    stack = ("exec", "master-node", "--", sys.executable, "-m", "allranks", "stack")
    held, unknown = (six_nodes.run(*stack, each, must_work=False) for each in (job, "999999"))
    six_nodes.on("master-node", "scancel", job)
    assert (held.returncode, held.stderr) == (
        3,
        f"error: job {job} is PENDING (JobHeldUser); expected a running job\n",
    )
    words = "error: job 999999: SLURM knows no such job; allranks list prints your jobs\n"
    assert (unknown.returncode, unknown.stderr) == (2, words)


def test_a_node_without_the_job_s_python_is_named(six_nodes: TestLab, tmp_path: Path) -> None:
    shell, python = "bash -c 'sleep 600'", f"{sys.executable} -c 'import time; time.sleep(600)'"
    # Without GPUs: in SLURM 20.11 two steps do not share them, even with --overlap.
    command = f"srun --overlap --mem=0 {shell} & srun --overlap -N1 -n1 {python}; wait"
    job = submit(six_nodes, tmp_path, command, gpus=0)
    try:
        stack_until(six_nodes, job, "1 rank on 6 nodes", "no Python process of the job")
        assert json.loads(six_nodes.on(
            "master-node", sys.executable, "-m", "allranks", "stack", "--json", job
        ))["silent"] == {}  # fmt: skip
    finally:
        six_nodes.on("master-node", "scancel", job)


def test_watch_names_the_stopped_rank_s_node_and_leaves_no_step(six_nodes: TestLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    job = submit(six_nodes, tmp_path, f"srun --mem=0 {sys.executable} train.py")
    try:
        heads = stack_until(six_nodes, job, "6 ranks on 6 nodes, 2 places", "read", "step")
        six_nodes.on("node03", "kill", "-STOP", heads.split("pid ")[1].split()[0])
        watch = ("exec", "master-node", "--", sys.executable, "-m", "allranks", "watch", "--once", "--json", job)
        done = six_nodes.run(*watch, must_work=False)
        assert done.returncode == 1, done.stdout + done.stderr
        document = json.loads(done.stdout)
        verdict = document["verdicts"][0]
        assert (verdict["cause_id"], verdict["node"], verdict["ranks"]) == ("AR010", "node03", [3])
        assert sum(row["num_ranks"] for row in document["rows"]) == 6
        steps = six_nodes.on("master-node", "squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%j").split()
        assert "allranks" not in "".join(steps)
    finally:
        six_nodes.on("master-node", "scancel", job)
