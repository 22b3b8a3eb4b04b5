"""What keeps a step's numbers the same at another number of ranks? Gradients weighed by samples, not by ranks.

DDP averages the gradients of ranks. Where rank r has m of the step's M samples, and W ranks take part, the average
over samples needs its gradient at m W / M: exactly 1 where the ranks share evenly, which is nearly always, and then
nothing is done. Else every gradient of the rank is multiplied on its way into `.grad`. The factors of all ranks and
micro batches add up to W, so a term of the loss that no sample has a part in (a norm of the weights) counts once, as
it should.

The learning rate belongs to the global batch, which stays, and not to the number of ranks that are alive.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def gradient_factor(samples: int, total: int, world_size: int) -> float:
    """What to multiply a rank's gradient with, so that DDP's average over ranks is the average over samples.

    >>> gradient_factor(4, 16, 4), gradient_factor(4, 16, 5), gradient_factor(0, 16, 5)
    (1.0, 1.25, 0.0)

    Args:
        samples: over which the loss of this backward pass is a mean; 0 where its sample only fills in.
        total: samples of the step, on all ranks.
        world_size: number of ranks that DDP averages over.
    """
    return samples * world_size / total


class GradientWeight:
    """Multiplies all gradients of these parameters by one factor; costs nothing while it is 1.

    Args:
        parameters: of modules in DDP. Those that need no gradient are left out.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self._factor = 1.0

    def set(self, factor: float) -> None:
        """Have the next backward passes use this factor."""
        self._factor = factor
        if factor == 1.0:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        elif not self._handles:
            self._handles = [parameter.register_hook(self._weigh) for parameter in self._parameters]

    def _weigh(self, gradient: Tensor) -> Tensor:
        # A sample that only fills in may have a gradient that is no number; 0 times that would stay none.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)
