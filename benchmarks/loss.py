"""What does each way of sending less over the network cost in loss? Simulated ranks in one process, paired runs.

    python benchmarks/loss.py --into build/loss                      # every method, three seeds; goes on where it was
    python benchmarks/loss.py --into build/loss --methods int8 --seeds 0
    python benchmarks/loss_report.py --into build/loss               # docs/evidence/compression_loss.json, .md and .svg

Six ranks train examples/gpt (0.12 M parameters, its data and its AdamW, nothing tuned) on 1,536 tokens a step. All
methods of one seed begin with the same weights and get the same windows in the same order, so their losses are compared
pair by pair. Once all runs have made their steps, a method that ended above plain's last loss trains on until it
reaches that loss, or for four times the steps. Validation loss is the mean of 256 windows, every 25 steps; the last
loss is the mean of the last four values.

Each method's arithmetic is what its collective does: bf16 rounds after every addition, as Gloo's ring does; int8 is
the code of comm/hooks.py; PowerSGD is torch's powerSGD_hook with rank 4, error feedback, warm start, and ten
uncompressed steps. Limits: one small model; no learning-rate decay; gradients are one bucket.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from train import GPT, load_text, take_windows  # noqa: E402  (the example is no package)

from allranks.comm.hooks import BLOCK, SCALE_BYTES, decode, encode  # noqa: E402
from allranks.comm.noise import LR_RULES  # noqa: E402

RANKS, WINDOWS, CONTEXT = 6, 4, 64  # 1,536 tokens a step
LR, WARM_UP = 1e-3, 20
EVERY, LAST = 25, 4  # steps between two validations; how many of them make a loss

Wire = Callable[[list[Tensor]], Tensor]
"""The gradients of all ranks in, flat, each (P,) fp32; what every rank gets out, (P,)."""


# --- What travels: the gradients -------------------------------------------------------------------------------------


def mean(grads: list[Tensor]) -> Tensor:
    return torch.stack(grads).mean(0)


def bf16(grads: list[Tensor]) -> Tensor:
    """As bf16_compress_hook: divided in bf16, then added in bf16, rank after rank."""
    total, *rest = (grad.to(torch.bfloat16).div_(RANKS) for grad in grads)
    for grad in rest:
        total += grad
    return total.float()


@dataclass
class Int8:
    """As `_Int8` of comm/hooks.py, with its encode and decode: all-to-all, mean in fp32, all-gather."""

    owed: Tensor | None = None
    """Of each rank, in slices of blocks."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        length, ranks = len(grads[0]), len(grads)
        blocks = -(-length // (ranks * BLOCK))
        if self.owed is None:
            self.owed = torch.zeros(ranks, ranks * blocks * BLOCK)
        self.owed[:, :length] += torch.stack(grads)
        slices = self.owed.view(ranks, ranks, blocks, BLOCK)
        sent = torch.empty(ranks, ranks, blocks * (BLOCK + SCALE_BYTES), dtype=torch.uint8)
        gathered = torch.empty(ranks, blocks * (BLOCK + SCALE_BYTES), dtype=torch.uint8)
        for rank in range(ranks):
            encode(slices[rank], sent[rank])
        for rank in range(ranks):
            average = decode(sent[:, rank]).mean(0)
            encode(average, gathered[rank])
            slices[rank, rank].add_(average, alpha=ranks)
        return decode(gathered).view(-1)[:length]


@dataclass
class PowerSgd:
    """torch's powerSGD_hook: M = gradient + error; P = mean(M Q), orthogonal; Q = mean(M^T P); the result is P Q^T."""

    shapes: list[torch.Size]
    rank: int = 4
    first_step: int = 10
    step: int = 0
    errors: list[Tensor] = field(default_factory=list)
    qs: dict[int, Tensor] = field(default_factory=dict)
    dice: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, grads: list[Tensor]) -> Tensor:
        self.step += 1
        if self.step <= self.first_step:
            return mean(grads)
        self.errors = self.errors or [torch.zeros_like(grad) for grad in grads]
        wanted = [grad + error for grad, error in zip(grads, self.errors, strict=True)]
        result, begin = torch.empty_like(grads[0]), 0
        for i, shape in enumerate(self.shapes):
            part = slice(begin, begin := begin + shape.numel())
            stacked = torch.stack([flat[part] for flat in wanted])
            rows, columns = (shape[0], shape.numel() // shape[0])
            if len(shape) < 2 or (rows + columns) * self.rank * 2 >= rows * columns:  # min_compression_rate 2
                result[part] = stacked.mean(0)
                continue
            matrices = stacked.view(-1, rows, columns)
            if i not in self.qs:
                self.qs[i] = torch.linalg.qr(torch.randn(columns, self.rank, generator=self.dice)).Q
            p = torch.linalg.qr((matrices @ torch.linalg.qr(self.qs[i]).Q).mean(0)).Q
            self.qs[i] = (matrices.mT @ p).mean(0)
            result[part] = (p @ self.qs[i].T).flatten()
        self.errors = [flat - result for flat in wanted]
        return result


@dataclass
class TopK:
    """Each rank sends the largest 1 % of its gradient and error, and keeps the rest."""

    errors: list[Tensor] = field(default_factory=list)

    def __call__(self, grads: list[Tensor]) -> Tensor:
        self.errors = self.errors or [torch.zeros_like(grad) for grad in grads]
        total = torch.zeros_like(grads[0])
        for rank, grad in enumerate(grads):
            wanted = grad + self.errors[rank]
            largest = wanted.abs().topk(len(wanted) // 100).indices
            total[largest] += wanted[largest]
            wanted[largest] = 0
            self.errors[rank] = wanted
        return total / len(grads)


# --- The methods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """One way to train: which gradients travel how, or whose weights are averaged how often."""

    name: str
    wire: str = "plain"
    accumulate: int = 1
    """Steps of plain that make one step of this."""
    lr_scale: float = 1.0
    average_every: int = 0
    """0: gradients are averaged in every step."""
    outer: bool = False
    """DiLoCo: SGD with learning rate 0.9 and Nesterov 0.5 on the averaged weights, after 10 % of plain steps."""


METHODS = (
    Method("plain"),
    Method("bf16", wire="bf16"),
    Method("int8", wire="int8"),
    Method("powersgd", wire="powersgd"),
    Method("topk", wire="topk"),
    Method("accumulate-8", accumulate=8),
    Method("average-8", average_every=8),
    Method("diloco-10", average_every=10, outer=True),
    Method("diloco-25", average_every=25, outer=True),
)
CURVE = (
    *(Method(f"accumulate-1-x{scale}", lr_scale=float(scale)) for scale in (2, 4, 8)),
    *(
        Method(f"accumulate-{k}-{rule}", accumulate=k, lr_scale=LR_RULES[rule](k))
        for k in (2, 4, 8)
        for rule in ("none", "sqrt", "linear")
        if (k, rule) != (8, "none")  # that is accumulate-8
    ),
)
"""For docs/how-to/scaling.md: what a larger batch needs under each rule, and what another learning rate does alone."""


class Trainer:
    """One method with one seed; picklable between any two steps."""

    def __init__(self, method: Method, seed: int, steps: int) -> None:
        self.method, self.seed, self.steps = method, seed, steps
        torch.manual_seed(seed)
        model = GPT(layers=2, heads=4, width=60, context=CONTEXT)
        self.outer = copy.deepcopy(model)
        self.models = [model]  # one for all ranks while their weights are the same, else one each
        self.optimizers = [make_optimizer(model)]
        parameters = list(model.parameters())
        wires: dict[str, Any] = {
            "plain": mean,
            "bf16": bf16,
            "int8": Int8(),
            "powersgd": PowerSgd([p.shape for p in parameters]),
            "topk": TopK(),
        }
        self.wire: Wire = wires[method.wire]
        self.outer_optimizer = torch.optim.SGD(self.outer.parameters(), lr=0.9, momentum=0.5, nesterov=True)
        self.step = 0
        self.pending: list[Tensor] = []  # gradient sums of this window, one a rank
        self.losses: list[tuple[int, float]] = []
        self.norms: list[tuple[float, float]] = []  # plain: mean square norm of the ranks' gradients, and of their mean

    def advance(self, text: Tensor, starts: Tensor) -> None:
        """Does one of plain's steps: 1,536 tokens."""
        local_from = self.steps // 10 if self.method.outer else 0
        if self.method.average_every and self.step == local_from:
            self.outer.load_state_dict(self.models[0].state_dict())
            self.models = [copy.deepcopy(self.models[0]) for _ in range(RANKS)]
            self.optimizers = [copied_optimizer(self.optimizers[0], model) for model in self.models]
        self.step += 1
        if len(self.models) == 1:
            self.step_together(text, starts)
        else:
            self.step_apart(text, starts)
            if (self.step - local_from) % self.method.average_every == 0:
                self.synchronize()

    def step_together(self, text: Tensor, starts: Tensor) -> None:
        model, optimizer = self.models[0], self.optimizers[0]
        grads = [gradient(model, text, own) for own in starts]
        every = self.method.accumulate
        self.pending = grads if not self.pending else [a + b for a, b in zip(self.pending, grads, strict=True)]
        if self.step % every:
            return
        grads, self.pending = [grad / every for grad in self.pending], []
        sent = self.wire(grads)
        if self.method.name == "plain":
            self.norms.append((statistics.fmean(float(grad.dot(grad)) for grad in grads), float(sent.dot(sent))))
        begin = 0
        for parameter in model.parameters():
            parameter.grad = sent[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        set_lr(optimizer, LR * self.method.lr_scale * min(self.step / every / WARM_UP, 1))
        optimizer.step()

    def step_apart(self, text: Tensor, starts: Tensor) -> None:
        for model, optimizer, own in zip(self.models, self.optimizers, starts, strict=True):
            set_lr(optimizer, LR * min(self.step / WARM_UP, 1))
            optimizer.zero_grad()
            model(*take_windows(text, own, CONTEXT, torch.device("cpu"))).backward()
            optimizer.step()

    @torch.no_grad()
    def synchronize(self) -> None:
        for outer, *inner in zip(*(m.parameters() for m in (self.outer, *self.models)), strict=True):
            average = torch.stack([p.detach() for p in inner]).mean(0)
            if self.method.outer:
                outer.grad = outer - average
            else:
                outer.copy_(average)
        if self.method.outer:
            self.outer_optimizer.step()
        for model in self.models:
            model.load_state_dict(self.outer.state_dict())

    @torch.no_grad()
    def validate(self, text: Tensor) -> None:
        model = self.models[0] if len(self.models) == 1 else self.outer
        starts = torch.linspace(0, len(text) - CONTEXT - 1, 256).long()
        self.losses.append((self.step, float(model(*take_windows(text, starts, CONTEXT, torch.device("cpu"))))))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


def copied_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    copied = make_optimizer(model)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return copied


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    loss = model(*take_windows(text, starts, CONTEXT, torch.device("cpu")))
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


# --- The runs --------------------------------------------------------------------------------------------------------


def last_loss(losses: Sequence[Sequence[float]], steps: int) -> float:
    """Mean of the last validations up to this step."""
    return statistics.fmean([loss for step, loss in losses if step <= steps][-LAST:])


def first_step_at(losses: Sequence[Sequence[float]], target: float) -> float | None:
    """The step at which the loss, smoothed as the last one is, first reached the target; None: never."""
    before: tuple[float, float] | None = None
    for i in range(LAST, len(losses) + 1):
        here = (float(losses[i - 1][0]), statistics.fmean(loss for _, loss in losses[i - LAST : i]))
        if here[1] <= target:
            if before is None:
                return here[0]
            return before[0] + (here[0] - before[0]) * (before[1] - target) / (before[1] - here[1])
        before = here
    return None


def run(
    method: Method, seed: int, *, steps: int, target: float | None, into: Path, texts: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """Trains, or trains on, up to `steps`, or beyond it to the target; saves as it goes. Returns what it saved."""
    out = path_of(into, method.name, seed)
    saved = out.with_suffix(".pt")
    trainer = torch.load(saved, weights_only=False) if saved.exists() else Trainer(method, seed, steps)
    dice = torch.Generator().manual_seed(seed * 1_000_003)
    starts = torch.randint(len(texts[0]) - CONTEXT, (4 * steps, RANKS, WINDOWS), generator=dice)
    end = steps if target is None else 4 * steps
    began = time.perf_counter()

    def save() -> dict[str, Any]:
        record = {
            "method": method.name,
            "seed": seed,
            "step": trainer.step,
            "losses": trainer.losses,
            "norms": trainer.norms,
        }
        torch.save(trainer, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
        out.write_text(json.dumps(record) + "\n")
        return record

    while trainer.step < end:
        if target is not None and trainer.step >= steps and first_step_at(trainer.losses, target) is not None:
            break
        trainer.advance(texts[0], starts[trainer.step])
        if trainer.step % EVERY == 0:
            trainer.validate(texts[1])
        if trainer.step % 250 == 0:
            save()
    loss, seconds = last_loss(trainer.losses, steps), time.perf_counter() - began
    print(f"{method.name:22s} seed {seed}   step {trainer.step:5d}   loss {loss:.4f}   {seconds:.0f} s", flush=True)
    return save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, help="directory of the runs; runs that are there go on")
    parser.add_argument("--methods", help="some of them, with commas between (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="(default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of plain (default: 1000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.into.mkdir(parents=True, exist_ok=True)
    everything = {method.name: method for method in METHODS + CURVE}
    names = args.methods.split(",") if args.methods else list(everything)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    texts = load_text(16_000_000)
    # All to the common last step first; only then on to plain's loss.
    order = [(method, seed, False) for method in METHODS for seed in seeds]
    order += [(method, seed, False) for seed in seeds for method in CURVE]
    order += [(method, seed, True) for seed in seeds for method in METHODS[1:]]
    for method, seed, to_target in order:
        if method.name in names:
            target = last_loss(read(args.into, "plain", seed)["losses"], args.steps) if to_target else None
            run(method, seed, steps=args.steps, target=target, into=args.into, texts=texts)


def path_of(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}.json"


def read(folder: Path, name: str, seed: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path_of(folder, name, seed).read_text())
    return record


if __name__ == "__main__":
    main()
