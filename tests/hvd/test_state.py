"""Does a job that starts again begin where allranks's elastic state was saved? One worker, without a launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import write

from .marks import NEEDS_HOROVOD

pytestmark = [
    pytest.mark.torch,
    pytest.mark.by_hand,
    NEEDS_HOROVOD,
]
SCRIPT = """
    import sys
    import horovod.torch as hvd
    import torch
    from allranks.horovod.state import TorchState

    hvd.init()
    torch.manual_seed(int(sys.argv[2]))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(12))
    state = TorchState(
        checkpoints=sys.argv[1], checkpoint_every_s=0.0, model=model, optimizer=optimizer, sampler=sampler, batch=0
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.sampler.record_batch(state.batch, 2)
        state.batch += 1
        state.commit()
    state.close()
    momentum = [each["momentum_buffer"].tolist() for each in optimizer.state_dict()["state"].values()]
    print(state.batch, state.sampler.processed_num, momentum, model.weight.tolist())
"""


def test_a_second_start_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", SCRIPT)

    def run(directory: str, seed: int) -> str:
        command = [sys.executable, str(script), str(tmp_path / directory), str(seed)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    first, second = run("saved", 1), run("saved", 2)
    assert first.startswith("3 6 ")
    assert second.startswith("6 12 ")
    whole = write(tmp_path / "whole.py", SCRIPT.replace("range(3)", "range(6)"))
    command = [sys.executable, str(whole), str(tmp_path / "other"), "1"]
    assert second == subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
