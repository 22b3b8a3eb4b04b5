"""Is a lost node's agent started again, owned, and ended? With a srun on PATH that does what a real one did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from allranks.launch.queue.revival import BACK_VARIABLE, Revivals, srun_command
from allranks.model.identity import world_from_env
from allranks.report.rundir import RunDir
from conftest import HANG_S

LOG = "13/attempt_0/node03/back.log"
Srun = Callable[[str], None]


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Srun:
    def write(script: str) -> None:
        path = tmp_path / "srun"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return write


def revive(tmp_path: Path, *, patience_s: float = 60.0, **env: str) -> Revivals:
    revivals = Revivals(
        command=["allranks", "run", "my train.py"],
        env={**os.environ, "SLURM_JOB_ID": "13", **env},
        run_dir=RunDir(tmp_path, "13"),
        patience_s=patience_s,
    )
    revivals.expect("node03", node_index=3)
    return revivals


def turn_until(revivals: Revivals, is_done: Callable[[], bool] = lambda: False, *, step_s: float = 0.0) -> list[str]:
    """What is said until something has happened, or until something is said; time passes between two tries only."""
    now_s, end_s, lines = 0.0, time.monotonic() + HANG_S, list[str]()
    while not lines and not is_done():
        assert time.monotonic() < end_s
        lines = [line for line in revivals.turn(now_s) if "will be restarted" not in line]
        now_s += 0.0 if revivals.pids else step_s
        time.sleep(0.02)
    return lines


def test_the_agent_is_started_beside_the_step_that_holds_everything() -> None:
    assert srun_command("node03", 3, ["allranks", "run", "t.py"], {"SLURM_JOB_ID": "13", "SLURM_STEP_ID": "0"}) == [
        "srun", "--jobid=13", "--overlap", "--nodelist=node03", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1",
        "--no-kill", "--kill-on-bad-exit=0", "--export=ALL", "--input=none", "env", "SLURM_PROCID=3", "SLURM_NODEID=3",
        "SLURM_GTIDS=3", "SLURM_LOCALID=0", "SLURMD_NODENAME=node03", "ALLRANKS_BACK=1", "ALLRANKS_STEP=0",
        "allranks", "run", "t.py",
    ]  # fmt: skip


def test_the_agent_gets_as_many_cores_as_the_one_that_was_lost(srun: Srun, tmp_path: Path) -> None:
    # srun of 22.05 and 23.02 does not read SLURM_CPUS_PER_TASK, and nothing of the leader's step is passed on.
    srun('echo "$@"; env; exec sleep 60')
    log = tmp_path / LOG
    revivals = revive(tmp_path, SLURM_CPUS_PER_TASK="8", SLURM_NTASKS="6", SLURM_CONF="/x")
    assert turn_until(revivals, lambda: log.exists() and "SLURM_JOB_ID" in log.read_text()) == []
    revivals.close()
    assert "--ntasks=1 --cpus-per-task=8 --ntasks-per-node=1" in log.read_text()
    variables = {line for line in log.read_text().splitlines() if line.startswith("SLURM_")}
    assert variables == {"SLURM_JOB_ID=13", "SLURM_CONF=/x"}


def test_an_srun_that_waits_for_its_node_is_ended_with_its_owner(srun: Srun, tmp_path: Path) -> None:
    srun('echo "$@"; exec sleep 60')
    revivals = revive(tmp_path)
    log = tmp_path / LOG
    turn_until(revivals, lambda: log.exists() and "my train.py" in log.read_text())
    assert log.read_text().startswith("--jobid=13 --overlap --nodelist=node03")
    (child,) = map(psutil.Process, revivals.pids)
    assert child.parent() == psutil.Process()
    assert revivals.turn(1000.0) == [], "patience is for tries, not for an srun that runs"
    revivals.close()
    assert not child.is_running()
    assert (revivals.pids, revivals.turn(2000.0)) == ([], [])


def test_other_failures_are_tried_again_until_patience_ends(srun: Srun, tmp_path: Path) -> None:
    srun('echo "srun: error: Task launch failed: Communication connection failure" >&2; exit 1')
    lines = turn_until(revive(tmp_path, patience_s=5.0), step_s=0.1)
    assert lines == [f"node03 has not come back; see {tmp_path / LOG}"]
    tries = (tmp_path / LOG).read_text().count("Task launch failed")
    assert tries in (2, 3)


def test_a_machine_without_srun_gives_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert turn_until(revive(tmp_path)) == [f"node03 has not come back; see {tmp_path / LOG}"]
    assert (tmp_path / LOG).read_text() == "srun: No such file or directory\n"


def test_the_new_agent_takes_the_lost_one_s_place(srun: Srun, tmp_path: Path) -> None:
    srun('echo "$@"; exec sleep 60')
    step = {
        "SLURM_JOB_ID": "13", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
        "SLURM_STEP_NODELIST": "node[00-05]", "SLURM_JOB_NUM_NODES": "6", "SLURMD_NODENAME": "node00",
    }  # fmt: skip
    log = tmp_path / LOG
    revivals = Revivals(
        command=["allranks", "run", "t.py"],
        env=os.environ | step,
        run_dir=RunDir(tmp_path, "13"),
        patience_s=9,
    )
    revivals.expect("node03", node_index=3)
    revivals.expect("node03", node_index=3)
    assert revivals.turn(0.0) == [f"node03: its agent will be restarted when the node comes back; see {log}"]
    end_s = time.monotonic() + HANG_S
    while not log.exists() or not log.read_text().endswith("t.py\n"):
        assert time.monotonic() < end_s
        assert revivals.turn(0.0) == []
        time.sleep(0.02)
    words = log.read_text().split()
    variables = dict(word.split("=", 1) for word in words[words.index("env") + 1 : words.index("allranks")])
    world = world_from_env({"SLURM_JOB_ID": "13", "SLURM_STEP_ID": "7"} | variables)
    assert (world.node_index, world.num_nodes, world.step_id, world.node_name) == (3, 6, "0", "node03")
    assert variables[BACK_VARIABLE] == "1", "the first node would hold a roll call of its own"
    revivals.close()


def test_a_node_that_is_gone_for_good_is_said_once(srun: Srun, tmp_path: Path) -> None:
    srun('echo "srun: error: Unable to create step: Requested node configuration is not available" >&2; exit 1')
    revivals = Revivals(env=os.environ | {"SLURM_JOB_ID": "13"}, run_dir=RunDir(tmp_path, "13"), patience_s=9)
    revivals.expect("node03", node_index=3)
    lines: list[str] = []
    end_s = time.monotonic() + HANG_S
    while len(lines) < 2 and time.monotonic() < end_s:
        lines += revivals.turn(0.0)
        time.sleep(0.02)
    assert lines[1] == "node03: SLURM has removed it from the job; it can take part again in the job's next run"
    assert revivals.turn(0.0) == []
