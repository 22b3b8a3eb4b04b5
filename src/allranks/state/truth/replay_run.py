"""Runs forward and backward of a batch where another rank would, and puts everything back.

    parcel = pack(batch, parts)                  what the result depends on: batch, state of modules, generators
    numbers = run(function, parcel, parts, ...)  of the gradients, by name; afterwards all is as it was

Weights are equal on all ranks. Sent is what may not be: buffers, and what modules have as attributes: tensors, and
numbers that the function changes; others may name a device of their rank. A replay works on copies of all tensors but
the weights, and on a copy of the batch, also on the rank whose batch it is. Put back are all attributes of modules and
of other parts, gradients, what a GradScaler knows of its optimizers, and the generators of random numbers. What a
script changes elsewhere (its own counters, inside of lists and dicts of modules, files) stays changed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch

from allranks.model.errors import UsageError
from allranks.state.resumed import rng
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved.pack import is_dtensor
from allranks.state.truth.contents import Contents
from allranks.state.truth.op_file import COLLECTIVES
from allranks.state.truth.ops import EagerMode

Replayed = Callable[[Any], object]
"""What the script gives to be replayed: forward and backward of a batch."""
Attribute = tuple[int, str]
"""A number that a module has: place in the order of `_places`, and key."""
Alone = Callable[[], AbstractContextManager[None]]
"""Returns the context in which each rank computes gradients of its own."""


def check(function: Replayed | None, every: int | None, parts: Mapping[str, Any]) -> tuple[Replayed, int]:
    """Return function and number of steps between replays; refuse with UsageError what can never be replayed."""
    if not callable(function):
        kind = type(function).__name__
        raise UsageError(f"track(replay={kind}): expected f(batch), which does forward and backward")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"track(replay_every={every!r}): expected steps, at least 1; for example replay_every=1000")
    modules = ((name, part) for name, part in parts.items() if isinstance(part, torch.nn.Module))
    for name, own in ((name, own) for name, part in modules for own in part.modules()):
        is_sharded = any(map(is_dtensor, own._parameters.values()))
        if is_sharded or isinstance(own, torch.nn.SyncBatchNorm):
            what = "is sharded" if is_sharded else "has SyncBatchNorm"
            raise UsageError(f"track(replay=): {name} {what}, so no single rank can repeat a step of it")
    if torch.backends.cudnn.benchmark and torch.cuda.is_available():
        raise UsageError(
            "track(replay=): torch.backends.cudnn.benchmark lets each rank choose other algorithms: switch it off"
        )
    return function, every


# What is sent


class _Pickler(pickle.Pickler):
    """Sends the elements of a tensor, and not the memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        file = io.BytesIO()
        torch.save(_copy(value), file)
        return _read_tensor, (file.getvalue(),)


