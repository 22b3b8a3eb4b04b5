"""The progress that the workers report (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def hear(self, beat: Beat) -> None:
        """Take what one node tells."""
        for rank in beat.node.ranks:
            if rank.step is not None:
                self.steps[rank.rank] = rank.step
            if rank.checkpoint is not None:
                self.find(rank.checkpoint)

    def find(self, checkpoint: int) -> None:
        """Take the step of a complete checkpoint."""
        self.checkpoint = checkpoint if self.checkpoint is None else max(checkpoint, self.checkpoint)
