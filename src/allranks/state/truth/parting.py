"""Where do two runs that should be equal part? Compares what they recorded (pure).

    find_parting(first, second).until        # 96: the first step at which something that both recorded differs

A step is compared where rank 0 of both runs has a row. Where they had another number of ranks, only the parts are, and
not even these where they are sharded: generators, batches and shards are those of other ranks.

A generator that a script neither seeds nor uses begins elsewhere in each run. So one that never moves is not compared,
and one that stood elsewhere at the first step is named once something else differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from allranks.report.text import fold_ranks
from allranks.state.truth.trace_file import TraceRow

Record = Mapping[int, Sequence[TraceRow]]
"""Rows by rank."""
_Cell = tuple[int, str]
"""Rank and column."""


@dataclass(frozen=True, slots=True)
class Differing:
    """One column that differs, and on which ranks."""

    column: str
    ranks: tuple[int, ...]

    def describe(self, num_ranks: int) -> str:
        """Return it in words: `generator torch (rank 1)`.

        >>> Differing("generator/torch", (1,)).describe(3), Differing("part/model", (0,)).describe(3)
        ('generator torch (rank 1)', 'part model')
        """
        where = "" if self.column.startswith("part/") else f" ({say_ranks(self.ranks, num_ranks)})"
        return f"{self.column.replace('/', ' ', 1)}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What a comparison of two records has found."""

    num_steps: int
    """How many steps both recorded, and that could be compared."""
    since: int | None = None
    """The last step before `until` at which all was equal; None: there is none."""
    until: int | None = None
    """The first one at which something differs; None: nothing does."""
    last: int | None = None
    """The last step that was compared."""
    differing: tuple[Differing, ...] = ()
    """At `until`; without it, generators that stood elsewhere at the first step, where nothing else differs."""
    num_ranks: int = 1
    """At `last`."""
    left_out: str = ""
    """What was not compared, and why."""

    @property
    def steps(self) -> range:
        """In which of them they part; -1 stands for what is before step 0.

        The batch of a step is recorded beside its beginning.
        """
        assert self.until is not None
        since = -1 if self.since is None else self.since
        return range(since, self.until + any(own.column == "batch" for own in self.differing))


def find_parting(first: Record, second: Record) -> Parting:
    """Return where they part."""
    rows = [{rank: {row.step: row for row in own} for rank, own in record.items()} for record in (first, second)]
    still = _still_generators(first) & _still_generators(second)
    since, last, num_steps, num_ranks, left_out = None, None, 0, 1, ""
    loose: set[_Cell] | None = None
    unseen = set[int]()
    for step in sorted(rows[0].get(0, {}).keys() & rows[1].get(0, {}).keys()):
        num_ranks, others = (int(of_run[0][step].about.get("world_size", 1)) for of_run in rows)
        cells = [_cells_at(step, of_run, num_ranks) for of_run in rows]
        common = (cells[0].keys() & cells[1].keys()) - still
        if num_ranks != others:
            is_sharded = any(of_run[0][step].about.get("is_sharded") for of_run in rows)
            common = {cell for cell in common if cell[1].startswith("part/") and not is_sharded}
            what = "nothing is common to shards" if is_sharded else "only parts are compared"
            left_out = f"{num_ranks} and {others} ranks: {what}"
        if not common:
            continue
        unseen.update(rank for rank in range(num_ranks) if any(step not in run.get(rank, {}) for run in rows))
        num_steps, last = num_steps + 1, step
        unlike = {cell for cell in common if cells[0][cell] != cells[1][cell]}
        if loose is None:
            loose = {cell for cell in unlike if cell[1].startswith("generator/")}
        if unlike - loose:
            differing, until = _by_column(unlike), step
            break
        since = step
    else:
        differing, until, since = _by_column(loose or ()), None, None
    if unseen and not left_out:
        left_out = f"generators and batches of {fold_ranks(unseen)}, at steps without a row of theirs"
    return Parting(num_steps=num_steps, since=since, until=until, last=last, differing=differing, num_ranks=num_ranks,
                   left_out=left_out)  # fmt: skip


def say_ranks(ranks: Sequence[int], num_ranks: int) -> str:
    """Return which ranks they are, of so many."""
    return "all ranks" if len(ranks) == num_ranks > 1 else fold_ranks(ranks)


def row_at(rows: Sequence[TraceRow], step: int | None) -> TraceRow:
    """Return a rank's row of this step, else its last one before that, else its first; None: its last one.

    A run that was resumed has rows of several processes, each with its own arguments, hardware and environment.
    """
    before = [row for row in rows if step is None or row.step <= step]
    return before[-1] if before else rows[0]


def find_unlike(first: Record, second: Record, step: int | None = None) -> list[tuple[str, str, str]]:
    """Return what else differs where they part, if they do: names (torch, hardware, script, arguments), both values."""
    found = []
    for rank in sorted(first.keys() & second.keys()):
        before, after = (_say_about(row_at(record[rank], step)) for record in (first, second))
        for name in sorted(before.keys() | after.keys()):
            values = before.get(name, "unset"), after.get(name, "unset")
            if values[0] != values[1] and (rank == 0 or name in ("hardware", "threads")):
                found.append((f"{name} of rank {rank}" if rank else name, *values))
    return found


def _by_column(cells: Collection[_Cell]) -> tuple[Differing, ...]:
    """Batches and generators come first, as their names do: they lead to other parts."""
    columns = sorted({column for _, column in cells})
    return tuple(Differing(name, tuple(sorted(rank for rank, own in cells if own == name))) for name in columns)


def _still_generators(record: Record) -> set[_Cell]:
    """Generators that stand at one place in all rows of a rank."""
    told = ((rank, pair) for rank, rows in record.items() for row in rows for pair in row.numbers.items())
    places = {(rank, column, number) for rank, (column, number) in told if column.startswith("generator/")}
    return {cell for cell, count in Counter(place[:2] for place in places).items() if count == 1}


def _cells_at(step: int, rows: Mapping[int, Mapping[int, TraceRow]], num_ranks: int) -> dict[_Cell, int]:
    """Numbers by rank and column; rows of ranks that did not run then are of a larger run that was resumed since."""
    own = {rank: rows[rank][step] for rank in range(num_ranks) if step in rows.get(rank, {})}
    return {(rank, column): number for rank, row in own.items() for column, number in row.numbers.items()}


def _say_about(row: TraceRow) -> dict[str, str]:
    names = {"text": "checksum of the script"}
    told = {key: own for key, own in row.about.items() if key not in ("call", "healed", "is_sharded")}
    environment = told.pop("environment", {})
    return {str(names.get(key, key)): str(own) for key, own in (told | environment).items()}
