"""Which tensors and numbers do the tracked parts hold, by name? What of them can be compared between ranks?

A name is a path through a part's state: `model/layers.0.weight`, `optimizer/state/layers.0.weight/exp_avg`. What is in
the same memory is there once. Of a DTensor it is this rank's shard. All of a part's numbers and text are one entry.
Of an object, such as a batch of the script's own class, its attributes count: its text may have its address. They count
once, since objects may refer to each other; elsewhere the path of the first place stands for them. Of a sparse tensor
its indices and values count.

Limits: quantized and nested tensors, and numbers of less than a byte, do not count.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks.state.saved.pack import is_dtensor
from allranks.state.truth.fingerprint import can_watch, fingerprint, hash_bytes, hash_text

DEEPEST, OBJECT = 20, 4
"""So many lists and dicts deep it looks; an object counts for so many of them."""


@dataclass(slots=True)
class Contents:
    """What a state holds."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """By name of the entry: each number with its path."""
    shards: set[tuple[int, ...]] = field(default_factory=set)
    """Where in the meshes of its DTensors this rank is, along the dimensions that cut them."""

    @classmethod
    def of(cls, state: Mapping[str, Any], *, is_shared_once: bool = True) -> Contents:
        """Return what the parts hold, by part; tensors in the same memory count once, else at each of their places."""
        found, places = cls(), set[object]()
        for path, value in _walk(state, "", {}):
            if isinstance(value, Tensor):
                found._add(path, value.detach(), places if is_shared_once else set())
            else:
                found.texts.setdefault(f"{path.partition('/')[0]}/numbers", []).append(f"{path}={value}")
        return found

    @classmethod
    def of_batches(cls, batches: Sequence[Any]) -> list[Contents]:
        """Return what each batch of a step holds.

        Each for itself, and a tensor at each of its places: what batches or tensors share, they do not share any more
        once they come from workers or into pinned memory.
        """
        return [cls.of({"batch": batch}, is_shared_once=False) for batch in batches]

    def numbers(self) -> dict[str, int]:
        """Return the fingerprint of each entry."""
        of_tensors = zip(self.tensors, fingerprint([*self.tensors.values()]), strict=True)
        return {**dict(of_tensors), **{name: hash_text(*texts) for name, texts in self.texts.items()}}

    def _add(self, path: str, tensor: Tensor, places: set[object]) -> None:
        if is_dtensor(tensor):
            mesh: Any = tensor.device_mesh
            at = mesh.get_coordinate() or ()
            cut = [place if not how.is_replicate() else -1 for place, how in zip(at, tensor.placements, strict=False)]
            self.shards.add(tuple(cut))
            tensor = tensor.to_local()
        if not can_watch(tensor):
            return
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if tensor.numel() == 0 or place not in places:
            places.add(place)
            while path in self.tensors:
                path += "'"  # other paths are written alike: of the keys 1 and "1"
            self.tensors[path] = tensor


def _walk(
    value: Any, path: str, seen: dict[int, tuple[str, Any]], depth: int = DEEPEST
) -> Iterator[tuple[str, Tensor | str]]:
    """Yield what is in a value.

    Args:
        seen: by id, the path of each object so far, and the object itself: no other one gets its id.
    """
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        value = value.detach().__reduce_ex__(2)[1]  # as pickle has it: layout, indices, values, size
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        value = value.tolist()  # of NumPy; its bytes are addresses of objects
    items: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping) and depth > 0:
        items = value.items()
    elif isinstance(value, list | tuple) and depth > 0:
        items = enumerate(value)
    elif isinstance(value, set | frozenset):
        items = enumerate(sorted(map(repr, value)))
    elif hasattr(value, "tobytes"):
        yield path, str(hash_bytes(value.tobytes()))
    elif depth <= 0 or (attributes := _attributes(value)) is None:
        yield path, re.sub(" at 0x[0-9a-f]+", "", repr(value))
    elif id(value) in seen:
        yield path, seen[id(value)][0]
    else:
        seen[id(value)] = path, value
        path, depth = f"{path}/{type(value).__qualname__}", depth - OBJECT + 1
        items = attributes.items()
    for key, item in items:
        yield from _walk(item, f"{path}/{key}" if path else str(key), seen, depth - 1)


def _attributes(value: Any) -> Mapping[str, Any] | None:
    """Return what an object has as attributes; None: its text tells what it is."""
    if callable(value):
        return None
    if dataclasses.is_dataclass(value):
        return {own.name: getattr(value, own.name) for own in dataclasses.fields(value)}
    state = object.__getstate__(value)
    # With __slots__ it is a pair; those of the standard library (Path, UUID) tell themselves, and have caches in there.
    if isinstance(state, tuple) and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
        own, slots = state
        return {**(own or {}), **slots}
    return vars(value) if hasattr(value, "__dict__") else None
