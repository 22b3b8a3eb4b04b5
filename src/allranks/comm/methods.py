"""What does each way to reduce gradients cost in loss, memory and checkpoints, and which line asks for it? Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

LOSS_SOURCE = "a GPT of 0.12 M parameters, six simulated ranks, 1,000 steps (docs/evidence/compression_loss.md)"
"""Nothing was tuned there; a large model, another optimizer or another batch may lose more or less."""


class Loss(NamedTuple):
    """What a method did to the validation loss there."""

    percent: float | None
    """How much higher it is than that of plain DDP after as many samples; None: not measured."""
    samples: float
    """Samples to the same loss, as a multiple of those of plain DDP."""


LOSSES: Mapping[str, Loss] = {
    "plain": Loss(0.0, 1.0),
    "bf16": Loss(0.0, 1.0),
    "int8": Loss(-0.4, 0.98),
    "powersgd": Loss(8.0, 1.34),
    "accumulate-8": Loss(54.0, 5.52),
    "average-8": Loss(14.8, 1.67),
    "diloco-10": Loss(9.3, 1.4),
    "diloco-25": Loss(13.3, 1.59),
}
"""By the names of benchmarks/loss.py."""
WARM_UP = 0.1
"""Part of the steps in which every gradient is reduced, as bf16, before DiLoCo begins."""
MIN_SYNCHRONIZATIONS = 40
"""Local steps were measured over 40 synchronizations and more."""
MIN_GAIN = 2.0
"""In time to equal loss over plain DDP: local steps change the result, and are not offered for less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to reduce gradients."""

    name: str
    line: str
    """What to write in the script."""
    flags: str = ""
    """What does the same for a script without a session: flags of `allranks run`."""
    loss: Loss = LOSSES["plain"]
    bucket_mb: float | None = None
    """Size of DDP's buckets in MiB; None: as `s.ddp()` chooses it."""
    wire: str = ""
    """Format of the gradients on the network; empty: as they are."""
    every: int = 1
    """Micro-batches or local steps from one synchronization to the next."""
    is_local: bool = False
    """Weights are averaged, not gradients."""
    has_warm_up: bool = False
    memory: float = 0.0
    """Further memory of each rank, as a multiple of its gradients' bytes."""
    checkpoint: float = 0.0
    """Further bytes of each rank in a checkpoint, in the same unit."""
    remark: str = ""
    """What else it asks for."""

    @property
    def samples(self) -> float:
        """Samples to equal loss, of those of plain DDP; fewer ones are chance."""
        return max(1.0, self.loss.samples)

    @property
    def changes_result(self) -> bool:
        """Whether an optimizer steps less often than in plain DDP, or on other weights."""
        return self.every > 1


def _compressed(name: str, *, bucket_mb: float | None = None, kept: float = 0.0) -> Method:
    line, flags = f's.ddp(model, compress="{name}")', f"--compress {name}{'' if bucket_mb else ' --bucket-mb auto'}"
    return Method(
        name=name,
        line=line,
        flags=flags,
        wire=name,
        loss=LOSSES[name],
        bucket_mb=bucket_mb,
        memory=kept,
        checkpoint=kept,
    )


COMPUTE = Method(name="compute", line="")
"""No reduction at all: what one rank alone takes."""
TORCH = Method(name="torch", line="DistributedDataParallel(model)")
EQUAL = Method(name="equal", line="DistributedDataParallel(model, bucket_cap_mb=1)", bucket_mb=1.0)
CHOSEN = Method(name="s.ddp", line="s.ddp(model)", flags="--bucket-mb auto")
BF16 = _compressed("bf16")
INT8 = _compressed("int8", kept=1.0)
POWERSGD = _compressed("powersgd", bucket_mb=25.0, kept=1.0)
ACCUMULATE = Method(
    name="accumulate 8",
    line="with ddp.no_sync(): ...  # backward passes of all micro-batches but the last",
    loss=LOSSES["accumulate-8"],
    every=8,
    remark="learning rate by docs/how-to/scaling.md",
)
_AT_SYNC = "checkpoints only at a synchronization"
LOCAL = (
    Method(
        name="local SGD 8",
        line="optimizer = s.local_sgd(model, optimizer, every=8)",
        loss=LOSSES["average-8"],
        every=8,
        is_local=True,
        checkpoint=2.0,
        remark=_AT_SYNC,
    ),
    *(
        Method(
            name=f"DiLoCo {every}",
            line=f"optimizer = s.local_sgd(model, optimizer, every={every}, plain_steps={{plain_steps}}, outer_lr=0.9)",
            loss=LOSSES[f"diloco-{every}"],
            every=every,
            is_local=True,
            has_warm_up=True,
            memory=2.0,
            checkpoint=2.0,
            remark=_AT_SYNC,
        )
        for every in (10, 25)
    ),
)
METHODS = (TORCH, EQUAL, CHOSEN, BF16, INT8, POWERSGD, ACCUMULATE, *LOCAL)


def accumulate(every: int, noise_scale: float) -> Method:
    """Return accumulation over this many micro-batches, as the gradient noise scale judges it.

    >>> accumulate(8, 1.0).loss.samples, accumulate(8, 1e9).loss.samples
    (4.5, 1.000000007)

    Args:
        every: how many times as large the batch becomes.
        noise_scale: as a multiple of the present whole batch, as `s.ddp(model, noise_scale=True)` prints it.
    Source: McCandlish et al. 2018, equation 2.11.
    """
    samples = (every + noise_scale) / (1 + noise_scale)
    return replace(ACCUMULATE, name=f"accumulate {every}", every=every, loss=Loss(None, samples))
