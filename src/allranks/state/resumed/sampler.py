"""Which samples belong to the next step, and which of them are this rank's: the same at any number of ranks.

    sampler = Sampler(len(dataset), global_batch_size=96, membership=s.membership, seed=1)
    loader = DataLoader(SeededDataset(dataset), batch_sampler=sampler, num_workers=4)

The order of an epoch is a function of seed and epoch alone; the position is one integer, the samples that steps have
consumed since the beginning. Step by step the next `global_batch_size` samples are taken from that order, and rank r
gets the r-th slice of them, whatever the number of ranks: slices may differ by one sample, so five ranks can go on
where six stopped. What that does to gradients is the matter of `state.resumed.averaging`.

The DataLoader runs ahead of the steps; the position does not: `state.steps()` moves it, or `advance()` does where a
loop is one's own. A rank without a sample in a small last batch gets the first one of it, to run forward and backward
with, at a weight of 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from allranks.model.errors import UsageError
from allranks.model.membership import ALONE, Membership
from allranks.state.resumed.rng import seeded


def mix(*numbers: int) -> int:
    """One seed of 63 bits out of several numbers; close ones come out unrelated.

    >>> mix(0, 1, 2)
    4450782424123420391
    """
    data = b"".join(struct.pack("<Q", number & 2**64 - 1) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def slice_of(count: int, part: int, parts: int) -> range:
    """The part-th of `parts` slices of `count` things, as even as can be.

    >>> [len(slice_of(16, rank, 5)) for rank in range(5)]
    [3, 3, 3, 3, 4]
    """
    return range(part * count // parts, (part + 1) * count // parts)


class SampleIndex(int):
    """The index of a sample that also knows the seed for its augmentation: of (seed, epoch, index), of no rank."""

    seed: int

    @classmethod
    def of(cls, index: int, *, seed: int, epoch: int) -> SampleIndex:
        """The index in this epoch."""
        made = cls(index)
        made.seed = mix(seed, epoch, index)
        return made


@dataclass(frozen=True, slots=True)
class Share:
    """What one step means for one rank."""

    total: int
    """Samples of the step on all ranks: the global batch, fewer at the end of an epoch."""
    own: range
    """This rank's, as places in the order of the epoch; empty where there are fewer samples than ranks."""
    parts: tuple[int, ...]
    """Samples of each micro batch; never empty, (0,) where the rank has none."""


class Sampler:
    """A `batch_sampler` for DataLoader: lists of indices for this rank, from the position to the end of the epoch.

    Args:
        dataset: its length, or anything that has one.
        global_batch_size: samples a step, over all ranks.
        membership: whose shares they are; the order does not depend on it.
        micro_batch_size: most samples of one forward pass, where memory asks for it: the share then comes in several
            batches, see state.resumed.steps. None: always one.
        seed: of the order and of each sample's own seed.
        shuffle: False: in the order of the dataset.
        drop_last: leave the samples out that do not fill a last global batch.
    Raises:
        UsageError: a size is not positive, or there is no whole batch and `drop_last` is set.
    """

    def __init__(
        self,
        dataset: int | Sized,
        *,
        global_batch_size: int,
        membership: Membership = ALONE,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = dataset if isinstance(dataset, int) else len(dataset)
        for name, size in (
            ("the dataset's length", self.num_samples),
            ("global_batch_size", global_batch_size),
            ("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size),
        ):
            if size < 1:
                raise UsageError(f"sampler: {name} is {size}; expected 1 or more")
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.membership = membership
        self.seed = seed
        self.shuffle = shuffle
        dropped = self.num_samples % global_batch_size if drop_last else 0
        self.epoch_size = self.num_samples - dropped
        """Samples of an epoch that are used."""
        if not self.epoch_size:
            raise UsageError(
                f"sampler: drop_last leaves nothing of {self.num_samples} samples; global_batch_size is "
                f"{global_batch_size}"
            )
        self.position = 0
        """Samples that steps have consumed since the beginning, over all ranks and epochs."""

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.position // self.epoch_size

    def share(self, position: int | None = None) -> Share:
        """What the step at this position means for this rank; None: the next step."""
        start = (self.position if position is None else position) % self.epoch_size
        total = min(self.global_batch_size, self.epoch_size - start)
        piece = slice_of(total, self.membership.rank, self.membership.world_size)
        own = range(start + piece.start, start + piece.stop)
        num_parts = -(-len(own) // self.micro_batch_size) if self.micro_batch_size else 1
        parts = tuple(len(slice_of(len(own), part, num_parts)) for part in range(num_parts)) or (0,)
        return Share(total, own, parts)

    def advance(self) -> None:
        """Say that the next step has been made; `state.steps()` does so by itself."""
        self.position += self.share().total

    def order(self, epoch: int) -> torch.Tensor:
        """Indices of all samples in the order of this epoch; (num_samples,) int64."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        return self._batches(self.position)  # the position of now, not of the first batch that is fetched

    def _batches(self, position: int) -> Iterator[list[SampleIndex]]:
        epoch = position // self.epoch_size
        order = self.order(epoch)
        while position // self.epoch_size == epoch:
            share = self.share(position)
            own = share.own or range(position % self.epoch_size, position % self.epoch_size + 1)
            places = order[own.start : own.stop].tolist()
            indices = iter([SampleIndex.of(index, seed=self.seed, epoch=epoch) for index in places])
            for size in share.parts:
                yield list(islice(indices, max(size, 1)))
            position += share.total

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        first = self.epoch * self.epoch_size
        num_whole, rest = divmod(self.epoch_size, self.global_batch_size)
        num_batches = num_whole * len(self.share(first).parts)
        return num_batches + (len(self.share(first + self.epoch_size - rest).parts) if rest else 0)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, **self._order_of()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that position.

        Raises:
            UsageError: it is one in another order, so samples would be repeated and left out.
        """
        for name, own in self._order_of().items():
            if state.get(name) != own:
                raise UsageError(
                    f"sampler: {name} is {own}, but the checkpoint was made with {state.get(name)}: its position means "
                    f"other samples; set it back, or begin with an empty checkpoint directory"
                )
        self.position = int(state["position"])

    def _order_of(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "epoch_size": self.epoch_size, "dataset": self.num_samples}


class SeededDataset(Dataset[Any]):  # type: ignore[misc]
    """A dataset in which every sample is made under a seed of its own: (seed, epoch, index).

    So augmentation by `random`, NumPy or torch gives the same sample on any rank, in any DataLoader worker and after
    any restart. The random numbers of the process around it are left as they were. It must be the outermost dataset,
    since a `Subset` or `ConcatDataset` makes a plain integer of the index.

    Args:
        dataset: with `__getitem__` and `__len__`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, SampleIndex):
            return self.dataset[index]
        with seeded(index.seed):
            return self.dataset[int(index)]
