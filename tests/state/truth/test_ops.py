"""The recorder of operations: what it sees, on which threads, and what does not count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from allranks.state.truth import ops
from allranks.state.truth.first_difference import DifferenceKind, find_first
from allranks.state.truth.op_file import BATCH, Op
from allranks.state.truth.ops import OpRecorder

pytestmark = pytest.mark.torch


def record(script: Callable[[], object], *, batch: Any = None, **modules: torch.nn.Module) -> list[Op]:
    recorder = OpRecorder(lambda: modules)
    if batch is not None:
        recorder.begin([batch])
    with recorder:
        script()
    return recorder.ops


def by_name(found: list[Op], name: str) -> Op:
    return next(own for own in found if own.name.startswith(f"aten.{name}."))


def test_an_operation_has_its_line_module_dtypes_and_the_numbers_of_what_it_read_and_made() -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.ones(4, 3)
    y = torch.zeros(4, 2)

    def script() -> None:
        y.copy_(net(x).detach())

    addmm = by_name(record(script, **{"model": net, "model.0": net[0]}), "addmm")
    assert addmm.line.startswith("test_ops.py:")
    assert addmm.module == "model.0"
    assert [value.form for value in addmm.inputs] == ["float32[2]", "float32[4, 3]", "float32[3, 2]"]
    assert addmm.outputs[0].number == by_name(record(lambda: y + 0), "add").inputs[0].number


def test_small_tensors_take_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 30 calls of torch for each operation made recorded steps of a tiny model 55 times slower than plain ones."""
    numbered = list[torch.Tensor]()
    monkeypatch.setattr(ops, "fingerprint", lambda tensors: numbered.extend(tensors) or [1] * len(tensors))
    small, large = torch.ones(16384), torch.ones(16385)
    found = [by_name(record(script), "add") for script in (lambda: small + 1, lambda: small + 2, lambda: large + 1)]
    assert [tuple(own.shape) for own in numbered] == [(16385,)] * 2
    assert found[0].inputs == found[1].inputs != found[0].outputs
    assert found[0].outputs != found[1].outputs


def test_backward_operations_are_seen_and_have_the_line_and_module_of_the_forward_one() -> None:
    net = torch.nn.Linear(3, 2)
    found = record(lambda: net(torch.ones(4, 3)).relu().sum().backward(), model=net)
    backward = by_name(found, "mm")
    assert backward.line.startswith("backward of test_ops.py:")
    assert backward.module == "model"


def test_backward_operations_on_a_thread_of_autograd_are_seen() -> None:
    seen = set[int]()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.add(threading.get_native_id())
            return gradient.cosh()

    def nest(x: torch.Tensor, depth: int) -> torch.Tensor:
        if not depth:
            return Noting.apply(x)
        return checkpoint(nest, x, depth - 1, use_reentrant=True) * 1.0  # a backward pass in a backward pass

    x = torch.ones(2, requires_grad=True)
    found = record(lambda: nest(x, 70).sum().backward())
    assert seen - {threading.get_native_id()}
    assert by_name(found, "cosh")


def test_what_is_only_overwritten_and_what_is_left_in_empty_memory_does_not_count() -> None:
    def script(left: float) -> None:
        x, one = torch.full((5,), left), torch.arange(5.0)
        for write in (x.zero_, lambda: x.copy_(one), lambda: torch.mul(one, 2, out=x), lambda: x.normal_(0, 1)):
            with torch.utils._python_dispatch._disable_current_modes():
                x.fill_(left)
            write()
        torch.empty(7).fill_(3.0).mul_(2.0)

    def seeded(left: float) -> list[Op]:
        torch.manual_seed(3)
        return [own for own in record(lambda: script(left)) if own.name != "aten.full.default"]

    assert find_first([(0, seeded(1.0), seeded(2.0))]) is None


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x[1:].mul_(2), lambda x: torch._foreach_add_([x], 1.0)]
)
def test_a_number_is_not_kept_over_a_write(write: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)

    def script() -> None:
        x.exp()
        write(x)
        x.cos()

    found = record(script)
    assert by_name(found, "exp").inputs[0].number != by_name(found, "cos").inputs[0].number
    assert by_name(found, "cos").inputs == by_name(record(x.cos), "cos").inputs


def test_what_the_receiver_of_a_broadcast_has_left_does_not_count() -> None:
    """A process group of one rank; that its root is another rank is what the operation is told."""
    form = ops._form_of(torch.ops.c10d.broadcast_.default)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # No name for the boxed group: as the last reference it would end Gloo's threads with the GIL held, and one of
        # them may wait for the GIL to let go of a tensor.
        is_given = [
            ops._only_receives(form, {"process_group": dist.group.WORLD.boxed(), "root_rank": root}) for root in (0, 1)
        ]
        found = record(lambda: dist.broadcast(torch.ones(2), 0))
    finally:
        dist.destroy_process_group()
    assert is_given == [False, True]
    (sent,) = [own for own in found if own.is_collective]
    assert [value.form for value in sent.inputs] == ["float32[2]"]


def test_generators_are_recorded_where_random_numbers_are_drawn() -> None:
    def script() -> None:
        torch.manual_seed(5)
        torch.rand(2)
        torch.rand(2, generator=torch.Generator().manual_seed(1))
        torch.ones(2)

    drawn = [own.generator for own in record(script)]
    assert all(drawn[:2])
    assert drawn[0] != drawn[1]
    assert drawn[-1] == ""


def test_the_batch_and_python_numbers_are_recorded() -> None:
    found = record(lambda: torch.ones(2).mul_(0.5), batch=(torch.ones(2), "text"))
    assert (found[0].name, [value.form for value in found[0].inputs]) == (BATCH, ["float32[2]"])
    assert found[0].settings.startswith("Python values ")
    other = record(lambda: torch.ones(2).mul_(0.25), batch=(torch.ones(2), "text"))
    difference = find_first([(0, found, other)])
    assert difference is not None
    assert difference.kind in (DifferenceKind.SETTING, DifferenceKind.INPUT)


def test_a_batch_has_its_tensors_at_all_places_whatever_shares_its_memory() -> None:
    x, equal = torch.ones(2), torch.ones(2)
    assert record(lambda: None, batch=(x, x)) == record(lambda: None, batch=(x, equal))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports the compiler
def test_compiled_code_runs_eager() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.sinh()

    assert by_name(record(lambda: torch.compile(double)(torch.ones(2))), "sinh")
