"""What do all ranks do together where their numbers differ? Tell all numbers, count elements, heal, or give up."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allranks.model.errors import AllranksError
from allranks.report.refusal import as_raised
from allranks.state.resumed.agree import Agreement
from allranks.state.truth.contents import Contents, differing_elements
from allranks.state.truth.corruption import OnCorruption, error_that_names
from allranks.state.truth.odd_one import DifferingTensor, ReplicaReport, TensorReport

MOST_COUNTED = 8
"""Tensors whose differing elements are counted, besides those that may have been updated."""


class Difference:
    """This rank's side; all ranks call each method together.

    Args:
        verified: returns the step of the newest checkpoint, if the replicas agreed on it.
    """

    def __init__(self, talks: Agreement, *, policy: OnCorruption, verified: Callable[[], int | None]) -> None:
        self._talks, self._policy, self._verified = talks, policy, verified
        self._rank = talks.membership.rank

    def exchange(self, entries: Mapping[str, TensorReport], group: str, contents: Contents) -> list[ReplicaReport]:
        """Return what each rank says of its tensors, in the order of ranks."""
        node = os.environ.get("ALLRANKS_NODE") or os.uname().nodename
        return self._talks.gather(
            ReplicaReport(entries=entries, group=group, node=node, device=_name_gpu(contents.device))
        )

    def count(
        self, suspects: Sequence[DifferingTensor], reports: Sequence[ReplicaReport], contents: Contents
    ) -> dict[str, tuple[int, int]]:
        """Return how many elements differ from the reference's, on the rank where most do, and of how many."""
        counted = [own for number, own in enumerate(suspects) if own.is_frozen or number < MOST_COUNTED]
        numbers, sizes = list[int](), list[int]()
        for suspect in counted:
            other, own = self._fetch(suspect, reports, contents), contents.tensors.get(suspect.name)
            is_meant = self._rank in suspect.ranks
            if other is None or own is None or (own.shape, own.dtype) != (other.shape, other.dtype):
                numbers.append(int(is_meant))
            else:
                numbers.append(differing_elements(own, other) if is_meant else 0)
            sizes.append(1 if other is None else other.numel())
        largest = self._talks.largest(*numbers)
        return {own.name: (number, of) for own, number, of in zip(counted, largest, sizes, strict=True)}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def heal(self, suspects: Sequence[DifferingTensor], reports: Sequence[ReplicaReport], contents: Contents) -> bool:
        """Give the odd ranks the bits of the majority; False: there is none, or it is about more than tensors."""
        if not all(_can_heal(suspect, reports) for suspect in suspects):
            return False
        for suspect in suspects:
            other = self._fetch(suspect, reports, contents)
            if other is not None and self._rank in suspect.ranks:
                contents.tensors[suspect.name].copy_(other)
        return True

    def error(
        self, cause_id: str, what: str, ranks: Sequence[int], reports: Sequence[ReplicaReport], *, is_decided: bool
    ) -> AllranksError:
        """Return what all ranks raise; the arguments are those of `error_that_names`."""
        verified, *_ = self._talks.gather(self._verified())  # rank 0's: others may not have heard of that checkpoint
        told: Any = {"is_decided": is_decided, "policy": self._policy, "verified": verified}
        return as_raised(error_that_names(cause_id, what, ranks, reports, **told))

    def _fetch(
        self, suspect: DifferingTensor, reports: Sequence[ReplicaReport], contents: Contents
    ) -> torch.Tensor | None:
        """Return the tensor of the reference, which sends it to all ranks; None: it has none there."""
        entry = reports[suspect.reference].entries.get(suspect.name)
        if entry is None or entry.form is None:
            return None
        dtype, shape = entry.form
        if self._rank == suspect.reference:
            own = contents.tensors[suspect.name]
            data = own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        else:
            data = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=contents.device)
        self._talks.give([data.reshape(-1)], suspect.reference)
        return data


def _can_heal(suspect: DifferingTensor, reports: Sequence[ReplicaReport]) -> bool:
    entries = [reports[rank].entries.get(suspect.name) for rank in (*suspect.ranks, suspect.reference)]
    forms = {entry and entry.form for entry in entries}
    return suspect.is_decided and len(forms) == 1 and forms != {None}


def _name_gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"
