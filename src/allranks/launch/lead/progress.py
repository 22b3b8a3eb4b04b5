"""The progress that the workers report."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from allranks.state.saved.manifest import parse_final
from allranks.wire.protocol import Beat


@dataclass(slots=True)
class Progress:
    """Steps and checkpoints, as the workers report them."""

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
            for path in directory.iterdir():
                if (found := parse_final(path.name)) is not None:
                    self._saw(found[0])

    def hear(self, beat: Beat) -> None:
        """Take what one node tells."""
        for rank in beat.node.ranks:
            if rank.step is not None:
                self.steps[rank.rank] = rank.step
            if rank.checkpoint is not None:
                self._saw(rank.checkpoint)

    def _saw(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint if self.checkpoint is None else max(checkpoint, self.checkpoint)
