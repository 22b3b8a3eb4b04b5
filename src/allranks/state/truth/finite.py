"""Did gradients become NaN or infinite, and what were the weights before? Is anything not finite about to be saved?

Before an optimizer steps, the sum of each gradient is looked at. After the update everything may be NaN on all ranks,
and nothing would tell the odd replica any more. So a rank that sees such a gradient keeps the numbers of its state from
before the update, and goes on: a collective would hang if it alone saw it. The next talk compares them.
A GPU is not waited for: what its sums are is known later, and then the numbers from before are lost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks.model.errors import AllranksError, Exit
from allranks.state.saved.pack import is_dtensor

RUINED = "not_finite"
"""File beside the checkpoints."""


class NotFiniteError(AllranksError):
    """Parameters became NaN or infinite at the same step as before a restart: the script has to change."""

    exit_code = Exit.USER_CODE


class Finiteness:
    """What this rank's gradients and parameters are; `numbers` returns those of its whole state now."""

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        parameters: Callable[[], Mapping[str, Tensor]],
        numbers: Callable[[], dict[str, int]],
    ) -> None:
        self._parameters, self._numbers = parameters, numbers
        self._exempt: set[str] | None = None
        """Parameters that were not finite at the beginning: it is meant."""
        self._pending: list[tuple[Tensor, Any, int]] = []
        """Of a GPU: what is being copied from it, when that is done, and of which step it is."""
        self.step = 0
        """How many steps are done."""
        self.seen_at = 0
        """The step at which gradients were not finite since the last talk; 0: they were."""
        self.before: dict[str, int] | None = None
        """The numbers of this rank's state before the update with them; None: they are not known."""
        look = weakref.WeakMethod(self.look)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda stepped, *_: (living := look()) and living(stepped))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that an optimizer is about to use."""
        held = (own.grad for group in optimizer.param_groups for own in group["params"])
        gradients = [own for own in map(_own_numbers, held) if own is not None]
        for device, bad in _seem_bad(gradients).items():
            if (skipped := getattr(optimizer, "found_inf", None)) is not None:  # a fused one, which a GradScaler told
                bad &= (skipped.to(device) == 0).all()
            if device.type == "cuda":
                copied, done = bad.to("cpu", non_blocking=True), torch.cuda.Event()
                done.record(torch.cuda.current_stream(device))
                self._pending.append((copied, done, self.step + 1))
            elif bad and not self.seen_at and not all(map(_is_finite, gradients)):
                self.seen_at, self.before = self.step + 1, self._numbers()

    def poll(self, step: int) -> bool:
        """Return whether gradients were not finite since the last talk, as far as is known when so many are done."""
        self.step = step
        if self._exempt is None:
            self.find_bad_parameter()
        while self._pending and self._pending[0][1].query():
            is_bad, _, at = self._pending.pop(0)
            self.seen_at = self.seen_at or at * bool(is_bad)
        return self.seen_at > 0

    def take(self) -> tuple[int, dict[str, int] | None]:
        """Return that step, and the numbers of this rank's state before its update, if they are known; forget both."""
        taken = self.seen_at, self.before
        self.seen_at, self.before = 0, None
        return taken

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def find_bad_parameter(self) -> str:
        """Return the name of a parameter that became NaN or infinite; empty: all are finite, or began so."""
        held = self._parameters().items()
        found = {name: own for name, parameter in held if (own := _own_numbers(parameter)) is not None}
        seems_bad = any(_seem_bad(found.values()).values())
        bad = {name for name, own in found.items() if seems_bad and not _is_finite(own)}
        if self._exempt is None:
            self._exempt = bad
        return min(bad - self._exempt, default="")


def read_ruined(directory: Path) -> int | None:
    """Return the step at which parameters became NaN or infinite in the runs of this directory; None: at none."""
    with contextlib.suppress(OSError, ValueError):
        return int((directory / RUINED).read_text())
    return None


def write_ruined(directory: Path, step: int) -> None:
    """Have the next life know it; where that cannot be written, it does not."""
    with contextlib.suppress(OSError):
        (directory / RUINED).write_text(f"{step}\n")


def _own_numbers(tensor: Any) -> Tensor | None:
    """Return this rank's shard, if it can be looked at: numbers with a point, but for float8, whose sum torch lacks."""
    if tensor is None:
        return None
    own: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    can_look = own.is_floating_point() and own.itemsize > 1 and own.layout is torch.strided and not own.is_meta
    return own if can_look else None


def _seem_bad(tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """Return by device, and on it, whether the sum of a tensor there is not finite.

    Memory is read once. A CPU adds the elements of each; a GPU adds the magnitudes of all in a few launches, since one
    for each would take longer than the sums. Only the sums of float16 can be more than what their dtype has.
    """
    alike, sums = defaultdict[Any, list[Tensor]](list), defaultdict[torch.device, list[Tensor]](list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    for (device, dtype), own in alike.items():
        wide, is_cpu = torch.float32 if dtype is torch.float16 else None, device.type == "cpu"
        sums[device] += [one.sum(dtype=wide) for one in own] if is_cpu else torch._foreach_norm(own, 1, dtype=wide)
    return {device: ~torch.isfinite(torch.stack(own)).all() for device, own in sums.items()}


def _is_finite(tensor: Tensor) -> bool:
    """Look at each element: the sum of large numbers may be infinite, too."""
    return bool(torch.isfinite(tensor).all())
