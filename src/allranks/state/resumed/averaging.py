"""How are gradients weighted, so that a step gives the same result at any number of ranks?

DDP averages the gradients of ranks. Where rank r has m of the step's M samples, and W ranks take part, the average
over samples needs its gradient at m W / M: exactly 1 where the ranks share evenly, which is nearly always, and then
nothing is done. Else every gradient of the rank is multiplied on its way into `.grad`. The factors of all ranks and
micro batches add up to W, so a term of the loss that no sample has a part in (a norm of the weights) counts once, as
it should.

FSDP2 divides the sum over ranks by one number that is the same on all of them. So it can weigh micro batches, but only
of ranks that share a step evenly. A module that no optimizer steps (an EMA, a teacher) has no gradients to weigh.

The learning rate belongs to the global batch, which stays, and not to the number of ranks that are alive.

Between two synchronizations of an optimizer that makes local steps (`Local`), a rank's gradient is the mean over its
own samples, and the optimizer weighs the ranks' weights by what it is told of their samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.resumed.sampler import Sampler, Share


@runtime_checkable
class Local(Protocol):
    """An optimizer whose ranks have different weights between two synchronizations: comm.local has one."""

    is_apart: bool
    """The next step is a local one."""
    is_synchronized: bool
    """All ranks have the same weights."""

    def count(self, samples: int) -> None:
        """Hear how many samples of this rank the next step has."""

    def synchronize(self) -> None:
        """Bring the ranks together now, if they are apart; all ranks call it."""


class Averaging:
    """The gradients of all tracked modules.

    Args:
        parts: that are tracked, by name. DDP and FSDP2 are found inside of them, also of a compiled module.
    Raises:
        UsageError: local steps would not be counted alike on all ranks, or not saved.
    """

    def __init__(self, parts: Mapping[str, Any], membership: Membership) -> None:
        modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        inside = [part for module in modules.values() for part in module.modules()]
        self._membership = membership
        self._local = [part for part in parts.values() if isinstance(part, Local)]
        self._ddp = [part for part in inside if isinstance(part, DistributedDataParallel)]
        self._sharded: list[Any] = [part for part in inside if hasattr(part, "set_gradient_divide_factor")]
        if any(getattr(part, "local_optimizer", None) not in (None, *self._local) for part in self._ddp):
            raise UsageError("track(): the module makes local steps, so track the optimizer that local_sgd() returned")
        if self._local and any(isinstance(part, torch.amp.GradScaler) for part in parts.values()):
            raise UsageError(
                "track(): a GradScaler skips steps of single ranks, but all ranks must make the same number of local "
                "steps: use bfloat16, which needs no scaler"
            )
        in_ddp, sharded = _parameters(*self._ddp), _parameters(*self._sharded)
        weighed = in_ddp if membership.world_size > 1 else _parameters(*modules.values())
        self._weight = GradientWeight(own for key, own in weighed.items() if key not in sharded)
        self._divisor = float(membership.world_size)
        groups = [group for part in parts.values() for group in getattr(part, "param_groups", ())]
        trained = {id(own) for group in groups for own in group["params"]}
        self._even: list[str] = []
        """Modules that can be averaged over even shares only."""
        self._whole: list[str] = []
        """Those of them whose micro batches cannot be weighed."""
        for name, module in modules.items() if membership.world_size > 1 else ():
            outside = (_parameters(module).keys() & trained if groups else _parameters(module).keys()) - in_ddp.keys()
            self._even += [name] * bool(outside)
            self._whole += [name] * bool(outside - sharded.keys())

    def check(self, sampler: Sampler) -> None:
        """Refuse with UsageError a module outside of DDP where shares are uneven, or come in micro batches."""
        size, ranks = sampler.global_batch_size, self._membership.world_size
        odd = f"{', '.join(self._even)} is not in DDP, so only even slices can be averaged: "
        if self._even and size % ranks:
            raise UsageError(f"{odd}global_batch_size is {size} at {ranks} ranks; take a multiple, or s.ddp()")
        if self._even and (last := sampler.epoch_size % size) % ranks:
            raise UsageError(
                f"{odd}the last batch of an epoch has {last} samples for {ranks} ranks; use drop_last=True, or s.ddp()"
            )
        if self._whole and sampler.micro_batch_size is not None:
            raise UsageError(
                f"{', '.join(self._whole)} is neither in DDP nor in FSDP2, so micro batches cannot be averaged: leave "
                f"micro_batch_size out, or use s.ddp()"
            )

    def begin(self, share: Share | None, part: int, is_last: bool) -> None:
        """Weigh the next backward pass.

        Args:
            share: what the step means for this rank; None: not known, and nothing is weighed.
            part: place of the micro batch in the step.
            is_last: it is the step's last one, in which DDP brings the ranks together.
        """
        is_apart = any(local.is_apart for local in self._local)
        if share is not None:
            for local in self._local:
                local.count(len(share.own))
            ranks, total = (1, max(len(share.own), 1)) if is_apart else (self._membership.world_size, share.total)
            self._weight.set(gradient_factor(share.parts[part], total, ranks))
            divisor = share.total / max(share.parts[part], 1)
            if divisor != self._divisor:
                self._divisor = divisor
                for module in self._sharded:
                    module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply before it adds up
                    module.set_gradient_divide_factor(divisor)
        for module in self._ddp:
            module.require_backward_grad_sync = is_last and not is_apart

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Have each rank compute gradients of its own in the block, as they are: not weighed, and not averaged."""
        names, factor = ("require_backward_grad_sync", "require_forward_param_sync"), self._weight.factor
        before = [(module, name, getattr(module, name)) for module in self._ddp for name in names]
        self._weight.set(1.0)
        for module, name, _ in before:
            setattr(module, name, False)
        try:
            yield
        finally:
            self._weight.set(factor)
            for module, name, value in before:
                setattr(module, name, value)

    def rebuild_buckets(self) -> None:
        """Do what DDP would do in its next forward pass, together: after its first synchronized backward pass that is a
        collective, also where gradients are not synchronized. All ranks call it."""
        for module in self._ddp:
            if torch.is_grad_enabled() and (reducer := getattr(module, "reducer", None)) is not None:
                reducer._rebuild_buckets()

    @property
    def counts_passes(self) -> bool:
        """Whether a module expects that each backward pass is one of a step."""
        return any(module.static_graph for module in self._ddp)

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights, so that rank 0's are those of the training."""
        return all(local.is_synchronized for local in self._local)

    def synchronize(self) -> None:
        """Bring ranks together that are apart; all ranks call it."""
        for local in self._local:
            local.synchronize()


def gradient_factor(samples: int, total: int, world_size: int) -> float:
    """What to multiply a rank's gradient with, so that DDP's average over ranks is the average over samples.

    >>> gradient_factor(4, 16, 4), gradient_factor(4, 16, 5), gradient_factor(0, 16, 5)
    (1.0, 1.25, 0.0)

    Args:
        samples: over which the loss of this backward pass is a mean; 0 where its sample only fills in.
        total: samples of the step, on all ranks.
    """
    return samples * world_size / total


class GradientWeight:
    """Multiplies all gradients of these parameters by one factor; costs nothing while it is 1."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self.factor = 1.0
        """Of the next backward passes."""

    def set(self, factor: float) -> None:
        """Have the next backward passes use this factor."""
        self.factor = factor
        if factor == 1.0:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        elif not self._handles:
            self._handles = [parameter.register_hook(self._weigh) for parameter in self._parameters]

    def _weigh(self, gradient: Tensor) -> Tensor:
        # A sample that only fills in may have a gradient that is no number; 0 times that would stay none.
        return gradient * self.factor if self.factor else torch.zeros_like(gradient)


def _parameters(*modules: torch.nn.Module) -> dict[int, torch.Tensor]:
    return {id(own): own for module in modules for own in module.parameters()}
