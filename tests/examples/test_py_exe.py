"""Does examples/six-node/py_exe.py run under every launcher, learn, prove its result, and fail in bounded time?"""

from __future__ import annotations

import argparse
import csv
import hashlib
import inspect
import os
import re
import runpy
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import free_port
from forked import ForkedScript, fork_ranks, fork_script

pytestmark = pytest.mark.torch

SIX_NODE = Path(__file__).parents[2] / "examples" / "six-node"
PY_EXE = SIX_NODE / "py_exe.py"
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "SLURM_", "MASTER_", "TORCHELASTIC_")


def clean_env(**extra: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_NAMES)}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in extra.items()}


def run(folder: Path, *arguments: object, **env: object) -> subprocess.CompletedProcess[str]:
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    return fork_script(folder, PY_EXE, *map(str, arguments), **{name: str(value) for name, value in env.items()})


def torchrun(folder: Path, num_ranks: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, *command]
    return subprocess.run(words, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=200)


def read_accuracy(output: str) -> float:
    return float(re.search(r"^held-out accuracy (\d\.\d\d) on 88 patients$", output, re.MULTILINE)[1])


def read_difference(output: str) -> float:
    line = r"^same weights as one process: largest difference (\S+) \(limit 1e-5\)$"
    return float(re.search(line, output, re.MULTILINE)[1])


def test_the_data_are_the_published_442_patients():
    text = (SIX_NODE / "diabetes.csv").read_bytes()
    rows = list(csv.DictReader(text.decode().splitlines()))
    assert list(rows[0]) == ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6", "progression"]
    assert len(rows) == 442
    assert list(rows[0].values()) == ["59", "2", "32.1", "101", "157", "93.2", "38", "4", "4.8598", "87", "151"]
    assert statistics.median(int(row["progression"]) for row in rows) == 140.5
    assert sum(int(row["progression"]) for row in rows) == 67243
    assert sum(int(row["age"]) for row in rows) == 21445
    assert hashlib.sha256(text).hexdigest() in (SIX_NODE / "DATA.md").read_text()


def test_the_names_and_signatures_of_the_reference_program():
    names = runpy.run_path(str(PY_EXE), run_name="py_exe")
    assert list(inspect.signature(names["setup"]).parameters)[:4] == [
        "rank",
        "world_size",
        "master_addr",
        "master_port",
    ]
    assert not inspect.signature(names["cleanup"]).parameters
    assert not inspect.signature(names["main"]).parameters
    shapes = [tuple(weight.shape) for weight in names["SimpleModel"]().parameters()]
    assert shapes == [(50, 10), (50,), (2, 50), (2,)]


def test_torchrun_wins_over_srun():
    find_rank = runpy.run_path(str(PY_EXE), run_name="py_exe")["find_rank"]
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x5),1"}
    torchrun = {"RANK": "7", "WORLD_SIZE": "12", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert find_rank({}) == (0, 1, 0, 1)
    assert find_rank(slurm) == (5, 11, 1, 2)
    assert find_rank(slurm | torchrun) == (7, 12, 3, 4)


def test_it_learns_alone(tmp_path):
    result = run(tmp_path, "--check")
    assert result.returncode == 0, result.stderr
    assert read_accuracy(result.stdout) >= 0.70
    assert read_difference(result.stdout) <= 1e-5


@pytest.mark.parametrize("start", [fork_ranks, pytest.param(torchrun, marks=pytest.mark.by_hand)])
def test_three_ranks_with_accumulated_batches_and_a_last_partial_window_equal_one_process(tmp_path, start):
    # 118 patients a rank: 16 batches of 7 and one of 6, so four windows of four batches, and one of the batch of 6.
    command = ["--batch-size", "7", "--accumulate", "4", "--lr-rule", "sqrt", "--epochs", "30", "--check"]
    result = start(tmp_path, "3", PY_EXE, *command)
    assert result.returncode == 0, result.stderr
    line = "effective batch 7 x 3 x 4 = 84 patients, learning rate 0.0229129 (sqrt rule from 0.02 at 64)\n"
    assert line in result.stdout
    assert read_accuracy(result.stdout) >= 0.70
    assert "\nsame weights on every rank\n" in result.stdout
    assert read_difference(result.stdout) <= 1e-5


@pytest.mark.parametrize(
    ("rule", "accumulate", "lr"), [("linear", 1, 0.12), ("linear", 2, 0.24), ("sqrt", 1, 0.048990), ("none", 8, 0.02)]
)
def test_the_learning_rate_follows_the_patients_of_a_step(rule, accumulate, lr):
    names = runpy.run_path(str(PY_EXE), run_name="py_exe")
    args = argparse.Namespace(batch_size=64, accumulate=accumulate, lr=0.02, lr_rule=rule)
    assert names["effective_batch"](args, 6) == 384 * accumulate
    assert names["learning_rate"](args, 6) == pytest.approx(lr, rel=1e-4)


def test_plain_srun_forms_the_group_from_slurm_variables(tmp_path):
    env = {"SLURM_NTASKS": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        ForkedScript(
            tmp_path, PY_EXE, "--epochs", "3", "--check", env=clean_env(SLURM_PROCID=rank, SLURM_LOCALID=rank, **env)
        )
        for rank in (1, 0)  # rank 0 starts last: the others wait for it to listen
    ]
    try:
        (out_1, err_1), (out_0, err_0) = (rank.communicate(timeout=200) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], err_0 + err_1
    assert out_0.startswith("world size 2, gloo on cpu")
    assert read_difference(out_0) <= 1e-5
    assert out_1 == ""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "num_replicas=world_size, rank=rank",
            "num_replicas=world_size, rank=0",
            "the weights differ from a training in one process",
        ),
        (
            "F.cross_entropy(model(x_NM",
            "F.cross_entropy(model.module(x_NM",
            "weights differ from rank 0's on ranks [1]",
        ),
        ("(loss * share)", "(loss / args.accumulate)", "the weights differ from a training in one process"),
    ],
    ids=["every rank trains on the same patients", "gradients are not averaged", "a partial window counts as a whole"],
)
def test_the_check_sees_a_broken_training_loop(tmp_path, right, wrong, message):
    source = PY_EXE.read_text()
    assert right in source
    broken = tmp_path / "py_exe.py"
    broken.write_text(source.replace(right, wrong, 1))
    command = ["--epochs", "2", "--accumulate", "2", "--check", "--data", SIX_NODE / "diabetes.csv"]
    result = fork_ranks(tmp_path, "2", broken, *command)
    assert re.search(r"^codes \[(1, \d|0, 1)\]$", result.stdout, re.MULTILINE)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("rank", "reason"), [(1, "Connection refused"), (0, "1/2 clients joined")], ids=["rank 0 absent", "rank 1 absent"]
)
def test_an_absent_rank_ends_the_other_in_time_with_one_line(tmp_path, rank, reason):
    port, start_s = free_port(), time.monotonic()
    env = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = run(tmp_path, "--init-timeout", 2, **env)
    assert time.monotonic() - start_s < 100
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"rank {rank} of 2 on {socket.gethostname()}: no process group at 127.0.0.1:{port}")
    assert reason in result.stderr
    assert f"nc -vz 127.0.0.1 {port}" in result.stderr


def test_several_ranks_without_an_address_are_a_usage_error(tmp_path):
    result = run(tmp_path, SLURM_PROCID=0, SLURM_NTASKS=6, SLURM_LOCALID=0)
    assert result.returncode == 2
    assert "6 ranks need MASTER_ADDR and MASTER_PORT" in result.stderr
