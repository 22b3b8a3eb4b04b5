"""A small training by session(), which writes down every sample it took and what the weights became.

exact_train.py OUT [--total N] [--every K] [--noise] [--micro M] [--workers N] [--batch G] [--unpinned] [--pause-s S]
              [--full] [--amp]

OUT/<life>/<rank>.pid and .steps (a line a step: its number and its samples), OUT/final.pt at the end: the states of
model, optimizer, EMA and GradScaler. The life is EXACT_LIFE plus torchrun's count of restarts.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import allranks
from allranks.state.resumed.sampler import SeededDataset


class Points(Dataset):
    """512 points, augmented a little."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(512, 16, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index] + 0.01 * torch.randn(16), self.targets[index]


class SimpleModel(torch.nn.Module):
    def __init__(self, *, has_noise: bool, has_norm: bool) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(16, 128)
        self.norm = torch.nn.BatchNorm1d(128) if has_norm else torch.nn.Identity()
        self.noise = torch.nn.Dropout(0.1 if has_noise else 0.0)
        self.middle = torch.nn.Linear(128, 128)
        self.last = torch.nn.Linear(128, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.noise(self.norm(self.hidden(inputs)).relu())).relu())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--total", type=int, default=60)
    parser.add_argument("--every", type=int)
    parser.add_argument("--noise", action="store_true", help="dropout, so that generators of all ranks count")
    parser.add_argument("--micro", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--unpinned", action="store_true", help="torch's own DDP")
    parser.add_argument("--full", action="store_true", help="with BatchNorm, EMA and clipping")
    parser.add_argument("--amp", action="store_true", help="bfloat16 by autocast, and a GradScaler")
    parser.add_argument("--pause-s", type=float, default=0.0)
    options = parser.parse_args()

    torch.manual_seed(1)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    with allranks.session(timeout_s=60) as s:
        count = sum(int(os.environ.get(name) or 0) for name in ("EXACT_LIFE", "TORCHELASTIC_RESTART_COUNT"))
        life = options.out / str(count)
        life.mkdir(parents=True, exist_ok=True)
        (life / f"{s.rank}.pid").write_text(str(os.getpid()))
        wrap = DistributedDataParallel if options.unpinned else s.ddp
        model = wrap(SimpleModel(has_noise=options.noise, has_norm=options.full).to(s.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.total)
        ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        # The scale soon overflows float32: a resumed run must skip the same steps and count them alike.
        scaler = torch.amp.GradScaler(s.device.type, init_scale=2.0**110, growth_interval=3, enabled=options.amp)
        sampler = s.sampler(512, global_batch_size=options.batch, micro_batch_size=options.micro, seed=3)
        loader = DataLoader(SeededDataset(Points()), batch_sampler=sampler, num_workers=options.workers)
        torch.manual_seed(100 + s.rank)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "sampler": sampler}
        parts |= {"scaler": scaler} if options.amp else {}
        state = s.track(**parts, checkpoint_every=options.every)
        with (life / f"{s.rank}.steps").open("w", buffering=1) as taken:
            for step in state.steps(loader, total=options.total):
                with step as batches:
                    samples = []
                    for indices, inputs, targets in batches if options.micro else [batches]:
                        samples += indices.tolist() if step.share.own else []
                        with torch.autocast(s.device.type, torch.bfloat16, enabled=options.amp):
                            outputs = model(inputs)
                        loss = (outputs.float() - targets).square().mean()
                        scaler.scale(loss).backward()
                    taken.write(" ".join(map(str, [step.number, *samples])) + "\n")
                    if options.full:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    ema.update_parameters(model.module)
                    scheduler.step()
                    optimizer.zero_grad()
                    step.log(loss=loss.detach())
                time.sleep(options.pause_s)
        if s.is_leader:
            final = {"model": model.module, "optimizer": optimizer, "ema": ema, "scaler": scaler}
            torch.save({name: part.state_dict() for name, part in final.items()}, options.out / "final.tmp")
            (options.out / "final.tmp").replace(options.out / "final.pt")


if __name__ == "__main__":
    main()
