"""Does a GPU see gradients that are not finite, with a few launches for all of them?"""

from __future__ import annotations

import pytest

from .conftest import Note
from .job import run_one

IMPORTS = """\
import time
import torch
from rank import device, is_rehearsal, synchronize, tell
from allranks.state.truth.finite import Finiteness

def looker(gradients):
    weights = [torch.nn.Parameter(torch.ones_like(own)) for own in gradients]
    for weight, own in zip(weights, gradients):
        weight.grad = own
    optimizer = torch.optim.SGD(weights, lr=0.0)
    return Finiteness([optimizer], lambda: dict(enumerate(weights)), dict), optimizer

"""


@pytest.mark.rehearsable
def test_a_gpu_sees_gradients_that_are_not_finite_and_no_others(tmp_path, note: Note):
    """Expected: one NaN or infinity among gradients of four dtypes is seen at the next poll, once the GPU is done;
    large gradients of float16, whose sum is more than float16 has, and empty ones are not.
    """
    script = (
        IMPORTS
        + """\
seen = []
for bad in (None, float("nan"), float("-inf")):
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    gradients = [torch.full((300, 70), 60000.0, dtype=kind, device=device) for kind in kinds]
    gradients.append(torch.empty(0, 3, device=device))
    if bad is not None:
        gradients[1][17, 3] = bad
    own, optimizer = looker(gradients)
    optimizer.step()
    synchronize()
    seen.append(own.poll(1))
tell(seen=seen)
"""
    )
    assert run_one(tmp_path / "seen", script) == {"seen": [False, True, True]}


def test_looking_at_100_million_gradients_takes_2_ms_of_the_cpu(tmp_path, note: Note):
    """Expected: of 150 gradients, 100 M numbers in all, at most 2 ms pass until the launches are queued, and at most
    1 ms more until the GPU has read 400 MB: 1 % of a step of 100 ms is not reached.
    """
    script = (
        IMPORTS
        + """\
own, optimizer = looker([torch.randn(700_000, device=device) for _ in range(150)])
queued, done = [], []
for _ in range(9):
    synchronize()
    began_s = time.perf_counter()
    own.look(optimizer)
    queued.append(1000 * (time.perf_counter() - began_s))
    synchronize()
    done.append(1000 * (time.perf_counter() - began_s))
    own.poll(1)
tell(queued_ms=round(min(queued), 2), done_ms=round(min(done), 2))
"""
    )
    told = run_one(tmp_path / "speed", script)
    note("ms to look at 100 M gradients", f"{told['queued_ms']} until queued, {told['done_ms']} until done")
    assert told["queued_ms"] <= 2.0
    assert told["done_ms"] <= 3.0
