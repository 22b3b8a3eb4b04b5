"""How do the tracked parts of a training go into a checkpoint, and back?

Names of parameters are those of the module itself: without DDP around it, and without the `_orig_mod.` of
torch.compile, so a checkpoint fits the script with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.state.saved.pack import Packer, StateError

_COMPILED = "_orig_mod."


class Parts:
    """What `track()` was given.

    Args:
        parts: by name.
    Raises:
        UsageError: one has no state, or one that no checkpoint can hold.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(f"track({name}={type(part).__name__}): expected something with state_dict")
        self.live = {name: _inner(part) for name, part in parts.items()}
        self._modules = {name: part for name, part in self.live.items() if isinstance(part, torch.nn.Module)}
        for name, state in self.state().items():
            try:
                Packer().pack(state, name)
            except StateError as exc:
                raise UsageError(f"track(): {exc}") from exc

    def state(self) -> dict[str, Any]:
        """Return the state of each."""
        return {name: _state_of(part) for name, part in self.live.items()}

    def load(self, kept: Mapping[str, Any]) -> None:
        """Put back what `state` returned; a part that is not in it stays as it is."""
        for name in kept.keys() & self.live.keys():
            part, state = self.live[name], kept[name]
            if name in self._modules:
                names = {own.replace(_COMPILED, ""): own for own in part.state_dict() if _COMPILED in own}
                state = {names.get(key, key): value for key, value in state.items()} if names else state
            part.load_state_dict(state)

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what has been accumulated on this rank; of sharded parameters, its shards."""
        return {
            name: {key: _local(own.grad) for key, own in _named(module) if own.grad is not None}
            for name, module in self._modules.items()
        }

    def load_gradients(self, kept: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put back what `gradients` returned."""
        for name, module in self._modules.items():
            for key, own in _named(module):
                if key in kept.get(name, ()):
                    own.grad = torch.zeros_like(own, requires_grad=False)
                    _local(own.grad).copy_(kept[name][key])

    def shape_sharded_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Give optimizers of sharded parameters (FSDP2) the state that a step makes, for the shards to go into."""
        shaped = {}
        for name, part in self.live.items():
            if isinstance(part, torch.optim.Optimizer) and not part.state and _has_shards(part):
                get_optimizer_state_dict(torch.nn.ModuleList(self._modules.values()), part)
                shaped[name] = part
        return shaped


def _inner(part: Any) -> Any:
    """The module itself, without DDP and torch.compile around it."""
    while isinstance(part, DistributedDataParallel) or "_orig_mod" in getattr(part, "_modules", ()):
        part = part.module if isinstance(part, DistributedDataParallel) else part._orig_mod
    return part


def _state_of(part: Any) -> Any:
    state = part.state_dict()
    if isinstance(part, torch.nn.Module) and any(_COMPILED in key for key in state):
        state = {key.replace(_COMPILED, ""): value for key, value in state.items()}
    return state


def _named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(key.replace(_COMPILED, ""), own) for key, own in module.named_parameters()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])
