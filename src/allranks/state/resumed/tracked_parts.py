"""How do the tracked parts of a training go into a checkpoint, and back?

Names of parameters are those of the module itself, without what DDP, torch.compile and activation checkpointing put
into them, so a checkpoint fits the script with and without these. An optimizer's state is kept by the same names, in
the form of torch's `get_optimizer_state_dict`; as its own `state_dict` has it if a parameter is in no tracked module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.state.saved.pack import Packer, StateError, is_dtensor
from allranks.state.truth.odd_one import Role, part_of

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class Parts:
    """What `track()` was given.

    Raises:
        UsageError: one has no state, or one that no checkpoint can hold.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"track({name}={type(part).__name__}): expected something with state_dict, or an option of track()"
                )
        self.live = {name: _inner(part) for name, part in parts.items()}
        """Without the wrappers of modules."""
        self.modules = {name: part for name, part in self.live.items() if isinstance(part, torch.nn.Module)}
        inside = [own for part in parts.values() if isinstance(part, torch.nn.Module) for own in part.modules()]
        self.is_compiled = any("_orig_mod" in own._modules or own._compiled_call_impl is not None for own in inside)
        sharded = [own for own in inside if "NO_SHARD" not in str(getattr(own, "sharding_strategy", ""))]
        if any(kind.__name__ == "FullyShardedDataParallel" for own in sharded for kind in type(own).__mro__):
            raise UsageError(
                "track(): of FullyShardedDataParallel (FSDP1) each rank has an optimizer state of its own, and a "
                "checkpoint would hold rank 0's alone: use fully_shard (FSDP2)"
            )
        for name, state in self.state().items():
            try:
                Packer().pack(state, name)
            except StateError as exc:
                raise UsageError(f"track(): {exc}") from exc

    def state(self) -> dict[str, Any]:
        """Return the state of each."""
        return {name: self._state_of(part) for name, part in self.live.items()}

    def like(self) -> dict[str, Any]:
        """Return `state`, with parameters in the place of state that their optimizer does not have yet."""
        states = self.state()
        for name, part in self.live.items():
            if keys := _keys(part, states[name]):
                kept = dict(zip(keys, _owned(part), strict=True)) | states[name]["state"]
                states[name] = states[name] | {"state": kept}
        return states

    def load(self, kept: Mapping[str, Any]) -> None:
        """Put back what `state` returned; a part that is not in it stays as it is.

        Raises:
            UsageError: an optimizer has other parameters in one of its groups.
        """
        for name in kept.keys() & self.live.keys():
            part, state = self.live[name], kept[name]
            if name in self.modules:
                own = {_plain(part, key): key for key in part.state_dict()}
                state = {own.get(key, key): value for key, value in state.items()}
            elif keys := _keys(part, part.state_dict()):
                if "param_groups" not in state:
                    raise UsageError(
                        f"{name} made local steps in the checkpoint, and does not here: wrap it in local_sgd(), or "
                        f"begin with an empty checkpoint directory"
                    )
                here = self._state_of(part)["param_groups"]
                for at, (old, new) in enumerate(zip(state["param_groups"], here, strict=False)):
                    if odd := sorted(map(str, {*old["params"]} ^ {*new["params"]})):
                        raise UsageError(
                            f"parameter group {at} of {name} is another one in the checkpoint: only one of the two has "
                            f"{', '.join(odd[:3])}{' ...' * (len(odd) > 3)}"
                        )
                    old["params"] = new["params"]  # torch goes by their order
                state = _rename(state, dict(zip(self._names(part) or keys, keys, strict=True)))
            part.load_state_dict(state)

    def own(self, *, accumulates: bool) -> dict[str, Any]:
        """Return what only this rank has: state of optimizers that make local steps, and accumulated gradients."""
        inner = {name: part.own_state_dict() for name, part in self.live.items() if hasattr(part, "own_state_dict")}
        return ({"inner": inner} if inner else {}) | ({"gradients": self.gradients()} if accumulates else {})

    def load_inner(self, kept: Mapping[str, Any]) -> None:
        """Put back what `own` returned of optimizers."""
        for name in kept.keys() & self.live.keys():
            if hasattr(self.live[name], "load_own_state_dict"):
                self.live[name].load_own_state_dict(kept[name])

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return those of all modules, by part and name."""
        named = {part: _named(module) for part, module in self.modules.items()}
        return {f"{part}/{key}": own for part, pairs in named.items() for key, own in pairs}

    def roles(self, names: Iterable[str]) -> dict[str, Role]:
        """Return who changes each tensor, by the part and path that name it."""
        owners = {part: own for part, own in self.live.items() if hasattr(own, "param_groups")}
        optimized = {id(one) for own in owners.values() for group in own.param_groups for one in group["params"]}
        parameters = self.parameters()
        roles = dict.fromkeys(names, Role.OTHER)
        for name in roles:
            if name in parameters:
                is_trained = not optimized or id(parameters[name]) in optimized
                roles[name] = Role.TRAINED if is_trained else Role.WEIGHT
            elif part_of(name) in owners:
                roles[name] = Role.TRAINED
        return roles

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that make the same steps on all ranks."""
        whole = [part for part in self.live.values() if isinstance(part, torch.optim.Optimizer)]
        return [part for part in whole if not hasattr(part, "own_state_dict")]

    def optimized(self) -> list[torch.Tensor]:
        """Return the parameters that these change."""
        return [own for optimizer in self.optimizers for group in optimizer.param_groups for own in group["params"]]

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what has been accumulated on this rank; of sharded parameters, its shards."""
        return {
            name: {key: _local(own.grad) for key, own in _named(module) if own.grad is not None}
            for name, module in self.modules.items()
        }

    def load_gradients(self, kept: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put back what `gradients` returned."""
        for name, module in self.modules.items():
            for key, own in _named(module):
                if key in kept.get(name, ()):
                    own.grad = torch.zeros_like(own, requires_grad=False)
                    _local(own.grad).copy_(kept[name][key])

    def _state_of(self, part: Any) -> Any:
        state = part.state_dict()
        if isinstance(part, torch.nn.Module):
            return {_plain(part, key): value for key, value in state.items()}
        keys = _keys(part, state)
        names = self._names(part) if keys else []
        return _rename(state, dict(zip(keys, names, strict=True))) if names else state

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of its parameters in the first module that has them all, else behind the part's name, else none."""
        named = {part: _named(module) for part, module in self.modules.items()}
        by_module = [{own: key for key, own in pairs} for pairs in named.values()]
        both = {own: f"{part}.{key}" for part, pairs in named.items() for key, own in pairs}
        owned = _owned(optimizer)
        return next(([names[own] for own in owned] for names in (*by_module, both) if names.keys() >= {*owned}), [])


