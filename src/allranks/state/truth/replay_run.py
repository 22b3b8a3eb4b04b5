"""Runs forward and backward of a batch where another rank would, and puts everything back.

    parcel = pack(batch, parts)                  what the result depends on: batch, state of modules, generators
    numbers = run(function, parcel, parts, ...)  of the gradients, by name; afterwards all is as it was

Weights are equal on all ranks. Sent is what may not be: buffers, and what modules have as attributes: tensors, and
numbers that the function changes; others may name a device of their rank. Put back are all of these and plain text,
those of other parts, gradients, what a GradScaler knows of its optimizers, and the generators of random numbers. A
replay works on a copy of the batch, also on the rank whose batch it is. What a script changes elsewhere (its own
counters, lists and dicts of modules, files) stays changed.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, TypeGuard

import torch

from allranks.model.errors import UsageError
from allranks.state.resumed import rng
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved.pack import is_dtensor
from allranks.state.truth.contents import Contents
from allranks.state.truth.ops import EagerMode

Replayed = Callable[[Any], object]
"""What the script gives to be replayed: forward and backward of a batch."""
Synchronization = AbstractContextManager[None]
_NUMBERS = (bool, int, float)
_PLAIN = (*_NUMBERS, str, type(None))


_TALKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's collectives as operators."""


class Attribute(NamedTuple):
    """A number that a module has."""

    place: int
    """In the order of `_places`."""
    key: str


