"""A Lightning training that goes on where it stopped when it is started again: `ckpt_path="last"`.

    allranks run --nproc-per-node 2 --max-restarts 3 examples/lightning/train.py

It saves at the end of each epoch: Lightning goes on exactly from there, in the middle of one it does not. When SLURM
warns of the time limit (SIGUSR1), it ends after the epoch and puts its job back into the queue.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.step_s = step_s

    def training_step(self, batch, index):
        time.sleep(self.step_s)
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.9f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class EndOnWarning(pl.Callback):
    is_warned = False

    def on_fit_start(self, trainer, module):
        signal.signal(signal.SIGUSR1, self.warn)

    def warn(self, signum, frame):
        self.is_warned = True

    def on_train_epoch_end(self, trainer, module):
        # Ranks hear of it at slightly different times, and must end after the same epoch.
        self.is_warned = trainer.strategy.reduce_boolean_decision(self.is_warned, all=False)
        if self.is_warned:
            trainer.should_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    warning = EndOnWarning()
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # fewer after a node was lost
        strategy="ddp",
        callbacks=[warning, ModelCheckpoint(args.dir, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line(args.step_s)
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True), ckpt_path="last")
    if warning.is_warned and trainer.is_global_zero and "SLURM_JOB_ID" in os.environ:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    if trainer.is_global_zero:
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
