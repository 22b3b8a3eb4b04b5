"""Do workers that are told to end get their whole grace, also from an agent that did not run meanwhile?"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.host.node import NodeFacts
from allranks.launch.crew import Crew, Output
from allranks.launch.plan import Request, plan_job
from allranks.launch.workers import Worker
from allranks.model.cluster import Cluster
from allranks.model.identity import world_from_env
from allranks.model.membership import Member
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Plan
from conftest import wait_until


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """One worker that never ends by itself."""
    any_job: Any = None
    said: list[str] = []
    crew = Crew(
        job=any_job, command=[], run_dir=any_job, output=any_job, env={}, interface=None, store_fd=None, say=said.append
    )
    worker = Worker(0, 0, "n", tmp_path / "out", tmp_path / "err", tmp_path / "error")
    worker.start(["sleep", "300"], {"PATH": "/usr/bin:/bin"})
    crew.workers.append(worker)
    yield crew
    crew.close()
    if worker.end is None:
        worker.reap()


def lines_of(crew: Crew) -> list[str]:
    return crew.say.__self__  # type: ignore[attr-defined, no-any-return]


def is_killed(crew: Crew) -> bool:
    process = crew.workers[0].process
    assert process is not None
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_worker_that_outlives_the_signal_is_named_and_killed_after_its_grace(crew: Crew):
    begin_s = time.monotonic()
    crew.end(signal.SIGCONT, grace_s=3.0)  # which ends nobody
    for turn in range(1, 50):
        assert not crew.advance(begin_s + 0.06 * turn)
    assert lines_of(crew) == ["rank 0 has not ended after SIGCONT yet; SIGKILL in 2 s"]
    assert not is_killed(crew)
    for turn in range(50, 60):
        crew.advance(begin_s + 0.06 * turn)
    wait_until(lambda: is_killed(crew), "SIGKILL")


def test_time_in_which_the_agent_itself_did_not_run_is_not_the_workers(crew: Crew):
    begin_s = time.monotonic()
    crew.end(signal.SIGCONT, grace_s=3.0)
    assert not crew.advance(begin_s + 0.05)
    assert not crew.advance(begin_s + 3600.0)
    assert lines_of(crew) == []
    assert not is_killed(crew)


MANY = tuple(Member(name=f"gpu-b{i:04}", first_rank=i, num_workers=1, host=f"gpu-b{i:04}") for i in range(8192))
ASK = """
from allranks.join.group import _members, name_ranks
from allranks.session import _identify
import os
print(name_ranks([0, 8191], _members()), _identify(os.environ, is_below_agent=True).world_size)
"""


@pytest.mark.parametrize(("num_nodes", "last"), [(2, "?"), (8192, "gpu-b8191")])
def test_workers_know_all_nodes_however_many_there_are(tmp_path: Path, num_nodes: int, last: str):
    # 8,192 names are longer than execve(2) lets a variable be.
    request = Request(num_workers="1", command=(sys.executable,))
    facts = NodeFacts(host=MANY[0].name, interfaces=(), num_gpus=0, num_cpus=2)
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    crew = Crew(
        job=plan_job(request, world_from_env({}), Cluster(), facts, job="4711", origin={}),
        command=[sys.executable, "-c", ASK],
        run_dir=run_dir,
        output=Output(log_dir=tmp_path, hidden=frozenset({(0, "out"), (0, "err")})),
        env=dict(os.environ) | {"ALLRANKS_HOOK": "0"},
        interface=None,
        store_fd=None,
        say=print,
    )
    group = Plan(members=MANY[:num_nodes], node_index=0, attempt=0, store_address="127.0.0.1", store_port=29500,
                 backend="gloo", backend_reason="no GPU")  # fmt: skip
    crew.start(group)
    try:
        [worker] = crew.workers
        assert worker.end is None, worker.end
        wait_until(lambda: worker.out_path.read_text(), "the worker's answer")
        said = f"rank 0 (gpu-b0000), rank 8191 ({last}) {num_nodes}\n"
        assert worker.out_path.read_text() == said, worker.err_path.read_text()
    finally:
        crew.close()
        if crew.workers and crew.workers[0].end is None:
            crew.workers[0].reap()
