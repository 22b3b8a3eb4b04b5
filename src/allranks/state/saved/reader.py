"""What is in a checkpoint for this rank?  Reads it, believes nothing that does not match its checksum, runs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch

from allranks.state.saved.manifest import Damaged, Manifest, parse_temp
from allranks.state.saved.pack import StateFile
from allranks.state.saved.parts import PartReader, list_checkpoints, read_manifest
from allranks.state.saved.tidy import look_at_writers

WRITERS_S = 30.0
"""How long a load waits for a writer that outlived its trainer and is about to finish a newer checkpoint."""
UNSEEN_WRITERS_S = 5.0
"""The same where the writer is on another machine, and may be dead."""
NEW_WRITERS_S = 0.5
"""The same where the directory is so new, or so old, that nobody has written into it."""


def read_checkpoint(directory: Path, *, rank: int, world_size: int, like: object) -> tuple[Manifest, Any, Any]:
    """Return manifest, common state and this rank's own; all ranks together verify all of its bytes.

    Args:
        directory: of the checkpoint.
        rank: of this process.
        world_size: of this run, which may be another than the one that wrote it.
        like: the live common state, whose DTensors say how sharded ones are placed now.
    Raises:
        Damaged: something is not what was written.
    """
    manifest = read_manifest(directory)
    sharded: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:

        @cache
        def reader_of(index: int) -> PartReader:
            return stack.enter_context(PartReader(directory, manifest.parts[index]))

        @cache
        def open_part(index: int) -> StateFile:
            return StateFile(reader_of(index), sharded.__getitem__)

        first = open_part(0)
        if first.tree["tensors"]:
            sharded.update(_load_sharded(manifest, open_part, like))
        common = first.unpack(first.tree["common"])
        own = None
        if manifest.world_size == world_size:
            own = open_part(rank).unpack(open_part(rank).tree["own"])
        for index in range(rank, manifest.world_size, world_size):
            reader_of(index).verify_rest()
    return manifest, common, own


def _load_sharded(manifest: Manifest, open_part: Callable[[int], StateFile], like: object) -> dict[str, torch.Tensor]:
    from allranks.state.saved.sharded import ShardedTensors, find_meshes, find_sharded

    tensors = ShardedTensors({described[0]: described for described in open_part(0).tree["tensors"]})
    for index in range(manifest.world_size):
        tensors.add_part(open_part(index).tree["shards"], open_part(index))
    live = dict(find_sharded(like, "common"))
    return tensors.load(find_meshes(live), live)


def await_writers(root: Path, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """Wait for living writers that are about to finish a newer checkpoint; return what stays unfinished, and why."""
    began_s = time.monotonic()
    while True:
        newest_step = max((_step_of(directory) for directory in list_checkpoints(root)), default=-1)
        entries = list(root.iterdir()) if root.exists() else []
        temps = [(temp[0], path) for path in entries if (temp := parse_temp(path.name))]
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
