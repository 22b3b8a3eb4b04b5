"""Do the formats in which gradients cross the network come to the mean on NCCL, too?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.comm import hooks

from .job import run_bare

REDUCE = """\
import importlib.util
import os
from rank import device, dist, form_group, torch

spec = importlib.util.spec_from_file_location("hooks", os.environ["HOOKS"])
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
form_group()
ranks = dist.get_world_size()
for wire_format in hooks.FORMATS:
    module = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 100)).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.1)
    compressor = hooks.attach(ddp, wire_format)
    for step in range(hooks.POWERSGD_PLAIN_STEPS + 4):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = [torch.randn(own.shape, generator=generator).to(device) for own in module.parameters()]
        if step == hooks.POWERSGD_PLAIN_STEPS + 1 and dist.get_rank() == 1:
            given[0][3, 4] = float("inf")
        ddp.zero_grad()
        module.forward = lambda _: sum((own * data).sum() for own, data in zip(module.parameters(), given))
        ddp(None).backward()
        is_bad = step == hooks.POWERSGD_PLAIN_STEPS + 1
        assert bool(module[0].weight.grad[3, 4].isfinite()) != is_bad, (wire_format, step)
        for number, (own, data) in enumerate(zip(module.parameters(), given)):
            mean = data.double()
            dist.all_reduce(mean)
            off = float((own.grad.double() - mean / ranks).abs().amax() / 5)
            bound = {"bf16": (ranks + 2) / 512, "int8": 2 / 127, "powersgd": 1e-6}[wire_format]
            is_exact = wire_format != "powersgd" or step < hooks.POWERSGD_PLAIN_STEPS or own.dim() == 1
            assert is_bad or not is_exact or off <= bound, (wire_format, step, number, off)
            alike = [torch.empty_like(own.grad) for _ in range(ranks)]
            dist.all_gather(alike, own.grad)
            assert all(torch.equal(own.grad.nan_to_num(7), other.nan_to_num(7)) for other in alike)
    compressor.close()
    print("good", wire_format, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.rehearsable
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_formats_come_to_the_mean_on_all_ranks(tmp_path: Path, ranks: int):
    """Expected: the bounds of docs/how-to/session.md, on streams as on the CPU; an inf shows on all ranks for one step.
    The module is loaded by its path, as into a script without allranks.
    """
    ended = run_bare(tmp_path / "hooks", REDUCE, ranks=ranks, env={"HOOKS": hooks.__file__})
    assert ended.codes == [0] * ranks, ended.text[-3000:]
    assert [name for name in hooks.FORMATS if f"good {name}" in ended.text] == list(hooks.FORMATS)
