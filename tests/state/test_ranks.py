"""Several ranks over real Gloo groups: all take the same checkpoint; shards come back at another world size."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

import allranks
from allranks.model.membership import Membership
from allranks.state.resumed.agree import Agreement
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved import parts as part_files
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
        with (
            said_in(directory).open("a") as said,  # stderr is that of the test which started the fork server
            Checkpointer(
                directory, Membership.spread(rank, world_size), store=store, say=partial(print, file=said)
            ) as checkpoints,
        ):
            getattr(sys.modules[__name__], what)(checkpoints, rank, world_size)
    finally:
        dist.destroy_process_group()


def said_in(directory: Path | str) -> Path:
    return Path(f"{directory}.said")


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


def test_all_ranks_pass_over_what_one_of_them_cannot_read(tmp_path: Path) -> None:
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
    assert f"{tmp_path / 'step_30'} is passed over: {damage}; going on from step_20" in said_in(tmp_path).read_text()
    altered.write_bytes(altered.read_bytes().replace(b"per_rang", b"per_rank"))
    os.truncate(tmp_path / "step_30" / "rank_00002.safetensors", 64)
    run("load_at_another_size", 2, tmp_path)
    assert f"{tmp_path / 'step_30'} is passed over: rank 0 reads rank_00002" in said_in(tmp_path).read_text()


# One rank reads for all


def save_large(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    table = torch.arange(6_000_000.0)
    for step in (10, 20):
        common = {"table": table + step, "tied": table + step, "step": torch.tensor(step), "none": torch.zeros(0, 3)}
        common |= {"alike": common["table"], "half": torch.full((3,), 0.5, dtype=torch.bfloat16)}
        checkpoints.save(step, common | {"array": numpy.arange(5)}, {"own": torch.full((3,), rank)}, wait=True)


class CountingOs:
    """`os` for the module that reads parts."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def pread(self, *told: int) -> bytes:
        data = os.pread(*told)
        self.read_bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def agreement_of(rank: int, world_size: int) -> Agreement:
    return Agreement(Membership.spread(rank, world_size), device=torch.device("cpu"))


def load_what_rank_0_reads(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """The others have the same state, and have read no more than the block with its header and their own part."""
    counting: Any = CountingOs()
    part_files.os = counting  # type: ignore[attr-defined]
    loaded = taken(checkpoints.load(share=agreement_of(rank, world_size).give))
    assert (counting.read_bytes > 40_000_000) == (rank == 0)
    assert counting.read_bytes < 10_000_000 or rank == 0
    common, table = loaded.common, torch.arange(6_000_000.0) + 20
    assert common["table"].equal(table)
    assert common["tied"].equal(table)
    assert common["alike"].data_ptr() == common["table"].data_ptr()
    assert (common["step"].item(), common["none"].shape, common["array"].tolist()) == (20, (0, 3), [0, 1, 2, 3, 4])
    assert common["half"].tolist() == [0.5] * 3
    assert loaded.per_rank["own"].tolist() == [rank] * 3


def load_what_rank_0_cannot_read(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    loaded = taken(checkpoints.load(share=agreement_of(rank, world_size).give))
    assert (loaded.step, loaded.common["table"][0]) == (10, 10)


def load_while_a_rank_dies(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """Rank 2 is gone when the state is sent: rank 0 says so at once; rank 1 may have got all of it already."""

    def give(tensors: Any) -> None:
        if rank == 2:
            os._exit(0)
        agreement_of(rank, world_size).give(tensors)

    began_s = time.monotonic()
    with pytest.raises(RuntimeError) if rank == 0 else contextlib.suppress(RuntimeError):
        checkpoints.load(share=give)
    assert time.monotonic() - began_s < 60  # the group has a timeout of 30 s


def test_one_rank_reads_for_all_and_its_errors_reach_all(tmp_path: Path) -> None:
    run("save_large", 3, tmp_path)
    run("load_what_rank_0_reads", 3, tmp_path)
    run("load_while_a_rank_dies", 3, tmp_path)
    altered = tmp_path / "step_20" / part_name(0)
    with altered.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    run("load_what_rank_0_cannot_read", 3, tmp_path)
    assert (
        f"{tmp_path / 'step_20'} is passed over: rank 0 reads rank_00000.safetensors: block "
        in said_in(tmp_path).read_text()
    )


# FSDP


def sharded(world_size: int) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, dict[str, torch.Tensor]]:
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
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rows = model[0].weight.device_mesh, optimizer.state[model[0].weight]
    rows["rows"] = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])  # as some optimizers sum up
    rows["all"] = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
    checkpoints.save(2, {"parts": Parts({"model": model, "optimizer": optimizer}).state()}, wait=True)
    train(model, optimizer)
    checkpoints.save(4, {"weights": weights_of(model)}, wait=True)


