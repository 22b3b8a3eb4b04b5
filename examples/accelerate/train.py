"""An Accelerate training that goes on where it stopped when it is started again: save_state and load_state.

    allranks run --nproc-per-node 2 --max-restarts 3 examples/accelerate/train.py

save_state writes several files, so a kill may leave half of them: it goes into a directory of another name, which is
renamed when all ranks have written their parts.
"""

import argparse
import hashlib
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """How far the training has come; saved with the rest, as the manual says."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def newest(directory: Path) -> Path | None:
    return max(directory.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(accelerator: Accelerator, directory: Path, step: int) -> None:
    unfinished = directory / "unfinished"
    accelerator.save_state(unfinished)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        before = newest(directory)
        unfinished.rename(directory / f"step-{step}")
        if before is not None:
            shutil.rmtree(before)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(1)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Its own generator: else the loader takes a number from torch's each time it begins, and dropout is another one
    # after a restart in the middle of an epoch.
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if (checkpoint := newest(args.dir)) is not None:
        accelerator.load_state(checkpoint)
        accelerator.print(f"resumed after step {progress.step}")

    first_epoch, done = divmod(progress.step, len(loader))
    for epoch in range(first_epoch, args.epochs):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, done) if epoch == first_epoch else loader
        for x, y in batches:
            time.sleep(args.step_s)
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {progress.step} loss {mean:.9f}")
            if progress.step % args.save_every == 0:
                save(accelerator, args.dir, progress.step)
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    accelerator.print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
