"""What does a training tell its agent, and what does the agent want of it? Nothing of both where there is no agent."""

from __future__ import annotations

from typing import Protocol


class Order(Protocol):
    """What the agent wants; see guard.inside.cell.CellOrder."""

    @property
    def at_step(self) -> int:
        """The first step that it is for."""

    @property
    def why(self) -> str:
        """In words."""

    @property
    def leaves(self) -> bool:
        """Whether the workers end, with 0, when their checkpoint is written."""


class Cell(Protocol):
    """The memory that a worker shares with its agent; see guard.inside.cell.Cell."""

    def step(self, number: int) -> None:
        """Say how far the training is."""

    def saved(self, step: int) -> None:
        """Say which checkpoint is complete."""

    def phase(self, name: str) -> None:
        """Say what is going on."""

    def finish(self) -> None:
        """Say that all steps are made."""

    def order(self) -> Order | None:
        """Return the last order, the same object until there is another one."""


class Telling:
    """One rank's talk with its agent, step by step.

    Args:
        cell: None: there is no agent.
    """

    def __init__(self, cell: Cell | None) -> None:
        self._cell = cell
        self._told_saved: int | None = None
        self._carried_out: Order | None = None

    def reach(self, step: int) -> Order | None:
        """Say that so many steps are done; return the order that is due there and was not carried out yet."""
        if self._cell is None:
            return None
        self._cell.step(step)
        order = self._cell.order()
        is_due = order is not None and order is not self._carried_out and order.at_step <= step
        return order if is_due else None

    def carry_out(self, order: Order | None) -> None:
        """Remember that this one is done."""
        self._carried_out = order or self._carried_out

    def save_done(self, step: int | None) -> None:
        """Say which checkpoint is complete; None: there is none."""
        if self._cell is not None and step is not None and step != self._told_saved:
            self._cell.saved(step)
            self._told_saved = step

    def phase(self, name: str) -> None:
        """Say what is going on: training, saving, leaving."""
        if self._cell is not None:
            self._cell.phase(name)

    def finish(self) -> None:
        """Say that all steps are made."""
        if self._cell is not None:
            self._cell.finish()
