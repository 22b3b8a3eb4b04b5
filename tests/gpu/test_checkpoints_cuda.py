"""Is state on the GPU saved as it is, out of the training's way, and does a run resume with the same bits?"""

from __future__ import annotations

import json
import signal

import pytest

from .conftest import Note, StartJob
from .job import run_bare, run_one

COMPARE = """\
from pathlib import Path
import torch
from rank import device, is_rehearsal, rank, synchronize, tell, world_size
from allranks.model.membership import Membership
from allranks.state.saved.checkpoint import Checkpointer

def same(one, other):
    if isinstance(one, torch.Tensor):
        one, other = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (one, other))
        one, other = (t.detach().cpu().resolve_conj().contiguous() for t in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
            one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other

"""
"""Two states are the same where each byte is."""


@pytest.mark.rehearsable
def test_tensors_of_all_kinds_come_back_with_the_same_bytes(tmp_path, note: Note):
    """Expected: contiguous, transposed and sliced tensors of each dtype on the GPU, empty ones, scalars, and tensors
    of the CPU beside them, are the same bytes after loading; the second save, of changed values, has the changed
    ones.
    """
    script = (
        COMPARE
        + """\
def state(seed):
    torch.manual_seed(seed)
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    made = {str(kind): (torch.randn(300, 70, device=device) * 9).to(kind) for kind in kinds}
    big = torch.randn(4096, 1024, device=device)
    made |= {"transposed": big.t(), "sliced": big[::3, 5:77], "big": big, "on_cpu": torch.randn(1000, 1000)}
    made |= {"complex": torch.randn(9, 9, device=device, dtype=torch.complex64).conj()}
    made |= {"scalar": torch.ones((), device=device)}
    made |= {"empty": torch.empty(0, 3, device=device), "nan": torch.full((7,), float("nan"), device=device)}
    return made

checks = []
with Checkpointer("saved") as checkpoints:
    for step in (1, 2):
        now = state(step)
        checkpoints.save(step, now)
        for value in now.values():
            value.zero_()  # what is copied after save() has returned would be zero
        assert checkpoints.wait()
    loaded = checkpoints.load()
checks = {key: same(value, loaded.common[key]) for key, value in state(2).items()}
tell(step=loaded.step, wrong=[key for key, ok in checks.items() if not ok])
"""
    )
    told = run_one(tmp_path / "kinds", script)
    assert told == {"step": 2, "wrong": []}


def test_the_staging_memory_is_pinned(tmp_path, note: Note):
    """Expected: cudaHostRegister on the shared mapping returns 0 (cudaSuccess), also after the state has grown and
    the mapping is another; and copies from the GPU then run at more than 5 GB/s, which pageable memory does not reach
    on PCIe gen 4 or 5 with small buffers. Source: CUDA runtime API, cudaHostRegister; a mapping of memfd is ordinary
    memory.
    """
    script = (
        COMPARE
        + """\
import time
from allranks.state.saved import checkpoint
asked = []
runtime = torch.cuda.cudart()
class Watched:
    def __getattr__(self, name):
        function = getattr(runtime, name)
        if name not in ("cudaHostRegister", "cudaHostUnregister"):
            return function
        def call(*arguments):
            answer = function(*arguments)
            asked.append((name, int(answer)))
            return answer
        return call
torch.cuda.cudart = lambda: Watched()
stalls = []
with Checkpointer("saved", keep=2) as checkpoints:
    for step in range(6):
        size = 64 << 20 if step < 3 else 128 << 20
        tensor = torch.randn(size, device=device)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        checkpoints.save(step, {"weight": tensor})
        stalls.append((tensor.numel() * 4 / (time.perf_counter() - began_s) / 1e9))
        assert checkpoints.wait()
    loaded = checkpoints.load()
    is_same = same(tensor, loaded.common["weight"])
tell(asked=asked, gb_s=[round(each, 2) for each in stalls], is_same=is_same)
"""
    )
    told = run_one(tmp_path / "pinned", script)
    note("CUDA runtime", json.dumps(told["asked"]))
    note("GB/s of each save, the first ones of each size also make the memory", told["gb_s"])
    assert told["is_same"]
    registered = [code for name, code in told["asked"] if name == "cudaHostRegister"]
    assert registered == [0, 0]
    assert [code for name, code in told["asked"] if name == "cudaHostUnregister"] == [0, 0]
    assert max(told["gb_s"][4:]) > 5


