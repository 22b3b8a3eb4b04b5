"""A character-level GPT that learns this file by heart, in the way of nanoGPT: one process, or DDP if RANK is set.

    python examples/char_gpt/train.py
    allranks run --nproc-per-node 2 --max-restarts 3 examples/char_gpt/train.py

Rank 0 writes model, optimizer and step to checkpoints/ckpt.pt; a start that finds this file goes on from there.
Batches and dropout depend on step and rank alone, so a resumed run computes the same bits.

Shapes: B sequences, T characters of context, C width, H heads, D = C / H, V characters in the vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, HEADS, WIDTH, CONTEXT, DROPOUT = 2, 2, 32, 32, 0.1
BATCH, ACCUMULATION, LR, WARM_UP = 4, 2, 3e-3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x_BTC)).chunk(3, dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (t_BTC.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t_BTC in qkv)
        seen_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.drop(self.out(seen_BHTD.transpose(1, 2).flatten(2)))
        return x_BTC + self.drop(self.mlp(self.norm_2(x_BTC)))


class GPT(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(num_characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_characters, bias=False)

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        logits_BTV = self.head(self.norm(self.blocks(self.token(x_BT) + self.position.weight)))
        return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


def take_batch(text: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=dice).tolist()
    return tuple(torch.stack([text[at + shift : at + shift + CONTEXT] for at in starts]) for shift in (0, 1))


def lr_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= WARM_UP:
        return LR * step / WARM_UP
    return LR * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--out-dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    is_ddp = "RANK" in os.environ
    if is_ddp:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_ddp else (0, 1)
    source = Path(__file__).read_text()
    characters = sorted(set(source))
    text = torch.tensor([characters.index(each) for each in source])
    torch.manual_seed(1337)
    model = GPT(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoint, done = args.out_dir / "ckpt.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
        print(f"rank {rank} resumes after step {done}")
    ddp = DistributedDataParallel(model) if is_ddp else model

    for step in range(done + 1, args.steps + 1):
        time.sleep(args.step_s)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, args.steps)
        seed = step * world_size + rank
        dice = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # dropout
        for micro_step in range(1, ACCUMULATION + 1):
            is_last = micro_step == ACCUMULATION
            with contextlib.nullcontext() if is_last or not is_ddp else ddp.no_sync():
                loss = ddp(*take_batch(text, dice))
                (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f}")
            if step % args.save_every == 0:
                args.out_dir.mkdir(exist_ok=True)
                unfinished = checkpoint.with_suffix(".unfinished")  # a kill in the middle leaves the last one whole
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
                unfinished.replace(checkpoint)
    if rank == 0:
        weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    if is_ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
