"""Ranks have different bits: is one of them wrong, and which one? Pure.

    judge(reports)                     which tensors differ, and which ranks are the odd ones
    find_updates(suspects, counts)     which of them one rank has updated: that is no fault
    teams_of(groups, turn)             which ranks compute the gradients of one batch, in a replay
    find_outvoted(numbers)             which of them computed others than most

Only ranks of one group are compared: those whose hardware, torch and number of threads compute the same bits, and whose
tensors are the same shards. More than half of a group outvote the others. Of two ranks, or in a tie, nobody is named,
but for a tensor that never changed: who has changed it, is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from allranks.state.truth.learner import Standing

UPDATE_SHARE = 0.01
"""Of the elements: an update changes nearly all, a fault one or a few."""


class TensorReport(NamedTuple):
    """What one rank says of one tensor."""

    number: int
    standing: Standing
    is_changed: bool
    """Since the last check at which all were equal; after a load, from what the checkpoint says."""
    form: tuple[str, tuple[int, ...]] | None = None
    """Dtype and shape; None where it stands for numbers of a part."""


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


class DifferingTensor(NamedTuple):
    """A tensor that differs where it must not."""

    name: str
    ranks: tuple[int, ...]
    """Those at fault; where nobody outvotes anybody, all that were compared."""
    reference: int
    """A rank of the majority; the lowest one where there is none."""
    is_decided: bool
    is_frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a comparison of all ranks comes to; nothing at all where they are equal."""

    suspects: tuple[DifferingTensor, ...] = ()
    not_replicated: tuple[str, ...] = ()
    """Tensors that differ before anybody knew that they must not."""
    is_by_script: bool = False
    """Most tensors differ, and no two ranks agree: the ranks train apart, and nothing is at fault."""


def judge(reports: Sequence[ReplicaReport], *, is_loaded: bool = False) -> Judged:
    """Return what the reports of all ranks, in their order, come to.

    Args:
        is_loaded: a checkpoint has just been loaded, so all its tensors must be equal.
    """
    suspects, not_replicated, is_by_script = list[DifferingTensor](), dict[str, None](), False
    for ranks in groups_of(reports):
        parted = 0
        known = {name: entry for rank in reversed(ranks) for name, entry in reports[rank].entries.items()}
        for name, (_, standing, _, _) in known.items():
            entries = {rank: reports[rank].entries.get(name) for rank in ranks}
            values = {rank: entry and entry.number for rank, entry in entries.items()}
            if len({*values.values()}) == 1:
                continue
            odd = {rank for rank, entry in entries.items() if entry is None or entry.is_changed}
            is_frozen, is_tensor = False, known[name].form is not None
            if standing is Standing.WATCHED or (is_loaded and is_tensor):
                parted += len({*values.values()}) == len(ranks)
                odd = find_outvoted(values) or (odd if is_loaded else set()) or {*ranks}
            elif standing is Standing.FROZEN and len(odd) == 1 and is_tensor:
                is_frozen = True
            else:
                not_replicated[name] = None
                continue
            right = [rank for rank in ranks if rank not in odd]
            suspects.append(DifferingTensor(name, tuple(sorted(odd)), (right or ranks)[0], bool(right), is_frozen))
        num_watched = sum(entry.standing is Standing.WATCHED for entry in known.values())
        is_by_script |= not is_loaded and parted > 1 and parted > num_watched / 2
    return Judged(
        suspects=tuple(sorted(suspects, key=lambda suspect: not suspect.is_decided)),
        not_replicated=tuple(not_replicated),
        is_by_script=is_by_script,
    )


def groups_of(reports: Sequence[ReplicaReport]) -> list[list[int]]:
    """Return the ranks that can be compared with each other, where there are several.

    >>> [groups_of([ReplicaReport(entries={}, group=name) for name in names]) for names in ("aba", "ab")]
    [[[0, 2]], []]
    """
    groups: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        groups.setdefault(report.group, []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def find_updates(suspects: Iterable[DifferingTensor], counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the names of tensors that never changed, and that one rank has updated: that is no fault.

    What one rank changed in one part counts together: the average of the weights, and how many steps are in it.

    Args:
        counts: by name, how many elements differ, of how many.
    """
    parts: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for suspect in suspects:
        if suspect.is_frozen:
            parts.setdefault((suspect.name.partition("/")[0], suspect.ranks), []).append(suspect.name)
    updated = list[str]()
    for names in parts.values():
        different, of = (sum(counts[name][place] for name in names) for place in (0, 1))
        updated += names if different > max(1, of * UPDATE_SHARE) else []
    return updated


def find_outvoted(values: Mapping[int, int | None]) -> set[int]:
    """Return the ranks whose number is not that of the majority; none where there is no majority."""
    (value, votes), *_ = Counter(values.values()).most_common(1)
    if votes > len(values) / 2:
        return {rank for rank, own in values.items() if own != value}
    return set()


def find_alike(values: Mapping[int, int]) -> list[int]:
    """Return the ranks whose number most have, at least two; none where another number has as many.

    >>> [find_alike(dict(enumerate(text))) for text in ("aab", "abac", "aabb", "abc")]
    [[0, 1], [0, 2], [], []]
    """
    (value, votes), *others = Counter(values.values()).most_common(2)
    if votes < 2 or (others and others[0][1] == votes):
        return []
    return [rank for rank, own in values.items() if own == value]


def teams_of(groups: Sequence[Sequence[int]], turn: int) -> list[tuple[int, ...]]:
    """Return teams of three to five ranks, or of two where a group has no more; each turn they begin one rank later.

    >>> [teams_of([[0, 1, 2, 3, 4, 5, 6], [7, 8]], turn) for turn in (0, 1)]
    [[(0, 1, 2), (3, 4, 5, 6), (7, 8)], [(1, 2, 3), (4, 5, 6, 0), (8, 7)]]

    Args:
        groups: ranks that compute the same bits; each group has two or more.
    """
    teams = list[tuple[int, ...]]()
    for group in groups:
        size, num = len(group), max(1, len(group) // 3)
        turned = [group[(turn + place) % size] for place in range(size)]
        teams += [tuple(turned[at * size // num : (at + 1) * size // num]) for at in range(num)]
    return teams
