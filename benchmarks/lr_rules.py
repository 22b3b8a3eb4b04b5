"""Which rule of the learning rate holds for SGD when the batch grows? Model and data of examples/six-node/py_exe.py.

    python benchmarks/lr_rules.py            # a Markdown table; a minute on one core

A batch of 8 patients trains for ten epochs; its loss on all training patients is the target. Then batches of k times 8
train with the learning rate by each rule until they reach it. The table has the samples that took, as a multiple of
those of the batch of 8: mean and range of ten seeds. Warm-up: a tenth of the base's steps, linear, counted in samples.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "six-node"
BASE, EPOCHS, LONGEST = 8, 10, 100  # patients in a batch; epochs to the target; epochs until a run is given up


def train(py_exe: dict, dataset: torch.utils.data.TensorDataset, *, batch: int, lr: float, seed: int) -> list[float]:
    """Return the losses on all training patients, after as many samples as there are patients each."""
    x, y = dataset.tensors
    torch.manual_seed(seed)
    model = py_exe["SimpleModel"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, seen, epochs = [], 0, LONGEST if batch > BASE else EPOCHS
    warm_up = len(y) * EPOCHS / 10
    order = torch.cat([torch.randperm(len(y)) for _ in range(epochs)])
    for part in order.split(batch):
        if len(part) < batch:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min((seen + batch) / warm_up, 1)
        optimizer.zero_grad()
        cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        before, seen = seen, seen + batch
        if seen // len(y) > before // len(y):
            with torch.no_grad():
                losses.append(cross_entropy(model(x), y).item())
    return losses


def epochs_to(losses: list[float], target: float) -> float | None:
    """Epochs until the loss was first at the target, between two of them in proportion; None: never."""
    for i, loss in enumerate(losses):
        if loss <= target:
            last = losses[i - 1] if i else 0.6931  # an even guess of two classes
            return i + (last - target) / (last - loss)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    py_exe = runpy.run_path(str(EXAMPLE / "py_exe.py"), run_name="py_exe")
    dataset, _ = py_exe["load_patients"](EXAMPLE / "diabetes.csv")
    lr = 0.02 * BASE / 64  # py_exe.py's, by its linear rule
    targets = [train(py_exe, dataset, batch=BASE, lr=lr, seed=seed)[-1] for seed in range(args.seeds)]
    print("| batch | linear | sqrt | none |\n|---|---|---|---|")
    for k in (2, 4, 8, 16):
        cells = []
        for rule in ("linear", "sqrt", "none"):
            own = lr * py_exe["LR_RULES"][rule](k)
            found = [
                epochs_to(train(py_exe, dataset, batch=BASE * k, lr=own, seed=seed), target)
                for seed, target in enumerate(targets)
            ]
            ratios = [epochs / EPOCHS for epochs in found if epochs is not None]
            late = len(found) - len(ratios)
            cell = f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells.append(f"{cell}{f' {late} never' * (late > 0)}")
        print(f"| {k} x | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
