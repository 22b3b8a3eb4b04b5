"""Logs of jobs that never ran, for benchmarks: the same bytes for the same seed.

    python benchmarks/synthetic_logs.py training /var/tmp/training.log --size 1e9
    python benchmarks/synthetic_logs.py nccl-info /var/tmp/nccl.log --size 1e9
    python benchmarks/synthetic_logs.py job /var/tmp/job --size 2e9 --files 4096

A training log is what many runs after one another write: banners, start-up, then steps as Megatron, the HF Trainer,
Lightning or tqdm print them, with warnings and prints of users between, and in one of `HIT_EVERY` lines one that a sign
of a cause matches. A job is one file a rank of a run that one rank's GPU ended (`plant_of`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from allranks.causes.book import all_causes

HIT_EVERY = 20_000
"""Lines of a training log: a failure every two megabytes, far more than jobs have that train."""
GPUS_A_NODE = 8
BLOCK_BYTES = 1 << 20

USER_PRINTS = (
    "loading shard {a:05d}-of-00512 ({b:.1f} MB)",
    "[rank{c}]: saved checkpoint to /fsx/checkpoints/llama-7b/step_{a:07d}/model_{c:02d}.pt in {b:.1f}s",
    "eval: mmlu={b:.4f} hellaswag={b:.4f} step={a}",
    "dataloader worker {c} reset, epoch seed {a}",
    "[rank{c}]:W0612 09:{c:02d}:11.{a:06d} torch/distributed/distributed_c10d.py:3070] using default timeout 0:10:00",
    "/opt/conda/lib/python3.11/site-packages/torch/utils/checkpoint.py:{c}: UserWarning: the use_reentrant parameter"
    " should be passed explicitly.",
    "max memory allocated: {b:.2f} GiB, reserved: {b:.2f} GiB, num_alloc_retries: 0",
    "wandb: Network error resolved after {b:.1f}s, resuming normal operation.",
    "",
)
TORCHRUN_BANNER = (
    "W0612 08:15:42.118000 140735 torch/distributed/run.py:793] *****************************************",
    "W0612 08:15:42.118000 140735 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each"
    " process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal"
    " performance in your application as needed.",
    "I0612 08:15:42.120000 140735 torch/distributed/launcher/api.py:194] Starting elastic_operator with launch"
    " configs:",
    "  entrypoint       : train.py",
    "  rdzv_backend     : c10d",
    "  rdzv_endpoint    : node001:29500",
    "  rdzv_configs     : {'timeout': 900}",
    "> initializing torch distributed ...",
    "NCCL version 2.21.5+cuda12.4",
    "> initialized tensor model parallel with size 4",
    "node001:140801:140801 [0] NCCL WARN NCCL_SOCKET_IFNAME set by environment to ib0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("training", "nccl-info", "job"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=float, default=1e9, help="bytes, all files together")
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.kind == "job":
        node, rank = write_job(options.path, num_files=options.files, size_bytes=int(options.size), seed=options.seed)
        print(f"rank {rank} on {node} did it")
    else:
        write_log(options.path, options.kind, size_bytes=int(options.size), seed=options.seed)


def write_log(path: Path, kind: str, *, size_bytes: int, seed: int = 1) -> None:
    """Write one log of this size, to the byte."""
    rng = random.Random(f"{kind} {seed}")
    lines = training_lines(rng, hit_every=HIT_EVERY) if kind == "training" else nccl_info_lines(rng)
    with path.open("wb") as file:
        for block in blocks_of(lines, size_bytes):
            file.write(block)


def blocks_of(lines: Iterator[str], size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    block: list[str] = []
    gathered = 0
    for line in lines:
        block.append(line)
        gathered += len(line)
        if gathered >= min(BLOCK_BYTES, left):
            data = "".join(block).encode()[:left]
            yield data
            left -= len(data)
            block, gathered = [], 0
            if not left:
                return


# --- A training log ---------------------------------------------------------------------------------------------------


def training_lines(rng: random.Random, *, hit_every: int | None) -> Iterator[str]:
    """Run after run without an end; the lines of a progress bar end in carriage returns.

    Args:
        hit_every: one of so many lines is a hit of a cause; None: no line.
    """
    hits = [hit.splitlines()[0] for cause in all_causes() for hit in cause.hits]
    writers: tuple[Callable[[random.Random, int], str], ...] = (megatron, hugging_face, lightning, tqdm_bar)
    count = 0
    while True:
        write = rng.choice(writers)
        for line in TORCHRUN_BANNER:
            yield line + "\n"
        for step in range(rng.randrange(500, 5000)):
            yield write(rng, step)
            count += 1
            if step % 20 == 0:
                text = rng.choice(USER_PRINTS)
                yield text.format(a=step, b=rng.uniform(0, 100), c=step % 64) + "\n"
            if hit_every and count % hit_every == 0:
                yield f"[rank{step % 64}]: {rng.choice(hits)}\n"


def megatron(rng: random.Random, step: int) -> str:
    return (
        f" [2024-06-12 09:{step // 60 % 60:02d}:{step % 60:02d}.{step % 1000:06d}] iteration {step:8d}/  500000 |"
        f" consumed samples: {step * 1024:12d} | elapsed time per iteration (ms): {rng.uniform(5000, 5100):.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {rng.uniform(380, 420):.1f} | learning rate: {rng.random():.6E} |"
        f" global batch size:  1024 | lm loss: {rng.uniform(1, 3):.6E} | loss scale: 1.0 |"
        f" grad norm: {rng.uniform(0, 2):.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def hugging_face(rng: random.Random, step: int) -> str:
    return (
        f"{{'loss': {rng.uniform(1, 3):.4f}, 'grad_norm': {rng.uniform(0, 2)}, 'learning_rate': {rng.random()}e-05,"
        f" 'epoch': {step / 4000:.2f}}}\n"
    )


def lightning(rng: random.Random, step: int) -> str:
    return (
        f"\rEpoch {step // 1000}: {step % 1000 // 10:3d}%|{'#' * (step % 1000 // 100):<10}| {step % 1000}/1000"
        f" [0{step % 10}:{step % 60:02d}<0{9 - step % 10}:{59 - step % 60:02d}, {rng.uniform(1, 9):.2f}it/s, v_num=12,"
        f" train_loss={rng.uniform(1, 3):.3f}]" + ("\n" if step % 1000 == 999 else "")
    )


def tqdm_bar(rng: random.Random, step: int) -> str:
    return (
        f" {step % 100:3d}%|{'#' * (step % 100 // 10):<10}| {step}/5000 [{step // 60:02d}:{step % 60:02d}<1:12:04,"
        f" {rng.uniform(1, 9):.2f}it/s, loss={rng.uniform(1, 3):.3f}]" + ("\n" if step % 100 == 99 else "\r")
    )


# --- NCCL_DEBUG=INFO --------------------------------------------------------------------------------------------------


def nccl_info_lines(rng: random.Random) -> Iterator[str]:
    """Start-up of rank after rank, then its collectives (NCCL_DEBUG_SUBSYS=INIT,ENV,COLL); nothing is wrong."""
    while True:
        for rank in range(64):
            pid, gpu = rng.randrange(10_000, 99_999), rank % GPUS_A_NODE
            who = f"node{rank // GPUS_A_NODE:03d}:{pid}:{pid + 123} [{gpu}] NCCL INFO"
            comm = f"comm 0x{rng.getrandbits(44):012x}"
            yield f"{who} NCCL_SOCKET_IFNAME set by environment to ib0\n"
            yield f"{who} Bootstrap : Using ib0:10.0.{rank // GPUS_A_NODE}.7<0>\n"
            yield f"{who} NET/Plugin: No plugin found (libnccl-net.so)\n"
            yield f"{who} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.{rank // GPUS_A_NODE}.7<0>\n"
            yield f"{who} Using network IB\n"
            yield f"{who} {comm} rank {rank} nRanks 64 nNodes 8 localRanks 8 localRank {gpu} MNNVL 0\n"
            for channel in range(16):
                order = " ".join(str((rank + hop * 7) % 64) for hop in range(64))
                yield f"{who} Channel {channel:02d}/16 : {order}\n"
                yield f"{who} Channel {channel:02d}/0 : {rank}[{gpu}] -> {rank + 1}[{gpu}] via P2P/CUMEM\n"
                yield f"{who} Channel {channel:02d}/0 : {rank}[{gpu}] -> {rank + 8}[{gpu}] [send] via NET/IB/0/GDRDMA\n"
            yield f"{who} Connected all rings\n"
            yield f"{who} threadThresholds 8/8/64 | 512/8/64 | 512 | 512\n"
            yield f"{who} {comm} rank {rank} nranks 64 cudaDev {gpu} busId {gpu}b000 commId 0x1f - Init COMPLETE\n"
            for op in range(400):
                yield (
                    f"{who} AllReduce: opCount {op:x} sendbuff 0x7f{rng.getrandbits(40):010x} recvbuff 0x7f"
                    f"{rng.getrandbits(40):010x} count {rng.randrange(1, 1 << 28)} datatype 9 op 0 root 0 {comm}"
                    f" [nranks=64] stream 0x{rng.getrandbits(44):012x}\n"
                )


# --- A job of many files, and who ended it ----------------------------------------------------------------------------


def plant_of(num_files: int) -> tuple[str, int]:
    """Return node and rank of the culprit that `write_job` plants."""
    rank = num_files * 2 // 3
    return f"node{rank // GPUS_A_NODE:03d}", rank


def write_job(folder: Path, *, num_files: int, size_bytes: int, seed: int = 1) -> tuple[str, int]:
    """Write `<node>/rank_<rank>.log`, all of one size; return the node and the rank that is to blame.

    Its GPU has an uncorrectable ECC error. The others' watchdogs give up ten minutes later, and each says so in many
    lines, as PyTorch 2.6 does.
    """
    culprit_node, culprit = plant_of(num_files)
    failed_at = datetime(2024, 6, 12, 17, 23, 9)
    share_bytes = size_bytes // num_files
    for rank in range(num_files):
        node = f"node{rank // GPUS_A_NODE:03d}"
        rng = random.Random(f"job {seed} {rank}")
        end = "".join(ecc_lines(rank, failed_at) if rank == culprit else watchdog_lines(rank, failed_at)).encode()
        path = folder / node / f"rank_{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for block in blocks_of(training_lines(rng, hit_every=None), max(1, share_bytes - len(end) - 1)):
                file.write(block)
            file.write(b"\n" + end)
    return culprit_node, culprit


def ecc_lines(rank: int, at: datetime) -> Iterator[str]:
    who = f"[rank{rank}]:"
    yield f"{who}[E{at:%m%d %H:%M:%S}.120414077 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    yield " Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
    yield f"{who} Traceback (most recent call last):\n"
    yield f'{who}   File "/home/u/train.py", line 412, in <module>\n'
    yield f"{who}     loss.backward()\n"
    yield f"{who} RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    yield f"{who} CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below"
    yield " might be incorrect.\n"


def watchdog_lines(rank: int, failed_at: datetime) -> Iterator[str]:
    at = failed_at + timedelta(seconds=600 + rank % 7)
    where = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    who = f"[rank{rank}]:[E{at:%m%d %H:%M:%S}.{rank % 1000:03d}414077 ProcessGroupNCCL.cpp"
    work = "WorkNCCL(SeqNum=88213, OpType=ALLREDUCE, NumelIn=52428800, NumelOut=52428800, Timeout(ms)=600000)"
    timeout = f"Watchdog caught collective operation timeout: {work} ran for 600{rank % 100:03d} milliseconds"
    yield f"{who}:629] {where} {timeout} before timing out.\n"
    yield f"{who}:2168] {where} failure detected by watchdog at work sequence id: 88213 PG status: last enqueued work:"
    yield " 88215, last completed work: 88212\n"
    yield f"{who}:681] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels,"
    yield " subsequent GPU operations might run on corrupted/incomplete data.\n"
    yield f"{who}:695] To avoid data inconsistency, we are taking the entire process down.\n"
    yield f"{who}:1895] {where} Process group watchdog thread terminated with exception: [Rank {rank}] {timeout} before"
    yield " timing out.\n"
    for frame in range(12):
        yield f"frame #{frame}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{frame:x}c1 (0x7f1b2c0a in"
        yield " libtorch_cuda.so)\n"


if __name__ == "__main__":
    main()
