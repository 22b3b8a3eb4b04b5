"""Ranks have different bits: must they be equal, is one of them wrong, and which one? Pure.

    Seen                               what is known of a tensor, from checks, anew in each process
    judge(reports)                     which tensors differ, and which ranks are the odd ones
    find_updates(suspects, counts)     which of them the script has changed on some ranks alone: that is no fault
    find_majority(values)              which ranks have the number of more than half of them

A tensor that has changed twice, and was equal on all ranks after that, is watched. One that was the same at all equal
checks, two at least, is frozen. What differs before it is either is not replicated, and is never compared again: what
each rank computes for itself differs before it has changed twice. All ranks learn the same, since they go by checks at
which all were equal, and by numbers that all have seen. Only tensors are compared: numbers of Python are few, so hardly
a flipped bit hits one, and scripts change some on one rank alone.

What an optimizer changes must be equal once it is watched. Whatever else differs may be an update, which a script makes
on one rank alone: its best weights, an average, a history, a counter, an adapter that it merges and takes out again. It
is one if it changes much of a tensor, or rounds some of it. It may also change little of what is no parameter: there, a
fault is one bit of a frozen fraction, or few watched fractions.

Only ranks of one group are compared: those whose hardware, torch and number of threads compute the same bits, and whose
tensors are the same shards. More than half of a group outvote the others. Of two ranks, or in a tie, nobody is named,
but for a tensor that never changed: who has changed it, is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

UPDATE_SHARE = 0.01
"""Of the elements: an update changes nearly all, a fault one or a few. If all have changed, it is an update, also of
the only one: a script may keep its best loss on rank 0 alone."""


class Role(Enum):
    """Who changes a tensor."""

    TRAINED = "an optimizer alone: a parameter, or the optimizer's own state"
    WEIGHT = "nobody, or the script as a whole: another parameter, such as those of an average"
    OTHER = "the script, maybe element by element: a buffer, or the state of another object"


class Difference(NamedTuple):
    """How a tensor differs from another one, on the rank where it does most."""

    elements: int
    fraction_bits: int
    """0 where one of these elements was a whole number, as counters, flags and empty places are."""
    is_rounded: int
    """More than one bit differs, by no more than the largest element's last one: something was added and taken off."""
    of: int


class Seen(NamedTuple):
    """What is known of a tensor from checks at which all ranks were equal."""

    number: int | None = None
    """Of the last one; None: there was none."""
    num_changes: int = 0
    """Since the one before."""
    is_frozen: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether a difference is a fault."""
        return self.num_changes > 1

    def then(self, number: int) -> Seen:
        """Return it after another such check."""
        is_new = self.number is None
        num_changes = self.num_changes + (not is_new and number != self.number)
        return Seen(number, num_changes, not is_new and num_changes == 0)


class TensorReport(NamedTuple):
    """What one rank says of one tensor."""

    number: int
    before: Seen
    """After a load, with the number that the checkpoint has."""
    form: tuple[Any, tuple[int, ...]]
    """Dtype and shape."""
    role: Role = Role.TRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What one rank says of itself when numbers differ."""

    entries: Mapping[str, TensorReport]
    """By name; the same names on all ranks of a group, unless the script did something else there."""
    group: str = ""
    """Ranks of one group can be compared."""
    node: str = ""
    device: str = ""
    """UUID of its GPU, where it has one."""


Reports = Sequence[ReplicaReport]
"""Of all ranks, in their order."""


class DifferingTensor(NamedTuple):
    """A tensor that differs where it must not."""

    name: str
    ranks: tuple[int, ...]
    """Those at fault; where nobody outvotes anybody, all that were compared."""
    reference: int
    """A rank of the majority; the lowest one where there is none."""
    is_decided: bool
    is_frozen: bool = False
    role: Role = Role.TRAINED


