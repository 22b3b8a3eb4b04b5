"""Is what happens to a real elastic Horovod job named? Six nodes, SLURM, Horovod 0.28.1; `make horovod` runs this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.lab import slurm_daemons
from allranks.lab.faults.running.network import ports_of
from allranks.lab.hosts import SWITCH, kill_hosts
from conftest import allranks_command, clean_env, wait_until
from lab.conftest import SIX_NODE, TestLab, lab_command, unique

from .marks import NEEDS_HOROVOD

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.by_hand,
    pytest.mark.timeout(600),
    NEEDS_HOROVOD,
]
TRAIN = Path(__file__).with_name("train.py")
SAID_WITHIN_S = 3.0
DEADLOCK_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def lab() -> Iterator[TestLab]:
    lab = TestLab(unique("hvd"))
    try:
        lab.run("up", "--cluster", SIX_NODE)
        yield lab
    finally:
        lab.run("down")


class Job:
    """`allranks horovod` in an allocation of all six nodes, with the time of each line that it prints."""

    def __init__(self, lab: TestLab, directory: Path, *options: str, batches: int = 1000, state: str = "") -> None:
        self.lab, self.directory = lab, directory
        self.lines: list[tuple[float, str]] = []
        words = ["horovod", "--max-np", "6", "--network", "192.168.20.0/24", *options, str(TRAIN), str(batches), "0.1"]
        command = ["salloc", "--nodes=6", "--no-kill", "--quiet", *allranks_command(*words, *filter(None, [state]))]
        self.process = subprocess.Popen(
            lab_command("exec", "--name", lab.name, "master-node", "--", *command),
            cwd=directory,
            env=clean_env(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    def close(self) -> None:
        """Wait for its end, which somebody else brings."""
        self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def when(self, pattern: str, *, after_s: float = 0.0) -> float:
        """Wait for a line, and return when it was printed."""

        def find() -> float | None:
            return next((at_s for at_s, line in list(self.lines) if at_s > after_s and re.search(pattern, line)), None)

        try:
            return float(wait_until(find, pattern))
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.text}") from None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def events(self) -> list[dict[str, Any]]:
        """The events of the driver."""
        path = self.directory / "runs/latest/attempt_0/driver.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def waited_s(self, *, after_s: float) -> float:
        """When the driver began to wait for slots that it did not have."""
        texts = [(each["time_s"], each.get("text", "")) for each in self.events() if each["time_s"] > after_s]
        return next(at_s for at_s, text in texts if text.startswith("wait for available slots"))

    def verdict(self) -> dict[str, Any]:
        found = json.loads((self.directory / "runs/latest/attempt_0/verdict.json").read_text())
        assert isinstance(found, dict)
        return found

    def kill_worker(self, node: str) -> float:
        """SIGKILL to the worker on a node; returns when."""
        found = self.lab.do(node, "pgrep", "-f", f"^[^ ]*python[^ ]* {TRAIN}").stdout.split()
        assert found, node
        struck_s = time.time()
        self.lab.do(node, "kill", "-KILL", *found)
        return struck_s


@pytest.fixture
def jobs(lab: TestLab, tmp_path: Path) -> Iterator[Any]:
    """Start jobs; in the end none is left, and all nodes are up."""
    started: list[Job] = []

    def start(*options: str, **more: Any) -> Job:
        started.append(Job(lab, tmp_path, *options, **more))
        started[-1].when("batch 3 of ")
        return started[-1]

    yield start
    lab.on("master-node", "scancel", "--full", "--user", "root")
    for job in started:
        job.close()
    lab.run("up", "--cluster", SIX_NODE)
    wait_until(lab.is_idle, "an idle lab")


def test_a_killed_worker_is_named_and_its_node_comes_back(jobs: Any) -> None:
    job = jobs("--min-np", "4", batches=250)
    struck_s = job.kill_worker("node02")
    named_s = job.when(r"AR407 dead-rank +node02")
    assert named_s - struck_s < SAID_WITHIN_S
    job.when("goes on with 5 workers", after_s=struck_s)
    back_s = job.when("goes on with 6 workers", after_s=struck_s)
    job.when("batch .* with 6 workers", after_s=back_s)
    assert job.process.wait(180) == 0
    verdict = job.verdict()
    assert (verdict["exit_code"], verdict["findings"][0]["severity"]) == (0, "warn")


def test_a_pause_is_named_with_the_time_left_and_ends_when_the_node_is_back(jobs: Any) -> None:
    job = jobs("--min-np", "6", "--elastic-timeout", "120")
    struck_s = job.kill_worker("node03")
    said_s = job.when(r"paused: Horovod has 5 of the 6 slots that it needs, without node03; in 1[12]\d s")
    assert said_s - job.waited_s(after_s=struck_s) < SAID_WITHIN_S
    back_s = job.when("goes on with 6 workers after a pause", after_s=struck_s)
    job.when("batch .* with 6 workers", after_s=back_s)


def cut_power(lab: TestLab, node: str) -> float:
    """The cables first: a machine without power closes no connections."""
    struck_s = time.time()
    (host,) = (each for each in lab.lab.planned_hosts() if each.name == node)
    for port in ports_of(host):
        lab.do(SWITCH, "ip", "link", "set", port, "down")
    kill_hosts(lab.lab.dir, [node])
    return struck_s


def test_a_lost_node_is_named_and_used_again_when_it_is_back(lab: TestLab, jobs: Any) -> None:
    job = jobs("--min-np", "6", "--elastic-timeout", "300")
    slurm_daemons.set_patience(300, lab.lab.dir, controller=lab.lab.find_init("master-node"))
    try:
        struck_s = cut_power(lab, "node04")
        job.when(r"AR012 node-failure +node04")
        said_s = job.when("paused: Horovod has 5 of the 6 slots that it needs, without node04")
        assert said_s - job.waited_s(after_s=struck_s) < SAID_WITHIN_S
        lab.run("up", "--cluster", SIX_NODE)
        job.when("node04 answers again")
        back_s = job.when("goes on with 6 workers after a pause")
        job.when("batch .* with 6 workers", after_s=back_s)
        assert "AR407" not in job.text
    finally:
        slurm_daemons.set_patience(slurm_daemons.PATIENCE_S, lab.lab.dir, controller=lab.lab.find_init("master-node"))


def test_the_end_of_the_timeout_is_named(jobs: Any) -> None:
    job = jobs("--min-np", "6", "--elastic-timeout", "12", "--blacklist-cooldown-range", "600", "600")
    job.kill_worker("node01")
    job.when(r"paused: .* in 1\d s")
    job.when(r"AR609 horovod-elastic-timeout +node01")
    assert job.process.wait(60) == 78
    assert [each["cause_id"] for each in job.verdict()["findings"]] == ["AR407", "AR609"]


def lose_gracefully(job: Job, hosts: Path) -> float:
    """A node leaves the discovery while its worker trains; when the driver waits, another one comes."""
    struck_s = time.time()
    hosts.write_text("master-node:1\nnode01:1\nnode02:1\n")
    job.when("paused: Horovod has 3 of the 4 slots", after_s=struck_s)
    hosts.write_text("master-node:1\nnode01:1\nnode02:1\nnode05:1\n")
    return struck_s


@pytest.mark.parametrize("state", ["", "own"])
def test_the_deadlock_after_a_graceful_loss(jobs: Any, tmp_path: Path, state: str) -> None:
    """horovod/horovod#3494: with Horovod's own state nothing goes on; with the state of allranks all do."""
    hosts = tmp_path / "hosts"
    hosts.write_text("master-node:1\nnode01:1\nnode02:1\nnode03:1\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    job = jobs("-np", "4", "--min-np", "4", "--host-discovery-script", str(script), state=state)
    struck_s = lose_gracefully(job, hosts)
    back_s = job.when("goes on with 4 workers after a pause", after_s=struck_s)
    if state == "own":
        job.when("batch .* with 4 workers", after_s=back_s + 1)
        assert "AR410" not in job.text
        return
    ready_s = job.when("a worker is ready", after_s=back_s)  # it enters state.sync()
    named_s = job.when(r"AR410 collective-mismatch +node05 +certain")
    assert named_s - ready_s < DEADLOCK_WITHIN_S
    assert not [line for at_s, line in job.lines if at_s > named_s and "batch" in line]


def test_sigterm_ends_everything(lab: TestLab, jobs: Any) -> None:
    job = jobs("--min-np", "4")
    lab.on("master-node", "scancel", "--full", "--user", "root")
    job.when(r"AR508 cancelled")
    job.process.wait(60)
    assert job.verdict()["exit_code"] == 128 + signal.SIGTERM
    assert "AR407" not in job.text
    assert not lab.do("node02", "pgrep", "-f", str(TRAIN)).stdout
