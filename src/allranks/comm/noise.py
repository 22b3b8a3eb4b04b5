"""How much larger could the batch be before it stops saving steps? The gradient noise scale, while a script trains.

    measure(ddp, ranks=6, say=print)
    ddp.register_comm_hook(None, all_reduce)        # or any other communication hook

Each rank's gradient is the mean over its share of the batch, and the mean over ranks is the gradient of the whole
batch. The square norm of a mean over B samples is on average |G|^2 + S / B, with G the true gradient and S the variance
of one sample. Two batch sizes are two equations, so norms before and after the all-reduce give both unknowns: two dot
products a bucket, and no collective, since rank 0's own share stands for those of all ranks.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1; S / |G|^2 is its simple
noise scale. Limits: it rises while a model learns; it says how many steps a batch can save at most, and measured runs
saved that much only with a learning rate that fits (docs/how-to/scaling.md); shares of the ranks are taken as equal;
under PowerSGD the mean lacks what it leaves out, so the scale comes out lower. Standard library and torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EVERY_STEPS = 100
BLOCK_STEPS = 20
"""Averaged before the division, since the ratio of two single steps has no mean; a range is of five such blocks."""
Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""What DistributedDataParallel.register_comm_hook takes: the state and a bucket in, the averaged bucket out."""
LR_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda factor: factor,
    "sqrt": math.sqrt,
    "none": lambda factor: 1.0,
}
"""What multiplies the learning rate if the batch grows by a factor. Linear: SGD with warm-up (Goyal et al. 2017,
"Accurate, Large Minibatch SGD"). Square root: Adam and its kind (Malladi et al. 2022, "On the SDEs and Scaling Rules
for Adaptive Gradient Algorithms"). Both hold below the noise scale only."""


def noise_scale(share: Sequence[float], whole: Sequence[float], ranks: int) -> float:
    """Return the noise scale, as a multiple of the whole batch; infinite where no gradient is left beside the noise.

    >>> round(noise_scale([4.0, 6.0], [2.0, 2.0], ranks=4), 3)
    1.0

    Args:
        share: square norms of one rank's gradient, step by step.
        whole: square norms of the mean over all ranks, of the same steps.
    """
    small, big = sum(share) / len(share), sum(whole) / len(whole)
    variance = (small - big) / (ranks - 1)  # S / B of the whole batch
    signal = (ranks * big - small) / (ranks - 1)  # |G|^2
    return math.inf if signal <= 0 else max(variance, 0.0) / signal


def steps_saved(scale: float, factor: float = 2.0) -> float:
    """Return the fraction of steps that a batch larger by this factor saves, at most.

    >>> steps_saved(0.0), steps_saved(1.0), steps_saved(math.inf)
    (0.0, 0.25, 0.5)

    Steps to a loss are proportional to 1 + noise scale / batch. Source: McCandlish et al. 2018, equation 2.11.

    Args:
        scale: as `noise_scale` returns it.
    """
    return 1 - 1 / factor if math.isinf(scale) else 1 - (1 + scale / factor) / (1 + scale)


def describe(norms: Sequence[tuple[float, float]], *, ranks: int, last_step: int) -> str:
    """Return one line about these steps: the range of the noise scale over their blocks.

    Args:
        norms: of each step, of this rank's gradient and of the mean; steps that are no number do not count.
        last_step: how many steps this process has made.
    """
    told = f"gradient noise scale over steps {last_step - len(norms) + 1} to {last_step} of this process"
    usable = [pair for pair in norms if all(map(math.isfinite, pair))]
    blocks = [usable[begin : begin + BLOCK_STEPS] for begin in range(0, len(usable) - BLOCK_STEPS + 1, BLOCK_STEPS)]
    if not blocks:
        return f"{told}: unknown, {len(norms) - len(usable)} of {len(norms)} steps have gradients that are not finite"
    scales = [noise_scale([share for share, _ in block], [whole for _, whole in block], ranks) for block in blocks]
    low, high = min(scales), max(scales)
    if math.isinf(high):
        size = f"at least {low:.2g} times" if math.isfinite(low) else "far above"
    else:
        size = f"{low:.2g} to {high:.2g} times"
    saved = 100 * steps_saved(high)
    return f"{told}: {size} the batch; a batch twice as large saves at most {saved:.0f} % of the steps"


class NoiseMeter:
    """Measures around a communication hook, and says a line every hundred steps.

    Args:
        ranks: that average their gradients; with one there is nothing to compare.
        say: takes the line; None: this rank only passes buckets on.
    """

    def __init__(self, *, ranks: int, say: Callable[[str], object] | None) -> None:
        self._ranks = ranks
        self._say = say if ranks > 1 else None
        self._share: list[Any] = []
        """Of this step's buckets, as tensors: nothing waits for a GPU until the line is due."""
        self._whole: list[Any] = []
        self._steps: list[tuple[Any, Any]] = []
        self._done = 0

    def around(self, hook: Hook) -> Hook:
        """Return a hook that does what this one does, and measures before and after."""
        if self._say is None:
            return hook

        def measured(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            if bucket.index() == 0:
                self._end_step()  # here, all futures of the step before are complete
            self._share.append(_square(bucket.buffer()))
            return hook(state, bucket).then(self._note)

        return measured

    def _note(self, future: torch.futures.Future[Any]) -> torch.Tensor:
        value = future.value()
        mean: torch.Tensor = value[0] if isinstance(value, list) else value
        self._whole.append(_square(mean))
        return mean

    def _end_step(self) -> None:
        if self._share and len(self._share) == len(self._whole):
            self._steps.append((sum(self._share), sum(self._whole)))
            self._done += 1
        self._share, self._whole = [], []
        if len(self._steps) == EVERY_STEPS and self._say is not None:
            norms = [(float(share), float(whole)) for share, whole in self._steps]
            self._say(describe(norms, ranks=self._ranks, last_step=self._done))
            self._steps = []


def around(attach: Callable[[Any], Any] | None, *, say: Callable[[str], object] | None) -> Callable[[Any], Any]:
    """Return what has a DistributedDataParallel measure around its communication hook, as `NoiseMeter` does.

    Args:
        attach: registers that hook on the module; None: gradients are summed as they are.
    """

    def attach_measured(ddp: Any) -> Any:
        group, register = ddp.process_group, ddp.register_comm_hook
        meter = NoiseMeter(ranks=group.size(), say=say)

        def register_measured(state: Any, hook: Hook) -> None:
            measured = meter.around(hook)
            own = lambda state, bucket: measured(state, bucket)  # noqa: E731  (DDP refuses annotations not its own)
            own.__qualname__ = hook.__qualname__  # which DDP logs
            register(state, own)

        def all_reduce_here(_: Any, bucket: Any) -> torch.futures.Future[Any]:
            return all_reduce(group, bucket)

        ddp.register_comm_hook = register_measured
        try:
            return attach(ddp) if attach else register_measured(None, all_reduce_here)
        finally:
            del ddp.register_comm_hook  # it would keep the module alive

    return attach_measured


def all_reduce(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    """Average a bucket as DistributedDataParallel does without a hook, to the bit; the hook where there is no other.

    Args:
        state: the process group; None: the default one.
    """
    import torch.distributed as dist

    # A product, as in DDP's reducer; torch's allreduce_hook divides, which rounds otherwise at 3 and 6 ranks.
    gradients = bucket.buffer().mul_(1 / dist.get_world_size(state))
    work = dist.all_reduce(gradients, group=state, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _square(flat: torch.Tensor) -> torch.Tensor:
    flat = flat.detach().float()
    return flat.dot(flat)
