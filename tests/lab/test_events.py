"""What becomes of a job when SLURM warns, ends, preempts or requeues it, or loses its nodes? On a real SLURM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from allranks.host.slurm import JobState, parse_show_job
from allranks.lab.faults.running.scheduler import URGENT_PARTITION
from conftest import allranks_command, clean_env

from .conftest import SIX_NODE, TestLab, lab_command

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parents[1] / "scripts"
WAIT_S = 240.0


@dataclass(frozen=True)
class Cluster:
    """The lab's SLURM, from its first node, in a directory of its own."""

    lab: TestLab
    directory: Path

    def run(self, *command: str) -> str:
        done = subprocess.run(
            lab_command("exec", "--name", self.lab.name, "master-node", "--", *command),
            cwd=self.directory,
            env=clean_env(os.environ),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Without standbys: what these jobs come back from is a requeue."""
        command = allranks_command("submit", "--json", "--no-standby", *arguments)
        return str(json.loads(self.run(*command))["job"])

    def show(self, job: str) -> JobState:
        return parse_show_job(self.lab.ask("scontrol", "--all", "show", "job", job))[-1]

    def said(self, job: str) -> str:
        path = self.directory / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: str, is_there: Callable[[JobState], bool], *, wait_s: float = WAIT_S) -> JobState:
        end_s = time.monotonic() + wait_s
        while not is_there(state := self.show(job)):
            assert time.monotonic() < end_s, f"{state}\n{self.said(job)}"
            time.sleep(0.5)
        return state

    def wait_for_words(self, job: str, words: str) -> None:
        self.wait(job, lambda _: words in self.said(job))

    def start_again(self, job: str) -> None:
        """Once it waits: SLURM would hold it for two minutes."""
        self.wait(job, lambda state: state.is_pending)
        time.sleep(3)  # it is held for a reason: its old run may still be being cleared away
        end_s = time.monotonic() + WAIT_S
        while self.lab.do("master-node", "scontrol", "update", f"JobId={job}", "StartTime=now").returncode:
            assert time.monotonic() < end_s
            time.sleep(0.5)

    def runs(self, node: str, program: str) -> bool:
        return self.lab.do(node, "pgrep", "-f", program).returncode == 0

    def kill(self, node: str) -> None:
        os.kill(self.lab.lab.find_init(node), signal.SIGKILL)


@pytest.fixture
def cluster(six_nodes: TestLab, tmp_path: Path) -> Iterator[Cluster]:
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, tmp_path)
    here = Cluster(six_nodes, tmp_path)
    yield here
    six_nodes.on("master-node", "scancel", "--full", "--user", "root")
    six_nodes.run("up", "--cluster", SIX_NODE)  # a job on a dead node would stay until SLURM gives it up


def steps_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\] step (\d+)$", text, re.MULTILINE)]


@pytest.mark.torch
@pytest.mark.parametrize(
    "warning",
    [("--signal=USR1",), pytest.param(("--batch", "--signal=USR1"), marks=pytest.mark.by_hand)],
    ids=["to the step", "to the batch script"],
)
def test_a_warned_job_saves_goes_back_and_takes_each_step_once(warning: tuple[str, ...], cluster: Cluster) -> None:
    given = ("--signal", "B:USR1@60") if "--batch" in warning else ()
    job = cluster.submit("--nodes", "2", *given, "steps.py", "120")
    cluster.wait_for_words(job, "step 20\n")
    cluster.run("scancel", *warning, job)
    cluster.start_again(job)
    state = cluster.wait(job, lambda state: state.is_finished)
    assert (state.state, state.restarts) == ("COMPLETED", 1), cluster.said(job)
    assert steps_of(cluster.said(job)) == list(range(120))
    assert f"job {job} goes back into the queue; it resumes in its next run" in cluster.said(job)


@pytest.mark.torch
def test_a_job_that_is_warned_before_its_time_limit_comes_back(cluster: Cluster) -> None:
    job = cluster.submit("--nodes", "2", "--time", "2", "--signal", "USR1@30", "steps.py", "1200")
    cluster.wait(job, lambda state: state.restarts == 1)
    said = cluster.said(job)
    assert re.search(r"SIGUSR1, \d+ s to the time limit: saving a checkpoint, then job", said)
    cluster.start_again(job)
    cluster.wait_for_words(job, f"step {max(steps_of(said)) + 20}\n")
    taken = steps_of(cluster.said(job))
    assert taken == list(range(len(taken)))


@pytest.mark.torch
@pytest.mark.by_hand
def test_a_task_of_an_array_comes_back_alone(cluster: Cluster) -> None:
    array = cluster.submit("--nodes", "2", "--array", "3", "--output", "slurm-%A_%a.out", "steps.py", "60")
    job = f"{array}_3"
    cluster.wait_for_words(job, "step 10\n")
    cluster.run("scancel", "--signal=USR1", job)
    cluster.start_again(job)
    state = cluster.wait(job, lambda state: state.is_finished)
    assert (state.state, state.restarts) == ("COMPLETED", 1), cluster.said(job)
    assert steps_of(cluster.said(job)) == list(range(60))


@pytest.mark.torch
def test_a_job_that_is_warned_after_its_last_step_is_not_put_back(cluster: Cluster) -> None:
    (cluster.directory / "tail.py").write_text(
        (SCRIPTS / "steps.py").read_text() + '    print("evaluating", flush=True)\n    time.sleep(5)\n'
    )
    job = cluster.submit("--nodes", "2", "tail.py", "10")
    cluster.wait_for_words(job, "evaluating\n")
    cluster.run("scancel", "--signal=USR1", job)
    state = cluster.wait(job, lambda state: state.is_finished)
    assert (state.state, state.restarts) == ("COMPLETED", 0), cluster.said(job)


@pytest.mark.torch
def test_a_cancelled_job_stays_cancelled(cluster: Cluster) -> None:
    job = cluster.submit("--nodes", "2", "steps.py", "600")
    cluster.wait_for_words(job, "step 5\n")
    cluster.run("scancel", job)
    state = cluster.wait(job, lambda state: state.is_finished and state.state != "COMPLETING")
    assert (state.state, state.restarts) == ("CANCELLED", 0)
    assert "goes back into the queue" not in cluster.said(job)


@pytest.mark.torch
def test_a_preempted_job_is_put_back_by_slurm_and_resumes(cluster: Cluster) -> None:
    job = cluster.submit("--nodes", "2", "--exclusive", "steps.py", "120")
    cluster.wait_for_words(job, "step 20\n")
    cluster.run(
        "sbatch", "--partition", URGENT_PARTITION, "--nodes=6", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"
    )
    cluster.wait(job, lambda state: state.restarts == 1)
    assert f"preempted: waiting for SLURM to end this run of job {job}, grace period 10 s since" in cluster.said(job)
    cluster.start_again(job)
    state = cluster.wait(job, lambda state: state.is_finished)
    assert (state.state, state.restarts) == ("COMPLETED", 1), cluster.said(job)
    assert steps_of(cluster.said(job)) == list(range(120))


def test_a_job_without_its_batch_host_is_put_back_by_whoever_is_left(cluster: Cluster) -> None:
    # Not the first node: SLURM's controller is there.
    job = cluster.submit("--nodes", "3", "--exclude", "master-node", "--no-python", "sleep", "600")
    state = cluster.wait(job, lambda state: state.state == "RUNNING")
    cluster.wait_for_words(job, "3 ranks on 3 nodes")
    time.sleep(2)
    leader = cluster.run("scontrol", "show", "hostnames", state.nodes).split()[0]
    cluster.kill(leader)
    state = cluster.wait(job, lambda state: leader in state.excluded_nodes)
    assert cluster.run("scontrol", "show", "hostnames", state.excluded_nodes).split() == ["master-node", leader]
    culprits = json.loads((cluster.directory / "runs" / job / "culprits.json").read_text())
    assert [(culprit["node"], culprit["attempts"]) for culprit in culprits] == [(leader, [0])]


def test_a_node_that_is_back_before_slurm_gives_it_up_takes_its_place_again(cluster: Cluster) -> None:
    script = f"#!/bin/bash\nexec srun --no-kill --kill-on-bad-exit=0 {sys.executable} revive.py {cluster.directory}\n"
    (cluster.directory / "job.sh").write_text(script)
    job = cluster.run("sbatch", "--parsable", "--no-kill", "--nodes=3", "--nodelist=node[01-03]", "job.sh").strip()
    cluster.wait(job, lambda _: len(list(cluster.directory.glob("node*.0"))) == 3)
    cluster.kill("node03")
    (cluster.directory / "lost.node03").touch()
    cluster.wait_for_words(job, "node03: its agent will be restarted when the node comes back")
    time.sleep(1)
    cluster.lab.run("up", "--cluster", SIX_NODE)
    cluster.wait(job, lambda _: any(cluster.directory.glob("node03.[1-9]*")))
    (again,) = cluster.directory.glob("node03.[1-9]*")
    assert again.read_text() == "2 of 3 in step 0\n"
    (cluster.directory / "done").touch()
    cluster.wait(job, lambda _: not cluster.runs("node03", "revive.py"))


def test_a_node_that_slurm_has_given_up_is_no_longer_in_the_job(cluster: Cluster) -> None:
    script = f"#!/bin/bash\nexec srun --no-kill --kill-on-bad-exit=0 {sys.executable} revive.py {cluster.directory}\n"
    (cluster.directory / "job.sh").write_text(script)
    job = cluster.run("sbatch", "--parsable", "--no-kill", "--nodes=3", "--nodelist=node[01-03]", "job.sh").strip()
    cluster.wait(job, lambda _: len(list(cluster.directory.glob("node*.0"))) == 3)
    cluster.kill("node03")
    cluster.wait(job, lambda state: state.num_nodes == 2)
    cluster.lab.run("up", "--cluster", SIX_NODE)
    (cluster.directory / "lost.node03").touch()
    cluster.wait_for_words(
        job, "node03: SLURM has removed it from the job; it can take part again in the job's next run"
    )
