"""What is in a checkpoint for this rank? Reads it, believes nothing that does not match its checksum, runs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allranks.model.membership import ALONE, Membership
from allranks.state.saved.commit import is_given_up
from allranks.state.saved.manifest import Damaged, parse_temp
from allranks.state.saved.pack import StateFile
from allranks.state.saved.parts import PartReader, list_checkpoints, read_manifest
from allranks.state.saved.tidy import look_at_writers

WRITERS_S = 30.0
"""How long a load waits for a writer that outlived its trainer and is about to finish a newer checkpoint."""
UNSEEN_WRITERS_S = 5.0
"""The same where the writer is on another machine, and may be dead."""
NEW_WRITERS_S = 0.5
"""The same where the directory is so new, or so old, that nobody has written into it."""


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
    inner: Any = None
    """What the rank of this number has of `per_rank["inner"]`, or one of a lower number where there were fewer."""


class CheckpointReader(ExitStack):
    """One checkpoint, whose parts are opened when they are needed.

    Raises:
        Damaged: the manifest or a part is not what was written.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.manifest = read_manifest(directory)
        self._directory = directory
        self._parts: dict[int, StateFile] = {}
        self._sharded: dict[str, torch.Tensor] = {}

    def part(self, rank: int) -> StateFile:
        """Return the part that this rank wrote."""
        if rank not in self._parts:
            reader = self.enter_context(PartReader(self._directory, self.manifest.parts[rank]))
            self._parts[rank] = StateFile(reader, self._sharded.__getitem__)
        return self._parts[rank]

    def load_sharded(self, path: str, like: object = None, membership: Membership = ALONE) -> None:
        """Read the sharded tensors below this path, before it is unpacked.

        Args:
            path: `common`, or one in it: `common['parts']['model']`.
            like: the live value of it, into whose DTensors they are read.
            membership: of this run, whose size may be another than that of the one that wrote it.
        """
        tensors = {
            described[0]: described for described in self.part(0).tree["tensors"] if described[0].startswith(path)
        }
        if tensors:
            from allranks.state.saved.sharded import find_sharded, load_sharded

            num, place = self.manifest.world_size, (membership.rank + 0.5) / membership.world_size
            near = sorted(range(num), key=lambda index: abs((index + 0.5) / num - place))
            self._sharded |= load_sharded(tensors, map(self.part, near), dict(find_sharded(like, path)))


def read_checkpoint(
    directory: Path, membership: Membership, *, like: object, is_read_once: bool
) -> tuple[Loaded, list[torch.Tensor]]:
    """Return what is in it for this rank, and tensors to send; all ranks together verify all of its bytes.

    Args:
        like: the live common state, into whose DTensors sharded ones are read.
        is_read_once: rank 0 alone reads the common tensors; the others' are as large, and wait for its bytes.
    Raises:
        Damaged: something is not what was written.
    """
    rank, world_size = membership.rank, membership.world_size
    with CheckpointReader(directory) as checkpoint:
        checkpoint.load_sharded("common", like, membership)
        first = checkpoint.part(0)
        first.is_read = rank == 0 or not is_read_once
        common = first.unpack(first.tree["common"])
        to_send = list(first.loaded.values()) if is_read_once else []
        manifest = checkpoint.manifest
        part = checkpoint.part(rank % manifest.world_size)
        own = part.unpack(part.tree["own"])
        inner = own.pop("inner", None) if isinstance(own, dict) else None
        for index in range(rank, manifest.world_size, world_size):
            checkpoint.part(index).reader.verify_rest()
        own = own if manifest.world_size == world_size else None
        return Loaded(manifest.step, directory, common, own, manifest.world_size, inner), to_send


def await_writers(root: Path, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """Wait for living writers that are about to finish a newer checkpoint; return what stays unfinished, and why."""
    began_s = time.monotonic()
    while True:
        newest_step = max((_step_of(directory) for directory in list_checkpoints(root)), default=-1)
        entries = list(root.iterdir()) if root.exists() else []
        temps = [(temp[0], path) for path in entries if (temp := parse_temp(path.name)) and not is_given_up(path)]
        unfinished = [path for step, path in sorted(temps, reverse=True) if step > newest_step]
        lives = {path: look_at_writers(path)[0] for path in unfinished}
        waited_s = time.monotonic() - began_s
        busy = [path for path, is_alive in lives.items() if waited_s < _patience_s(path, is_alive=is_alive)]
        if not busy:
            return [
                (path, "its writer is still at it" if is_alive else "it was never finished")
                for path, is_alive in lives.items()
            ]
        if not waited_s // 0.1:
            say(f"waiting for the writer of {busy[0].name}, which outlived its run, up to {WRITERS_S:.0f} s")
        time.sleep(0.1)


def _patience_s(directory: Path, *, is_alive: bool | None) -> float:
    if is_alive is None:
        return UNSEEN_WRITERS_S if any(directory.glob("*.safetensors")) else NEW_WRITERS_S
    return WRITERS_S if is_alive else 0.0


def _step_of(directory: Path) -> int:
    try:
        return read_manifest(directory).step
    except Damaged:
        return -1
