"""A script that knows nothing of `allranks run --compress`, in all the ways in which scripts use DDP."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH = 512
"""A layer fills a bucket of 1 MiB."""
AS_IT_IS = torch.nn.Identity()


class Branches(torch.nn.Module):
    """Each rank uses another branch of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(dist.get_world_size() + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.own[dist.get_rank()](x)
        return used


class Centered(torch.autograd.Function):
    """Calls collectives of its own in both passes, as SyncBatchNorm does, which DDP has on GPUs only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - mean_of_all(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad - mean_of_all(grad)


def mean_of_all(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(0)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


class Normed(torch.nn.Module):
    """With collectives between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = Centered.apply(layer(x))
        return x


class Own(DistributedDataParallel):
    """Somebody's subclass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Those of all parameters, flat; zeros for one that was not used."""
    return torch.cat([own.flatten() * 0 if own.grad is None else own.grad.flatten() for own in model.parameters()])


def train(name: str, ddp: Any, *, call: Callable[[Any], Any] | None = None, behind: torch.nn.Module = AS_IT_IS) -> None:
    """Take steps, and hold the gradients against the exact mean of those that the ranks compute alone."""
    call = ddp if call is None else call
    alone, rank = copy.deepcopy(ddp.module), dist.get_rank()
    worst = 0.0
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, WIDTH)
        for model in (ddp, alone):
            model.zero_grad()
        with ddp.no_sync() if step == 1 else contextlib.nullcontext():  # a micro-batch that is only added
            call(x).square().mean().backward()
        behind(alone(x)).square().mean().backward()
        if step == 1:
            continue
        got, exact = gradients(ddp.module), gradients(alone)
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        seen = [torch.empty_like(got) for _ in range(dist.get_world_size())]
        dist.all_gather(seen, got)
        assert all(torch.equal(got, other) for other in seen), f"{name}: the ranks have other gradients"
        worst = max(worst, ((got - exact).norm() / exact.norm()).item())
    hook = ddp._get_ddp_logging_data().get("comm_hook") or "none"
    if rank == 0:
        print(f"{name}: {hook}, {ddp.bucket_bytes_cap / 2**20:.3g} MiB, {'exact' if worst < 1e-6 else 'near'}")
    assert worst < 0.05, f"{name}: {worst}"


def main() -> None:
    dist.init_process_group("gloo")
    first = DistributedDataParallel(net())
    if dist.get_rank() == 0:  # tries its model, alone
        with torch.no_grad():
            first(torch.ones(2, WIDTH))
    train("plain", first)
    train("copied", copy.deepcopy(first))
    train("pickled", pickle.loads(pickle.dumps(first)))
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "a DDP with a hook is never freed"
    train("own bucket", DistributedDataParallel(net(), bucket_cap_mb=2))
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, allreduce_hook)
    train("own hook", hooked)
    train("copy of it", copy.deepcopy(hooked))
    built_in = DistributedDataParallel(net())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train("built-in hook", built_in)
    train("subclass", Own(net()))
    train("unused", DistributedDataParallel(Branches(), find_unused_parameters=True))
    train("static", DistributedDataParallel(net(), static_graph=True))
    train("collectives of its own", DistributedDataParallel(Normed()))
    both = DistributedDataParallel(net()), DistributedDataParallel(net())
    train("two at once", both[0], call=lambda x: both[1](both[0](x)), behind=copy.deepcopy(both[1].module))
    compiled = DistributedDataParallel(net())
    train("compiled", compiled, call=torch.compile(compiled, backend="eager"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
