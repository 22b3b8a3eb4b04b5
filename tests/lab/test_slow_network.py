"""Is a slow network told from a late rank, for a script that imports nothing of ours?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import TestLab
from .test_run import AGENT, end, srun

TRAIN = """\
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
FORWARD_S, BACKWARD_S, LATE_S, FOR_S = 0.02, 0.04, float(sys.argv[1]), float(sys.argv[2])

def compute(seconds):
    global computed_s
    began_s = time.perf_counter()
    time.sleep(seconds)
    computed_s += time.perf_counter() - began_s  # longer on a busy machine

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        compute(FORWARD_S)
        ctx.shape = weight.shape
        return x + weight[0]
    @staticmethod
    def backward(ctx, grad):
        compute(BACKWARD_S)
        return grad, torch.ones(ctx.shape)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1_000_000))  # 4 MB: 430 ms at 100 Mbit/s on three nodes
    def forward(self, x):
        return Slow.apply(x, self.weight)

torch.set_num_threads(1)
dist.init_process_group("gloo")
computed_s, rank, model, goes_on, step = 0.0, dist.get_rank(), DistributedDataParallel(Net()), torch.ones(1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
while goes_on[0]:
    if step == 3:
        counted_s, computed_s = time.perf_counter(), 0.0
    if rank == 1:
        time.sleep(LATE_S)
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    step += 1
    if step % 10 == 0:
        goes_on[0] = time.perf_counter() < counted_s + FOR_S and not os.path.exists("line_is_there")
        dist.broadcast(goes_on, 0)
print("truth", rank, 1 - computed_s / (time.perf_counter() - counted_s), flush=True)
dist.destroy_process_group()
"""
LINE = re.compile(
    r"allranks: \d\d % of the time is spent waiting for the network \(node01 ens1f1 at \d+ % of the (\d+) Mbit/s "
    r"that its connections reach\): allranks advise\n"
)


def run(lab: TestLab, folder: Path, *, late_s: float, for_s: float) -> tuple[str, float, dict[str, object]]:
    """Train on three nodes until the line is there, or for so long.

    Returns stderr, what share of a step rank 0 waits in truth, and the last event about it.
    """
    (folder / "train.py").write_text(TRAIN)
    three = ("-N3", "-w", "master-node,node01,node02")
    seconds = str(late_s), str(for_s)
    step = srun(lab, folder, *AGENT, "--ignore", "AR213", "train.py", *seconds, flags=three)
    stderr = ""
    try:
        for line in step.stderr or ():
            stderr += line
            if LINE.fullmatch(line):
                (folder / "line_is_there").touch()
    finally:
        code, stdout, _ = end(step)
    assert code == 0, stderr
    truth = dict(re.findall(r"truth (\d) (\S+)", stdout))
    events = (folder / "runs/latest/attempt_0/events.jsonl").read_text()
    told = [json.loads(line) for line in events.splitlines() if '"event": "network"' in line]
    return stderr, float(truth["0"]), [each for each in told if "wait_share" in each][-1]


@pytest.mark.lab
@pytest.mark.torch
def test_the_link_that_makes_all_steps_wait_is_named_and_the_share_is_true(six_nodes: TestLab, tmp_path: Path) -> None:
    six_nodes.run("inject", "slow-link", "--on", "node01")
    try:
        stderr, truth, told = run(six_nodes, tmp_path, late_s=0.0, for_s=60.0)
    finally:
        six_nodes.run("heal")
    line = LINE.search(stderr)
    assert line, (told, stderr)
    assert 80 < int(line[1]) < 130
    assert told["wait_share"] == pytest.approx(truth, abs=0.1)
    assert told["num_nodes"] == 3


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.by_hand
def test_a_late_rank_is_no_slow_network(six_nodes: TestLab, tmp_path: Path) -> None:
    six_nodes.run("inject", "slow-link", "--on", "node01")
    try:
        stderr, truth, told = run(six_nodes, tmp_path, late_s=2.5, for_s=20.0)
    finally:
        six_nodes.run("heal")
    assert "waiting for the network" not in stderr
    assert told["wait_share"] == pytest.approx(truth, abs=0.1)