TRAIN = """\
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import allranks
from rank import is_rehearsal, rank
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)
inputs = torch.randn(512, 64)
data = TensorDataset(inputs, inputs.sin())
with allranks.session() as s:
    layers = (torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model = s.ddp(torch.nn.Sequential(*layers).to(s.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(s.device.type, init_scale=2.0**10, growth_interval=7)
    sampler = s.sampler(data, global_batch_size=32, seed=3)
    torch.manual_seed(100 + s.rank)
    state = s.track(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler, checkpoint_every=5)
    for step in state.steps(DataLoader(data, batch_sampler=sampler), total=40):
        with step as (x, y):
            x, y = x.to(s.device), y.to(s.device)
            kind = torch.bfloat16 if is_rehearsal else torch.float16
            with torch.autocast(s.device.type, dtype=kind):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step.log(loss=loss.detach())
        if s.rank == 0:
            print("step", step.number, flush=True)
        if os.environ.get("SLOWLY"):
            time.sleep(0.1)
    if s.is_leader:
        torch.save({"model": model.module.state_dict(), "scaler": scaler.state_dict()}, "final.pt")
"""
"""Dropout (CUDA's generator), a GradScaler, half precision: what a resumed run could have otherwise."""


@pytest.mark.rehearsable
def test_a_killed_and_resumed_run_ends_with_the_same_bits(start: StartJob, tmp_path, note: Note):
    """Expected: two ranks train 40 steps; rank 1 of the second run is killed after step 17, and the run resumes from
    the checkpoint of a step before: weights and GradScaler at the end are those of the first run, bit for bit. All
    kernels are deterministic ones (torch.use_deterministic_algorithms); the sum of two ranks is the same in any
    order.
    """
    undisturbed = start(TRAIN, name="undisturbed")
    struck = start(TRAIN, name="struck", flags=["--max-restarts", "1"], env={"SLOWLY": "1"})
    struck.wait_for("step 17\n")
    struck.strike(1, signal.SIGKILL)
    assert struck.end() == [0, 0], struck.tail()
    assert undisturbed.end() == [0, 0], undisturbed.tail()
    resumed = [line for line in (struck.out + struck.err).splitlines() if "resumed at step" in line]
    note("resumed", resumed[0] if resumed else "no")
    assert resumed, struck.tail()
    paths = [str(job.where / "final.pt") for job in (undisturbed, struck)]
    compare = f"""\
    from rank import tell, torch
    one, other = (torch.load(path, map_location="cpu") for path in {paths!r})
    tell(same={{key: torch.equal(one["model"][key], other["model"][key]) for key in one["model"]}},
         scalers=[one["scaler"], other["scaler"]])
    """
    told = run_one(tmp_path / "compare", compare)
    note("scaler", json.dumps(told["scalers"][0]))
    assert set(told["same"].values()) == {True}, told["same"]
    assert told["scalers"][0] == told["scalers"][1]


@pytest.mark.rehearsable
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_state_comes_back_with_the_same_bytes(tmp_path, ranks: int):
    """Expected: parameters and AdamW's state of a fully_shard'ed model, each rank's shards on the GPU, are the same
    after they were saved, overwritten and loaded. With two ranks each shard is written by its own rank.
    """
    script = (
        COMPARE
        + """\
from rank import dist, form_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
form_group()
mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 129), torch.nn.ReLU(), torch.nn.Linear(129, 7)).to(device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
store = dist.distributed_c10d._get_default_store()
with Checkpointer("saved", Membership.spread(rank, world_size), store=store) as checkpoints:
    checkpoints.save(3, state)
    assert checkpoints.wait()
    loaded = checkpoints.load(torch.utils._pytree.tree_map(torch.zeros_like, state))  # sharded ones are read into it
tell(is_same=same(state, loaded.common), sharded=type(state["model"]["0.weight"]).__name__,
     device=str(state["model"]["0.weight"].to_local().device))
dist.barrier()
dist.destroy_process_group()
"""
    )
    ended = run_bare(tmp_path / "fsdp2", script, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.text[-3000:]
    for rank in range(ranks):
        told = json.loads((tmp_path / f"fsdp2/{rank}.json").read_text())
        assert told["is_same"]
        assert told["sharded"] == "DTensor"


@pytest.mark.rehearsable
def test_a_checkpoint_survives_its_trainer(tmp_path):
    """Expected: the trainer dies by SIGKILL as soon as save() has returned; the writer has the shared memory, pinned
    or not, and makes the checkpoint whole. Pinned pages belong to the process that registered them; the memfd keeps
    its own.
    """
    save = (
        COMPARE
        + """\
import os, signal
torch.manual_seed(5)
tensor = torch.randn(64 << 20, device=device)
checkpoints = Checkpointer("saved")
checkpoints.save(1, {"weight": tensor})
Path("sum").write_text(repr(float(tensor[::1000].double().sum().item())))
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    where = tmp_path / "survives"
    assert run_bare(where, save, ranks=1).codes == [-signal.SIGKILL]
    load = (
        COMPARE
        + f"""\
with Checkpointer({str(where / "saved")!r}) as checkpoints:
    loaded = checkpoints.load()
tell(step=loaded.step, sum=float(loaded.common["weight"][::1000].double().sum().item()))
"""
    )
    told = run_one(tmp_path / "load", load)
    assert told["step"] == 1
    assert told["sum"] == pytest.approx(float((where / "sum").read_text()), rel=1e-9)
