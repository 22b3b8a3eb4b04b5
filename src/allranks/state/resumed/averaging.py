"""Which gradients of a training are weighed, and how? Those in DDP by hooks, those in FSDP2 by what it divides by.

FSDP2 divides the sum over ranks by one number that is the same on all of them. So it can weigh micro batches, but only
of ranks that share a step evenly. A module that no optimizer steps (an EMA, a teacher) has no gradients to weigh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.resumed.sampler import Sampler, Share
from allranks.state.resumed.scaling import GradientWeight, gradient_factor


class Averaging:
    """The gradients of all tracked modules.

    Args:
        parts: that are tracked, by name. DDP and FSDP2 are found inside of them, also of a compiled module.
    """

    def __init__(self, parts: Mapping[str, Any], membership: Membership) -> None:
        modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        inside = [part for module in modules.values() for part in module.modules()]
        self._membership = membership
        self._ddp = [part for part in inside if isinstance(part, DistributedDataParallel)]
        self._sharded: list[Any] = [part for part in inside if hasattr(part, "set_gradient_divide_factor")]
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
        """Refuse what cannot be averaged.

        Raises:
            UsageError: a module is not in DDP, and the ranks' shares are uneven, or come in micro batches.
        """
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
        if share is not None:
            self._weight.set(gradient_factor(share.parts[part], share.total, self._membership.world_size))
            divisor = share.total / max(share.parts[part], 1)
            if divisor != self._divisor:
                self._divisor = divisor
                for module in self._sharded:
                    module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply before it adds up
                    module.set_gradient_divide_factor(divisor)
        for module in self._ddp:
            module.require_backward_grad_sync = is_last


def _parameters(*modules: torch.nn.Module) -> dict[int, torch.Tensor]:
    return {id(own): own for module in modules for own in module.parameters()}
