"""What a real job leaves of its status, its events and the values of its steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from allranks.model.curve import read_curves
from allranks.model.job_status import JobStatus
from allranks.report.event_table import make_schema
from allranks.report.readback import parse_job_status
from allranks.report.rundir import RunDir
from conftest import Allranks, allranks_command, clean_env, wait_until, write

RUN = ("run", "--nproc-per-node", "2", "--ignore", "AR011", "--master-port", "0")
SCHEMA = make_schema()["$defs"]
KINDS: dict[str, Any] = {
    "integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


def left_of(tmp_path: Path) -> tuple[JobStatus, list[dict[str, Any]]]:
    run = tmp_path / "runs/latest"
    lines = (run / "attempt_0/events.jsonl").read_text().splitlines()
    return parse_job_status((run / "status.json").read_bytes()), [json.loads(line) for line in lines]


def check_events(events: list[dict[str, Any]]) -> None:
    """Hold events against the schema: known names, all required fields, the right types, and no other field."""
    for event in events:
        known = SCHEMA[event["event"]]
        assert set(known["required"]) <= event.keys() <= known["properties"].keys(), event
        for name, value in event.items():
            said = known["properties"][name].get("type", [])
            kinds = [said] if isinstance(said, str) else said
            assert not kinds or any(isinstance(value, KINDS[kind]) for kind in kinds), (name, value)


def test_a_job_without_torch_leaves_its_end(allranks: Allranks, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, sys, time; time.sleep(1.2); sys.exit(3 * int(os.environ['RANK']))")
    result = allranks(*RUN, "--no-standby", "train.py")
    status, events = left_of(tmp_path)
    assert result.returncode != 0
    assert (status.phase, status.exit_code, status.num_ranks, status.num_up) == ("over", result.returncode, 2, 0)
    assert (status.step, status.steps_per_s, status.eta_s, status.stuck) == (None, None, None, None)
    assert {rank for row in status.rows for rank in row.ranks} == {0, 1}
    assert 1.0 < status.age_s < 60
    assert [event.event for event in status.events] == ["worker_ended", "verdict"]
    ledger = RunDir(tmp_path / "runs", status.job).status_files.read_ledger()
    assert ledger is not None
    assert ledger.rank_s > 2.4
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.rank_s, rel=0.001)
    assert {event["event"] for event in events} == {"started", "worker_ended", "verdict", "ended"}
    check_events(events)


def test_a_roll_call_says_who_is_missing_and_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "pass")
    write(tmp_path / "cluster.toml", "[guard]\njoin_s = 3.0\n")
    run = allranks_command(
        "run", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "a", "train.py"
    )
    env = clean_env(os.environ, ALLRANKS_LAB_DIR="/nowhere")
    with subprocess.Popen(run, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        path = tmp_path / "runs/a/status.json"
        wait_until(path.exists, "a status")
        seen = parse_job_status(path.read_bytes())
        said = job.communicate(timeout=60)[0].decode()
    assert (seen.phase, seen.missing, seen.num_nodes, len(seen.nodes)) == ("forming", "node rank 1", 2, 1), said
    assert seen.gives_up_in_s is not None
    assert 0 < seen.gives_up_in_s <= 3
    last = parse_job_status(path.read_bytes())
    assert (last.phase, last.exit_code, last.gives_up_in_s) == ("over", job.returncode, None), said
    assert last.started_s == pytest.approx(seen.started_s, abs=0.1)


@pytest.mark.torch
def test_a_session_leaves_its_total_its_checkpoints_and_its_values(allranks: Allranks, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import time
        import torch, allranks
        from torch.utils.data import DataLoader, TensorDataset

        with allranks.session() as s:
            data = TensorDataset(torch.arange(64.0).reshape(64, 1))
            sampler = s.sampler(data, global_batch_size=4)
            model = s.ddp(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_every=4)
            for step in state.steps(DataLoader(data, batch_sampler=sampler), total=12):
                with step as (batch,):
                    time.sleep(0.1)
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    step.log(loss=loss)
        """,
    )
    result = allranks(*RUN, "train.py")
    assert result.returncode == 0, result.stderr
    status, events = left_of(tmp_path)
    assert (status.phase, status.exit_code, status.total_steps, status.is_step_of_session) == ("over", 0, 12, True)
    assert status.step is not None
    assert 8 <= status.step <= 12
    written = [event for event in events if event["event"] == "checkpoint"]
    assert {event["step"] for event in written} <= {4, 8, 12}
    assert len(written) >= 1
    assert status.checkpoint == written[-1]["step"]
    assert all(0 < event["write_s"] < 60 for event in written)
    check_events(events)
    points = read_curves((tmp_path / "runs/latest/attempt_0/curves.jsonl").read_bytes())
    assert [point.step for point in points] == list(range(1, 13))
    assert all(point.values["loss"] is not None for point in points)
