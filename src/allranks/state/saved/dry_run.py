"""Is this directory fit for checkpoints? Saves, kills the trainer in the middle, loads, corrupts, loads again.

    python -m allranks.state.saved.dry_run DIRECTORY        started by `allranks check --checkpoints DIRECTORY`

Everything happens in a directory of its own below it, which is gone afterwards. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from allranks.state.saved.checkpoint import Checkpointer, CheckpointError
from allranks.state.saved.commit import ORPHANED_PATIENCE_S, explain
from allranks.state.saved.manifest import part_name

SIZE_BYTES = 64 << 20
FINISH_S = ORPHANED_PATIENCE_S + 60.0
"""How long the writer of the killed trainer may take."""


@dataclass(frozen=True, slots=True)
class TriedStep:
    """One thing that was tried."""

    name: str
    is_fine: bool
    note: str


def try_directory(directory: Path) -> list[TriedStep]:
    """Return what was tried in this directory, made for it where it is not there; the last one failed, if any did."""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="allranks-check-", dir=directory))
    except OSError as exc:
        return [TriedStep("write", False, explain(exc, directory))]
    try:
        return _try_all(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _try_all(place: Path) -> list[TriedStep]:
    said = ["nothing was said"]
    told, killed_s = _train_and_be_killed(place)
    if "why" in told:
        return [TriedStep("write", False, told["why"])]
    rate = SIZE_BYTES / 1e6 / told["write_s"]
    note = f"{SIZE_BYTES / 1e6:.0f} MB in {told['write_s']:.2f} s ({rate:.0f} MB/s), flushed to disk and read back; "
    steps = [TriedStep("write", True, f"{note}training was held up {told['stall_s'] * 1000:.0f} ms")]

    def load() -> int | None:
        """The step that all of it is of; None: there is none, or bytes of several."""
        with Checkpointer(place, say=said.append) as checkpoints, contextlib.suppress(CheckpointError):
            loaded = checkpoints.load()
            return loaded.step if loaded and loaded.common["weights"].eq(loaded.step).all() else None
        return None

    deadline_s = time.monotonic() + FINISH_S
    while not (place / "step_2").exists() or any(place.glob("*/rank_*.json")):
        if time.monotonic() > deadline_s:
            note = f"its writer did not finish in {FINISH_S:.0f} s after the trainer was killed; {said[-1]}"
            return [*steps, TriedStep("kill", False, note)]
        time.sleep(0.02)
    steps.append(
        TriedStep("kill", True, f"trainer killed {killed_s * 1000:.0f} ms into a save; its writer finished it")
    )
    began_s = time.monotonic()
    if load() != 2:
        return [*steps, TriedStep("load", False, f"what was written is not what is read: {said[-1]}")]
    steps.append(TriedStep("load", True, f"step 2 as it was saved, verified in {time.monotonic() - began_s:.2f} s"))
    with (place / "step_2" / part_name(0)).open("r+b") as file:
        byte = os.pread(file.fileno(), 1, SIZE_BYTES // 2)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), SIZE_BYTES // 2)
    if load() != 1:
        return [*steps, TriedStep("alter", False, f"one flipped bit: {said[-1]}")]
    return [*steps, TriedStep("alter", True, "one flipped bit: step 2 is refused, step 1 is taken")]


def _train_and_be_killed(place: Path) -> tuple[dict[str, Any], float]:
    """Fork a trainer and kill it in a save; returns what it told of the one before, and how long after that."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        try:
            _train(place, ours)
        finally:
            os._exit(1)
    os.close(ours)
    with os.fdopen(theirs) as told:
        line = told.readline()
        began_s = time.monotonic()
        told.readline()  # the second save has been handed over
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(line or '{"why": "the trainer died"}'), time.monotonic() - began_s


def _train(place: Path, told: int) -> None:
    said = ["nothing was said"]
    checkpoints = Checkpointer(place, say=said.append)
    checkpoints.save(0, _state(0), wait=True)  # the first one also makes the memory
    stall = checkpoints.save(1, _state(1), wait=True)
    is_fine = checkpoints.last_complete == 1
    answer = {"stall_s": stall.copy_s, "write_s": checkpoints.write_s} if is_fine else {"why": said[-1]}
    os.write(told, json.dumps(answer).encode() + b"\n")
    if not is_fine:
        return
    checkpoints.save(2, _state(2))
    os.write(told, b"\n")
    time.sleep(60)  # for the kill


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((SIZE_BYTES // 4,), float(step))}


def main() -> None:
    """Try the directory of the command line."""
    print(json.dumps([asdict(step) for step in try_directory(Path(sys.argv[1]))]))


if __name__ == "__main__":
    main()
