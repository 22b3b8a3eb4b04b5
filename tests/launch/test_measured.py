"""What does `allranks advise --measure` find out about a script, and how does it end it?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.comm.bench_table import BenchRow, BenchTable, to_json
from allranks.launch.measured import Measurement, Module
from conftest import Allranks

TRAIN = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Slow(torch.nn.Module):
    def forward(self, x):
        return Sleep.apply(x)

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.04)
        return grad

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 100), Slow(), torch.nn.Linear(100, 10, bias=False))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(int(sys.argv[1])):
        with ddp.no_sync():  # a micro-batch that sends nothing
            ddp(torch.ones(2, 64)).sum().backward()
        ddp(torch.ones(2, 64)).sum().backward()
        optimizer.step()
finally:
    open("went-on", "w").close()
dist.destroy_process_group()
"""
PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [
        BenchRow(collective="all_reduce", size_bytes=size, count=size // 4, time_s=size / 7e6, p95_s=size / 7e6)
        for size in (1 << 19, 1 << 25)
    ]
    path = tmp_path / "runs" / "bench.json"
    path.parent.mkdir()
    path.write_bytes(to_json(BenchTable(backend="gloo", nodes=("a", "b"), ranks=2, rows=tuple(rows))))
    return path


@pytest.mark.torch
def test_a_script_is_measured_and_ended_without_its_finally(allranks: Allranks, tmp_path: Path, table: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    result = allranks("advise", "--nproc-per-node", "2", "--json", "--measure", "train.py", "1000000")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "allranks: measuring train.py: its first 12 steps, then it is ended\n"
    told = json.loads(result.stdout)
    assert told["gradient_bytes"] == 4 * (64 * 100 + 100 + 100 * 10)
    assert 20 <= told["forward_ms"] < told["backward_ms"]
    assert told["backward_ms"] >= 40
    assert told["measured_ms"] >= 120  # two micro-batches; and as many ranks as the table has
    assert told["other_ms"] >= 20
    assert [path.name for path in table.parent.iterdir()] == ["bench.json"]
    assert not (tmp_path / "went-on").exists()


@pytest.mark.torch
def test_a_script_without_ddp_gets_one_line(allranks: Allranks, tmp_path: Path, table: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    result = allranks("advise", "--measure", "train.py")
    assert result.returncode == 2
    assert result.stderr.splitlines()[1:] == [
        "error: advise: train.py: it made no DistributedDataParallel in 20 optimizer steps; without a measurement, "
        "give --params and --step-ms"
    ]


@pytest.mark.torch
def test_a_script_that_fails_shows_its_report(allranks: Allranks, tmp_path: Path, table: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('bad batch')")
    result = allranks("advise", "--measure", "train.py")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert "ValueError: bad batch" in [line.strip() for line in lines]
    assert lines[-1].startswith("error: advise: train.py: it ended with exit code 1 before its steps were measured; ")
    kept = Path(lines[-1].rpartition(" ")[2])
    assert kept.parent == table.parent
    assert (kept / "latest").exists()


def module(**more: float) -> Module:
    times = {"step_s": 0.5, "forward_s": 0.1, "backward_s": 0.2, "comm_s": 0.15, "overlap_s": 0.05} | more
    return Module(
        tensor_bytes=(400, 40), element_bytes=4, low_rank_bytes=88, bucket_bytes=(440,), steps=8, ranks=2, **times
    )


def test_what_is_neither_computed_nor_waited_for_belongs_to_the_rest_of_a_step() -> None:
    step = Measurement(modules=(module(),), num_modules=1, optimizer_steps=11).to_step()
    assert step.other_s == pytest.approx(0.5 - 0.1 - 0.2 - (0.15 - 0.05))
    assert (step.tensor_bytes, step.bucket_bytes, step.low_rank_bytes) == ((400, 40), (440,), 88)
    assert step.has_vectors  # an older allranks did not tell
    without = Measurement(modules=(module(has_vectors=False),), num_modules=1, optimizer_steps=11)
    assert not without.to_step().has_vectors


def test_passes_of_two_modules_follow_each_other_in_one_step() -> None:
    both = Measurement(modules=(module(), module(comm_s=0.0, overlap_s=0.0)), num_modules=2, optimizer_steps=11)
    step = both.to_step()
    assert (step.forward_s, step.backward_s) == pytest.approx((0.2, 0.4))
    assert step.other_s == 0.0  # 0.5 s of a step, 0.6 s of passes, whose clocks are others
    assert step.gradient_bytes == 880
