"""Does a step come to the same numbers whatever the number of ranks that share it?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.membership import Membership
from allranks.state.resumed.averaging import GradientWeight, gradient_factor
from allranks.state.resumed.sampler import Sampler


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 9), st.none() | st.integers(1, 6), st.integers(0, 300))
def test_the_factors_of_all_ranks_and_micro_batches_add_up_to_the_number_of_ranks(samples, batch, world, micro, at):
    factors = []
    for rank in range(world):
        sampler = Sampler(
            samples, global_batch_size=batch, membership=Membership.spread(rank, world), micro_batch_size=micro
        )
        for _ in range(at % (2 * -(-samples // batch))):
            sampler.advance()
        share = sampler.share()
        factors += [gradient_factor(size, share.total, world) for size in share.parts]
    assert sum(factors) == pytest.approx(world)


def averaged_gradient(world: int, micro: int | None = None) -> torch.Tensor:
    """What DDP would average to in the last step of an epoch: 10 samples, 7 of them in the step before."""
    inputs = torch.arange(20, dtype=torch.float64).reshape(10, 2)
    total = torch.zeros(2, dtype=torch.float64)
    for rank in range(world):
        model = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 0.5)
        weight = GradientWeight(model.parameters())
        sampler = Sampler(10, global_batch_size=7, membership=Membership.spread(rank, world), micro_batch_size=micro)
        batches = iter(sampler)
        share = sampler.share()
        for size in share.parts:
            weight.set(gradient_factor(size, share.total, world))
            loss = model(inputs[[int(index) for index in next(batches)]]).square().mean()
            (loss + model.weight.square().sum()).backward()  # the second term is of no sample
        assert model.weight.grad is not None
        total += model.weight.grad[0] / world
    return total


@pytest.mark.parametrize("world", [2, 3, 5, 7, 9])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_the_average_over_ranks_is_the_average_over_samples(world, micro):
    assert torch.allclose(averaged_gradient(world, micro), averaged_gradient(1), rtol=1e-12)


def test_a_factor_of_one_leaves_no_hook_and_zero_wipes_out_what_is_no_number():
    parameter = torch.nn.Parameter(torch.ones(2))
    weight = GradientWeight([parameter, torch.ones(1)])
    weight.set(0.0)
    (parameter * float("nan")).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    weight.set(0.5)
    (parameter * 3).sum().backward()
    assert parameter.grad.tolist() == [1.5, 1.5]
    weight.set(1.0)
    assert not parameter._backward_hooks
