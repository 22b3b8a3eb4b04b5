"""How does a tensor that lies in shards on many ranks get into a checkpoint, and out of it on other ranks?

torch.distributed.checkpoint decides: its save planner says which slice this rank has, its load planner which slices of
the saved ones make the slices that are needed now, at any world size. Its collectives are not used (every rank
plans for itself, and the manifest joins the parts), nor are its files: they pickle, and carry no checksums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from allranks.state.saved.manifest import Damaged
from allranks.state.saved.pack import Packer, StateError, StateFile, dtype_of

_OTHER = -1


def describe_tensors(tensors: Mapping[str, DTensor]) -> list[Any]:
    """What is the same on all ranks: shape, dtype, mesh and placements of each tensor, as plain values.

    Raises:
        StateError: one is placed in a way that no checkpoint can hold.
    """
    return [
        [
            path,
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            [_describe_placement(placement, path) for placement in tensor.placements],
            _names_of(tensor.device_mesh),
        ]
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
        name = packer.add(shard, f"{item.index.fqn}@{list(chunk.offsets)}")
        chunks.append([item.index.fqn, list(chunk.offsets), list(chunk.sizes), name])
    return chunks


def _is_first_copy(tensor: DTensor) -> bool:
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(at == 0 for at, how in zip(place, tensor.placements, strict=True) if isinstance(how, Replicate))


def _describe_placement(placement: Placement, path: str) -> int | None:
    """The dimension that is cut, None for copies, _OTHER for what only a live tensor can tell."""
    if placement.is_partial():
        raise StateError(f"{path} is a DTensor placed as {placement}: it has not been summed up yet")
    if isinstance(placement, Replicate):
        return None
    return int(placement.dim) if type(placement) is Shard else _OTHER


def _names_of(mesh: DeviceMesh) -> list[str]:
    return list(mesh.mesh_dim_names or [""] * mesh.ndim)


# And back


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: StateFile
    name: str
    sizes: torch.Size


@dataclass(slots=True)
class ShardedTensors:
    """The sharded tensors of one checkpoint; all parts that have shards are open."""

    tensors: dict[str, list[Any]]
    """By path, as `describe_tensors` gave them."""
    chunks: dict[MetadataIndex, _Chunk] = field(default_factory=dict)

    def add_part(self, chunks: list[Any], file: StateFile) -> None:
        """Take in what `pack_shards` gave on one rank."""
        for path, offsets, sizes, name in chunks:
            self.chunks[MetadataIndex(path, torch.Size(offsets))] = _Chunk(file, name, torch.Size(sizes))

    def check(self) -> None:
        """Every element of every tensor is in one shard.

        Raises:
            Damaged: some are in none. DCP would leave them as they happen to be.
        """
        found = dict.fromkeys(self.tensors, 0)
        for index, chunk in self.chunks.items():
            found[index.fqn] = found.get(index.fqn, 0) + math.prod(chunk.sizes)
        for path, (_, _, shape, _, _) in self.tensors.items():
            if found[path] != math.prod(shape):
                raise Damaged(f"{path}: shards with {found[path]} of {math.prod(shape)} elements are there")

    def load(
        self, meshes: Mapping[tuple[str, ...], DeviceMesh], like: Mapping[str, DTensor]
    ) -> dict[str, torch.Tensor]:
        """Read all tensors: as in `like` where the path is there, else on the mesh with their dimensions, else whole.

        Raises:
            Damaged: a shard is not what was written.
        """
        self.check()
        targets = {path: self._target(path, meshes, like.get(path)) for path in self.tensors}
        if targets:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(targets, self._describe())
            plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
            for item in plan.items:
                target = planner.resolve_tensor(item)
                target.detach().copy_(self._read(item))
                planner.commit_tensor(item, target)
        return targets

    def _target(self, path: str, meshes: Mapping[tuple[str, ...], DeviceMesh], like: DTensor | None) -> torch.Tensor:
        _, dtype, shape, dimensions, names = self.tensors[path]
        if like is not None and list(like.shape) == shape:
            mesh, placements = like.device_mesh, tuple(like.placements)
        elif _OTHER not in dimensions and (found := meshes.get(tuple(names))):
            mesh = found
            placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dimensions)
        else:
            return torch.empty(shape, dtype=dtype_of(dtype))
        return torch.distributed.tensor.empty(*shape, dtype=dtype_of(dtype), device_mesh=mesh, placements=placements)

    def _read(self, item: ReadItem) -> torch.Tensor:
        """The slice of a saved shard that DCP asks for."""
        chunk = self.chunks[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
        saved = chunk.file.read(chunk.name, self.tensors[item.storage_index.fqn][1], list(chunk.sizes))
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            saved = saved.narrow(dim, start, length)
        return saved

    def _describe(self) -> Metadata:
        """As DCP wants to know it."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {path: [] for path in self.tensors}
        for index, chunk in self.chunks.items():
            assert index.offset is not None
            chunks[index.fqn].append(ChunkStorageMetadata(index.offset, chunk.sizes))
        return Metadata(
            {
                path: TensorStorageMetadata(TensorProperties(dtype_of(dtype)), torch.Size(shape), chunks[path])
                for path, (_, dtype, shape, _, _) in self.tensors.items()
            }
        )


def find_meshes(like: Mapping[str, DTensor]) -> dict[tuple[str, ...], DeviceMesh]:
    """The meshes that live tensors are on, by the names of their dimensions."""
    return {tuple(_names_of(tensor.device_mesh)): tensor.device_mesh for tensor in like.values()}


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
