"""Do workers start, and know all nodes, where there are thousands of them?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from allranks.host.node import NodeFacts
from allranks.launch.plan import Request, plan_job
from allranks.launch.worker_group import WorkerGroup
from allranks.model.cluster import Cluster
from allranks.model.identity import world_from_env
from allranks.model.membership import Member
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Plan
from conftest import wait_until

MANY = tuple(Member(name=f"gpu-b{i:04}", first_rank=i, num_workers=1, host=f"gpu-b{i:04}") for i in range(8192))
ASK = """
from allranks.join.group import _members, name_ranks
from allranks.preflight.identify import identify
import os
print(name_ranks([0, 8191], _members()), identify(os.environ, is_below_agent=True).world_size)
"""


@pytest.mark.parametrize(("num_nodes", "last"), [(2, "?"), (8192, "gpu-b8191")])
def test_workers_know_all_nodes_however_many_there_are(tmp_path: Path, num_nodes: int, last: str):
    # 8,192 names are longer than execve(2) lets a variable be.
    request = Request(num_workers="1", command=(sys.executable,))
    facts = NodeFacts(host=MANY[0].name, interfaces=(), num_gpus=0, num_cpus=2)
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(0)
    workers = WorkerGroup(
        job=plan_job(request, world_from_env({}), Cluster(), facts, job="4711", origin={}),
        command=[sys.executable, "-c", ASK],
        run_dir=run_dir,
        hidden={(0, "out"), (0, "err")},
        env=dict(os.environ) | {"ALLRANKS_HOOK": "0"},
    )
    group = Plan(members=MANY[:num_nodes], node_index=0, attempt=0, store_address="127.0.0.1", store_port=29500,
                 backend="gloo", backend_reason="no GPU")  # fmt: skip
    workers.start(group)
    try:
        [worker] = workers.processes
        assert worker.end is None, worker.end
        wait_until(lambda: worker.path("out").read_text().endswith("\n"), "the worker's answer")
        said = f"rank 0 (gpu-b0000), rank 8191 ({last}) {num_nodes}\n"
        assert worker.path("out").read_text() == said, worker.path("err").read_text()
    finally:
        workers.close()
        if workers.processes and workers.processes[0].end is None:
            workers.processes[0].process.wait()
            os.close(workers.processes[0].pidfd)
