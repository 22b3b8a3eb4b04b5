"""Does training on many nodes work here? A small real model, trained by all ranks together, that can prove its result.

    python py_exe.py                                                         # one process, no launcher
    torchrun --standalone --nproc-per-node 6 py_exe.py --batch-size 8 --check
    allranks run --nproc-per-node 6 py_exe.py --batch-size 8 --check         # the same; explains failures
    srun --ntasks-per-node=1 allranks run py_exe.py                          # on all nodes of a SLURM job

Plain srun needs no launcher, each task is a rank (inside sbatch or salloc):

    export MASTER_ADDR=192.168.20.15 MASTER_PORT=29500                       # rank 0's node, on the fast network
    srun --nodes=6 --ntasks-per-node=1 --gpus-per-node=1 python py_exe.py --backend nccl

The task: from 10 measurements of a patient, will the diabetes progress more than in half of the patients (DATA.md)?
Limits: no checkpoints; `--backend auto` looks at its own node only, so name the backend where just some have GPUs.

Shapes: N patients, M = 10 measurements, P weights.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

NUM_TRAIN = 354  # of 442; the other 88 are held out
LR_RULES = {"linear": lambda factor: factor, "sqrt": math.sqrt, "none": lambda factor: 1.0}


# --- The process group -----------------------------------------------------------------------------------------------


def find_rank(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and ranks on a node, as the launcher says; torchrun's words win over SLURM's.

    Inside `srun torchrun` both are there, and SLURM's then describe the agent, not this worker.
    """
    if "RANK" in env:
        local_rank = int(env["LOCAL_RANK"])
        ranks_per_node = int(env.get("LOCAL_WORLD_SIZE", local_rank + 1))
        return int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, ranks_per_node
    if "SLURM_PROCID" in env:
        local_rank = int(env["SLURM_LOCALID"])
        # "2(x5),1": five nodes with two tasks, one with one. The most on any node, so that all nodes decide alike.
        tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(local_rank + 1)).split(",")
        ranks_per_node = max(int(tasks.split("(")[0]) for tasks in tasks_per_node)
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), local_rank, ranks_per_node
    return 0, 1, 0, 1


def setup(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    *,
    backend: str = "gloo",
    timeout_s: float = 120,
) -> None:
    """Joins the process group, or ends this rank with one line that says what to check.

    Args:
        rank: this process, 0 to world_size - 1.
        world_size: processes in the group, over all nodes.
        master_addr: rank 0's address, the same on every rank.
        master_port: where rank 0 listens, the same on every rank.
        backend: "nccl" (after `torch.cuda.set_device`) or "gloo".
        timeout_s: the longest wait for rank 0 to listen, then for the others, then in each later collective.
    Raises:
        SystemExit: the group cannot be formed in time.
    """
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master_addr, str(master_port)
    try:
        # Phase 1: rank 0 listens. Tried here first, because torch says it with two screens of C++ frames.
        if rank != 0:
            wait_for_listener(master_addr, master_port, timeout_s)
        # Phase 2: every rank has met every other. With a device, NCCL connects now and not in the first all-reduce.
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise SystemExit(
            f"rank {rank} of {world_size} on {socket.gethostname()}: no process group at {master_addr}:{master_port} "
            f"within {timeout_s:g} s ({reason}); check that all {world_size} ranks run, that this node reaches rank 0 "
            f"(nc -vz {master_addr} {master_port}: firewall, interface, name), and that MASTER_ADDR, MASTER_PORT and "
            f"the backend ({backend}) are the same on every rank"
        ) from error


def wait_for_listener(master_addr: str, master_port: int, timeout_s: float) -> None:
    """Returns once something listens there; else raises the last error: refused, no such name, timed out."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(deadline - time.monotonic(), 0.1)
            return socket.create_connection((master_addr, master_port), timeout=left_s).close()
        except OSError:  # ranks start in any order: until the deadline this is normal
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


def cleanup() -> None:
    """Leaves the process group, if there is one; called in a `finally`, a failed rank does not hold up the rest."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads may still hold the last collective; an interpreter that ends meanwhile is aborted by torch 2.13
        # ("terminate called without an active exception").
        time.sleep(0.2)


# --- Data and model --------------------------------------------------------------------------------------------------


