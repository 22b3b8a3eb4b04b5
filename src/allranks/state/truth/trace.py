"""Records what a training went through, beside its checkpoints: `allranks diff` compares two such records.

    trace.note(step, numbers)        # at a boundary with a check (state.truth.comparing), and at a save
    trace.batch(batches)             # when the batch of that step has been fetched

Rank 0 records a number for each tracked part; each rank records one for each generator of random numbers and one for
its batch. The first row is written at once, the others every FLUSH_S and with each save, so a slow directory delays a
step as a print does. What cannot be written costs the record, never a step.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from allranks.files.folder import Folder
from allranks.model.membership import Membership
from allranks.model.setting import Setting
from allranks.report.mask import mask_setting
from allranks.state.resumed import rng
from allranks.state.truth.contents import Contents
from allranks.state.truth.fingerprint import hash_bytes, hash_numbers, hash_text
from allranks.state.truth.odd_one import part_of
from allranks.state.truth.trace_file import FOLDER, PREFIXES, TraceRow, file_name, is_recorded, to_bytes

FLUSH_S = 10.0
_ANEW = ("_ID", "_PORT", "_FD", "_PID", "_FILE", "_COUNT", "_RESTARTS")
"""How the names of variables end that are others in each run."""
_calls = itertools.count()
"""Of `track` in this process."""


class Trace:
    """The record of one rank, beside its checkpoints; `experiment` has script, arguments and torch of this process."""

    def __init__(self, directory: Path, membership: Membership, experiment: Mapping[str, Any]) -> None:
        self._directory, self._membership = directory, membership
        self._about = {**experiment, "world_size": membership.world_size}
        self._about |= describe_machine() | {"call": next(_calls)}
        self._rows = list[TraceRow]()
        """That are not written yet."""
        self._first: TraceRow | None = None
        """Of the written ones, the first that says the same of this process as the last one."""
        self._last_step = -1
        self._pending: tuple[int, dict[str, int]] | None = None
        self._flushed_s = time.monotonic()
        self._is_flush_due = True
        """At once: the first row cuts those of an earlier life."""

    @property
    def is_of_first_call(self) -> bool:
        """Whether it belongs to the first `track` of this process."""
        return not self._about["call"]

    def note(self, step: int, numbers: Mapping[str, int], *, is_saved: bool = False, **about: int) -> None:
        """Record a boundary.

        Args:
            numbers: of the state here, by name; those of rank 0 count.
            is_saved: it is that of a checkpoint: have the rows so far written with the next batch.
            about: what else the rows from here on say of this training.
        """
        self._is_flush_due |= is_saved
        self._about |= about
        if self._pending is not None and self._pending[0] == step:
            return
        self._commit()
        is_first = self._last_step < 0  # rows behind it no longer count
        if step == self._last_step or not (is_first or is_saved or is_recorded(step)):
            return  # the same step: saved between the last fetch and it
        by_part: dict[str, dict[str, int]] = {}
        for name, number in numbers.items() if self._membership.is_leader else ():
            by_part.setdefault(part_of(name), {})[name] = number
        told = {f"part/{part}": hash_numbers(own) for part, own in by_part.items()}
        self._pending = step, told | {f"generator/{name}": number for name, number in find_generators().items()}

    def batch(self, batches: Sequence[Any]) -> None:
        """Take in the batch of the step that was recorded last, if none was told yet."""
        if self._pending is None:
            return
        with contextlib.suppress(Exception):  # an object of the script that cannot be read costs the record a number
            found = [hash_numbers(own.numbers()) for own in Contents.of_batches(batches)]
            self._pending[1]["batch"] = hash_text(*map(str, found))
        self._commit()
        if self._is_flush_due or time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write all rows; those that cannot be written stay for the next time."""
        self._commit()
        self._flushed_s, self._is_flush_due = time.monotonic(), False
        if not self._rows:
            return
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            with Folder.at(self._directory).make(FOLDER).append(file_name(self._membership.rank)) as file:
                file.write(to_bytes(self._rows, self._first))
            for row in self._rows:
                self._first = self._first if self._first and self._first.about == row.about else row
            self._rows.clear()

    def _commit(self) -> None:
        if self._pending is None:
            return
        if self._last_step < 0:
            atexit.register(self.flush)
        (self._last_step, numbers), self._pending = self._pending, None
        self._rows.append(TraceRow(self._last_step, numbers, dict(self._about)))


def find_generators() -> dict[str, int]:
    """Return 64 bits of where each generator stands."""
    state = rng.capture()
    python, cpu, numpy = state["cpu"]
    found = {"python": repr(python).encode(), "torch": cpu.numpy().tobytes()}
    if numpy:
        found["numpy"] = numpy[1].tobytes() + repr((numpy[0], *numpy[2:])).encode()
    if "cuda" in state:
        found["cuda"] = state["cuda"].cpu().numpy().tobytes()
    return {name: hash_bytes(data) for name, data in found.items()}


def describe_machine() -> dict[str, Any]:
    """Return the hardware of this process, how it was started, and the variables that change what it computes."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and torch.cuda.is_initialized() else ""
    own = {name for name in os.environ if name.startswith(PREFIXES) and not name.endswith(_ANEW)}
    settings = (mask_setting(Setting(name, os.environ[name], reason="", source="")) for name in sorted(own))
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return {
        "directory": os.getcwd(),  # noqa: PTH109
        "module": spec.name.removesuffix(".__main__") if spec is not None else "",
        "python": platform.python_version(),
        "hardware": device or f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "environment": {setting.name: setting.value for setting in settings},
    }
