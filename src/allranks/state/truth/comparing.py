"""Are the replicas still equal? One rank's side of the comparisons, which ride in the talks of the ranks.

    words = comparing.words(step)              # None: no check is due here
    ... all ranks take the largest of each     (state.resumed.agree)
    comparing.heard(step, largest)             # raises ReplicaError on all ranks, where one of them has other bits

The words are k (below), a number h of all that is compared, and its complement: where the largest h is the complement
of the largest complement, all ranks have one h, and all of them know it. Only where that is not so, a second exchange
follows:

1  each rank computes all numbers again, and tells all others them by name    (all_gather_object)
2  what differs is judged, the same on all ranks                              (state.truth.odd_one)
3  the tensors of a rank of the majority are sent to all, which count the elements that differ, and, to heal, copy them
4  what the user asked for follows: the job ends, or the replica is healed

A check is due at the first boundaries, to learn what is replicated, then at steps that 2^k divides. Rank 0 measures
what a check takes, and says k with the next one. Where ranks make local steps, it waits for their synchronization.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from allranks.model.errors import AllranksError
from allranks.report.refusal import as_raised
from allranks.report.text import count_of
from allranks.state.resumed.agree import Agreement
from allranks.state.resumed.telling import add_event
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.truth.contents import Contents
from allranks.state.truth.corruption import OnCorruption, ReplicaError, describe_bits
from allranks.state.truth.fingerprint import count_differences, hash_numbers
from allranks.state.truth.finite import Finiteness, NotFiniteError, read_ruined, write_ruined
from allranks.state.truth.odd_one import (
    Difference,
    DifferingTensor,
    ReplicaReport,
    Reports,
    Role,
    Seen,
    Suspects,
    TensorReport,
    find_updates,
    groups_of,
    judge,
    part_of,
)

SHARE = 0.005
"""Of the time, that checks may take."""
FIRST_CHECKS = 4
"""At each boundary: so many are needed to learn what changes."""
RECORD_S = 0.001
"""Of a check: what its row in the record takes (state.truth.trace)."""
MOST_EXPONENT, MOST_MORE = 20, 3
"""Of k; and how much it grows from one check to the next: the first may have waited for what a GPU still did."""
_LEAST = -(1 << 63)
"""No word of this rank: the largest of all is another one's."""


def choose_exponent(check_s: float, step_s: float) -> int:
    """Return k, so that a check every 2^k steps takes at most SHARE of the time.

    >>> choose_exponent(0.06, 0.4), choose_exponent(0.001, 1.0), choose_exponent(0.06, 0.0)
    (5, 0, 20)
    """
    if step_s <= 0:
        return MOST_EXPONENT
    return min(MOST_EXPONENT, max(0, math.ceil(math.log2(max(check_s, 1e-9) / step_s / SHARE))))


