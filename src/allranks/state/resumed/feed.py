"""Which batches come next, whatever the loader is, and what must be remembered to go on there?

A DataLoader over our own `Sampler` needs nothing: the sampler has the position. A loader with a state of its own
(torchdata's StatefulDataLoader, recognised by its `state_dict`) is asked for it at the step boundary, where nothing
is fetched ahead of the steps but by its own workers, which it reckons with. Of any other iterable the batches that
were used are counted, drawn again and passed over, which is slow. Its order must come from the generators of Python,
NumPy and torch, or from the `generator` of a DataLoader: each epoch draws from a stream of its own, which depends on
the run's seed and the epoch, so `DataLoader(shuffle=True)` has the same order again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from allranks.model.errors import UsageError
from allranks.state.resumed import rng
from allranks.state.resumed.sampler import Sampler, Share, mix


class Feed:
    """The loader, and how far it has been used on this rank; it counts on the epochs of the feed before it.

    Raises:
        UsageError: the loader makes batches of our Sampler's batches.
    """

    def __init__(self, loader: Any, before: Feed | None = None) -> None:
        self.loader = loader
        if isinstance(getattr(loader, "sampler", None), Sampler):
            raise UsageError("DataLoader(sampler=...): s.sampler gives whole batches; write batch_sampler=...")
        batch_sampler = getattr(loader, "batch_sampler", None)
        self.sampler = batch_sampler if isinstance(batch_sampler, Sampler) else None
        self._has_state = self.sampler is None and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._batches: Iterator[Any] | None = None
        self._fetched: list[Any] | None = None
        self._noise: rng.Stream | None = None
        """What this loader draws its random numbers from; None: those of the training."""
        owners = (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
        generators = [getattr(owner, "generator", None) for owner in owners]
        self._generators = {id(own): own for own in generators if isinstance(own, torch.Generator)}.values()
        self._epoch: int = before._epoch if before else 0
        self._used = 0
        self._first_epochs: int | None = before._first_epochs if before else None
        """What the first loop over epochs asked for."""
        self._seeds = [torch.initial_seed(), *(generator.initial_seed() for generator in self._generators)]
        if before and len(before._seeds) == len(self._seeds):
            self._seeds = before._seeds

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._epoch if self.sampler is None else self.sampler.epoch

    @property
    def is_ahead(self) -> bool:
        """Whether the loader's own state is a batch ahead of the steps: it was fetched, and its step was not made."""
        return self._has_state and self._fetched is not None

    def count_steps(self, step: int, *, total: int | None, epochs: int | None) -> int | None:
        """Return how many steps the run will have; None: nobody can tell.

        A script with a loop of its own over epochs asks for one epoch at first, then for two: how many there will be is
        not known then.

        Args:
            step: how many are made.
            total: what the loop asks for, as `epochs`.
        """
        self._first_epochs = self._first_epochs or epochs
        if epochs is None or self._first_epochs == 1 or (num_batches := self._count_batches()) is None:
            return total
        num_steps, used = num_batches
        end = step + max(0, (epochs - self.epoch) * num_steps - used)
        return end if total is None else min(end, total)

    def _count_batches(self) -> tuple[int, int] | None:
        """Return the steps of an epoch, and how many of this one are made."""
        if (own := self.sampler) is not None:
            size, done = own.global_batch_size, own.position % own.epoch_size
            num_steps = -(-own.epoch_size // size)
            return num_steps, num_steps - -(-(own.epoch_size - done) // size)
        try:
            return len(self.loader), self._used
        except (TypeError, NotImplementedError):  # an IterableDataset
            return None

    def open(self, step: int) -> None:
        """Begin to draw, at the place where the state says; the generators of this process stay where they are."""
        inner: Any = getattr(self.loader, "sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(self.epoch)
        if self.sampler is not None or self._has_state:
            with rng.seeded(mix(torch.initial_seed(), step)):  # iter() draws the seed of DataLoader's workers
                self._batches = iter(self.loader)
            return
        for generator, seed in zip(self._generators, self._seeds[1:], strict=True):
            generator.manual_seed(mix(seed, self.epoch))
        self._noise = rng.Stream(mix(self._seeds[0], self.epoch))
        with self._noise:
            self._batches = iter(self.loader)
            for _ in range(self._used):
                next(self._batches, None)

    def fetch(self, step: int, *, epochs: int | None, ended: Callable[[], None]) -> list[Any] | None:
        """Return the micro batches of the next step, the same until `consume`; None where the last epoch is over.

        Args:
            ended: called when the loader says that its epoch is over, before the next one is begun.
        Raises:
            UsageError: the loader has nothing, even when it is begun again.
        """
        share = self.share()
        for _ in range(2):
            if epochs is not None and self.epoch >= epochs:
                return None
            if self._fetched is not None:
                return self._fetched
            if self._batches is None:
                self.open(step)
            assert self._batches is not None
            try:
                with self._noise or contextlib.nullcontext():
                    self._fetched = [next(self._batches) for _ in (share.parts if share else (1,))]
                return self._fetched
            except StopIteration:
                if self.sampler is None:
                    self._epoch, self._used = self._epoch + 1, 0
                    ended()  # with the old iterator: a loader's own state belongs to that
                self._batches = None
        raise UsageError(f"the loader gave no batch for step {step}, not even when it was begun again")

    def share(self) -> Share | None:
        """What the next step means for this rank, where it is known."""
        return None if self.sampler is None else self.sampler.share()

    def consume(self) -> None:
        """Say that the step has been made."""
        self._fetched = None
        if self.sampler is not None:
            epoch = self.sampler.epoch
            self.sampler.advance()
            if self.sampler.epoch != epoch:
                self._batches = None
        else:
            self._used += 1

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember."""
        state: dict[str, Any] = {"epoch": self._epoch, "used": self._used, "seeds": self._seeds}
        if self._has_state and self._batches is not None:
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, with the next `open`."""
        self._epoch, self._used, self._batches, self._fetched = state["epoch"], state["used"], None, None
        if len(state.get("seeds", ())) == len(self._seeds):
            self._seeds = state["seeds"]
        if self._has_state and "loader" in state:
            self.loader.load_state_dict(state["loader"])
