"""Which ranks repeat whose batch, and which of them computed other gradients? Pure.

    pairs_of(groups, turn)         who repeats whose batch this time
    are_proven(equal, pair)        whether it is known that these ranks compute the same bits
    find_wrong(pair, numbers)      whose gradients are the wrong ones, once a third rank has repeated the batch, too

All pairs of a group work at the same time, so nearly each rank is tried each time; the next time it is in a pair with
its other neighbor. Where two ranks differ, a third one decides. Three different results are no wrong device: the model
computes other bits each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from allranks.report.text import fold_ranks
from allranks.state.truth.corruption import place_of
from allranks.state.truth.odd_one import ReplicaReport


class ReplayPair(NamedTuple):
    """Who repeats the batch of whom."""

    owner: int
    """Whose batch it is; it computes its gradients, too."""
    other: int
    third: int | None
    """Who decides where they differ; None: the group has no third rank."""

    @property
    def members(self) -> tuple[int, ...]:
        """All that may have to compute."""
        return (self.owner, self.other) if self.third is None else (self.owner, self.other, self.third)


def pairs_of(groups: Sequence[Sequence[int]], turn: int) -> list[ReplayPair]:
    """Return the pairs of this turn; in a group of an odd size one rank is left over, each time another one.

    >>> [[(pair.owner, pair.other, pair.third) for pair in pairs_of([[0, 1, 2]], turn)] for turn in (0, 1, 2)]
    [[(0, 1, 2)], [(1, 2, 0)], [(2, 0, 1)]]

    Args:
        groups: ranks that compute the same bits; each group has two or more.
    """
    pairs = list[ReplayPair]()
    for group in groups:
        size = len(group)
        for place in range(turn, turn + size - 1, 2):
            owner, other, third = (group[(place + step) % size] for step in range(3))
            pairs.append(ReplayPair(owner, other, third if size > 2 else None))
    return pairs


def join_equal(equal: Sequence[frozenset[int]], pair: ReplayPair) -> list[frozenset[int]]:
    """Return sets of ranks that computed the same bits, now that this pair did.

    >>> [sorted(ranks) for ranks in join_equal([frozenset({0, 1}), frozenset({2, 3})], ReplayPair(1, 2, 3))]
    [[0, 1, 2, 3]]
    """
    own = frozenset(pair[:2])
    return [ranks for ranks in equal if not ranks & own] + [own.union(*(ranks for ranks in equal if ranks & own))]


def are_proven(equal: Sequence[frozenset[int]], pair: ReplayPair) -> bool:
    """Return whether all that have to do with a pair have computed the same bits before."""
    return any(ranks.issuperset(pair.members) for ranks in equal)


@dataclass(frozen=True, slots=True)
class WrongGradients:
    """What a pair comes to that computed different gradients."""

    ranks: tuple[int, ...]
    """The one at fault; both where nobody decides."""
    right: tuple[int, ...]
    """Those that agree with each other."""
    owner: int
    names: tuple[str, ...]
    """Of the gradients that differ."""

    def describe(self, step: int, reports: Sequence[ReplicaReport]) -> str:
        """Return it in words.

        Args:
            step: so many are done.
        """
        if self.right:
            (rank,) = self.ranks
            what = f"rank {rank} on {place_of(reports[rank])} computed other gradients than {fold_ranks(self.right)}"
        else:
            what = f"{fold_ranks(self.ranks)} computed different gradients, and no third rank tells which are wrong,"
        more = f" (and in {len(self.names) - 1} more)" if len(self.names) > 1 else ""
        return f"{what} from the batch of rank {self.owner}, in {self.names[0]}{more} at step {step}"


def find_wrong(pair: ReplayPair, numbers: Mapping[int, Mapping[str, int]]) -> WrongGradients | None:
    """Return whose gradients are wrong; None: nobody's, all three ranks computed different ones.

    Args:
        numbers: by rank, the number of each gradient by name; without a rank that has no gradients. Without the third
            rank's, nobody decides.
    """
    first, second = numbers.get(pair.owner, {}), numbers.get(pair.other, {})
    names = tuple(name for name in {**first, **second} if first.get(name) != second.get(name))
    decisive = numbers.get(pair.third) if pair.third is not None else None
    if pair.third is None or decisive is None:
        return WrongGradients((pair.owner, pair.other), (), pair.owner, names)
    for wrong, right, own in ((pair.other, pair.owner, first), (pair.owner, pair.other, second)):
        if decisive == own:
            return WrongGradients((wrong,), tuple(sorted((right, pair.third))), pair.owner, names)
    return None
