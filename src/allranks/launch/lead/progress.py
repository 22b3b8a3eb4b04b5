"""How far are the workers, as they tell it themselves?"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from allranks.wire.protocol import Beat


@dataclass(slots=True)
class Progress:
    """How far the workers say they are."""

    steps: dict[int, int] = field(default_factory=dict)
    """By rank, of this generation; empty where the script does not tell."""
    checkpoint: int | None = None
    """Step of the newest complete one."""

    @property
    def step(self) -> int | None:
        """Of the rank that is furthest."""
        return max(self.steps.values(), default=None)

    def look(self, directory: Path) -> None:
        """Take what lies in the directory of checkpoints: one may have become whole since the last beat."""
        with contextlib.suppress(OSError):
            found = [re.fullmatch(r"step_(\d+)(?:\.\d+)?", path.name) for path in directory.iterdir()]
            self.checkpoint = max([int(name[1]) for name in found if name] + [self.checkpoint or 0]) or self.checkpoint

    def hear(self, beat: Beat) -> None:
        """Take what one node tells."""
        for rank in beat.node.ranks:
            if rank.step is not None:
                self.steps[rank.rank] = rank.step
            if rank.checkpoint is not None:
                self.checkpoint = max(rank.checkpoint, self.checkpoint or 0)