def load_sharded(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard

    model, optimizer, _ = sharded(world_size)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("it makes a step while it is loaded"))
    parts = Parts({"model": model, "optimizer": optimizer})
    first = taken(checkpoints.load({"parts": parts.like()}))
    assert first.step == 4
    expected: Any = first.common["weights"]
    own = Membership.spread(rank, world_size)
    with Checkpointer(first.directory.parent / "copy", own, store=store_of()) as older:
        loaded = taken(older.load({"parts": parts.like()}))
        whole = taken(older.load()).common["parts"]
        kept = loaded.common["parts"]
        read_by_dcp: Any = {
            "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
            "optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros_like(model[0].weight)}}},
        }
        dcp.load({"parts": read_by_dcp}, storage_reader=HuggingFaceStorageReader(str(loaded.directory)))
    for name, weights in model.state_dict().items():
        assert kept["model"][name].to_local().data_ptr() == weights.to_local().data_ptr()  # there is no second copy
        assert weights.to_local().equal(read_by_dcp["model"][name].to_local())
        assert weights.full_tensor().equal(whole["model"][name])
    parts.load(kept)
    state = optimizer.state[model[0].weight]
    assert (
        state["exp_avg"].to_local().data_ptr()
        == kept["optimizer"]["state"]["0.weight"]["exp_avg"].to_local().data_ptr()
    )
    assert state["exp_avg"].to_local().equal(read_by_dcp["optimizer"]["state"]["0.weight"]["exp_avg"].to_local())
    assert [(state[name].placements, state[name].full_tensor().tolist()) for name in ("rows", "all")] == [
        ((Shard(0),), [0.0, 1.0, 2.0, 3.0]),
        ((Replicate(),), [0.0, 1.0, 2.0]),
    ]
    optimizer._optimizer_step_pre_hooks.clear()
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
            checkpoint.load_sharded("common", loaded.common, Membership.spread(rank, world_size))
            alone = checkpoint.part(0).unpack(checkpoint.part(0).tree["common"])
        assert alone["w"].to_local().equal(whole[:, :2])


def cut_of(world_size: int, value: float) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.full((5, 3), value), init_device_mesh("cpu", (world_size,)), [Shard(0)])


def save_shards_twice(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    for step in (1, 2):
        checkpoints.save(step, {"w": cut_of(world_size, float(step))}, wait=True)


def load_past_a_shard_that_is_altered(checkpoints: Checkpointer, rank: int, world_size: int) -> None:
    """Rank 0 has read its shard of step 2 into the live tensor before rank 1 finds its own altered."""
    live = cut_of(world_size, 0.0)
    loaded = taken(checkpoints.load({"w": live}))
    assert (loaded.step, loaded.common["w"] is live) == (1, True)
    assert live.full_tensor().eq(1).all()


def test_live_shards_of_a_checkpoint_that_is_passed_over_are_overwritten_whole(tmp_path: Path) -> None:
    run("save_shards_twice", 2, tmp_path)
    altered = tmp_path / "step_2" / part_name(1)
    altered.write_bytes(altered.read_bytes()[:-1] + b"?")
    run("load_past_a_shard_that_is_altered", 2, tmp_path)


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
