"""What does a training record that is run again? $ALLRANKS_RERUN says what its ranks shall do.

    SCRATCH/A/at                         the step that rank 0 has reached
    SCRATCH/A/checkpoints/trace          its record, with a row for each step
    SCRATCH/A/ops_96_00001               the operations of step 96 on rank 1; step -1 is all that is before step 0

`allranks diff` reads them without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

VARIABLE = "ALLRANKS_RERUN"
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's collectives as operators."""
SETUP = -1
"""Number of what is before the first step, from the beginning of the session."""
BATCH = "batch"
"""Name of the first line of a step: its inputs are the batch's tensors, its settings stand for all else in it."""


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
    step: int = SETUP
    """In which it was done."""

    @property
    def is_collective(self) -> bool:
        """Whether ranks do it together."""
        return self.name.partition(".")[0] in COLLECTIVES


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunPlan:
    """What the ranks of a training that runs again shall do."""

    folder: str
    """Where they write; checkpoints/ in it has the checkpoint to begin with, if there is one."""
    first: int
    """From which step on each one has a row; SETUP: from the beginning of the session."""
    until: int
    """The run ends when so many steps are done."""
    are_ops_recorded: bool
    """Those of these steps."""

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

    def _file_of(self, step: int, rank: int) -> Path:
        return Path(self.folder) / f"ops_{step}_{rank:05d}"

    def write(self, ops: Sequence[Op], step: int, rank: int) -> None:
        """Write the operations of a step; a million have 0.3 GB."""
        self._file_of(step, rank).write_bytes(msgspec.json.encode(ops))

    def read(self, step: int, rank: int) -> list[Op]:
        """Return the operations of a step."""
        return msgspec.json.decode(self._file_of(step, rank).read_bytes(), type=list[Op])
