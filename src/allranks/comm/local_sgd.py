"""How do ranks synchronize less often? Each steps on its own gradients, and every few steps weights come together.

    model = s.ddp(net)
    optimizer = s.local_sgd(model, torch.optim.AdamW(model.parameters()), every=25, plain_steps=100, outer_lr=0.9)

The first `plain_steps` average gradients, as DDP does. Then DDP sends nothing, and after every `every` steps the
weights of all ranks are averaged, each rank's weighted by the samples that it trained on since the last time: local
SGD (Stich 2018, "Local SGD Converges Fast and Communicates Little"), torch's PostLocalSGDOptimizer. With `outer_lr`,
the way from the last common weights to that average is a gradient, on which an outer SGD with Nesterov momentum steps:
DiLoCo (Douillard et al. 2023). Buffers of floating point are averaged, too; the others become rank 0's.

The result differs from plain DDP's: docs/evidence/compression_loss.md has the losses. Between two synchronizations
the ranks have different weights, so a checkpoint is taken only at one: state.resumed.track waits for the next, or calls
`synchronize` where it cannot wait. Limits: all parameters on one device, in DDP, not in FSDP2; no GradScaler, which
would skip steps of single ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError

with warnings.catch_warnings():  # torch 2.13 compiles its own scripts here with what it calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer


class _Averager(PeriodicModelAverager):  # type: ignore[misc]
    """torch's, but weighted by samples, with an outer step, and not in the first local step."""

    def __init__(
        self, ddp: DistributedDataParallel, every: int, plain_steps: int, outer: tuple[float, float] | None
    ) -> None:
        super().__init__(every, plain_steps, ddp.process_group)
        module = ddp.module
        self._weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buffers = list(module.buffers())
        self._averaged = self._weights + [own for own in buffers if own.is_floating_point()]
        self._given = [own for own in buffers if not own.is_floating_point()]
        self.outer: torch.optim.Optimizer | None = None
        if outer is not None:
            self._common = [own.detach().clone().requires_grad_() for own in self._weights]
            """Weights of the last synchronization."""
            self.outer = torch.optim.SGD(self._common, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
        self.since = 0
        """Local steps since the last synchronization."""
        self.samples = 0
        """Of this rank in them."""

    @property
    def is_apart(self) -> bool:
        """Whether the next step is a local one."""
        return bool(self.step >= self.warmup_steps)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def begin(self, samples: int) -> None:
        """Say that the optimizer is about to make a step on the gradients of so many samples."""
        if not self.is_apart:
            return
        if self.since == 0 and self.outer is not None:
            _copy(self._common, self._weights)  # here, since a checkpoint or a plain step may have changed them
        self.since, self.samples = self.since + 1, self.samples + samples

    def average_parameters(self, params: object = None) -> None:
        """Count the step that was made, and bring the ranks together if it is their turn."""
        self.step += 1
        if self.since and (self.step - self.warmup_steps) % self.period == 0:
            self.synchronize()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def synchronize(self) -> None:
        """Bring the ranks together now; all ranks call it."""
        device = self._averaged[0].device
        total = torch.tensor(float(self.samples), dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.process_group)
        ranks = dist.get_world_size(self.process_group)
        share = self.samples / float(total) if total else 1 / ranks
        for flat, own in _flat(self._averaged):
            flat.mul_(share)
            dist.all_reduce(flat, group=self.process_group)
            _copy(own, [part.view_as(to) for part, to in zip(flat.split([o.numel() for o in own]), own, strict=True)])
        for buffer in self._given:
            dist.broadcast(buffer, dist.get_global_rank(self.process_group, 0), group=self.process_group)
        if self.outer is not None:
            for common, average in zip(self._common, self._weights, strict=True):
                common.grad = common - average
            self.outer.step()
            self.outer.zero_grad()
            _copy(self._weights, self._common)
        self.since = self.samples = 0


class LocalSGD(PostLocalSGDOptimizer):  # type: ignore[misc]
    """The optimizer of a training that synchronizes every few steps; takes the place of the one that it is given.

    Args:
        ddp: the module whose parameters `optimizer` steps.
        optimizer: each rank's own; its state differs from rank to rank.
        every: steps between two synchronizations.
        plain_steps: that average gradients, before the first local one. DiLoCo was measured with a tenth of the run.
        outer_lr: learning rate of the outer SGD; None: weights are averaged, and there is no outer step.
        outer_momentum: Nesterov momentum of the outer SGD.
    Raises:
        UsageError: a number is out of its range, or the module is not in DDP.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        plain_steps: int = 0,
        outer_lr: float | None = None,
        outer_momentum: float = 0.5,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise UsageError(f"local_sgd({type(ddp).__name__}): expected the module that s.ddp() returned")
        if every < 2 or plain_steps < 0:
            raise UsageError(
                f"local_sgd(every={every}, plain_steps={plain_steps}): expected every from 2, plain_steps from 0"
            )
        if outer_lr is not None and not (outer_lr > 0 and 0 <= outer_momentum < 1):
            raise UsageError(
                f"local_sgd(outer_lr={outer_lr}, outer_momentum={outer_momentum}): expected outer_lr above 0, "
                f"outer_momentum from 0 to below 1"
            )
        outer = None if outer_lr is None else (outer_lr, outer_momentum)
        super().__init__(optimizer, _Averager(ddp, every, plain_steps, outer))
        self._ddp = ddp
        ddp.local_optimizer = self  # for state.resumed.averaging, which refuses to track the module without it
        self._counted: int | None = None
        self._sync_gradients()

    @property
    def is_apart(self) -> bool:
        """Whether the next step is a local one: its gradients stay on this rank."""
        return bool(self.averager.is_apart)

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights."""
        return bool(self.averager.since == 0)

    def count(self, samples: int) -> None:
        """Say how many samples of this rank the next step has; where nobody says it, all ranks count the same."""
        self._counted = samples

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's gradients, and bring the ranks together if it is their turn; all ranks call it.

        Args:
            closure: makes the gradients and returns the loss, which is then returned: Lightning always has one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.averager.begin(1 if self._counted is None else self._counted)
        self._counted = None
        super().step()
        self._sync_gradients()
        return loss

    def synchronize(self) -> None:
        """Bring the ranks together now, if they are apart; all ranks call it. The turns stay where they are."""
        if not self.is_synchronized:
            self.averager.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks: how many steps were made, and the outer optimizer's momentum."""
        outer = self.averager.outer
        return {"step": self.averager.step, "outer": None if outer is None else outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            UsageError: it was made with an outer optimizer, and there is none now, or the other way round.
        """
        outer = self.averager.outer
        if "step" not in state or (state["outer"] is None) != (outer is None):
            raise UsageError(
                "local_sgd: the checkpoint was made without it, or outer_lr is set here or there only; set it back, or "
                "begin with an empty checkpoint directory"
            )
        self.averager.step = state["step"]
        if outer is not None:
            outer.load_state_dict(copy.deepcopy(state["outer"]))
        self._sync_gradients()

    def own_state_dict(self) -> dict[str, Any]:
        """Return what only this rank has: the state of its optimizer."""
        state: dict[str, Any] = self.optim.state_dict()
        return state

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `own_state_dict` returned."""
        self.optim.load_state_dict(state)
        self.param_groups = self.optim.param_groups  # torch's load makes new ones

    def _sync_gradients(self) -> None:
        self._ddp.require_backward_grad_sync = not self.is_apart


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    torch._foreach_copy_([own.detach() for own in to], [own.detach() for own in of])


def _flat(tensors: list[Tensor]) -> Iterable[tuple[Tensor, list[Tensor]]]:
    """One tensor with the numbers of all, for each type of numbers."""
    for kind in dict.fromkeys(own.dtype for own in tensors):
        own = [tensor.detach() for tensor in tensors if tensor.dtype == kind]
        yield torch.cat([tensor.reshape(-1) for tensor in own]), own
