"""What does each way to reduce gradients cost in loss, memory and checkpoints, and which line asks for it? Data.

Losses are of benchmarks/loss.py: a GPT of 0.12 M parameters, six simulated ranks, 1,536 tokens a step, nothing tuned.
A large model, another optimizer or another batch may lose more or less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LOSS_SOURCE = "prototype of 2026-11-28: GPT of 0.12 M parameters, six simulated ranks, 1,000 steps, one or two seeds"
WARM_UP = 0.1
"""Part of the steps in which every gradient is reduced, as bf16, before DiLoCo begins."""
MIN_SYNCHRONIZATIONS = 40
"""Local steps pay only over many synchronizations: the loss table was measured over 40 and more."""
MIN_GAIN = 2.0
"""In time to equal loss: what changes the result is not offered for less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to reduce gradients."""

    name: str
    line: str
    """What to write in the script."""
    flags: str = ""
    """What does the same for a script without a session: flags of `allranks run`."""
    loss_percent: float | None = 0.0
    """How much higher the validation loss is than that of plain DDP after as many samples; None: not measured."""
    samples: float = 1.0
    """Samples that it needs to the same loss, as a multiple of those of plain DDP."""
    changes_result: bool = False
    """Optimizer steps are others than those of plain DDP: fewer of them, or on other weights."""
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


COMPUTE = Method(name="compute", line="")
"""No reduction at all: what one rank alone takes."""
TORCH = Method(name="torch", line="DistributedDataParallel(model)")
EQUAL = Method(name="equal", line="DistributedDataParallel(model, bucket_cap_mb=1)", bucket_mb=1.0)
CHOSEN = Method(name="s.ddp", line="s.ddp(model)", flags="--bucket-mb auto")
BF16 = Method(
    name="bf16", line='s.ddp(model, compress="bf16")', flags="--compress bf16", wire="bf16", loss_percent=-1.0
)
INT8 = Method(
    name="int8",
    line='s.ddp(model, compress="int8")',
    flags="--compress int8",
    wire="int8",
    bucket_mb=4.0,
    loss_percent=0.9,
    samples=1.04,
    memory=1.0,
    checkpoint=1.0,
)
POWERSGD = Method(
    name="powersgd",
    line='s.ddp(model, compress="powersgd")',
    flags="--compress powersgd",
    wire="powersgd",
    bucket_mb=25.0,
    loss_percent=7.0,
    samples=1.4,
    memory=1.0,
    checkpoint=1.0,
)
ACCUMULATE = Method(
    name="accumulate 8",
    line="with ddp.no_sync(): ...",
    loss_percent=27.0,
    samples=3.65,
    changes_result=True,
    every=8,
    remark="{every} micro-batches a step: learning rate by docs/how-to/scaling.md",
)
LOCAL = (
    Method(
        name="local SGD 8",
        line="PeriodicModelAverager(period=8)  # docs/how-to/scaling.md",
        loss_percent=11.0,
        samples=1.66,
        changes_result=True,
        every=8,
        is_local=True,
        checkpoint=1.0,
        remark="checkpoints only at a synchronization",
    ),
    *(
        Method(
            name=f"DiLoCo {every}",
            line=f"DiLoCo(every={every})  # docs/how-to/scaling.md",
            loss_percent=loss_percent,
            samples=samples,
            changes_result=True,
            every=every,
            is_local=True,
            has_warm_up=True,
            memory=2.0,
            checkpoint=2.0,
            remark="checkpoints only at a synchronization",
        )
        for every, loss_percent, samples in ((10, 7.0, 1.38), (25, 10.0, 1.52))
    ),
)
METHODS = (TORCH, EQUAL, CHOSEN, BF16, INT8, POWERSGD, ACCUMULATE, *LOCAL)


def accumulate(every: int, noise_scale: float) -> Method:
    """Return accumulation over this many micro-batches, as the gradient noise scale judges it.

    >>> accumulate(8, 1.0).samples, accumulate(8, 1e9).samples
    (4.5, 1.000000007)

    Args:
        every: how many times as large the batch becomes.
        noise_scale: gradient noise scale as a multiple of the present whole batch, as comm/noise.py prints it.
    Source: McCandlish et al. 2018, equation 2.11.
    """
    samples = (every + noise_scale) / (1 + noise_scale)
    return replace(ACCUMULATE, name=f"accumulate {every}", every=every, samples=samples, loss_percent=None)
