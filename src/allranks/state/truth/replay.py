"""Does each rank compute what another one computes? One rank's side of the replays, which `track(replay=)` asks for.

    replay.fetched(step, batch)      # when the batch of a step has been fetched: raises ReplicaError on all ranks

Comparing replicas shows bits that one rank has. A gradient that is computed wrongly goes into the sum of all ranks, and
all of them are equal. So every N steps, before the step:

1  of each pair, the rank r sends its batch, buffers and generators to its neighbor    (state.truth.replay_pairs)
2  both run f on a copy of them without synchronization, and put everything back       (state.truth.replay_run)
3  all ranks tell one number of their gradients each                                   (all_gather_object)
4  where a pair differs, the replicas are compared first: other weights give other gradients
5  a third rank repeats the batch, and decides; all ranks raise the same words

Nobody is named before replays have shown that these ranks compute the same bits: a function may depend on its rank.
Before the first step of a process each rank tries f out, on its own batch. Each wait ends with the timeout of the
process group. If f raises, its rank raises that after 3, and the others go into their step, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allranks.model.errors import UsageError
from allranks.report.refusal import as_raised
from allranks.state.resumed.agree import Agreement
from allranks.state.resumed.averaging import Averaging
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.truth.comparing import Comparing
from allranks.state.truth.fingerprint import hash_text
from allranks.state.truth.odd_one import ReplicaReport, groups_of
from allranks.state.truth.replay_pairs import ReplayPair, are_proven, find_wrong, join_equal, pairs_of
from allranks.state.truth.replay_run import Attribute, Replayed, check, pack, run, try_out


class Replay:
    """This rank's side.

    Args:
        function: f(batch): forward and backward.
        every: steps between two replays.
        comparing: of the replicas, which must be equal for this.
        say: takes what rank 0 tells.
    Raises:
        UsageError: these parts can never be replayed, or only one of function and number was given.
    """

    def __init__(
        self,
        function: Replayed | None,
        every: int | None,
        parts: Parts,
        averaging: Averaging,
        comparing: Comparing,
        *,
        talks: Agreement,
        say: Callable[[str], None],
    ) -> None:
        if averaging.counts_passes:
            raise UsageError("track(replay=): DDP with static_graph counts backward passes, so none can be repeated")
        self._function, self._every = check(function, every, parts.live)
        self._parts, self._averaging, self._comparing = parts, averaging, comparing
        self._talks, self._say = talks, say
        self._rank = talks.membership.rank
        self._groups: list[list[int]] | None = None
        """Ranks that compute the same bits; None: not tried yet."""
        self._proven: list[frozenset[int]] = []
        """Ranks that have computed the same bits in replays."""
        self._changing = set[Attribute]()
        """Numbers of modules that are sent."""
        self._is_on, self._is_due = True, False

    def fetched(self, step: int, batch: Any) -> None:
        """Take in the batch of this rank's next step; all ranks call it together.

        Raises:
            UsageError: this function cannot be replayed.
            ReplicaError: one rank computes other gradients than two others, or the weights are not equal.
        """
        self._is_due |= step % self._every == 0
        is_wanted = self._groups is None or self._is_due
        if not self._is_on or not is_wanted or not self._averaging.is_synchronized:
            return
        self._averaging.rebuild_buckets()
        if why := self._comparing.why_apart([*self._parts.parameters()]):
            self._end(why)
            return
        if self._groups is None:
            self._try(batch)
        if self._is_due and self._is_on:
            self._is_due = False
            self._repeat(step, batch)

    def _try(self, batch: Any) -> None:
        why, error = "", None
        try:
            why = try_out(self._function, batch, self._parts, self._averaging.unsynchronized, self._changing)
        except UsageError as exc:
            why = str(exc)
        except Exception as exc:
            error = exc
        self._groups = groups_of(self._comparing.exchange())
        told = self._talks.gather(why)
        if error is not None:
            raise error
        if refused := [rank for rank, own in enumerate(told) if own]:
            where = "" if len(refused) == len(told) else f"on rank {refused[0]} "
            raise as_raised(UsageError(f"track(replay=): {where}{told[refused[0]].removeprefix('track(replay=): ')}"))
        if not self._groups:
            self._end("no two ranks have the same hardware, torch and number of threads")

    def _repeat(self, step: int, batch: Any) -> None:
        assert self._groups is not None
        pairs = pairs_of(self._groups, step // self._every)
        own = next((pair for pair in pairs if self._rank in pair[:2]), None)
        numbers, error = dict[str, int](), None
        if own is not None:
            numbers, error = self._compute(own.owner, own.other, batch, on=own[:2])
        told = self._talks.gather((_as_one(numbers), error is not None))
        failed = {rank for rank, (_, is_failed) in enumerate(told) if is_failed}
        if error is not None and (own is None or own.owner == self._rank or own.owner not in failed):
            raise error  # where it raised on both, it is the owner's batch
        differing = [pair for pair in pairs if told[pair.owner] != told[pair.other] and not failed & {*pair[:2]}]
        for pair in pairs if not failed else ():
            if pair not in differing:
                self._proven = join_equal(self._proven, pair)
        if failed or not differing:
            return
        num_healed = len(self._comparing.healed)
        self._comparing.compare_now(step)
        reports, groups = self._comparing.exchange(), self._groups
        self._groups = groups_of(reports)
        if why := self._comparing.why_apart([*self._parts.parameters()]):
            self._end(why)
        elif len(self._comparing.healed) == num_healed and self._groups == groups:  # else that is the reason
            for pair in differing:
                self._decide(step, pair, batch, numbers, reports)

    def _decide(
        self, step: int, pair: ReplayPair, batch: Any, numbers: dict[str, int], reports: Sequence[ReplicaReport]
    ) -> None:
        if not self._is_on:
            return
        if not are_proven(self._proven, pair):
            self._end(
                "the first replays already differ between ranks: f depends on the rank or on state that is not "
                "tracked, or a device always computes wrongly"
            )
            return
        error: Exception | None = None
        if pair.third is not None and self._rank in (pair.owner, pair.third):
            found, error = self._compute(pair.owner, pair.third, batch, on=(pair.third,))
            numbers = found if self._rank == pair.third else numbers
        told = self._talks.gather(numbers if self._rank in pair.members else {})
        if wrong := find_wrong(pair, {rank: own for rank, own in enumerate(told) if own}):
            told_of, is_decided = wrong.describe(step, reports), bool(wrong.right)
            error_of = self._comparing.difference.error
            raise error_of("AR611", told_of, wrong.ranks, reports, is_decided=is_decided) from error
        self._end(f"three ranks computed three different gradients at step {step}: the model is not deterministic")

    def _compute(
        self, owner: int, other: int, batch: Any, *, on: tuple[int, ...]
    ) -> tuple[dict[str, int], Exception | None]:
        """Return the numbers of the gradients of the owner's batch, which it sends to the other one; none if it cannot.

        Args:
            on: the ranks that compute them.
        """
        parcel = b""
        error: Exception | None = None
        if self._rank != owner:
            parcel = self._talks.receive(owner)
        else:
            try:
                parcel = pack(batch, self._parts, self._changing)
            except UsageError as exc:
                error = as_raised(exc)
            self._talks.send(parcel, other)
        if parcel and self._rank in on:
            try:
                return run(self._function, parcel, self._parts, self._averaging.unsynchronized), None
            except Exception as exc:
                error = exc
        return {}, error

    def _end(self, why: str) -> None:
        self._is_on = False
        if self._talks.membership.is_leader:
            self._say(f"steps are not replayed: {why}")


def _as_one(numbers: dict[str, int]) -> int:
    return hash_text(*(f"{name}={own}" for name, own in numbers.items()))
