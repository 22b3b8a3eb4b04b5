"""Does the gradient noise scale come out as it was made, around any hook, and what is said of it?"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from allranks.comm.noise import LR_RULES, NoiseMeter, describe, noise_scale, steps_saved
from test_session_track import run_ranks

pytestmark = pytest.mark.torch


def norms_of(*, signal: float, variance: float, ranks: int, steps: int, size: int = 1000) -> list[tuple[float, float]]:
    """Square norms of one rank's gradient and of the mean: a true gradient, and noise of this variance in a batch."""
    dice = torch.Generator().manual_seed(1)
    true_D = torch.full((size,), math.sqrt(signal / size))
    pairs = []
    for _ in range(steps):
        grads_RD = true_D + torch.randn(ranks, size, generator=dice) * math.sqrt(variance * ranks / size)
        pairs.append((float(grads_RD[0].square().sum()), float(grads_RD.mean(0).square().sum())))
    return pairs


@pytest.mark.parametrize(("signal", "variance", "scale"), [(1.0, 0.0, 0.0), (1.0, 0.5, 0.5), (1.0, 3.0, 3.0)])
def test_a_known_noise_comes_back_as_a_multiple_of_the_batch(signal, variance, scale):
    share, whole = zip(*norms_of(signal=signal, variance=variance, ranks=6, steps=100), strict=True)
    assert noise_scale(share, whole, 6) == pytest.approx(scale, rel=0.1, abs=0.01)


def test_gradients_that_are_all_noise_have_no_finite_scale():
    assert math.isinf(noise_scale([6.0], [0.9], 6))
    assert steps_saved(math.inf) == 0.5


@pytest.mark.parametrize(
    ("last_block", "said"),
    [
        ((4.0, 2.0), "0.43 to 1 times the batch; a batch twice as large saves at most 25 % of the steps"),
        ((6.0, 2.0), "at least 0.43 times the batch; a batch twice as large saves at most 50 % of the steps"),
    ],
    ids=["all finite", "one block without signal"],
)
def test_the_line_gives_a_range_and_what_a_larger_batch_saves_at_most(last_block, said):
    norms = [(4.0, 2.5)] * 80 + [last_block] * 20
    told = "gradient noise scale over steps 201 to 300 of this process: "
    assert describe(norms, ranks=3, last_step=300) == told + said


def test_steps_whose_gradients_are_no_number_do_not_count():
    broken = [(math.nan, math.nan)] * 90 + [(4.0, 2.0)] * 10
    assert "unknown, 90 of 100 steps" in describe(broken, ranks=3, last_step=100)
    assert "1 to 1 times" in describe([(math.inf, math.inf), *[(4.0, 2.0)] * 99], ranks=3, last_step=100)


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, index: int, values: list[float]) -> None:
        self._index, self._buffer = index, torch.tensor(values)

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer


def halve(state: object, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """A hook whose other rank had gradients of 0."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result([bucket.buffer().mul_(0.5)])
    return done


def test_the_meter_passes_the_hooks_result_on_and_adds_up_the_buckets_of_a_step():
    lines: list[str] = []
    hook = NoiseMeter(ranks=2, say=lines.append).around(halve)
    for _ in range(101):
        assert hook(None, Bucket(0, [2.0, 2.0])).wait().tolist() == [1.0, 1.0]
        assert hook(None, Bucket(1, [4.0])).wait().tolist() == [2.0]
    # Norms 24 and 6 in each step: no signal is left, (2 * 6 - 24) / 1 < 0.
    assert lines == [
        "gradient noise scale over steps 1 to 100 of this process: far above the batch; a batch twice as large saves "
        "at most 50 % of the steps"
    ]


def test_only_the_rank_that_says_the_line_measures():
    assert NoiseMeter(ranks=2, say=None).around(halve) is halve
    assert NoiseMeter(ranks=1, say=print).around(halve) is halve


@pytest.mark.parametrize(("rule", "factor", "expected"), [("linear", 8, 8.0), ("sqrt", 4, 2.0), ("none", 8, 1.0)])
def test_rules_of_the_learning_rate(rule, factor, expected):
    assert LR_RULES[rule](factor) == expected


TRAIN = """
    import copy
    import os
    import torch
    import torch.distributed as dist
    import allranks

    with allranks.session(timeout_s=20) as s:
        weights = []
        for measured in (False, True):
            torch.manual_seed(1)
            model = s.ddp(torch.nn.Linear(7, 3), noise_scale=measured)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            dice = torch.Generator().manual_seed(s.rank)
            for _ in range(101):
                model(torch.randn(4, 7, generator=dice)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        print("same bits", torch.equal(*weights), flush=True)
        pair = dist.new_group([0, 1])
        if s.rank < 2:
            model = s.ddp(torch.nn.Linear(1, 1, bias=False), noise_scale=True, process_group=pair)
            model(torch.full((1, 1), s.rank + 1.0)).sum().backward()
            print("mean of two", model.module.weight.grad.item(), "register_comm_hook" in vars(model), flush=True)
        model = s.ddp(torch.nn.Linear(7, 3), noise_scale=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        print("a copy", copy.deepcopy(model) is not None, model._get_ddp_logging_data()["comm_hook"][:1], flush=True)
        sampler = s.sampler(100, global_batch_size=6)
        state = s.track(model=model, optimizer=optimizer, sampler=sampler)
        for step in state.steps(torch.utils.data.DataLoader(torch.ones(100, 7), batch_sampler=sampler), total=3):
            with step as batch:
                loss = model(batch).square().mean()
                if s.rank == 1 and step.number == 2:
                    os._exit(9)  # the others are in the hook
                loss.backward()
"""


def test_three_ranks_sum_to_the_same_bits_with_it_and_a_lost_rank_is_told_as_without(tmp_path: Path):
    result = run_ranks(tmp_path, "3", TRAIN)
    assert result.stdout.count("same bits True\n") == 3, result.stderr
    assert result.stdout.count("mean of two 1.5 False\n") == 2, result.stderr
    assert result.stdout.count("a copy True") == 3, result.stderr
    assert result.stderr.count("gradient noise scale over steps 1 to 100 of this process: ") == 1
    assert result.stdout.endswith("codes [1, 9, 1]\n"), result.stdout + result.stderr
    assert len(re.findall(r"rank [02]: step 2 does not count, a collective failed", result.stderr)) == 2, result.stderr
    assert "Traceback" not in result.stderr
