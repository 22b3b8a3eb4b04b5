"""What does a training record that is run again? A file for each step of each rank.

    SCRATCH/a/at                         the step that rank 0 has reached
    SCRATCH/a/step_96/rank_00001         the operations of step 96 on rank 1; step -1 is all that is before step 0

$ALLRANKS_RERUN says what the ranks of a run shall do.

A step's file appears whole. `allranks diff` compares it with the same file of the other run and deletes it; a rank
waits while it has MOST_FILES of them. So the disk holds at most that many steps, of at most MOST_OPS operations each.

`allranks diff` reads it without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from allranks.files.regular import find_regular
from allranks.model.errors import SetupError

VARIABLE = "ALLRANKS_RERUN"
SETUP = -1
"""Number of what is before the first step, from the beginning of the session."""
MOST_OPS = 100_000
"""Of a step on a rank; further ones are only counted."""
MOST_FILES = 2
BATCH = "batch"
"""Name of the first line of a step: its inputs are the batch's tensors, its settings stand for all else in it."""
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OpValue:
    """A tensor that an operation has read or written."""

    form: str
    """`float32[64, 3]`"""
    number: int
    """Stands for its bits."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    name: str
    """`aten.addmm.default`"""
    line: str
    """Of the script: `train.py:31 in step`; of a backward operation that of the forward one, if it is known."""
    module: str
    """The innermost module that was running: `model.blocks.0.mlp`."""
    inputs: tuple[OpValue, ...]
    """Without the old content of what it only overwrites."""
    outputs: tuple[OpValue, ...]
    """None of `empty` and its kin, whose content is left over from something else."""
    settings: str = ""
    """Arguments that are no tensors."""
    generator: str = ""
    """Where the generators stood, if it draws random numbers."""

    @property
    def is_collective(self) -> bool:
        """Whether ranks do it together."""
        return self.name.startswith(("c10d", "_c10d_functional"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunPlan:
    """What the ranks of a training that runs again shall do."""

    folder: str
    """Where they write; checkpoints/ in it has the checkpoint to begin with, if there is one."""
    first: int
    """From which step on operations are recorded; SETUP: from the beginning of the session."""
    until: int
    """The run ends when so many steps are done."""

    @classmethod
    def inherited(cls) -> Self | None:
        """Return the plan of this process; None: it is no training that runs again."""
        text = os.environ.get(VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else None

    def to_environ(self) -> dict[str, str]:
        """Return the variable that `inherited` reads."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints, for the one that the run begins with and for its record."""
        return Path(self.folder) / "checkpoints"

    @property
    def found(self) -> Path:
        """Is there once the first difference is known: further steps are not recorded."""
        return Path(self.folder) / "found"

    def file_of(self, step: int, rank: int) -> Path:
        """Return the file of a step."""
        return Path(self.folder) / f"step_{step}" / f"rank_{rank:05d}"


def encode_ops(ops: Iterable[Op], num_left_out: int = 0) -> bytes:
    """Return the content of a step's file, which `read_ops` reads.

    >>> encode_ops([Op("aten.relu.default", "a.py:3", "model", (OpValue("float32[2]", 7),), ())]).decode()[:63]
    '[[{"name":"aten.relu.default","line":"a.py:3","module":"model",'
    """
    return msgspec.json.encode(([*ops], num_left_out))


def read_ops(path: Path) -> tuple[list[Op], int]:
    """Return the operations of a step, and how many more there were.

    Raises:
        SetupError: nobody can read the file.
    """
    if (data := find_regular(path, at_most=_MAX_BYTES)) is None:
        raise SetupError(f"diff --replay: {path} cannot be read, or has more than {_MAX_BYTES >> 30} GiB")
    return msgspec.json.decode(data, type=tuple[list[Op], int])
