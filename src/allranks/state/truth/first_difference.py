"""Which operation is the first one that differs where a step was run twice? (pure)

    find_first([(0, ops_of_a, ops_of_b), (1, ...)])     # a FirstDifference, of rank 1, or None

Operations of a rank are aligned by their names. Of two that are aligned, inputs are compared before outputs, so a value
that differs is named where it was made: by an operation (equal inputs, another output), by one that only one of the
runs has done, by a generator that stood elsewhere, or outside of all operations, such as data and what Python computed.

Of several ranks, the one is named that differs after the fewest collectives, since these carry a difference on to the
others; and a collective whose result differs comes after the ranks that brought a difference to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest

from allranks.state.truth.op_file import BATCH, SETUP, Op, OpValue
from allranks.state.truth.parting import say_ranks

REACH = 400
"""How many operations may be in one run alone, before both go on alike."""
_ALIKE = 2
"""So many alike in a row mean that both go on alike: the nearest place, since layers repeat each other."""


class DifferenceKind(StrEnum):
    """What differs first, in words."""

    OUTPUT = "another output, although its inputs are equal"
    INPUT = "another input, which no recorded operation has made"
    FORM = "inputs of another dtype or shape, or another number of inputs"
    SETTING = "another argument"
    OP = "another operation"
    GENERATOR = "its random numbers come from a generator that stood elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first one of a step."""

    kind: DifferenceKind
    ranks: tuple[int, ...]
    """On which it is the same; the first one is described."""
    a: Op | None
    """In run A; None: the run has not done it."""
    b: Op | None
    values: tuple[str, str] = ("", "")
    """What differs, in A and in B."""

    def describe(self, num_ranks: int) -> list[str]:
        """Return it in lines."""
        op = self.a or self.b
        assert op is not None
        ranks = say_ranks(self.ranks, num_ranks)
        where = ", ".join(filter(None, [ranks, op.line, op.module and f"in {op.module}"]))
        said = f"the data differ: the batch of {ranks}" if op.name == BATCH else f"{op.name} ({where}): {self.kind}"
        at = "before step 0" if op.step == SETUP else f"in step {op.step}"
        return [
            f"first difference {at}: {said}",
            *(f"  {name}: {value}" for name, value in zip("AB", self.values, strict=True) if value),
        ]


def find_first(steps: Iterable[tuple[int, Sequence[Op], Sequence[Op]]]) -> FirstDifference | None:
    """Return the first difference of a step; it has for each rank its operations in run A, and those in run B."""
    found = [own for rank, a, b in steps if (own := _find_on(rank, a, b))]
    if not found:
        return None
    *_, first = min(found, key=lambda own: (own[:3], own[3].ranks))
    ranks = sorted(rank for *_, own in found if _name(own) == _name(first) for rank in own.ranks)
    return replace(first, ranks=tuple(ranks))


def _find_on(rank: int, a: Sequence[Op], b: Sequence[Op]) -> tuple[bool, int, bool, FirstDifference] | None:
    """Return the first difference of a rank, behind what tells whether it is named before those of others.

    Those without an effect come last: of an operation of one run alone, after which no value differs. Of the others it
    counts how many collectives came before, and whether it is the result of one.
    """
    made, num_before = set[int](), 0
    other: FirstDifference | None = None
    draws: FirstDifference | None = None
    for one, two in align(a, b):
        if one is None or two is None or one.name != two.name:
            alone = [op for op in (one, two) if op is not None]
            made |= {value.number for op in alone for value in op.outputs}
            values = _say_op(one), _say_op(two)
            told = FirstDifference(kind=DifferenceKind.OP, ranks=(rank,), a=one, b=two, values=values)
            other = other or told
            if any(op.generator for op in alone):
                draws = draws or told
            continue
        if found := _compare(one, two):
            kind, values = found
            told = FirstDifference(kind=kind, ranks=(rank,), a=one, b=two, values=values)
            if kind is DifferenceKind.GENERATOR and draws:
                told = draws
            elif kind is DifferenceKind.INPUT and other and made & _differing(one.inputs, two.inputs):
                told = other
            return False, num_before, one.is_collective and kind is DifferenceKind.OUTPUT, told
        num_before += one.is_collective
    return (True, num_before, False, other) if other else None


def _compare(one: Op, two: Op) -> tuple[DifferenceKind, tuple[str, str]] | None:
    """Return what differs between two operations of one name."""
    forms = [", ".join(value.form for value in op.inputs) for op in (one, two)]
    if forms[0] != forms[1]:
        return DifferenceKind.FORM, (forms[0], forms[1])
    if one.inputs != two.inputs:
        return DifferenceKind.INPUT, _say_values(one.inputs, two.inputs)
    if one.settings != two.settings:
        return DifferenceKind.SETTING, (one.settings, two.settings)
    if one.outputs != two.outputs:
        kind = DifferenceKind.GENERATOR if one.generator != two.generator else DifferenceKind.OUTPUT
        return kind, _say_values(one.outputs, two.outputs)
    return None


def align(a: Sequence[Op], b: Sequence[Op]) -> Iterator[tuple[Op | None, Op | None]]:
    """Yield operations that belong together; those that one run alone has done beside the other's, or None.

    >>> runs = [[Op(name, "", "", (), ()) for name in own] for own in ("xyzuv", "xqyzuv")]
    >>> [[op and op.name for op in pair] for pair in align(*runs)][:3]
    [['x', 'x'], [None, 'q'], ['y', 'y']]
    """
    i = j = 0
    while i < len(a) and j < len(b):
        more = less = 1
        if a[i].name != b[j].name:
            more, less = _find_again(a, b, i, j)
        yield from zip_longest(a[i : i + more], b[j : j + less])
        i, j = i + more, j + less
    yield from zip_longest(a[i:], b[j:])


def _find_again(a: Sequence[Op], b: Sequence[Op], i: int, j: int) -> tuple[int, int]:
    """Return after how many more operations of each both go on alike; all the rest of both, if they do not."""
    names = [op.name for op in a[i : i + REACH + _ALIKE]], [op.name for op in b[j : j + REACH + _ALIKE]]
    for skipped in range(1, 2 * REACH):
        for more in range(max(0, skipped - REACH), min(skipped, REACH) + 1):
            rows = names[0][more : more + _ALIKE], names[1][skipped - more : skipped - more + _ALIKE]
            if rows[0] and rows[0] == rows[1]:
                return more, skipped - more
    return len(a) - i, len(b) - j


def _differing(one: Sequence[OpValue], two: Sequence[OpValue]) -> set[int]:
    return {value.number for pair in zip(one, two, strict=True) if pair[0] != pair[1] for value in pair}


def _say_values(one: Sequence[OpValue], two: Sequence[OpValue]) -> tuple[str, str]:
    """Return the first values that differ, as texts."""
    for pair in zip(one, two, strict=False):
        if pair[0] != pair[1]:
            first, second = (f"{value.form} {value.number & (1 << 64) - 1:016x}" for value in pair)
            return first, second
    return f"{len(one)} tensors", f"{len(two)} tensors"


def _say_op(op: Op | None) -> str:
    return f"{op.name} {', '.join(value.form for value in op.inputs)} {op.line}".replace("  ", " ") if op else "none"


def _name(own: FirstDifference) -> tuple[object, ...]:
    return own.kind, *(op and (op.name, op.line) for op in (own.a, own.b))
