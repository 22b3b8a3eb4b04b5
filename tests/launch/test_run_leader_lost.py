"""Does a job go on when its leader is lost, and does a lost connection cost it nothing? Real agents on one machine."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from conftest import agents_in_background, free_port, wait_until

SCRIPT = """
import os, time
from pathlib import Path
generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
time.sleep(1)  # up only after the first heartbeats
Path(f"up_{generation}_{rank}_{os.environ['ALLRANKS_NODE']}").touch()
while not Path("finish").exists():
    time.sleep(0.05)
"""
"""Without torch, so that a rank does not notice that another one is gone."""
END_S = 90


class Job:
    """Nodes n0, n1, ... on this machine, which share one directory."""

    def __init__(self, directory: Path, begin: Callable[..., Popen[str]]) -> None:
        self.directory, self._begin, self.port = directory, begin, free_port()
        self.agents: dict[int, Popen[str]] = {}
        (directory / "train.py").write_text(SCRIPT)
        (directory / "cluster.toml").write_text("[guard]\ngone_s = 3\nbeat_s = 0.2\n")

    def start(
        self, *nodes: int, of: int, port: int | None = None, min_nodes: int = 1, max_restarts: int = 3, **env: str
    ) -> None:
        for node in nodes:
            self.agents[node] = self._begin(
                self.directory, "--nnodes", f"{min_nodes}:{of}", "--node-rank", node, "--rdzv-id", "job",
                "--rdzv-endpoint", f"127.0.0.1:{port or self.port}", "--max-restarts", max_restarts, "train.py",
                SLURMD_NODENAME=f"n{node}", PYTHONIOENCODING="utf-8", **env,
            )  # fmt: skip

    def wait_up(self, generation: int, *nodes: int) -> None:
        """Wait for the ranks of a generation: rank 0 is on the first of these nodes."""
        for rank, node in enumerate(nodes):
            path = self.directory / f"up_{generation}_{rank}_n{node}"
            wait_until(path.exists, f"{path.name}; {[each.name for each in self.directory.glob('up_*')]}", END_S)

    def finish(self) -> dict[int, tuple[int, str]]:
        """Let the workers end; return each living agent's exit code and what it said."""
        (self.directory / "finish").touch()
        ends = {}
        for node, agent in self.agents.items():
            _, said = agent.communicate(timeout=END_S)
            ends[node] = agent.returncode, said
        return ends

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.directory / "runs/job/attempt_0/events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == name]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with agents_in_background() as begin:
        yield Job(tmp_path, begin)


def test_the_others_go_on_under_another_leader(job: Job):
    checkpoints = job.directory / "checkpoints"
    job.start(0, 1, 2, 3, of=4, ALLRANKS_CHECKPOINT_DIR=str(checkpoints))
    job.wait_up(0, 0, 1, 2, 3)
    assert json.loads((checkpoints / "owner.json").read_bytes())["pid"] == job.agents[0].pid
    job.agents.pop(0).kill()
    job.wait_up(1, 1, 2, 3)
    assert json.loads((checkpoints / "owner.json").read_bytes())["pid"] == job.agents[1].pid
    ends = job.finish()
    assert list(checkpoints.iterdir()) == []
    assert {node: code for node, (code, _) in ends.items()} == {1: 0, 2: 0, 3: 0}, ends
    said = ends[1][1]
    assert re.search(r"^allranks: n1 leads now: the leader's agent on n0 is gone \(.*\)$", said, re.MULTILINE)
    assert "AR012 node-failure   n0 · rank 0" in said
    assert "the node's agent died, but the machine answers" in said
    (taken,) = job.events("took_over")
    assert (taken["leader"], taken["generation"], taken["after"]) == ("n1", 0, "n0")
    verdict = json.loads((job.directory / "runs/job/attempt_0/verdict.json").read_text())
    assert (verdict["exit_code"], [each["severity"] for each in verdict["findings"]]) == (0, ["warn"])


def test_the_next_leader_may_be_lost_too(job: Job):
    job.start(0, 1, 2, 3, 4, of=5)
    job.wait_up(0, 0, 1, 2, 3, 4)
    job.agents.pop(0).kill()
    job.wait_up(1, 1, 2, 3, 4)
    job.agents.pop(1).kill()
    job.wait_up(2, 2, 3, 4)
    ends = job.finish()
    assert {node: code for node, (code, _) in ends.items()} == {2: 0, 3: 0, 4: 0}, ends
    assert [(each["leader"], each["generation"]) for each in job.events("took_over")] == [("n1", 0), ("n2", 1)]


def test_a_lost_leader_s_agent_that_is_started_again_follows_its_successor(job: Job):
    job.start(0, 1, 2, 3, of=4)
    job.wait_up(0, 0, 1, 2, 3)
    job.agents.pop(0).kill()
    job.wait_up(1, 1, 2, 3)
    assert [each["node"] for each in job.events("node_lost")] == ["n0"]
    job.start(0, of=4, ALLRANKS_BACK="1")
    announced = job.directory / "runs/job/leader.json"
    assert json.loads(announced.read_text())["host"] == "n1"
    said = job.agents[1].stderr
    assert said is not None
    assert any(line == "allranks: n0 has joined and waits for the next restart\n" for line in said), "it said no more"
    job.agents.pop(3).kill()
    job.wait_up(2, 1, 0, 2)
    ends = job.finish()
    assert {node: code for node, (code, _) in ends.items()} == {0: 0, 1: 0, 2: 0}, ends
    assert len(job.events("took_over")) == 1


def test_of_two_nodes_only_the_leaders_goes_on(job: Job):
    job.start(0, 1, of=2)
    job.wait_up(0, 0, 1)
    job.agents.pop(0).kill()
    code, said = job.finish()[1]
    assert code == 75, said
    assert job.events("took_over") == []


class Proxy:
    """A way to the leader that can be cut: passes bytes on between each peer and one port of this machine."""

    def __init__(self, target: int) -> None:
        self._target, self._pairs = target, list[tuple[socket.socket, socket.socket]]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """End all connections, and refuse new ones; returns how many there were."""
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
        return len(self._pairs)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                try:
                    pair = (peer, socket.create_connection(("127.0.0.1", self._target), timeout=10))
                except OSError:
                    peer.close()
                    continue
                self._pairs.append(pair)
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # `cut` closes both
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_a_connection_that_ends_is_taken_up_again_and_costs_no_restart(job: Job):
    job.start(0, of=3, min_nodes=3)
    proxy = Proxy(job.port)
    job.start(1, of=3, min_nodes=3, port=proxy.port)
    job.start(2, of=3, min_nodes=3)
    job.wait_up(0, 0, 1, 2)
    assert proxy.cut() >= 1
    time.sleep(6)  # longer than a lost connection may last
    ends = job.finish()
    assert {code for code, _ in ends.values()} == {0}, ends
    for event in ("node_lost", "took_over", "restarting", "verdict"):
        assert job.events(event) == []
    assert len(job.events("worker_ended")) == 3
