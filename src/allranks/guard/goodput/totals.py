"""What has the job spent its time on in all that is closed: totals, a row for each rank, and the losses. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from allranks.model.ledger import PRODUCTIVE, Category, Ledger, LostTime, RankLedger, RestartCost

MIN_LOSS_S = 0.001
MIN_OWED = 0.1
"""Of the waiting of all ranks, that is owed to a rank which is listed."""
ODD_FACTOR, ODD_S = 1.5, 0.05
"""A loss is owed to the ranks that have lost so much more than the median of all."""
MAX_OWED = 8


@dataclass(slots=True)
class Row:
    """One rank, over all generations that are closed."""

    node: str = ""
    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    waited_for_s: float = 0.0
    waited_for_at_start_s: float = 0.0
    steps: int = 0

    def copy(self) -> Row:
        """Return one that can be added to."""
        return Row(self.node, self.seconds.copy(), self.waited_for_s, self.waited_for_at_start_s, self.steps)


@dataclass(slots=True)
class Totals:
    """What is closed."""

    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    rows: defaultdict[int, Row] = field(default_factory=lambda: defaultdict(Row))
    rank_s: float = 0.0
    """Wall time times ranks."""
    steps: int = 0
    save_s: float = 0.0

    @classmethod
    def of(cls, earlier: Ledger) -> Totals:
        """Return what a ledger has, as far as it has rows."""
        totals = cls(rank_s=earlier.rank_s, steps=earlier.steps, save_s=earlier.save_s)
        for name, found_s in earlier.seconds.items():
            if name in _NAMES:
                totals.seconds[Category(name)] += found_s
        for row in {row.rank: row for row in (*earlier.waited_for, *earlier.ranks)}.values():
            own = totals.rows[row.rank]
            own.node, own.waited_for_s, own.steps = row.node, row.waited_for_s, row.steps
            own.waited_for_at_start_s = row.waited_for_at_start_s
            for name, found_s in row.seconds.items():
                if name in _NAMES:
                    own.seconds[Category(name)] += found_s
        return totals

    def copy(self) -> Totals:
        """Return one that can be added to."""
        rows = defaultdict(Row, {rank: row.copy() for rank, row in self.rows.items()})
        return Totals(self.seconds.copy(), rows, self.rank_s, self.steps, self.save_s)

    def book(self, rank: int, category: Category, seconds: float) -> None:
        """Add seconds of one rank."""
        self.seconds[category] += seconds
        self.rows[rank].seconds[category] += seconds


_NAMES = frozenset(category.value for category in Category)
LOST = tuple(category for category in Category if category not in PRODUCTIVE)


def show_row(rank: int, row: Row) -> RankLedger:
    """Return a row as the ledger has it."""
    return RankLedger(
        rank=rank,
        node=row.node,
        seconds={category.value: round(found_s, 3) for category, found_s in row.seconds.items() if found_s >= 0.0005},
        waited_for_s=round(row.waited_for_s, 3),
        waited_for_at_start_s=round(row.waited_for_at_start_s, 3),
        steps=row.steps,
    )


def find_losses(totals: Totals, restarts: Sequence[RestartCost], *, is_estimated: bool) -> tuple[LostTime, ...]:
    """Return all categories but the productive ones, the largest first, and whom they are owed to.

    Args:
        is_estimated: part of the waits is.
    """
    found = []
    for category in LOST:
        if (lost_s := totals.seconds[category]) < MIN_LOSS_S:
            continue
        waited_s = 0.0
        if category is Category.WAIT:
            owed = {rank: row.waited_for_s for rank, row in totals.rows.items()}
            ranks = _most(owed, least=lost_s * MIN_OWED)
        elif category is Category.START and (late := _find_late(totals, lost_s)):
            ranks, waited_s = tuple(late), min(lost_s, max(late.values()))
        elif category in (Category.RESTART, Category.REDO, Category.QUEUE, Category.END):
            ranks = ()
        else:
            owed = {rank: row.seconds[category] for rank, row in totals.rows.items() if category in row.seconds}
            middle_s = median([*owed.values(), *[0.0] * (len(totals.rows) - len(owed))])
            ranks = _most(owed, least=max(ODD_FACTOR * middle_s, middle_s + ODD_S))
        nodes = [totals.rows[rank].node for rank in ranks]
        if category in (Category.RESTART, Category.REDO):
            nodes = [cost.node for cost in restarts if cost.node]
        found.append(
            LostTime(
                category=category,
                rank_s=round(lost_s, 3),
                ranks=ranks,
                nodes=tuple(dict.fromkeys(nodes))[:MAX_OWED],
                waited_s=round(waited_s, 3),
                is_estimated=is_estimated and category is Category.WAIT,
            )
        )
    return tuple(sorted(found, key=lambda loss: -loss.rank_s))


def _find_late(totals: Totals, start_s: float) -> dict[int, float]:
    """Return how long others waited before their first steps, by the ranks that came last, most first."""
    owed = {rank: row.waited_for_at_start_s for rank, row in totals.rows.items()}
    return {rank: owed[rank] for rank in _most(owed, least=max(ODD_S, start_s * MIN_OWED))}


def _most(owed: Mapping[int, float], *, least: float) -> tuple[int, ...]:
    """Return the ranks with more than that, most first; none: they are too many to be odd."""
    ranks = sorted((rank for rank, found_s in owed.items() if found_s > least), key=lambda rank: (-owed[rank], rank))
    return tuple(ranks[:MAX_OWED])