def load_patients(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out patients; the same split on every rank and in every run, whatever --seed is."""
    with path.open(newline="") as file:
        rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
    table = torch.tensor(rows)
    x_NM, progression_N = table[:, :-1], table[:, -1]
    y_N = (progression_N > statistics.median(progression_N.tolist())).long()

    order_N = torch.randperm(len(table), generator=torch.Generator().manual_seed(442))
    train, held_out = order_N[:NUM_TRAIN], order_N[NUM_TRAIN:]
    mean_M, std_M = x_NM[train].mean(0), x_NM[train].std(0)  # of the training patients only: the others are the future
    x_NM = (x_NM - mean_M) / std_M
    return TensorDataset(x_NM[train], y_N[train]), TensorDataset(x_NM[held_out], y_N[held_out])


class SimpleModel(nn.Module):
    """10 measurements -> 50 hidden units -> 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 50)
        self.out = nn.Linear(50, 2)

    def forward(self, x: Tensor) -> Tensor:  # (N, 10) -> (N, 2)
        return self.out(F.relu(self.hidden(x)))


def effective_batch(args: argparse.Namespace, world_size: int) -> int:
    """Patients whose gradients make one step of the optimizer, on all ranks."""
    return args.batch_size * world_size * args.accumulate


def learning_rate(args: argparse.Namespace, world_size: int) -> float:
    """--lr is for 64 patients in a step; with more, --lr-rule says by what it grows.

    Linear for SGD: twice the ranks, half the steps, each twice as long (Goyal et al. 2017, "Accurate, Large Minibatch
    SGD"). Square root for Adam and its kind (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms"). Both hold up to the batch at which the gradient's noise is no longer what limits a step.
    """
    return args.lr * LR_RULES[args.lr_rule](effective_batch(args, world_size) / 64)


def make_optimizer(model: nn.Module, args: argparse.Namespace, world_size: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate(args, world_size), momentum=0.9)


