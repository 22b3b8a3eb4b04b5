"""How does a tensor that lies in shards on many ranks get into a checkpoint, and out of it on other ranks?

torch.distributed.checkpoint decides: its save planner says which slice this rank has, its load planner which slices of
the saved ones make the slices that are needed now, at any world size. Its collectives are not used (every rank
plans for itself, and the manifest joins the parts), nor are its files: they pickle, and carry no checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, empty
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard, empty

from allranks.state.saved.manifest import Damaged
from allranks.state.saved.pack import Packer, StateError, StateFile, dtype_of, name_of


def describe_tensors(tensors: Mapping[str, DTensor]) -> list[Any]:
    """What is the same on all ranks: path, dtype, shape of each tensor, and per mesh dimension which one is cut.

    Raises:
        StateError: one is placed in a way that no checkpoint can hold.
    """
    for path, tensor in tensors.items():
        if partial := [placement for placement in tensor.placements if placement.is_partial()]:
            raise StateError(f"{path} is a DTensor placed as {partial[0]}: it has not been summed up yet")
    return [
        [path, name_of(tensor.dtype), list(tensor.shape), [getattr(how, "dim", None) for how in tensor.placements]]
        for path, tensor in tensors.items()
    ]


def pack_shards(packer: Packer) -> list[Any]:
    """Take this rank's shards in; returns path, place in the whole, shape and name of each.

    Of copies on several ranks, the first rank along each mesh dimension writes one.
    """
    writes = {path: tensor for path, tensor in packer.sharded.items() if _is_first_copy(tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(writes))
    chunks = []
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None  # a plan of tensors alone
        shard = planner.resolve_data(item)
        assert isinstance(shard, torch.Tensor)
        chunk = item.tensor_data.chunk
        name = packer.add(shard, item.index.fqn)
        packer.offsets[name] = list(chunk.offsets)
        chunks.append([item.index.fqn, list(chunk.offsets), list(chunk.sizes), name])
    return chunks


def _is_first_copy(tensor: DTensor) -> bool:
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(at == 0 for at, how in zip(place, tensor.placements, strict=True) if isinstance(how, Replicate))


# And back


def load_sharded(
    tensors: Mapping[str, list[Any]], parts: Iterable[StateFile], like: Mapping[str, DTensor]
) -> dict[str, torch.Tensor]:
    """Read tensors: into those of `like` where they fit, else on the same mesh; whole where `like` has none.

    Args:
        tensors: by path, as `describe_tensors` gave them.
        parts: opened one by one, until no slice is missing; those that probably have what is needed come first.
        like: live tensors by path, overwritten even if this fails. Tensors below the path of one are placed as it is.
    Raises:
        Damaged: a shard is missing, or not what was written. DCP would leave the tensor as it happens to be.
    """
    targets = {path: _target(described, like) for path, described in tensors.items()}
    local = {path: own.to_local() if isinstance(own, DTensor) else own for path, own in targets.items()}
    missing = {path: size for path, own in local.items() if (size := own.numel())}
    found: dict[str, dict[tuple[int, ...], tuple[StateFile, list[Any]]]] = {path: {} for path in missing}
    for part in parts if missing else ():
        shards = [shard for shard in part.tree["shards"] if shard[0] in missing]
        for shard in shards:
            found[shard[0]][tuple(shard[1])] = part, shard
        for path in {shard[0] for shard in shards}:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            chunks = [
                ChunkStorageMetadata(torch.Size(at), torch.Size(shard[2])) for at, (_, shard) in found[path].items()
            ]
            _, dtype, shape, _ = tensors[path]
            described = TensorStorageMetadata(TensorProperties(dtype_of(dtype)), torch.Size(shape), chunks)
            planner.set_up_planner({path: targets[path]}, Metadata({path: described}))
            items = planner.create_local_plan().items
            if sum(item.lengths.numel() for item in items) == missing[path]:
                for item in items:
                    assert item.storage_index.offset is not None
                    _read(item, planner.resolve_tensor(item), *found[path][tuple(item.storage_index.offset)], dtype)
                del missing[path]
        if not missing:
            break
    for path, size in missing.items():
        raise Damaged(f"{path}: of {size} elements that this rank needs, some are in no shard")
    return targets


def _target(described: list[Any], like: Mapping[str, DTensor]) -> torch.Tensor:
    path, dtype, shape, cut = described
    near = path
    while near and near not in like:
        near = near.rpartition("[")[0]
    if not near:
        return torch.empty(shape, dtype=dtype_of(dtype))
    live = like[near]
    if near == path and (list(live.shape), name_of(live.dtype)) == (shape, dtype):
        return live
    placements: Sequence[Any] = live.placements
    if list(live.shape) != shape:  # as it was cut when it was saved
        cut = (cut + [None] * live.device_mesh.ndim)[: live.device_mesh.ndim]
        placements = [Replicate() if dim is None else Shard(dim) for dim in cut]
    placed: dict[str, Any] = {"device_mesh": live.device_mesh, "placements": placements}
    return empty(*shape, dtype=dtype_of(dtype), **placed)


def _read(item: ReadItem, target: torch.Tensor, part: StateFile, shard: list[Any], dtype: str) -> None:
    """Fill the target with the slice of a saved shard that DCP asks for."""
    _, _, sizes, name = shard
    saved = part.read(name, dtype, sizes)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, start, length)
    target.detach().copy_(saved)


def find_sharded(value: object, path: str) -> Iterator[tuple[str, DTensor]]:
    """All DTensors in nested dicts, lists and tuples, with their paths as `Packer.pack` names them."""
    if isinstance(value, DTensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from find_sharded(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_sharded(item, f"{path}[{index}]")
