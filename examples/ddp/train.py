"""A plain DDP training that goes on where it stopped when it is started again: torch.save, and a rename.

allranks run --nproc-per-node 2 --max-restarts 3 examples/ddp/train.py
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, **state) -> None:
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path, first = args.dir / "newest.pt", 0
    if path.exists():
        state = torch.load(path)
        layers.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    for step in range(first + 1, args.steps + 1):
        time.sleep(args.step_s)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * dist.get_world_size() + rank))
        loss = torch.nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f}")
            if step % args.save_every == 0:
                args.dir.mkdir(exist_ok=True)
                save(path, model=layers.state_dict(), optimizer=optimizer.state_dict(), step=step)
    if rank == 0:
        weights = b"".join(value.detach().numpy().tobytes() for value in layers.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
