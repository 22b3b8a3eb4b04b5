"""A DeepSpeed training (ZeRO stage 1) that goes on where it stopped when it is started again.

allranks run --nproc-per-node 2 --max-restarts 3 examples/deepspeed/train.py
"""

import argparse
import hashlib
import time
from pathlib import Path

import deepspeed
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=layers,
        optimizer=torch.optim.Adam(layers.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}, "steps_per_print": 10**9},
    )
    if (args.dir / "latest").exists():  # written last, when the checkpoint that it names is complete
        engine.load_checkpoint(args.dir)

    for step in range(engine.global_steps + 1, args.steps + 1):
        time.sleep(args.step_s)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = torch.nn.functional.mse_loss(engine(x), x.square().sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f}")
        if step % args.save_every == 0:
            engine.save_checkpoint(args.dir, tag=f"step_{step}")  # all ranks: each writes its part of the optimizer
    if rank == 0:
        weights = b"".join(value.detach().numpy().tobytes() for value in layers.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