def _keys(part: Any, state: Any) -> list[Any]:
    """The keys of an optimizer's parameters in its state, in their order; none if the state is not in torch's form."""
    if not isinstance(part, torch.optim.Optimizer) or not {"state", "param_groups"} <= state.keys():
        return []
    keys = [key for group in state["param_groups"] for key in group.get("params", ())]
    return keys if len({*keys}) == len(keys) == len(_owned(part)) else []


def _owned(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _rename(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other keys, without torch's `param_names`: they have the names of wrappers in them."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    kept = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}


def _inner(part: Any) -> Any:
    """The module itself, without DDP and torch.compile around it."""
    while isinstance(part, DistributedDataParallel) or "_orig_mod" in getattr(part, "_modules", ()):
        part = part.module if isinstance(part, DistributedDataParallel) else part._orig_mod
    return part


def _plain(module: torch.nn.Module, key: str) -> str:
    """The key of a module's state without the names of wrappers inside of it."""
    words, at = [], module
    for word in key.split("."):
        if word not in _WRAPPERS and not (word == "module" and isinstance(at, DistributedDataParallel)):
            words.append(word)
        at = getattr(at, "_modules", {}).get(word)
    return ".".join(words)


def _named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(_plain(module, key), own) for key, own in module.named_parameters()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
