"""What do all ranks do together where their numbers differ? Tell what they have, count elements, and heal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from allranks.state.resumed.agree import Agreement
from allranks.state.truth.contents import Contents, differing_elements
from allranks.state.truth.odd_one import DifferingTensor, ReplicaReport, TensorReport

MOST_COUNTED = 8
"""Tensors whose differing elements are counted, besides those that may have been updated."""


class Difference:
    """What each rank says of its tensors; all ranks make it, and call each method, together.

    Args:
        entries: what this rank says of its tensors, by name.
        group: its own.
        contents: of this rank.
    """

    def __init__(self, talks: Agreement, contents: Contents, entries: Mapping[str, TensorReport], group: str) -> None:
        self._talks, self._contents, self._rank = talks, contents, talks.membership.rank
        node = os.environ.get("ALLRANKS_NODE") or os.uname().nodename
        own = ReplicaReport(entries=entries, group=group, node=node, device=_name_gpu(contents.device))
        self.reports: list[ReplicaReport] = talks.gather(own)
        """Of all ranks, in their order."""

    def count(self, suspects: Sequence[DifferingTensor]) -> dict[str, tuple[int, int]]:
        """Return how many elements differ from the reference's, on the rank where most do, and of how many."""
        counted = [own for number, own in enumerate(suspects) if own.is_frozen or number < MOST_COUNTED]
        numbers, sizes = list[int](), list[int]()
        for suspect in counted:
            other, own = self._fetch(suspect), self._contents.tensors.get(suspect.name)
            is_meant = self._rank in suspect.ranks
            if other is None or own is None or (own.shape, own.dtype) != (other.shape, other.dtype):
                numbers.append(int(is_meant))
            else:
                numbers.append(differing_elements(own, other) if is_meant else 0)
            sizes.append(1 if other is None else other.numel())
        largest = self._talks.largest(*numbers)
        return {own.name: (number, of) for own, number, of in zip(counted, largest, sizes, strict=True)}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def heal(self, suspects: Sequence[DifferingTensor]) -> bool:
        """Give the odd ranks the bits of the majority; False: there is none, or it is about more than tensors."""
        if not all(map(self._can_heal, suspects)):
            return False
        for suspect in suspects:
            other = self._fetch(suspect)
            if other is not None and self._rank in suspect.ranks:
                self._contents.tensors[suspect.name].copy_(other)
        return True

    def _can_heal(self, suspect: DifferingTensor) -> bool:
        entries = [self.reports[rank].entries.get(suspect.name) for rank in (*suspect.ranks, suspect.reference)]
        forms = {entry and entry.form for entry in entries}
        return suspect.is_decided and len(forms) == 1 and forms != {None}

    def _fetch(self, suspect: DifferingTensor) -> torch.Tensor | None:
        """Return the tensor of the reference, which sends it to all ranks; None: it has none there."""
        entry = self.reports[suspect.reference].entries.get(suspect.name)
        if entry is None or entry.form is None:
            return None
        dtype, shape = entry.form
        if self._rank == suspect.reference:
            own = self._contents.tensors[suspect.name]
            data = own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        else:
            device = self._contents.device
            data = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        self._talks.give([data.reshape(-1)], suspect.reference)
        return data


def _name_gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"