def check(function: Replayed | None, every: int | None, parts: Mapping[str, Any]) -> tuple[Replayed, int]:
    """Return the function, and the number of steps between replays; refuse with UsageError what can never be replayed.

    Args:
        parts: that are tracked.
    """
    if not callable(function):
        kind = type(function).__name__
        raise UsageError(f"track(replay={kind}): expected f(batch), which does forward and backward")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"track(replay_every={every!r}): expected steps, at least 1; for example replay_every=1000")
    modules = {name: [*part.modules()] for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    for name, inside in modules.items():
        is_sharded = any(type(own).__name__ == "FullyShardedDataParallel" for own in inside)
        if is_sharded or any(is_dtensor(own) for module in inside for own in module.parameters(recurse=False)):
            raise UsageError(f"track(replay=): {name} is sharded, so no single rank can repeat a step of it")
        if any(isinstance(own, torch.nn.SyncBatchNorm) for own in inside):
            raise UsageError(f"track(replay=): {name} has SyncBatchNorm, so no single rank can repeat a step of it")
    if torch.backends.cudnn.benchmark and torch.cuda.is_available():
        raise UsageError(
            "track(replay=): torch.backends.cudnn.benchmark lets each rank choose other algorithms: switch it off"
        )
    return function, every


# What is sent


class _BatchPickler(pickle.Pickler):
    """Sends the elements of a tensor, and not the memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        file, own = io.BytesIO(), value.detach().clone().requires_grad_(value.requires_grad)
        torch.save(own, file)
        return _read_tensor, (file.getvalue(),)


def pack(batch: Any, parts: Parts, changing: Collection[Attribute] = ()) -> bytes:
    """Return what a rank has that the gradients of its batch depend on.

    Args:
        changing: numbers that the function changes.
    Raises:
        UsageError: the batch holds something that cannot be sent.
    """
    file = io.BytesIO()
    try:
        _BatchPickler(file, protocol=5).dump((rng.capture(), _sendable(parts, changing), batch))
    except Exception as exc:  # whatever an object of the script raises
        raise UsageError(f"track(replay=): the batch cannot be sent to another rank: {exc}") from exc
    return file.getvalue()


def _read_tensor(data: bytes) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(data), map_location=_to_own_device, weights_only=False)
    return tensor


def _to_own_device(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage


def _sendable(parts: Parts, changing: Collection[Attribute]) -> list[dict[str, Any]]:
    """What each module has as attributes and buffers, in the order of `_places`; no text, which may name a device."""
    return [
        {
            key: own
            for key, own in place.items()
            if _is_state(own) or (isinstance(own, _NUMBERS) and (number, key) in changing)
        }
        for number, place in enumerate(_places(parts.modules))
    ]


def _numbers(parts: Parts) -> dict[Attribute, float]:
    return {
        Attribute(number, key): own
        for number, place in enumerate(_places(parts.modules))
        for key, own in place.items()
        if isinstance(own, _NUMBERS)
    }


# What is run


def run(
    function: Replayed,
    parcel: bytes,
    parts: Parts,
    synchronization: Callable[[], Synchronization],
    *,
    changing: set[Attribute] | None = None,
) -> dict[str, int]:
    """Return the number of each gradient that the function computes, by name, and put everything back.

    Args:
        synchronization: returns the context in which ranks compute gradients of their own.
        changing: gets the numbers of modules that the function changes.
    Raises:
        Exception: whatever the function raises.
    """
    before = _Before(parts)
    try:
        generators, state, batch = pickle.loads(parcel)
        before.begin(state)  # an attribute of DDP may be in it, which the context sets
        numbers = _numbers(parts) if changing is not None else {}
        with synchronization():
            rng.restore(generators)
            function(batch)
        if changing is not None:
            changing |= {
                place for place, own in _numbers(parts).items() if place not in numbers or numbers[place] != own
            }
        return Contents.of(parts.gradients()).numbers()
    finally:
        before.put_back()


def try_out(
    function: Replayed,
    batch: Any,
    parts: Parts,
    synchronization: Callable[[], Synchronization],
    changing: set[Attribute],
) -> str:
    """Return why this function cannot be replayed; empty: it can. It is run three times.

    Args:
        changing: gets the numbers of modules that the function changes.
    Raises:
        UsageError: the batch cannot be sent.
        Exception: whatever the function raises.
    """
    parcel, watching = pack(batch, parts), _Watching()
    if _Watching.can_run_eager or not parts.is_compiled:
        with suppress(Exception), watching:  # an operator that the mode does not know raises nothing in the next run
            run(function, parcel, parts, synchronization)
    if watching.found:
        return (
            f"it talks to other ranks ({watching.found}), and only some of them repeat a step; track the module as "
            f"s.ddp() returned it, and leave other collectives out"
        )
    before, outside = _weights(parts), _parameters_outside(parts)
    gradients = [*map(_gradient_of, outside)]
    first = run(function, parcel, parts, synchronization, changing=changing)
    if gradients != [*map(_gradient_of, outside)]:
        return "it leaves gradients in parameters that are not tracked, which nobody puts back: track their module, too"
    if changed := [name for name, own in _weights(parts).items() if own != before[name]]:
        return f"it changed {changed[0].removeprefix('/')}: it must do forward and backward only"
    if not first:
        return "it leaves no gradients in the tracked modules"
    second = run(function, parcel, parts, synchronization)
    if differing := [name for name in {**first, **second} if first.get(name) != second.get(name)]:
        return (
            f"the same batch gave other gradients the second time, in {differing[0]}: the model is not deterministic "
            f"(torch.use_deterministic_algorithms), or the device computes wrongly"
        )
    return ""


def _parameters_outside(parts: Parts) -> list[torch.Tensor]:
    """Return the parameters of this process that no part has."""
    own = {id(one) for one in (*parts.parameters().values(), *parts.optimized())}
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return [one for one in found if one.is_leaf and one.requires_grad and id(one) not in own]


def _gradient_of(one: torch.Tensor) -> tuple[int, int]:
    """Return what tells a gradient from another one, and from itself after a change."""
    return id(one.grad), getattr(one.grad, "_version", 0)


def _weights(parts: Parts) -> dict[str, int]:
    return Contents.of({"": parts.parameters()}).numbers()


class _Watching(EagerMode):
    """Stops the first collective."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _TALKS:
            self.found = str(func)
            raise UsageError(self.found)
        return func(*args, **(kwargs or {}))


class _Before:
    """What this rank had before a replay."""

    def __init__(self, parts: Parts) -> None:
        self._modules = parts.modules
        self._gradients = {own: own.grad for own in (*parts.parameters().values(), *parts.optimized())}
        self._kept = list[tuple[MutableMapping[str, Any], frozenset[str], dict[str, Any], dict[str, torch.Tensor]]]()
        """Each place with all its keys, what is put back there, and the content of tensors among that."""
        for place in _places(parts.live):
            kept = {key: own for key, own in place.items() if _is_put_back(own)}
            content = {key: own.detach().clone() for key, own in kept.items() if _is_state(own)}
            self._kept.append((place, frozenset(place), kept, content))
        scalers = [part for part in parts.live.values() if isinstance(part, torch.amp.GradScaler)]
        self._scalers = [(own, copy.deepcopy(own._per_optimizer_states)) for own in scalers]
        self._generators = rng.capture()

    def begin(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Have no gradients, and the modules' state of the rank whose batch it is."""
        for parameter in self._gradients:
            parameter.grad = None
        for place, theirs in zip(_places(self._modules), state, strict=True):
            for key, value in theirs.items():
                own = place.get(key)
                is_alike = _is_state(own) and _is_state(value) and (own.shape, own.dtype) == (value.shape, value.dtype)
                if not (is_alike and _write(own, value)):
                    place[key] = value

    def put_back(self) -> None:
        """Have what there was before."""
        for own, gradient in self._gradients.items():
            own.grad = gradient
        for place, keys, kept, content in self._kept:
            for key in [key for key, own in place.items() if key not in keys and _is_put_back(own)]:
                del place[key]
            for key, data in content.items():
                _write(kept[key], data)
            place.update(kept)
        for scaler, states in self._scalers:
            scaler._per_optimizer_states = states
        rng.restore(self._generators)


def _places(live: Mapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    for part in live.values():
        if isinstance(part, torch.nn.Module):
            for module in part.modules():
                yield module._buffers
                yield vars(module)
        elif not isinstance(part, torch.optim.Optimizer) and hasattr(part, "__dict__"):
            yield vars(part)


def _write(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Copy past the tensor's version, which a graph of the script may go by; False: nobody can write to it in place."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return False
    tensor.data.copy_(data)
    return True


def _is_state(value: Any) -> TypeGuard[torch.Tensor]:
    is_alone = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return is_alone and value.layout is torch.strided


def _is_put_back(value: Any) -> bool:
    return isinstance(value, _PLAIN) or _is_state(value)
