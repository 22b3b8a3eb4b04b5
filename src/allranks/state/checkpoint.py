"""Where did the training stand, and does every rank agree?  Saves and loads the state of a run.

    with Checkpointer("runs/17/checkpoints", rank=rank, world_size=world_size, store=store) as checkpoints:
        if loaded := checkpoints.load():                     # all ranks together, the same one on all
            model.load_state_dict(loaded.common["model"])
            ...
        for step in ...:
            checkpoints.save(step, {"model": model.state_dict(), "step": step}, {"rng": torch.get_rng_state()})

All ranks call `load` and `save` at the same steps, in the same order. None of them is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import Store


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that was passed over."""

    directory: Path
    why: str
    """One line, in words: `rank_00001.state: 4096 bytes are there, the manifest says 8192`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest checkpoint that is whole, the same on all ranks."""

    step: int
    directory: Path
    common: Any
    """As it was given to `save`, tensors on the CPU. Sharded tensors: see `Checkpointer.load`."""
    per_rank: Any
    """This rank's own; None where another number of ranks wrote it."""
    world_size: int
    """How many ranks wrote it."""
    skipped: tuple[Skipped, ...] = ()
    """Newer ones, newest first, and what is wrong with each. They have been said aloud already."""


@dataclass(frozen=True, slots=True)
class Stall:
    """How long one `save` held up the training thread."""

    copy_s: float
    """Walking the state and copying it to shared memory: what an interval between checkpoints is reckoned with."""
    waited_s: float
    """Waiting for the save before it, where that was still being written; and for this one with `wait=True`."""

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.copy_s + self.waited_s


class Checkpointer:
    """Saves and loads the state of one run in one directory, which all ranks see.

    A failed save never stops the training: it is said in one line, and the older checkpoints stay as they are.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        keep: int = 3,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Touches nothing yet but the store: all ranks agree on a name for this run there.

        Args:
            directory: made when it is not there; on a file system that all nodes share.
            rank: of this process.
            world_size: how many ranks save and load together.
            store: what the ranks agree over in `load`; None for a single rank.
            keep: how many whole checkpoints stay, at least 2.
            say: takes the one-line messages; else they go to stderr.
        """
        raise NotImplementedError

    @property
    def last_complete(self) -> int | None:
        """Step of the newest checkpoint that this run has written whole or loaded; costs nothing to ask."""
        raise NotImplementedError

    @property
    def write_s(self) -> float | None:
        """How long the last complete save took from the copy to the rename; None: there was none yet."""
        raise NotImplementedError

    def load(self, like: object = None) -> Loaded | None:
        """Return the newest checkpoint that is whole, or None where there is none.

        All ranks call it together and get the same one. What is torn or altered is passed over and said aloud.

        Args:
            like: the live state, as `save` would get it. Sharded tensors (DTensor) come back as DTensors on the meshes
                found in it; without it they come back whole.
        """
        raise NotImplementedError

    def save(self, step: int, common: object, per_rank: object = None, *, wait: bool = False) -> Stall:
        """Copy the state now and have it written meanwhile; all ranks call it at the same steps.

        Both parts are nested dicts, lists and tuples of tensors, numbers, str, bytes, None, NumPy arrays and scalars,
        torch dtypes.

        Args:
            step: how many steps are done.
            common: what is the same on all ranks: rank 0 writes it. Of DTensors every rank writes its shards.
            per_rank: what only this rank has: its random generators, its place in the data.
            wait: return only when it is written, or has failed.
        Raises:
            StateError: there is something in it that cannot be saved; the message names its path. Raised before
                anything is written.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait for the last save to be written; True: it is complete (or there was none)."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the last save and end the writer."""
        raise NotImplementedError

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
