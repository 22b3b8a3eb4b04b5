"""Do gradients that cross the network in fewer bytes come to the mean, and does a training go on with them?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from allranks.comm.hooks import BLOCK, FORMATS, SCALE_BYTES, attach, decode, encode, preferred_bucket_mb
from forked import fork_ranks

SCRIPTS = Path(__file__).parents[1] / "scripts"


def coded(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out of the wire, and what is left to send."""
    wire = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * (BLOCK + SCALE_BYTES), dtype=torch.uint8)
    left = blocks.clone()
    encode(left, wire)
    return decode(wire), left


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-3, 1.0, 1e30, 3e38])
def test_a_block_comes_out_within_half_a_code_and_the_rest_is_left(size: float):
    blocks = (torch.rand(3, 5, BLOCK, generator=torch.Generator().manual_seed(1)) * 2 - 1) * size
    blocks[1, 2] = 0
    out, left = coded(blocks)
    top = blocks.abs().amax(-1, keepdim=True)
    assert ((out - blocks).abs() <= top / 254 * 1.001 + 1e-38).all()
    assert torch.allclose(out + left, blocks, rtol=1e-6, atol=1e-38)
    assert not out[1, 2].any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_makes_its_block_so_and_leaves_nothing(bad: float):
    blocks = torch.ones(2, 3, BLOCK)
    blocks[1, 2, 7] = bad
    out, left = coded(blocks)
    assert not out[1, 2].isfinite().any()
    assert out.isfinite().sum() == 5 * BLOCK
    assert left.abs().amax() < 1e-6


def test_a_format_that_there_is_not_is_refused_with_the_names_of_those_that_there_are():
    with pytest.raises(ValueError, match=r"^compress='fp8': expected 'bf16', 'int8' or 'powersgd'$"):
        attach(torch.nn.Linear(1, 1), "fp8")  # type: ignore[arg-type]
    assert [preferred_bucket_mb(name) for name in FORMATS] == [None, None, 25.0]


@pytest.mark.torch
def test_every_format_comes_to_the_mean_within_its_bounds_at_1_2_3_and_6_ranks(tmp_path: Path):
    script = SCRIPTS / "compressed.py"
    cases = re.findall(r"^    (\w+),$", script.read_text().partition("\nCASES = (")[2], re.M)
    assert len(cases) == 9
    result = fork_ranks(tmp_path, "1,2,3,6", script)
    told = [line for line in result.stdout.splitlines() if not line.startswith("codes")]
    wanted = {1: cases, 2: cases[:2], 3: cases, 6: cases[:2]}
    assert told == [f"{size} {name} {case}" for size in wanted for name in FORMATS for case in wanted[size]], (
        result.stderr
    )
    assert "Warning" not in result.stderr


TRAIN = """
import os
import signal
import sys
import torch
import allranks
from allranks.comm import hooks

hooks.POWERSGD_PLAIN_STEPS = 2
LIFE = int(os.environ["EXACT_LIFE"])
FORMATS = {"bf16": {}, "int8": {"bucket_cap_mb": 0.05}, "powersgd": {"static_graph": True}}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.randn(64, generator=torch.Generator().manual_seed(index))

def train(s, wire_format, directory, until, killed_at=None, **arguments):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100))
    net.direct = torch.nn.Parameter(torch.zeros(64))
    net.forward = lambda x: torch.nn.Sequential.forward(net, x).square().mean() + (x @ net.direct).mean()
    model = s.ddp(net, compress=wire_format, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = s.sampler(100, global_batch_size=4)
    loader = torch.utils.data.DataLoader(Data(), batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_dir=directory)
    for step in state.steps(loader, total=until):
        with step as batch:
            if step.number == killed_at and s.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch).backward()
            # Shares of 2, 1 and 1 samples: the mean over samples, not over ranks.
            wanted = torch.zeros(64)
            wanted += batch.mean(0) * (len(step.share.own) / 4)
            torch.distributed.all_reduce(wanted)
            assert (net.direct.grad - wanted).abs().max() < wanted.abs().max() / 50
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([own.detach().flatten() for own in model.parameters()])

with allranks.session(timeout_s=120) as s:
    for wire_format, arguments in FORMATS.items():
        if LIFE == 0:
            whole = train(s, wire_format, f"whole_{wire_format}", 7, **arguments)
            torch.save(whole, f"{wire_format}.{s.rank}")
            train(s, wire_format, f"cut_{wire_format}", 4, **arguments)
        elif LIFE == 1:
            cut = train(s, wire_format, f"cut_{wire_format}", 7, **arguments)
            if s.is_leader:
                print(wire_format, torch.equal(cut, torch.load(f"{wire_format}.0")), flush=True)
        elif LIFE == 2:
            train(s, wire_format, f"cut_{wire_format}", 8, **arguments)
        elif LIFE - 3 == list(FORMATS).index(wire_format):
            train(s, wire_format, f"killed_{wire_format}", 20, killed_at=5, **arguments)
        elif LIFE == 6:
            train(s, "fp8", "none", 20)
"""


@pytest.mark.torch
def test_a_run_with_a_format_resumes_with_the_same_bits_and_tells_of_a_lost_rank(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    result = fork_ranks(tmp_path, "3,3,2,3,3,3,1", "train.py")
    assert [line for line in result.stdout.splitlines() if not line.startswith("[vm")] == [
        "codes [0, 0, 0]",
        "bf16 True",
        "int8 True",
        "powersgd True",
        "codes [0, 0, 0]",
        "codes [0, 0]",
        *["codes [1, -9, 1]"] * 3,
        "codes [2]",
    ], result.stderr
    said = result.stderr.splitlines()
    assert [line for line in said if "error feedback" in line] == [
        f"allranks: error feedback of {name} starts at 0: 3 ranks wrote it, 2 go on" for name in ("int8", "powersgd")
    ]
    lost = [line for line in said if "does not count" in line]
    assert len(lost) == 6
    for line in lost:
        assert re.match(
            r"allranks: rank [02]: step 5 does not count, a collective failed; no checkpoint is complete: \[\S+"
            r"pair\.cc:\d+\] .*(Connection closed by peer|Connection reset by peer|Broken pipe)",
            line,
        ), line
    assert "Traceback" not in result.stderr
    assert said[-1] == "error: s.ddp(): compress='fp8': expected 'bf16', 'int8' or 'powersgd'"
