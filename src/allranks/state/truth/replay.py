"""Does each rank compute what others compute? One rank's side of the replays, which `track(replay=)` asks for.

    replay.fetched(step, batch)      # when the batch of a step has been fetched: raises ReplicaError on all ranks

Comparing replicas shows bits that one rank has. A gradient that is computed wrongly goes into the sum of all ranks, and
all of them are equal. So every N steps, before the step:

1  of ranks that compute the same bits, one sends its batch, buffers and generators to the others, another one each time
2  all of them run f on a copy of them without synchronization, and put everything back     (state.truth.replay_run)
3  all ranks tell one number of their gradients each                                        (all_gather_object)
4  where they differ, the replicas are compared first: other weights give other gradients
5  more than half are right, and one of the others is named, else nobody; all ranks raise the same words

Nobody is named before all have agreed in two replays: a function may depend on its rank.
Before the first step of a process each rank tries f out, on its own batch. Each wait ends with the timeout of the
process group. If f raises, its rank raises that after 3, and the others go into their step, as ever.
"""

from __future__ import annotations

from typing import Any

from allranks.model.errors import UsageError
from allranks.report.refusal import as_raised
from allranks.state.resumed.averaging import Averaging
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.truth.comparing import Comparing
from allranks.state.truth.corruption import describe_gradients
from allranks.state.truth.fingerprint import hash_numbers
from allranks.state.truth.odd_one import find_majority, groups_of
from allranks.state.truth.replay_run import Attribute, Replayed, check, pack, run, try_out

PROVEN = 2
"""Replays in which all agreed, before anybody is named."""


class Replay:
    """This rank's side: f(batch), forward and backward, is run once in so many steps, where replicas are equal.

    Raises:
        UsageError: these parts can never be replayed, or only one of function and number was given.
    """

    def __init__(
        self, function: Replayed | None, every: int | None, parts: Parts, averaging: Averaging, comparing: Comparing
    ) -> None:
        if averaging.counts_passes:
            raise UsageError("track(replay=): DDP with static_graph counts backward passes, so none can be repeated")
        self._function, self._every = check(function, every, parts.live)
        self._parts, self._averaging, self._comparing = parts, averaging, comparing
        self._talks, self._rank = comparing.talks, comparing.talks.membership.rank
        self._groups: list[list[int]] | None = None
        """Ranks that compute the same bits; None: not tried yet."""
        self._num_equal = 0
        """Replays in which all agreed."""
        self._changing = set[Attribute]()
        """Numbers of modules that are sent."""
        self._is_on, self._is_due = True, False

    def fetched(self, step: int, batch: Any) -> None:
        """Take in the batch of this rank's next step; all ranks call it together.

        Raises:
            UsageError: this function cannot be replayed.
            ReplicaError: one rank computes other gradients than the rest, or the weights are not equal.
        """
        self._is_due |= step % self._every == 0
        if not self._is_on or not (self._groups is None or self._is_due) or not self._averaging.is_synchronized:
            return
        self._averaging.rebuild_buckets()
        why = self._comparing.why_apart([*self._parts.parameters()])
        if not why and self._groups is None:
            self._try(batch)
        if why or not self._groups:
            self._end(why or "no two ranks have the same hardware, torch and number of threads")
        elif self._is_due:
            self._is_due = False
            self._repeat(step, batch, self._groups)

    def _try(self, batch: Any) -> None:
        why, error = "", None
        try:
            why = try_out(self._function, batch, self._parts, self._averaging.unsynchronized, self._changing)
        except UsageError as exc:
            why = str(exc)
        except Exception as exc:
            error = exc
        self._groups = groups_of(self._comparing.exchange({}))
        told = self._talks.gather(why)
        if error is not None:
            raise error
        if refused := [rank for rank, own in enumerate(told) if own]:
            where = "" if len(refused) == len(told) else f"on rank {refused[0]} "
            raise as_raised(UsageError(f"track(replay=): {where}{told[refused[0]].removeprefix('track(replay=): ')}"))

    def _repeat(self, step: int, batch: Any, groups: list[list[int]]) -> None:
        owners = [group[self._num_equal % len(group)] for group in groups]
        shared = [self._share(owner, batch) for owner in owners]
        own = next((place for place, group in enumerate(groups) if self._rank in group), None)
        numbers, error = ({}, None) if own is None else self._compute(*shared[own])
        said = self._talks.gather((hash_numbers(numbers), error is not None))
        failed = {rank for rank, (_, is_failed) in enumerate(said) if is_failed}
        if error is not None and own is not None and (owners[own] == self._rank or owners[own] not in failed):
            raise error  # where it raised on both, it is the batch's
        differing = [place for place, group in enumerate(groups) if len({said[rank] for rank in group}) > 1]
        self._num_equal += not differing and not failed
        if failed or not differing:
            return
        num_healed = len(self._comparing.healed)
        self._comparing.compare_now(step)
        reports = self._comparing.exchange({})
        self._groups = groups_of(reports)
        if self._groups != groups or len(self._comparing.healed) > num_healed:  # that is the reason
            self._num_equal = 0
        elif self._num_equal < PROVEN:
            self._end(
                "the first replays already differ between ranks: f depends on the rank or on state that is not "
                "tracked, or a device always computes wrongly"
            )
        else:
            told, group = self._talks.gather(numbers), groups[differing[0]]
            right = find_majority({rank: hash_numbers(told[rank]) for rank in group})
            ranks = [min({*group} - {*right})] if right else group
            what = describe_gradients(told, owners[differing[0]], ranks, right, step, reports)
            raise self._comparing.accuse("AR611", what, ranks, reports, is_decided=bool(right))

    def _share(self, owner: int, batch: Any) -> tuple[bytes, Exception | None]:
        """Return what the owner of a batch sends to all ranks, or why it cannot."""
        data, error = b"", None
        try:
            data = pack(batch, self._parts, self._changing) if self._rank == owner else b""
        except UsageError as exc:
            error = as_raised(exc)
        return self._talks.share(data, owner), error

    def _compute(self, parcel: bytes, error: Exception | None) -> tuple[dict[str, int], Exception | None]:
        """Return the numbers of the gradients; none, and what f raised, if it did, or why there is no parcel."""
        try:
            return run(self._function, parcel, self._parts, self._averaging.unsynchronized) if parcel else {}, error
        except Exception as exc:
            return {}, exc

    def _end(self, why: str) -> None:
        self._is_on = False
        self._comparing.say(f"steps are not replayed: {why}")