Suspects = Sequence[DifferingTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a comparison of all ranks comes to; nothing at all where they are equal."""

    suspects: tuple[DifferingTensor, ...] = ()
    not_replicated: tuple[str, ...] = ()
    """Tensors that differ before anybody knew that they must not."""
    is_by_script: bool = False
    """Most tensors differ, and no two ranks agree: the ranks train apart, and nothing is at fault."""


def judge(reports: Reports, *, is_loaded: bool = False) -> Judged:
    """Return what the reports come to; where a checkpoint has just been loaded, all its tensors must be equal."""
    suspects, not_replicated, is_by_script = list[DifferingTensor](), dict[str, None](), False
    for ranks in groups_of(reports):
        num_parted = num_watched = 0
        for name in dict.fromkeys(name for rank in ranks for name in reports[rank].entries):
            entries = {rank: reports[rank].entries.get(name) for rank in ranks}
            before, role = next((own.before, own.role) for own in entries.values() if own is not None)
            num_watched += before.is_watched
            values = {rank: own and own.number for rank, own in entries.items()}
            if len({*values.values()}) == 1:
                continue
            unchanged = [rank for rank, own in entries.items() if own is not None and own.number == own.before.number]
            if before.is_watched or is_loaded:
                num_parted += len({*values.values()}) == len(ranks)
                right = find_majority(values) or unchanged * is_loaded
            elif before.is_frozen and len(unchanged) == len(ranks) - 1:
                right = unchanged
            else:
                not_replicated[name] = None
                continue
            odd = tuple(rank for rank in ranks if rank not in right) or tuple(ranks)
            is_decided = len(odd) < len(ranks)
            reference = right[0] if is_decided else ranks[0]
            suspects.append(DifferingTensor(name, odd, reference, is_decided, before.is_frozen, role))
        is_by_script |= not is_loaded and num_parted > 1 and num_parted > num_watched / 2
    return Judged(
        suspects=tuple(sorted(suspects, key=lambda suspect: not suspect.is_decided)),
        not_replicated=tuple(not_replicated),
        is_by_script=is_by_script,
    )


def groups_of(reports: Reports) -> list[list[int]]:
    """Return the ranks that can be compared with each other, where there are several.

    >>> [groups_of([ReplicaReport(entries={}, group=name) for name in names]) for names in ("aba", "ab")]
    [[[0, 2]], []]
    """
    groups = defaultdict[str, list[int]](list)
    for rank, report in enumerate(reports):
        groups[report.group].append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def part_of(name: str) -> str:
    """Return the part of a tensor: `model` of `model/w`."""
    return name.partition("/")[0]


def find_updates(suspects: Suspects, counts: Mapping[str, Difference], *, parts: Collection[str] = ()) -> list[str]:
    """Return the names of tensors that the script has changed on some ranks alone: that is no fault.

    Where these ranks changed much of one tensor of a part, all that they changed of that kind is an update: of the rows
    of an embedding, a better copy of the weights may have few others.

    Args:
        parts: that had updates before: what a part computes, such as a mean of BatchNorm's, follows from them.
    """
    kinds = [(part_of(own.name), own.ranks, own.role) for own in suspects]
    updated = {kind for kind, own in zip(kinds, suspects, strict=True) if _is_update(own, counts[own.name])}
    updated |= {kind for kind in kinds if kind[0] in parts and kind[2] is Role.OTHER}
    return [own.name for kind, own in zip(kinds, suspects, strict=True) if kind in updated]


def _is_update(suspect: DifferingTensor, difference: Difference) -> bool:
    elements, bits, is_rounded, of = difference
    if elements == of or elements > max(1, of * UPDATE_SHARE) or is_rounded:
        return True
    return suspect.role is Role.OTHER and (bits == 0 or (suspect.is_frozen and bits > 1))


def find_majority(values: Mapping[int, int | None]) -> list[int]:
    """Return the ranks that have the number of more than half of them; none where no number is that of so many.

    >>> [find_majority(dict(enumerate(map(ord, text)))) for text in ("aab", "abaca", "abc", "aabb")]
    [[0, 1], [0, 2, 4], [], []]
    """
    (value, votes), *_ = Counter(values.values()).most_common(1)
    return [rank for rank, own in values.items() if own == value] if votes > len(values) / 2 else []
