"""At which step boundary do all ranks do the same thing: save, or save and leave?

An order (time limit, preemption, somebody's `save_now`) reaches the ranks at different moments, and the next checkpoint
that the cadence asks for is known to rank 0 alone. A rank that acted on what it sees would wait at a step where no
other comes. A step number sent around is no cure: with steps of 5 ms it is past before it arrives.

So the ranks talk, at boundaries that all of them know in advance: one collective on a handful of numbers, the largest
wins. Each talk also says when the next one is: after as many steps as take a quarter of a second by rank 0's clock, at
most 16. A run of slow steps talks at every boundary, one of fast steps pays a small collective in 16. Nothing is lost
between two talks, since orders and wishes stay until they are carried out; all ranks act at the same boundary by
construction, whichever of them saw the order, and also where only one did.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from allranks.model.membership import Membership

TALK_EVERY_S = 0.25
CHUNK_BYTES = 64 << 20
"""Of one broadcast: what a GPU has room for."""
SMALL_BYTES = 64 << 10
MOST_STEPS = 16
"""Between two talks: how much slower than the last ones steps may become before an order waits long."""


class Wish(NamedTuple):
    """What one rank would do at this boundary; after the talk, what all of them do."""

    saves: bool = False
    leaves: bool = False
    stops: bool = False
    looks: bool = False
    """Its gradients were not finite."""
    words: tuple[int, ...] = ()
    """Numbers of which each rank hears the largest; with them the boundary is a talk's. As many on all ranks."""


class Agreement:
    """One rank's side of the talks, with tensors on the device that the default process group takes them from."""

    def __init__(self, membership: Membership, *, device: torch.device) -> None:
        self.membership = membership
        self._device = device
        self._next_step: int | None = None
        self._last_step = 0
        self._last_s = 0.0

    def reach(self, step: int, wish: Wish) -> Wish:
        """Return what all ranks do at this boundary, nothing where it is no talk's; all ranks call it at every one."""
        if self.membership.world_size == 1:
            return wish
        if self._next_step is not None and step < self._next_step and not wish.words:
            return Wish()
        own_steps = self._steps_until_next(step) if self.membership.is_leader else 0
        *said, next_steps = self.largest(*wish[:4], *wish.words, own_steps)
        self._next_step = step + next_steps
        saves, leaves, stops, looks = map(bool, said[:4])
        return Wish(saves, leaves, stops, looks, tuple(said[4:]))

    def give(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        """Fill the tensors of all ranks with the bytes of one rank's, which are as many; all ranks call it together."""
        small = list[torch.Tensor]()
        for data in (tensor.view(-1).view(torch.uint8) for tensor in tensors):
            if data.numel() < SMALL_BYTES:
                small.append(data)
            else:
                for piece in data.split(CHUNK_BYTES):
                    self._give(piece, source)
        if small:  # in one go, since each broadcast takes its time
            together = torch.cat(small)
            self._give(together, source)
            torch._foreach_copy_(small, together.split([data.numel() for data in small]))

    def gather(self, word: Any) -> list[Any]:
        """Return what each rank says, in their order; all ranks call it together."""
        if self.membership.world_size == 1:
            return [word]
        said: list[Any] = [None] * self.membership.world_size
        dist.all_gather_object(said, word)
        return said

    def share(self, data: bytes, source: int) -> bytes:
        """Return the bytes of one rank; all ranks call it together."""
        (size,) = self.largest(len(data))
        if not size:
            return b""
        own = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
        self.give([own], source)
        return bytes(own.numpy())

    def _give(self, data: torch.Tensor, source: int) -> None:
        chunk = data.to(self._device)
        dist.broadcast(chunk, source)
        if chunk is not data and self.membership.rank != source:
            data.copy_(chunk)

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all ranks, which call it together."""
        if self.membership.world_size == 1:
            return list(numbers)
        said = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return list(said.tolist())

    def _steps_until_next(self, step: int) -> int:
        now_s = time.monotonic()
        done, took_s = step - self._last_step, now_s - self._last_s
        self._last_step, self._last_s = step, now_s
        if self._next_step is None:
            return 1
        return max(1, min(MOST_STEPS, int(TALK_EVERY_S * done / max(took_s, 1e-9))))