def _read_tensor(data: bytes) -> torch.Tensor:
    def to_own_device(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage

    tensor: torch.Tensor = torch.load(io.BytesIO(data), map_location=to_own_device, weights_only=False)
    return tensor


def pack(batch: Any, parts: Parts, changing: Collection[Attribute] = ()) -> bytes:
    """Return what a rank has that the gradients of its batch depend on; of the modules' numbers, those in `changing`.

    Raises:
        UsageError: the batch holds something that cannot be sent.
    """
    state = [
        {key: own for key, own in place.items() if _is_state(own) or (number, key) in changing}
        for number, place in enumerate(_places(parts.modules))
    ]
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump((rng.capture(), state, batch))
    except Exception as exc:  # whatever an object of the script raises
        raise UsageError(f"track(replay=): the batch cannot be sent to another rank: {exc}") from exc
    return file.getvalue()


# What is run


def run(
    function: Replayed, parcel: bytes, parts: Parts, synchronization: Alone, *, changing: set[Attribute] | None = None
) -> dict[str, int]:
    """Return the number of each gradient that the function computes, by name, and put everything back.

    Args:
        changing: gets the numbers of modules that the function changes.
    Raises:
        Exception: whatever the function raises; everything is put back then, too.
    """
    with _as_before(parts):
        generators, state, batch = pickle.loads(parcel)
        for place, theirs in zip(_places(parts.modules), state, strict=True):
            place.update(theirs)  # an attribute of DDP may be in it, which the context sets
        numbers = _numbers(parts)
        with synchronization():
            rng.restore(generators)
            function(batch)
        if changing is not None:
            changing |= {place for place, own in _numbers(parts).items() if numbers.get(place) != own}
        return Contents.of(parts.gradients()).numbers()


def try_out(function: Replayed, batch: Any, parts: Parts, synchronization: Alone, changing: set[Attribute]) -> str:
    """Return why this function cannot be replayed; empty: it can. It is run three times.

    Args:
        changing: gets the numbers of modules that the function changes.
    Raises:
        UsageError: the batch cannot be sent.
        Exception: whatever the function raises.
    """
    parcel, watching = pack(batch, parts), _Watching()
    if _Watching.can_run_eager or not parts.is_compiled:
        with contextlib.suppress(Exception), watching:  # an operator that the mode does not know is none in the next
            run(function, parcel, parts, synchronization)
    if watching.found:
        return (
            f"it talks to other ranks ({watching.found}), and only some of them repeat a step; track the module as "
            f"s.ddp() returned it, and leave other collectives out"
        )
    weights, own = Contents.of({"": parts.parameters()}), {id(one) for one in _trained(parts)}
    others = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in own)
    outside = [one for one in others if one.is_leaf and one.requires_grad]  # while they are held, no id is another's
    before, gradients = weights.numbers(), _gradients_of(outside)
    first = run(function, parcel, parts, synchronization, changing=changing)
    if gradients != _gradients_of(outside):
        return "it leaves gradients in parameters that are not tracked, which nobody puts back: track their module, too"
    if changed := _find_unlike(before, weights.numbers()):
        return f"it changed {changed.removeprefix('/')}: it must do forward and backward only"
    if not first:
        return "it leaves no gradients in the tracked modules"
    if differing := _find_unlike(first, run(function, parcel, parts, synchronization)):
        return (
            f"the same batch gave other gradients the second time, in {differing}: the model is not deterministic "
            f"(torch.use_deterministic_algorithms), or the device computes wrongly"
        )
    return ""


class _Watching(EagerMode):
    """Stops the first collective."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            self.found = str(func)
            raise UsageError(self.found)
        return func(*args, **(kwargs or {}))


def _find_unlike(first: Mapping[str, int], second: Mapping[str, int]) -> str:
    return next((name for name in {**first, **second} if first.get(name) != second.get(name)), "")


def _gradients_of(leaves: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return what tells their gradients from others, and from themselves after a change."""
    return [(id(leaf.grad), -1 if leaf.grad is None else leaf.grad._version) for leaf in leaves]


@contextlib.contextmanager
def _as_before(parts: Parts) -> Iterator[None]:
    """Have copies of all tensors in the block, and no gradients; afterwards have what there was before."""
    places = [(place, dict(place)) for place in _places(parts.live)]
    gradients = {own: own.grad for own in _trained(parts)}
    scalers = [part for part in parts.live.values() if isinstance(part, torch.amp.GradScaler)]
    states, generators = [copy.deepcopy(own._per_optimizer_states) for own in scalers], rng.capture()
    try:
        for place, kept in places:
            place.update({key: _copy(own) for key, own in kept.items() if _is_state(own)})
        for parameter in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for place, kept in places:
            for key in place.keys() - kept.keys():
                del place[key]
            place.update(kept)
        for scaler, state in zip(scalers, states, strict=True):
            scaler._per_optimizer_states = state
        rng.restore(generators)


def _trained(parts: Parts) -> list[torch.Tensor]:
    return [*parts.parameters().values(), *parts.optimized()]


def _places(live: Mapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    for part in live.values():
        if isinstance(part, torch.nn.Module):
            for module in part.modules():
                yield module._buffers
                yield vars(module)
        elif not isinstance(part, torch.optim.Optimizer) and hasattr(part, "__dict__"):
            yield vars(part)


def _numbers(parts: Parts) -> dict[Attribute, float]:
    places = enumerate(_places(parts.modules))
    return {(at, key): own for at, place in places for key, own in place.items() if isinstance(own, bool | int | float)}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_state(value: Any) -> TypeGuard[torch.Tensor]:
    is_alone = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return is_alone and value.layout is torch.strided
