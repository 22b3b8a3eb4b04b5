"""Several ranks over real Gloo groups: all take the same checkpoint; shards come back at another world size."""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import allranks
from allranks.model.membership import Membership
from allranks.state.saved.checkpoint import Checkpointer, Loaded
from allranks.state.saved.manifest import part_name
from allranks.state.saved.reader import CheckpointReader

pytestmark = pytest.mark.torch


def in_group(rank: int, world_size: int, port: int, what: str, directory: str) -> None:
    """One rank of a group; `what` is a function of this module."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    try:
        with Checkpointer(directory, Membership.spread(rank, world_size), store=store) as checkpoints:
            getattr(sys.modules[__name__], what)(checkpoints, rank, world_size)
    finally:
        dist.destroy_process_group()


def run(what: str, world_size: int, directory: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])  # seconds a process
    told = (world_size, server.port, what, str(directory))
    mp.start_processes(in_group, told, world_size, start_method="forkserver")


def taken(loaded: Loaded | None) -> Loaded:
    assert loaded is not None
    return loaded


# DDP


def save_replicated(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    assert checkpoints.load() is None
    for step in (10, 20, 30):
        state = {"weights": torch.full((1000,), float(step))}
        checkpoints.save(step, state, {"rng": torch.full((3,), rank)}, wait=True)
    assert checkpoints.last_complete == 30


def load_what_one_rank_cannot_read(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """Rank 1's own part of step 30 is altered: nobody else reads it for itself."""
    loaded = taken(checkpoints.load())
    assert loaded.step == 20
    assert loaded.common["weights"].eq(20).all()
    assert loaded.per_rank["rng"].tolist() == [rank] * 3


def load_at_another_size(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """Rank 0 of two verifies the part of rank 2 of three, too."""
    loaded = taken(checkpoints.load())
    assert (loaded.step, loaded.world_size, loaded.per_rank) == (20, 3, None)


def test_all_ranks_pass_over_what_one_of_them_cannot_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run("save_replicated", 3, tmp_path)
    assert {path.name for path in (tmp_path / "step_30").iterdir()} == {
        "MANIFEST.json",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
        "rank_00002.safetensors",
    }
    altered = tmp_path / "step_30" / "rank_00001.safetensors"
    altered.write_bytes(altered.read_bytes().replace(b"per_rank", b"per_rang"))
    run("load_what_one_rank_cannot_read", 3, tmp_path)
    damage = "rank 1 reads rank_00001.safetensors: block 1 of 1 does not match its checksum"
    assert f"{tmp_path / 'step_30'} is passed over: {damage}; going on from step_20" in capfd.readouterr().err
    altered.write_bytes(altered.read_bytes().replace(b"per_rang", b"per_rank"))
    os.truncate(tmp_path / "step_30" / "rank_00002.safetensors", 64)
    run("load_at_another_size", 2, tmp_path)
    assert f"{tmp_path / 'step_30'} is passed over: rank 0 reads rank_00002" in capfd.readouterr().err


# FSDP


def sharded(world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model in uneven shards, and its whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    whole = {name: weights.clone() for name, weights in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1), whole


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps on the same data on all ranks: the gradient does not depend on their number."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(14.0).reshape(2, 7)).square().mean().backward()
        optimizer.step()


def weights_of(model: torch.nn.Module) -> list[list[float]]:
    return [weights.full_tensor().flatten().tolist() for weights in model.state_dict().values()]


def save_sharded(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    model, optimizer, _ = sharded(world_size)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoints.save(2, state, wait=True)
    train(model, optimizer)
    checkpoints.save(4, {"weights": weights_of(model)}, wait=True)


def load_sharded(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    model, optimizer, _ = sharded(world_size)
    get_optimizer_state_dict(model, optimizer)  # gives the optimizer the state that a step makes
    like = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    first = taken(checkpoints.load(like))
    assert first.step == 4
    expected: Any = first.common["weights"]
    own = Membership.spread(rank, world_size)
    with Checkpointer(first.directory.parent / "copy", own, store=store_of()) as older:
        loaded = taken(older.load(like))
        whole = taken(older.load())
        read_by_dcp = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(read_by_dcp, storage_reader=HuggingFaceStorageReader(str(loaded.directory)))
    for name, weights in model.state_dict().items():
        assert read_by_dcp["model"][name].to_local().equal(loaded.common["model"][name].to_local())
        assert loaded.common["model"][name].placements == weights.placements
        assert loaded.common["model"][name].full_tensor().equal(whole.common["model"][name])
    model.load_state_dict(loaded.common["model"])
    optimizer.load_state_dict(loaded.common["optimizer"])
    train(model, optimizer)
    for got, wanted in zip(weights_of(model), expected, strict=True):
        assert torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def store_of() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def save_on_a_mesh_of_two(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """Cut along one dimension of the mesh, copied along the other (HSDP): each shard is written once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    whole = torch.arange(15.0).reshape(5, 3)
    cut = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    checkpoints.save(1, {"parts": {"model": {"w": cut}}}, wait=True)
    checkpoints.save(2, {"w": distribute_tensor(whole, mesh, [Shard(1), Replicate()])}, wait=True)
    loaded = taken(checkpoints.load(like={"w": distribute_tensor(whole * 0, mesh, [Shard(1), Replicate()])}))
    assert loaded.common["w"].placements == (Shard(1), Replicate())
    assert loaded.common["w"].full_tensor().equal(whole)
    if rank == 0:  # its part has all that it needs, and it opens no other
        (loaded.directory / part_name(1)).unlink()
        with CheckpointReader(loaded.directory) as checkpoint:
            checkpoint.load_sharded("common", loaded.common, rank=rank, world_size=world_size)
            alone = checkpoint.part(0).unpack(checkpoint.part(0).tree["common"])
        assert alone["w"].to_local().equal(whole[:, :2])


def test_shards_come_back_at_another_world_size(tmp_path: Path) -> None:
    run("save_sharded", 2, tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "step_2").rename(tmp_path / "copy" / "step_2")
    run("load_sharded", 3, tmp_path)


def test_copies_of_a_shard_are_written_once(tmp_path: Path) -> None:
    run("save_on_a_mesh_of_two", 2, tmp_path)
    shards = [list(load_file(tmp_path / "step_1" / f"rank_0000{rank}.safetensors").values()) for rank in range(2)]
    assert [[shard.shape for shard in own] for own in shards] == [[(5, 3)], []]
    with Checkpointer(tmp_path) as checkpoints:
        loaded = taken(checkpoints.load())  # of step 2, one part is gone
    whole = torch.arange(15.0).reshape(5, 3)
    assert loaded.common["parts"]["model"]["w"].equal(whole)
    assert allranks.load_weights(tmp_path / "step_1")["w"].equal(whole)
