"""How fast does this cluster train a GPT? A small one, on bytes, that learns to write Python from Python's own library.

    python train.py --layers 2 --width 64 --context 64 --steps 100      # alone, on a CPU
    torchrun --standalone --nproc-per-node 2 train.py
    allranks run --nproc-per-node 2 train.py                            # the same; explains failures
    srun --nodes=6 --ntasks-per-node=1 python train.py --seconds 60     # each task a rank; MASTER_ADDR and _PORT set

By default 11 M parameters and 2048 bytes a rank and step: some 1 GB of memory, and about a second on two CPU cores.
Limits: no checkpoints; every node must have the same Python, since its library is the text.

Shapes: B sequences a rank, T bytes of context, C width, H heads, D = C / H, V = 256 byte values.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

V = 256

# --- The model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Each byte looks at those before it, then thinks for itself; both add to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(
            self.attention_out.weight
        )  # a block begins as the identity, so that depth costs nothing at first
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTC = self.qkv(norm(x_BTC)).chunk(3, dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (t_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t_BTC in qkv_BTC)
        seen_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.attention_out(seen_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp_out(F.relu(self.mlp_in(norm(x_BTC))).square())


def norm(x_BTC: Tensor) -> Tensor:
    return F.rms_norm(x_BTC, (x_BTC.size(-1),))


class GPT(nn.Module):
    """Bytes in, for each the mean loss of guessing the next one out."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(V, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.next_byte = nn.Linear(width, V, bias=False)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.next_byte.weight)  # the first guess is even: a loss of ln 256 = 5.55

    def forward(self, bytes_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.byte(bytes_BT) + self.position.weight[: bytes_BT.size(1)]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.next_byte(norm(x_BTC)).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


# --- The text --------------------------------------------------------------------------------------------------------


def load_text(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: every 20th file of the standard library is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))
    train, validation, left = bytearray(), bytearray(), max_bytes
    for i, path in enumerate(files):
        text = path.read_bytes()[:left]
        (validation if i % 20 == 0 else train).extend(text)
        left -= len(text)
        if left == 0:
            break
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def take_windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows of the text from these starts, and the same one byte on: what to guess."""
    windows = text[starts[:, None] + torch.arange(context + 1)].to(device).long()
    return windows[:, :-1], windows[:, 1:]


# --- Training --------------------------------------------------------------------------------------------------------


def join_group(backend: str, timeout_s: float) -> tuple[int, int, str, torch.device]:
    """Joins the process group from torchrun's variables, else srun's, else alone: rank, world size, backend, device."""
    env = os.environ
    if "RANK" not in env:
        env["RANK"] = env.get("SLURM_PROCID", "0")
        env["WORLD_SIZE"] = env.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in env else "1"
        env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
        # "2(x5),1": five nodes with two tasks, one with one. The most on any node, so that all nodes decide alike.
        tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")
        env["LOCAL_WORLD_SIZE"] = str(max(int(tasks.split("(")[0]) for tasks in tasks_per_node))
    rank, world_size, local_rank = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    ranks_per_node = int(env.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if world_size == 1:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "0")  # any free one
    if backend == "auto":
        backend = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= ranks_per_node else "gloo"
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device_id)
    return rank, world_size, backend, device


@torch.no_grad()
def measure_bits_per_byte(model: GPT, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Bits that the model needs for a byte of unseen text: 8 knows nothing. 32 windows, dealt out to the ranks."""
    starts = torch.linspace(0, len(text) - args.context - 1, 32).long()[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros(2, device=device)  # loss in nats, windows
    for start in starts.split(1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total += torch.stack(
                [model(*take_windows(text, start, args.context, device)), torch.ones((), device=device)]
            )
    dist.all_reduce(total)
    return (total[0] / total[1] / math.log(2)).item()


def train(args: argparse.Namespace, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    train_text, validation_text = load_text(args.max_bytes)
    if min(len(train_text), len(validation_text)) < args.context + 2:
        raise SystemExit(f"--max-bytes {args.max_bytes}: too little text for --context {args.context}")
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.heads, args.width, args.context).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    dice = torch.Generator().manual_seed(args.seed * 1_000_003 + rank)  # every rank draws its own windows
    if rank == 0:
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        size_mb = (len(train_text) + len(validation_text)) / 1e6
        print(f"world size {world_size}, {backend} on {device}, {millions:.2f} M parameters, {size_mb:.1f} MB of text")

    step, start_s = 0, time.perf_counter()
    while True:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / 20, 1)  # warm up, then constant: with --seconds nobody knows the end
        starts = torch.randint(len(train_text) - args.context, (args.batch_size,), generator=dice)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = ddp(*take_windows(train_text, starts, args.context, device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step == 1 or step % args.log_every == 0 or step == args.steps:
            # Rank 0's clock decides for all, and travels with the loss: the ranks must stop after the same step.
            elapsed_s = time.perf_counter() - start_s if rank == 0 else 0.0
            sums = torch.stack([loss.detach(), torch.tensor(elapsed_s, device=device)])
            dist.all_reduce(sums)
            mean_loss, elapsed_s = sums[0].item() / world_size, sums[1].item()
            if step == 1:  # pays for starting up: the rate counts from its end
                first_step_s, tokens_per_s = elapsed_s, 0.0
                rate = f"{first_step_s:.1f} s to start up"
            else:
                tokens = (step - 1) * world_size * args.batch_size * args.context
                tokens_per_s = tokens / (elapsed_s - first_step_s)
                rate = f"{tokens_per_s:,.0f} tokens/s"
            if rank == 0:
                print(f"step {step:5d}   loss {mean_loss:.3f}   {rate}", flush=True)
            if step == args.steps or elapsed_s > args.seconds:
                break

    bits_per_byte = measure_bits_per_byte(model, validation_text, args, device)
    if rank == 0:
        print(f"validation {bits_per_byte:.3f} bits per byte after {step} steps", flush=True)
        if args.json:
            figures = {"tokens_per_s": round(tokens_per_s, 1), "steps": step, "loss": mean_loss}
            figures |= {
                "bits_per_byte": bits_per_byte,
                "seconds": elapsed_s,
                "world_size": world_size,
                "backend": backend,
            }
            print(json.dumps(figures), flush=True)


def main() -> None:
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=defaults)
    parser.add_argument("--layers", type=int, default=6, help="number of transformer blocks")
    parser.add_argument("--heads", type=int, default=6, help="attention heads per block; must divide --width")
    parser.add_argument("--width", type=int, default=384, help="size of the embedding of a byte")
    parser.add_argument("--context", type=int, default=256, help="number of earlier bytes that a prediction can use")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=200, help="number of steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit, checked at every log line")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, after 20 steps of warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and the order of the text")
    parser.add_argument("--max-bytes", type=int, default=16_000_000, help="maximum number of bytes of text")
    parser.add_argument("--log-every", type=int, default=10, help="steps between log lines")
    parser.add_argument("--json", action="store_true", help="print the results as one line of JSON at the end")
    parser.add_argument("--backend", choices=["auto", "nccl", "gloo"], default="auto", help="auto: nccl on GPUs")
    parser.add_argument("--timeout", type=float, default=300, help="timeout of collectives, in seconds")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")

    try:
        train(args, *join_group(args.backend, args.timeout))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(0.2)  # Gloo's threads may still hold the last collective; see examples/six-node/py_exe.py


if __name__ == "__main__":
    main()
