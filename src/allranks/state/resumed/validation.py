"""Evaluates a model over a whole dataset, shared among the ranks: each sample counts once, at any number of ranks.

Every rank makes the same number of forward passes: DDP sends buffers in each of them, FSDP2 parameters, and a rank with
one pass less would leave the others waiting. A rank that has run out of samples repeats one, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.resumed import rng
from allranks.state.resumed.sampler import slice_of


def share_batches(count: int, batch_size: int, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Return the samples of each of a rank's batches, the same number of batches on all ranks; and how many count.

    >>> share_batches(5, 1, 0, 2), share_batches(5, 1, 1, 2)
    (([[0], [1], [0]], 2), ([[2], [3], [4]], 3))
    """
    own, most = slice_of(count, rank, world_size), -(-count // world_size)
    batches = [list(own[at : at + batch_size]) for at in range(0, len(own), batch_size)]
    return batches + [[0]] * (-(-most // batch_size) - len(batches)), len(batches)


def validate(
    model: torch.nn.Module,
    dataset: Any,
    measure: Callable[[Any], Mapping[str, Any]],
    *,
    batch_size: int,
    membership: Membership,
    device: torch.device,
    **arguments: Any,
) -> dict[str, float]:
    """Return the sums of what `measure` returns, over all batches of all ranks; see `Session.validate`."""
    if len(dataset) < 1:
        raise UsageError("validate: the dataset is empty")
    batches, counted = share_batches(len(dataset), batch_size, membership.rank, membership.world_size)
    sums: dict[str, Any] = {}
    was_training = model.training
    model.eval()
    try:
        with rng.untouched(), torch.no_grad():
            for place, batch in enumerate(DataLoader(dataset, batch_sampler=batches, **arguments)):
                for name, value in measure(batch).items():
                    part = torch.as_tensor(value, dtype=torch.float64, device=device) if place < counted else 0.0
                    sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=device)) + part
    finally:
        model.train(was_training)
    names = sorted(sums)
    total = torch.stack([sums[name] for name in names])
    if membership.world_size > 1:
        dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