def windows(loader: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[list[tuple[Tensor, Tensor, float]]]:
    """For each step of the optimizer its batches, each with its share of the window's patients.

    The shares add up to 1 in the last window of an epoch, too, which may have fewer batches, and a shorter one.
    """
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        total = sum(len(y_N) for _, y_N in window)
        yield [(x_NM, y_N, len(y_N) / total) for x_NM, y_N in window]


@torch.no_grad()
def measure_accuracy(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    x_NM, y_N = (tensor.to(device) for tensor in dataset.tensors)
    return (model(x_NM).argmax(1) == y_N).float().mean().item()


# --- Training, and its proof -----------------------------------------------------------------------------------------


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    """Trains with DDP; rank 0 reports."""
    train_set, held_out = load_patients(args.data)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        SimpleModel().to(device), device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = make_optimizer(model, args, world_size)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        loss_sum = torch.zeros((), device=device)
        for window in windows(loader, args.accumulate):
            optimizer.zero_grad()
            for i, (x_NM, y_N, share) in enumerate(window, start=1):
                with contextlib.nullcontext() if i == len(window) else model.no_sync():
                    loss = F.cross_entropy(model(x_NM.to(device)), y_N.to(device))
                    (loss * share).backward()  # in the window's last one DDP averages the gradients over the ranks
                loss_sum += loss.detach()
            optimizer.step()
        dist.all_reduce(loss_sum)
        if rank == 0 and (epoch == args.epochs or epoch % max(args.epochs // 10, 1) == 0):
            mean_loss = loss_sum.item() / (world_size * len(loader))
            accuracy = measure_accuracy(model.module, held_out, device)
            print(f"epoch {epoch:3d}   loss {mean_loss:.3f}   held-out accuracy {accuracy:.2f}", flush=True)

    if rank == 0:
        accuracy = measure_accuracy(model.module, held_out, device)
        print(f"held-out accuracy {accuracy:.2f} on {len(held_out)} patients", flush=True)
    if args.check:
        check(args, rank, world_size, device, train_set, parameters_to_vector(model.parameters()).detach())


def check(
    args: argparse.Namespace,
    rank: int,
    world_size: int,
    device: torch.device,
    train_set: TensorDataset,
    weights: Tensor,  # (P,)
) -> None:
    """Proves that the ranks did together what one process does alone, or ends rank 0 with the difference.

    Rank 0 trains again, without DDP, on what every rank's sampler should have yielded, padding included.
    """
    # Phase 1: every rank has bit for bit the weights of rank 0.
    all_weights = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(all_weights, weights)
    odd_ranks = [r for r in range(world_size) if not torch.equal(all_weights[r], all_weights[0])]
    if odd_ranks:
        sys.exit(
            f"weights differ from rank 0's on ranks {odd_ranks}: expected the same on every rank" if rank == 0 else 1
        )

    # Phase 2: one process, same batches.
    torch.manual_seed(args.seed)
    model = SimpleModel().to(device)
    optimizer = make_optimizer(model, args, world_size)
    samplers = [DistributedSampler(train_set, world_size, r, seed=args.seed) for r in range(world_size)]
    for epoch in range(1, args.epochs + 1):
        if rank == 0:
            for sampler in samplers:
                sampler.set_epoch(epoch)
            # Without micro batches: what a rank accumulates is one batch here.
            size = args.batch_size * args.accumulate
            for batches in zip(*(DataLoader(train_set, size, sampler=s) for s in samplers), strict=True):
                # As DDP does: the mean over the ranks of each rank's mean, whatever the sizes of their batches.
                losses = [F.cross_entropy(model(x_NM.to(device)), y_N.to(device)) for x_NM, y_N in batches]
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
        dist.barrier()  # once an epoch, so that no rank waits for the whole of it in one collective

    if rank == 0:
        difference = (parameters_to_vector(model.parameters()) - weights).abs().max().item()
        verdict = f"largest difference {difference:.1e} (limit 1e-5)"
        # Sums in another order differ by some 1e-7, a gradient lost by 1e-2. Not `>`: NaN must fail too.
        if not difference <= 1e-5:
            sys.exit(f"the weights differ from a training in one process: {verdict}")
        print(f"same weights on every rank\nsame weights as one process: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=["auto", "nccl", "gloo"], default="auto", help="auto: nccl on GPUs")
    parser.add_argument("--batch-size", type=int, default=64, help="patients per rank and step (default: 64)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a rank in one step (default: 1)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate at 64 patients per step (default: 0.02)")
    parser.add_argument(
        "--lr-rule", choices=LR_RULES, default="linear", help="how --lr grows with the patients of a step"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and the order of the patients")
    parser.add_argument("--check", action="store_true", help="compare the result with a training in one process")
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("diabetes.csv"))
    parser.add_argument("--master-addr", default=os.environ.get("MASTER_ADDR"), help="default: $MASTER_ADDR")
    parser.add_argument("--master-port", type=int, default=os.environ.get("MASTER_PORT"), help="default: $MASTER_PORT")
    parser.add_argument("--init-timeout", type=float, default=120, help="timeout of collectives, in seconds")
    args = parser.parse_args()
    if args.batch_size < 1 or args.accumulate < 1:
        parser.error(f"--batch-size {args.batch_size} --accumulate {args.accumulate}: expected 1 or more of each")

    rank, world_size, local_rank, ranks_per_node = find_rank(os.environ)
    if world_size == 1 and args.master_addr is None:
        args.master_addr, args.master_port = "127.0.0.1", 0  # alone: any free port
    if args.master_addr is None or args.master_port is None:
        parser.error(f"{world_size} ranks need MASTER_ADDR and MASTER_PORT: export rank 0's address and a free port")

    backend, num_gpus = args.backend, torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if dist.is_nccl_available() and num_gpus >= ranks_per_node else "gloo"
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(local_rank)  # before any tensor, else every rank opens a context on GPU 0

    try:
        setup(rank, world_size, args.master_addr, args.master_port, backend=backend, timeout_s=args.init_timeout)
        if rank == 0:
            unused = f" ({num_gpus} GPUs here are not used)" if backend == "gloo" and num_gpus else ""
            print(f"world size {world_size}, {backend} on {device.type}{unused}, batches of {args.batch_size} per rank")
            product = f"{args.batch_size} x {world_size}{f' x {args.accumulate}' * (args.accumulate > 1)}"
            lr = f"{learning_rate(args, world_size):g} ({args.lr_rule} rule from {args.lr:g} at 64)"
            print(f"effective batch {product} = {effective_batch(args, world_size)} patients, learning rate {lr}")
        train(args, rank, world_size, device)
    finally:
        cleanup()


if __name__ == "__main__":
    main()
