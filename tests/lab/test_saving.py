"""Does a script that saves for 25 s on SIGTERM save once, whoever ends its job? In a lab with time for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env, wait_until

from .conftest import RELEASE_FLAGS, TestLab, lab_command, unique

pytestmark = [pytest.mark.lab, pytest.mark.by_hand, pytest.mark.timeout(600)]
TWO_NODES = """\
[network]
data = "192.168.20.0/24"
[[node]]
name = "node01"
address = "192.168.20.16"
[[node]]
name = "node02"
address = "192.168.20.17"
"""
SAVES_S = 25
TRAIN = f"""\
import os, signal, sys, time

def tell(word):
    with open("rank_" + os.environ["RANK"], "a") as log:
        log.write(word + "\\n")

def save(signum, frame):
    tell(f"began after {{signal.Signals(signum).name}}")
    end_s = time.monotonic() + {SAVES_S}
    while time.monotonic() < end_s:
        time.sleep(0.1)
    tell("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
tell("up")
time.sleep(600)
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def patient() -> Iterator[TestLab]:
    """Two nodes; KillWait and GraceTime are 40 s. SLURM's signals reach every process of a job."""
    lab = TestLab(unique("saving"))
    cluster = Path("/tmp") / f"{lab.name}.toml"
    cluster.write_text(TWO_NODES)
    try:
        lab.run("up", "--cluster", cluster, "--kill-wait", "40", "--grace-time", "40", *RELEASE_FLAGS)
        yield lab
    finally:
        lab.run("down")
        cluster.unlink()


@pytest.fixture
def run(patient: TestLab, tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*command: str) -> str:
        done = subprocess.run(
            lab_command("exec", "--name", patient.name, "node01", "--", *command),
            cwd=tmp_path, env=clean_env(os.environ), capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    yield run
    patient.on("node01", "scancel", "--full", "--signal=KILL", "--user", "root")
    wait_until(lambda: not patient.do("node01", "squeue", "--noheader", "--all").stdout, "an empty queue", 120)


def told(directory: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(directory.glob("rank_*"))]


def wait_for(directory: Path, words: list[str], wait_s: float = 90.0) -> None:
    wait_until(lambda: told(directory) == [words] * 2, f"both ranks say {words}", wait_s)


def submit(run: Run, directory: Path, *flags: str) -> str:
    step = "exec srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=0"
    wrap = f"--wrap={step} {sys.executable} -m allranks run train.py"
    job = run("sbatch", "--parsable", "--nodes=2", "--exclusive", *flags, wrap)
    wait_for(directory, ["up"])
    return job


SAVED = ["up", "began after SIGTERM", "saved"]


def test_scancel(run: Run, patient: TestLab, tmp_path: Path):
    run("scancel", submit(run, tmp_path))
    wait_for(tmp_path, SAVED)


def test_a_time_limit(run: Run, patient: TestLab, tmp_path: Path):
    submit(run, tmp_path, "--time=1")
    wait_for(tmp_path, SAVED, 180)


def test_a_preemption_and_the_job_goes_back_into_the_queue(run: Run, patient: TestLab, tmp_path: Path):
    job = submit(run, tmp_path, "--requeue")
    run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_for(tmp_path, SAVED)
    wait_until(lambda: "Restarts=1" in patient.do("node01", "scontrol", "show", "job", job).stdout, "requeued", 120)


def test_sigterm_to_one_agent(run: Run, patient: TestLab, tmp_path: Path):
    submit(run, tmp_path)
    (agent, *_) = patient.do("node02", "pgrep", "-f", "^[^ ]*python[^ ]* -m allranks run").stdout.split()
    patient.do("node02", "kill", "-TERM", agent)
    wait_for(tmp_path, SAVED)


def test_ctrl_c(patient: TestLab, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = allranks_command("run", "--standalone", "--nproc-per-node", "2", "--master-port", "0", "train.py")
    terminal = subprocess.Popen(
        lab_command("exec", "--name", patient.name, "node01", "--", *command),
        cwd=tmp_path, env=clean_env(os.environ), start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(tmp_path, ["up"])
        pressed_s = time.monotonic()
        os.killpg(terminal.pid, signal.SIGINT)
        wait_for(tmp_path, SAVED)
        assert terminal.wait(100) == 130
        assert SAVES_S < time.monotonic() - pressed_s < SAVES_S + 10
    finally:
        terminal.kill()
        terminal.wait()
