"""Do communication hooks do what they promise? Each case is for all ranks; rank 0 prints its name.

The loss is a sum of products with data, so each rank's gradient is that data, and the exact mean is known.
"""

from __future__ import annotations

import copy
import math
import re
import threading
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import allranks
from allranks.comm import hooks
from allranks.state.resumed.buckets import PinnedBuckets

warnings.simplefilter("error")
SHAPES = {"a": (70, 90), "b": (90,), "c": (33, 4, 5), "d": (), "e": (256,), "f": (300, 20), "g": (5, 7)}
SMALL = {"bucket_cap_mb": 0.01}
KINDS: dict[str, dict[str, Any]] = {
    "several buckets": SMALL,
    "views": SMALL | {"gradient_as_bucket_view": True},
    "unused parameters": SMALL | {"find_unused_parameters": True},
    "static graph": SMALL | {"static_graph": True},
    "one bucket": {"bucket_cap_mb": 100},
}
PLAIN, EPS = 2, 1e-6
hooks.POWERSGD_PLAIN_STEPS = PLAIN


class Products(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        made = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        self.own = torch.nn.ParameterDict(made)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((self.own[name] * given).sum() for name, given in gradients.items())


class Made(NamedTuple):
    """One parameter after a step, in fp64; means are over all ranks."""

    gradient: Tensor
    wanted: Tensor
    """Mean of gradients and of what was owed."""
    owed: Tensor
    """Mean of what is owed now."""
    most: float
    """The largest number that was to be sent, of all parameters and ranks."""


def gradients_of(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def mean_of(value: Tensor) -> Tensor:
    value = value.double().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def most_of(value: Tensor) -> float:
    most = value.double().abs().amax()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def assert_alike(value: Tensor) -> None:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    assert all(torch.equal(value.nan_to_num(7), other.nan_to_num(7)) for other in gathered)


def flat(values: dict[str, Tensor | None]) -> Tensor:
    return torch.cat(
        [torch.zeros(SHAPES[name]).view(-1) if own is None else own.view(-1) for name, own in values.items()]
    )


def owed_of(compressor: hooks.Compressor) -> Tensor:
    owed = compressor.state_dict().get("owed", {})
    return flat({name: owed.get(f"own.{name}") for name in SHAPES}).double()


def make_step(ddp: Any, compressor: hooks.Compressor, given: dict[str, Tensor]) -> dict[str, Made]:
    """Make a step with these gradients; those that are left out are 0 here."""
    ddp.zero_grad()
    sent = owed_of(compressor) + flat({name: given.get(name) for name in SHAPES})
    ddp(given).backward()
    gradient = flat({name: own.grad for name, own in ddp.module.own.items()})
    assert_alike(gradient)
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    means = mean_of(torch.stack([sent, owed_of(compressor)]))
    parts = [value.split(sizes) for value in (gradient.double(), *means)]
    shaped = [[part.view(shape) for part, shape in zip(own, SHAPES.values(), strict=True)] for own in parts]
    made = map(Made, *shaped, [most_of(sent)] * len(SHAPES))
    return dict(zip(SHAPES, made, strict=True))


def check(wire_format: str, step: int, name: str, made: Made, eps: float = EPS) -> None:
    """The bounds that docs/how-to/session.md states."""
    ranks, off = dist.get_world_size(), (made.gradient - made.wanted).abs().amax() / (made.most or 1)
    what = f"{wire_format}, step {step}, {name}: {off}"
    if ranks == 1:
        assert off == 0, what
    elif wire_format == "bf16":
        assert off <= (ranks + 2) / 512 + eps, what
    else:
        # What has come and what is owed now are together what was to be sent.
        assert (made.gradient + made.owed - made.wanted).abs().amax() <= 8 * eps * ranks * made.most, what
        if wire_format == "int8":
            assert off <= 1 / 127 + 8 * eps, what
        elif step < PLAIN or made.gradient.dim() < 2:
            assert off <= 8 * eps * ranks, what


def the_mean_is_within_bounds(wire_format: str) -> None:
    for kind, arguments in KINDS.items():
        for wrap in (PinnedBuckets, DistributedDataParallel) if arguments == SMALL else (PinnedBuckets,):
            ddp = wrap(Products(), **arguments)
            compressor = hooks.attach(ddp, wire_format)
            for step in range(PLAIN + 2 if wire_format == "powersgd" else 3):
                given = gradients_of(step)
                if kind == "unused parameters":  # nobody uses a, and rank 0 leaves c out, which the others use
                    given = {
                        name: own for name, own in given.items() if name != "a" and (name != "c" or dist.get_rank())
                    }
                for name, made in make_step(ddp, compressor, given).items():
                    if "a" in given or name != "a":
                        check(wire_format, step, name, made)
                assert (ddp.module.own["a"].grad is None) == ("a" not in given)
            compressor.close()


def other_numbers_have_their_own_bounds(wire_format: str) -> None:
    for dtype, eps in {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: EPS}.items():
        ddp = DistributedDataParallel(Products(dtype))
        compressor = hooks.attach(ddp, wire_format)
        for step in range(PLAIN + 1 if wire_format == "powersgd" else 2):
            for name, made in make_step(ddp, compressor, gradients_of(step, dtype)).items():
                check(wire_format, step, name, made, eps)
        compressor.close()


def matrices_of_low_rank_come_whole(wire_format: str) -> None:
    ddp = DistributedDataParallel(Products(), **SMALL)
    compressor = hooks.attach(ddp, wire_format)
    for step in range(PLAIN + 2):
        given = gradients_of(step)
        for name in ("a", "f"):
            rows, columns = SHAPES[name]
            base = torch.Generator().manual_seed(step)
            low = torch.randn(rows, 2, generator=base) @ torch.randn(2, columns, generator=base)
            given[name] = low * (1 + dist.get_rank())
        made = make_step(ddp, compressor, given)
        for name in ("a", "f"):
            off = (made[name].gradient - made[name].wanted).abs().amax() / made[name].most
            assert off <= (1e-5 if wire_format == "powersgd" else 2e-2), (name, off)
    compressor.close()


def what_is_not_finite_shows_on_all_ranks_and_only_then(wire_format: str) -> None:
    for bad in (float("inf"), float("nan")):
        ddp = PinnedBuckets(Products(), **SMALL)
        compressor = hooks.attach(ddp, wire_format)
        for step in range(PLAIN + 5):
            given, is_bad = gradients_of(step), step in (1, PLAIN + 2)
            if is_bad and dist.get_rank() == dist.get_world_size() - 1:
                given["f"][7, 3] = bad
            made = make_step(ddp, compressor, given)
            assert bool(made["f"].gradient[7, 3].isfinite()) != is_bad, (step, bad)
            for name in SHAPES if not is_bad else ():
                check(wire_format, step, name, made[name])
        compressor.close()


def accumulated_gradients_are_sent_once(wire_format: str) -> None:
    ddp = PinnedBuckets(Products(), **SMALL)
    compressor = hooks.attach(ddp, wire_format)
    first, second = gradients_of(0), gradients_of(1)
    with ddp.no_sync():
        ddp(first).backward()
    ddp(second).backward()
    most = most_of(flat(first) + flat(second))
    for name in SHAPES:
        wanted = mean_of(first[name] + second[name])
        off = (ddp.module.own[name].grad.double() - wanted).abs().amax() / most
        bound = {"bf16": (dist.get_world_size() + 2) / 512, "int8": 1 / 127}.get(wire_format, 0)
        assert off <= bound + 1e-5, (name, off)
    compressor.close()


def owed_first(compressor: hooks.Compressor) -> Tensor:
    return compressor.state_dict().get("owed", {}).get("first", torch.zeros(4800)).view(40, 60, 2).clone()


def complex_parameters_that_are_shared_are_reduced(wire_format: str) -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = torch.nn.Parameter(torch.zeros(40, 60, dtype=torch.complex64))

        def forward(self, given: Tensor) -> Tensor:
            return (self.first * given).sum().real + (self.second * given).sum().imag

    ddp = DistributedDataParallel(Shared())
    compressor = hooks.attach(ddp, wire_format)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = torch.randn(40, 60, dtype=torch.complex64, generator=generator)
        local = Shared()
        local(given).backward()
        ddp.zero_grad()
        before = owed_first(compressor)
        ddp(given).backward()
        sent = torch.view_as_real(local.first.grad) + before
        off = (torch.view_as_real(ddp.module.first.grad).double() - mean_of(sent - owed_first(compressor))).abs().amax()
        bound = (dist.get_world_size() + 2) / 512 if wire_format == "bf16" else 1e-5
        assert off <= bound * most_of(sent), off
    compressor.close()


def a_run_that_goes_on_from_its_state_has_the_same_bits(wire_format: str) -> None:
    def run(begin: int, end: int, state: dict[str, Any] | None, wrap: Any) -> tuple[list[Tensor], dict[str, Any]]:
        ddp = wrap(Products(), **SMALL)
        compressor = hooks.attach(ddp, wire_format)
        assert compressor.load_state_dict(state or {}) in (
            None,
            f"error feedback of {wire_format} starts at 0: the checkpoint has none",
        )
        for step in range(begin, end):
            ddp.zero_grad()
            ddp(gradients_of(step)).backward()
        kept = copy.deepcopy(compressor.state_dict())
        compressor.close()
        return [own.grad for own in ddp.module.parameters()], kept

    whole, _ = run(0, PLAIN + 4, None, PinnedBuckets)
    for cut in (3, PLAIN + 2):
        _, kept = run(0, cut, None, PinnedBuckets)
        _, again = run(cut, cut, kept, PinnedBuckets)  # saved before a step was made
        assert str(again) == str(kept)
        resumed, _ = run(cut, PLAIN + 4, again, PinnedBuckets)
        assert all(map(torch.equal, whole, resumed)), cut


def modules_share_a_thread_that_ends(wire_format: str) -> None:
    before = threading.active_count()
    pair = [DistributedDataParallel(Products(), **SMALL) for _ in range(2)]
    compressors = [hooks.attach(ddp, wire_format) for ddp in pair]
    for step in range(3):
        for ddp, compressor in zip(pair, compressors, strict=True):
            for name, made in make_step(ddp, compressor, gradients_of(step)).items():
                check(wire_format, step, name, made)
    is_threaded = wire_format != "bf16" and dist.get_world_size() > 1
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("allranks-compress") == is_threaded
    compressors[0].close()
    make_step(pair[1], compressors[1], gradients_of(3))
    compressors[1].close()
    assert threading.active_count() == before


def what_cannot_be_is_refused_in_a_line(wire_format: str) -> None:
    for module, second, why in (
        (torch.nn.Embedding(4, 3, sparse=True), False, "gradients of the module are sparse"),
        (torch.nn.Sequential(torch.nn.EmbeddingBag(4, 3, sparse=True)), False, "gradients of 0 are sparse"),
        (torch.nn.Linear(2, 2), True, "has a communication hook already, and takes only one"),
    ):
        ddp = DistributedDataParallel(module)
        if second:
            ddp.register_comm_hook(None, lambda _, bucket: None)
        with pytest.raises(ValueError, match=re.escape(why)) as refused:
            hooks.attach(ddp, wire_format)
        assert "\n" not in str(refused.value)


def main() -> None:
    with allranks.session(timeout_s=240) as s:
        for wire_format in hooks.FORMATS:
            for case in CASES if s.world_size in (1, 3) else CASES[:2]:
                case(wire_format)
                if s.is_leader:
                    print(s.world_size, wire_format, case.__name__, flush=True)


CASES = (
    the_mean_is_within_bounds,
    what_is_not_finite_shows_on_all_ranks_and_only_then,
    # With 1 and 3 ranks only.
    other_numbers_have_their_own_bounds,
    matrices_of_low_rank_come_whole,
    accumulated_gradients_are_sent_once,
    complex_parameters_that_are_shared_are_reduced,
    a_run_that_goes_on_from_its_state_has_the_same_bits,
    modules_share_a_thread_that_ends,
    what_cannot_be_is_refused_in_a_line,
)

if __name__ == "__main__":
    main()
