"""What do all ranks do together where their numbers differ? Tell what they have, count elements, and heal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from allranks.state.resumed.agree import Agreement
from allranks.state.truth.contents import Contents
from allranks.state.truth.odd_one import DifferingTensor, ReplicaReport, TensorReport


class Difference:
    """What each rank says of its tensors; all ranks make it, and call each method, together.

    Args:
        entries: what this rank says of its tensors, by name.
        group: its own.
        contents: of this rank.
    """

    def __init__(self, talks: Agreement, contents: Contents, entries: Mapping[str, TensorReport], group: str) -> None:
        self._talks, self._contents, self._rank = talks, contents, talks.membership.rank
        node, device = os.environ.get("ALLRANKS_NODE") or os.uname().nodename, ""
        if contents.device.type == "cuda":
            device = f"GPU-{getattr(torch.cuda.get_device_properties(contents.device), 'uuid', contents.device.index)}"
        self.reports: list[ReplicaReport] = talks.gather(
            ReplicaReport(entries=entries, group=group, node=node, device=device)
        )
        """Of all ranks, in their order."""

    def count(self, suspects: Sequence[DifferingTensor]) -> dict[str, tuple[int, int]]:
        """Return how many elements differ from the reference's, on the rank where most do, and of how many."""
        found = [(self._count(own, self._fetch(own)), own.name) for own in suspects]
        largest = self._talks.largest(*(number for (number, _), _ in found)) if found else []
        return {name: (number, of) for number, ((_, of), name) in zip(largest, found, strict=True)}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def heal(self, suspects: Sequence[DifferingTensor]) -> bool:
        """Give the odd ranks the bits of the majority; False: there is none, or it is about more than tensors."""
        for suspect in suspects:
            entries = [self.reports[rank].entries.get(suspect.name) for rank in (*suspect.ranks, suspect.reference)]
            forms = {entry and entry.form for entry in entries}
            if not suspect.is_decided or len(forms) > 1 or None in forms:
                return False
        for suspect in suspects:
            other = self._fetch(suspect)
            if other is not None and self._rank in suspect.ranks:
                self._contents.tensors[suspect.name].copy_(other)
        return True

    def _count(self, suspect: DifferingTensor, other: torch.Tensor | None) -> tuple[int, int]:
        """Return how many elements of this rank differ, and of how many; numbers of a part are one."""
        of, own = 1 if other is None else other.numel(), self._contents.tensors.get(suspect.name)
        if self._rank not in suspect.ranks:
            return 0, of
        if other is None or own is None or (own.shape, own.dtype) != (other.shape, other.dtype):
            return 1, of
        return _differing_elements(own, other), of

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


def _differing_elements(own: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many elements of two tensors of one dtype and shape have other bits."""
    if not own.numel():
        return 0
    bits = [one.resolve_conj().resolve_neg().reshape(-1, 1).contiguous().view(torch.uint8) for one in (own, other)]
    return int((bits[0] != bits[1]).view(own.numel(), -1).any(1).sum())