class Comparing:
    """What this rank compares with the others; `say` tells it on rank 0."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: Checkpointer,
        *,
        policy: OnCorruption,
        talks: Agreement,
        say: Callable[[str], object],
    ) -> None:
        self._read, self._read_roles, self._policy, self.talks, self.say = parts.state, parts.roles, policy, talks, say
        self._membership, self._directory = talks.membership, checkpoints.directory
        self._roll_back: Callable[[], list[str]] = list if policy is OnCorruption.STOP else checkpoints.roll_back
        self._finite = Finiteness(parts.optimizers, parts.parameters, lambda: Contents.of(self._read()).numbers())
        self._ruined: int | None = None
        """Step at which parameters became NaN or infinite in an earlier life of this training."""
        self._is_nan_said = self._is_ruined = False
        self._is_on = self._membership.world_size > 1
        self._is_verified: bool | None = None
        """Rank 0, which saves, is compared with another rank; None: they have not met yet."""
        self._own_group, self._groups = "", list[str]()
        self._contents, self._seen = Contents(), dict[str, Seen]()
        self._dropped, self._updated_parts = set[str](), set[str]()
        """What is not replicated, and never compared again."""
        self.numbers: dict[str, int] = {}
        """Of the last check, by name; where there are no replicas, rank 0 computes them for the record alone."""
        self._exponent = self._proposed = self._num_checks = 0
        """The exponent of now, and rank 0's next one: of many ranks there is always one that measured too much."""
        self._last_step, self._last_s, self._check_s = -1, 0.0, 0.0
        """Step and end of the last check, and how long it took."""
        self.equal_step: int | None = None
        """At which all ranks were equal the last time."""
        self.healed: list[dict[str, Any]] = []
        """Tensors that got the bits of other ranks in this training: it is no longer the undisturbed one."""

    def looks(self, step: int) -> bool:
        """Return whether this rank's gradients were not finite since the last talk."""
        return self._finite.poll(step)

    def words(self, step: int, *, is_synchronized: bool = True) -> tuple[int, ...]:
        """Return what this rank says at a boundary; as all, nothing where no check is due or weights may differ."""
        is_due = self._num_checks < FIRST_CHECKS or step >> self._exponent != self._last_step >> self._exponent
        return self._words_now() if is_synchronized and is_due and step != self._last_step else ()

    def compare_now(self, step: int) -> None:
        """Compare the replicas, due or not; raises as `heard` does."""
        self.heard(step, self.talks.largest(*self._words_now()))

    def measure(self) -> None:
        """Compute all numbers; all ranks call it together, since a state may be gathered from all."""
        began_s = time.monotonic()
        self._contents = Contents.of(self._read())
        if self._is_on and self._is_verified is None:  # which ranks can be compared is found out once
            groups = groups_of(self.exchange({}))
            self._is_on, self._is_verified = bool(groups), any(0 in ranks for ranks in groups)
            if not self._is_on:
                self.say("the ranks are not compared with each other: none has a replica, a rank with the same state")
        self.numbers = self._contents.numbers() if self._is_on or self._membership.is_leader else {}
        if not self._is_on:
            self._contents.tensors.clear()  # what was gathered takes memory
        self._check_s = time.monotonic() - began_s

    def heard(self, step: int, largest: Sequence[int], *, looks: bool = False) -> bool:
        """Take in the largest of each word, and whether any rank `looks`; return whether there was a check here.

        Raises:
            NotFiniteError: parameters became NaN at this step in an earlier life, too.
            ReplicaError: one rank has other bits than the rest, or the ranks have different ones.
        """
        if looks:
            self._examine_before()
        if not largest:
            return False
        self._exponent, *said = largest
        self._num_checks += 1
        if said and _are_equal(said):
            self._agree(step)
        elif said:
            self._examine(step)
        now_s = time.monotonic()
        if self._membership.is_leader and step > self._last_step >= 0:
            step_s = (now_s - self._last_s - self._check_s) / (step - self._last_step)
            self._proposed = min(choose_exponent(self._check_s + RECORD_S, step_s), self._exponent + MOST_MORE)
        self._last_step, self._last_s = step, now_s
        return True

    def loaded(self, step: int, parts: Collection[str], common: Mapping[str, Any]) -> None:
        """Compare what was loaded, on all ranks; all of it must be equal, and stay so where it was watched before.

        Args:
            parts: names of those that the checkpoint has.
            common: what `state` returned, if the checkpoint has it: what was compared then must be equal.
        Raises:
            ReplicaError: it is not.
        """
        self.healed = [*common.get("healed", ())]
        self._ruined, *_ = self.talks.gather(read_ruined(self._directory) if self._membership.is_leader else None)
        if self._is_on:
            self.measure()
        if self._is_on:  # measured, some ranks can be compared
            own = self._compared()
            known = common.get("fingerprints", own)
            self._seen = {name: Seen(known[name]) for name in own if name in known and part_of(name) in parts}
            if not _are_equal(self.talks.largest(*self._said())):
                reports = self._exchange_anew(self._seen)
                self._settle(judge(reports, is_loaded=True).suspects, reports, step)
            roles = self._read_roles(self._seen.keys() & {*common.get("watched", ())})
            self._seen |= {name: Seen(num_changes=2) for name, role in roles.items() if role is Role.TRAINED}

    # Saves

    def refuse_to_save(self) -> str:
        """Return why this rank must not save; empty: it may."""
        name = self._finite.find_bad_parameter()
        return f"{name} is NaN or infinite, so the last finite checkpoint stays" if name else ""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of this: the numbers of what is compared, what is watched, what was healed."""
        watched = [name for name, seen in self._seen.items() if seen.is_watched and name not in self._dropped]
        own = {"fingerprints": self._compared(), "watched": watched}
        return {"healed": self.healed} | (own if self._is_on else {})

    def about(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of it, once all ranks can save."""
        return {"verified": bool(self._is_verified), "healed": len(self.healed)}

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has all of the state."""
        return any(place != -1 for places in self._contents.shards for place in places)

    # Replays

    def why_apart(self, names: Sequence[str]) -> str:
        """Return why ranks may compute other gradients from the same batch; empty: their parameters are the same."""
        if not self._is_on:
            return "no two ranks are known to have the same weights"
        apart = self._dropped & {*names}
        return f"{count_of(len(apart), 'parameter')} ({_some(sorted(apart))}) of each rank are its own" if apart else ""

    def exchange(self, numbers: Mapping[str, int]) -> Reports:
        """Return who all ranks are, which of them compute the same bits, and what they have; all call it together.

        A script may have set another number of threads since the last time.
        """
        tensors, entries = self._contents.tensors, dict[str, TensorReport]()
        compared = (name for name in numbers if name in tensors and name not in self._dropped)
        for name, role in self._read_roles(compared).items():
            form = tensors[name].dtype, tensors[name].shape
            entries[name] = TensorReport(numbers[name], self._seen.get(name, Seen()), form, role)
        own = ReplicaReport(
            entries=entries,
            group=_describe_group(self._contents),
            node=os.environ.get("ALLRANKS_NODE") or os.uname().nodename,
            device=_name_gpu(self._contents),
        )
        reports = self.talks.gather(own)
        self._own_group, self._groups = own.group, sorted({report.group for report in reports})
        return reports

    def accuse(
        self, cause_id: str, what: str, ranks: Sequence[int], reports: Reports, *, is_decided: bool
    ) -> AllranksError:
        """Return what all ranks raise; the arguments are those of `ReplicaError`."""
        verified, *_ = self.talks.gather(self._roll_back())  # rank 0's: others may not have heard of that checkpoint
        told: Any = {"is_decided": is_decided, "policy": self._policy, "verified": verified}
        return as_raised(ReplicaError(cause_id, what, ranks, reports, **told))

    # The words

    def _words_now(self) -> tuple[int, ...]:
        self.measure()
        return self._proposed, *(self._said() if self._is_on else ())

    def _said(self) -> tuple[int, ...]:
        own = hash_numbers(self._compared())
        said = ((own, ~own) if group == self._own_group else (_LEAST, _LEAST) for group in self._groups)
        return tuple(itertools.chain(*said))

    def _compared(self) -> dict[str, int]:
        """Return the number of each tensor that is compared; `numbers` has entries for Python's numbers, too."""
        return {name: number for name, number in self.numbers.items()
                if name in self._contents.tensors and name not in self._dropped}  # fmt: skip

    def _agree(self, step: int) -> None:
        self._seen |= {name: self._seen.get(name, Seen()).then(number) for name, number in self._compared().items()}
        self.equal_step = step

    # Where they differ

    def _examine(self, step: int) -> None:
        reports = self._exchange_anew(self._contents.tensors)
        judged = judge(reports)
        if judged.is_by_script:
            self._is_on = self._is_verified = False
            self.say(f"at step {step} most tensors differ between all ranks: they are not compared any more")
            return
        self._leave_out(judged.not_replicated)
        self._settle(self._without_updates(judged.suspects, reports, step), reports, step)
        self._agree(step)

    def _exchange_anew(self, names: Collection[str]) -> Reports:
        self.numbers = self._contents.numbers()  # a second time: the first one may have been wrong itself
        return self.exchange({name: self.numbers[name] for name in names})

    def _examine_before(self) -> None:
        """Gradients were not finite: compare what the ranks had before the update with them."""
        (seen_at, before), name = self._finite.take(), self._finite.find_bad_parameter()
        found = self.talks.gather((seen_at, name, before is not None))
        step, name = max(seen for seen, *_ in found), next((own for _, own, _ in found if own), "")
        can_compare = self._is_on and all(is_known for *_, is_known in found)
        reports = self.exchange(before or {}) if can_compare else []
        self._settle(self._without_updates(judge(reports).suspects, reports, step), reports, step, is_past=True)
        said = f"gradients are NaN or infinite at step {step}"
        ruined = f"{said}, and then {name} is" if name else ""
        if ruined and not self._is_ruined:  # from then on, all gradients are NaN
            if step == self._ruined:
                text = f"{ruined}, as before the checkpoint was loaded: a restart does not help"
                raise as_raised(NotFiniteError(f"allranks: AR604 nan-loss: {text}"))
            self._is_ruined = True
            if self._membership.is_leader:
                write_ruined(self._directory, step)
        if not self._is_nan_said:
            equal = ", on all ranks alike" if groups_of(reports) else ""
            self.say(f"AR604 nan-loss: {ruined or said}{equal}: look at the data, the learning rate and the precision")
        self._is_nan_said = True

    def _without_updates(self, suspects: Suspects, reports: Reports, step: int) -> Suspects:
        """Return suspects without those that the script updated on some ranks alone: these are no longer compared."""
        doubtful = [own for own in suspects if own.is_frozen or own.role is not Role.TRAINED]
        updated = find_updates(doubtful, self._count(doubtful, reports), parts=self._updated_parts)
        self._updated_parts.update(map(part_of, updated))
        self._leave_out(updated, f" from step {step} on")
        return [own for own in suspects if own.name not in updated]

    def _settle(self, faults: Suspects, reports: Reports, step: int, *, is_past: bool = False) -> None:
        """Heal them, or raise; if it is past, their bits are gone."""
        if faults:
            first, count = faults[0], None if is_past else self._count(faults[:1], reports)[faults[0].name]
            what = describe_bits(faults, count, reports, step=step, equal_step=self.equal_step)
            if is_past or not self._heal(faults, reports, what, step):
                raise self.accuse("AR610", what, first.ranks, reports, is_decided=first.is_decided)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _heal(self, suspects: Suspects, reports: Reports, what: str, step: int) -> bool:
        """Give the odd ranks the bits of the majority; False: nobody wants it, there is none, or it did not help."""
        for suspect in suspects:
            entries = [reports[rank].entries.get(suspect.name) for rank in (*suspect.ranks, suspect.reference)]
            forms = {entry and entry.form for entry in entries}
            if self._policy is not OnCorruption.HEAL or not suspect.is_decided or len(forms) > 1 or None in forms:
                return False
        for suspect in suspects:
            other = self._fetch(suspect, reports)
            if other is not None and self._membership.rank in suspect.ranks:
                self._contents.tensors[suspect.name].copy_(other)
        self.measure()  # reads the state anew: a part may give copies of its tensors
        if not _are_equal(self.talks.largest(*self._said())):
            return False
        names, ranks = [own.name for own in suspects], list(suspects[0].ranks)
        self.healed.append({"step": step, "names": names, "ranks": ranks})
        if self._membership.is_leader:
            add_event("healed", step=step, ranks=ranks, tensors=names)
        self.say(f"AR610 replica-differs: {what}; healed: the run is no longer the undisturbed one")
        return True

    def _count(self, suspects: Suspects, reports: Reports) -> dict[str, Difference]:
        """Return how each differs from the reference's, on the rank where most does."""
        found = dict[str, Difference]()
        for suspect in suspects:
            other, own = self._fetch(suspect, reports), self._contents.tensors.get(suspect.name)
            counts = count_differences(own, other) if self._membership.rank in suspect.ranks else (0, 0, 0)
            found[suspect.name] = Difference(*self.talks.largest(*counts, 1 if other is None else other.numel()))
        return found

    def _fetch(self, suspect: DifferingTensor, reports: Reports) -> torch.Tensor | None:
        """Return the tensor of the reference, which sends it to all ranks; None: it has none there."""
        entry = reports[suspect.reference].entries.get(suspect.name)
        if entry is None:
            return None
        dtype, shape = entry.form
        own = self._contents.tensors.get(suspect.name)
        data = torch.empty(shape, dtype=dtype, device=None if own is None else own.device)
        if own is not None and self._membership.rank == suspect.reference:
            data.copy_(own)
        self.talks.give([data.reshape(-1)], suspect.reference)
        return data

    def _leave_out(self, names: Sequence[str], since: str = "") -> None:
        self._dropped |= {*names}
        if names:
            what = f"{count_of(len(names), 'tensor')} ({_some(names)})"
            is_trained = Role.TRAINED in self._read_roles(names).values()
            fix = "; to train one model on all ranks, wrap it in s.ddp()" if is_trained else ""
            self.say(f"not replicated{since}: {what}; not compared between ranks{fix}")


def _are_equal(largest: Sequence[int]) -> bool:
    return all(most == ~complement for most, complement in zip(largest[::2], largest[1::2], strict=True))


def _describe_group(contents: Contents) -> str:
    """What decides which bits this rank computes, and which shards it has."""
    names = sorted({torch.cuda.get_device_name(own.device) for own in contents.tensors.values() if own.is_cuda})
    own = (*names, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__)
    return repr((own, sorted(contents.shards)))


def _name_gpu(contents: Contents) -> str:
    device = next((own.device for own in contents.tensors.values() if own.is_cuda), None)
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}" if device else ""


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
