"""How far one rank has come in its process groups, from whatever told of it. Pure data.

A flight recorder knows every call, a heartbeat the last ones, a line of a watchdog one number. All are a Dump: what is
not known stays empty (wait_graph.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import prod

import msgspec

from allranks.model.beat import CallSeen, show_call

_SPELLINGS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "all_reduce_barrier": "barrier",  # NCCL has no barrier of its own: torch 2.11, ProcessGroupNCCL::barrier
}
_BYTES = {
    **dict.fromkeys(("Double", "Long", "UInt64", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz"), 1),
    **dict.fromkeys(("Float8_e8m0fnu", "Float4_e2m1fn_x2"), 1),
    "ComplexDouble": 16,
}
"""Of one element, by torch's name of its dtype: c10/core/ScalarType.h."""
_VARIANT = re.compile(r"(?:_into)?(?:_(?:tensor|base|single|coalesced))+$")
"""torch's own names of the same thing, in Python and in the recorder."""


class Call(CallSeen, frozen=True, kw_only=True):
    """One operation of one rank: what a beat tells of it, and what only a dump has.

    An empty `op` and empty `sizes` are not known: they differ from nothing.
    """

    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    is_p2p: bool = False
    number: int = 0
    """Of its entry in the dump, from 1; 0: it was counted, and has no entry."""

    @property
    def created_s(self) -> float | None:
        """Since the epoch, by its node's clock; None: not known."""
        return self.created_ns / 1e9 if self.created_ns else None

    def __str__(self) -> str:
        return show_call(self.op, self.sizes or self.output_sizes, self.dtypes or self.output_dtypes)


class Dump(msgspec.Struct, frozen=True):
    """What is known of one rank."""

    rank: int
    calls: tuple[Call, ...] = ()
    """In their order. One that is not done is open: the rank waits in it."""
    enqueued: Mapping[str, int] = {}
    """By the name of the group, the number of the last collective that it called; -1: not known."""
    completed: Mapping[str, int] = {}
    """Of the last collective that is done."""
    started: Mapping[str, int] = {}
    """Of the last collective that its GPU has started; only NCCL's recorder with TORCH_NCCL_ENABLE_TIMING=1 tells."""
    members: Mapping[str, Sequence[int]] = {}
    """Global ranks of each group in the group's order, where the recorder knows them (Gloo's does not)."""
    descs: Mapping[str, str] = {}
    is_whole: bool = False
    """No call is missing: in a group that is not told of, it has called nothing."""
    formed_again: Collection[str] = ()
    """Groups of a name that an earlier one had: only calls of the last one are told. That of other ranks may be
    another."""
    taken_s: float | None = None
    """When it was taken, by the clock of its node."""
    source: str = ""
    """The file it came from."""


@lru_cache(maxsize=1024)
def canonical(op: str) -> str:
    """Return one name for the spellings of an operation.

    >>> canonical("_allgather_base"), canonical("ALLREDUCE"), canonical("ReduceScatter")
    ('all_gather', 'all_reduce', 'reduce_scatter')
    """
    plain = _VARIANT.sub("", op.lower().rpartition(":")[2].lstrip("_"))
    return _SPELLINGS.get(plain, plain)


def size_of(op: str, sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> tuple[object, ...]:
    """Return what of its tensors must be the same on all ranks: how many elements and their width, not the shape.

    A broadcast only copies bytes.

    >>> size_of("all_reduce", [[2, 2]], ["Float"]) == size_of("all_reduce", [[4]], ["Int"])
    True
    >>> size_of("broadcast", [[4]], ["Float"]), size_of("broadcast", [[2]], ["Double"]), size_of("broadcast", [[]], [])
    ((16,), (16,), (1,))

    Args:
        op: as `canonical` names it.
        dtypes: empty: not known.
    """
    num, widths = sum(map(prod, sizes)), sorted({str(_BYTES.get(dtype, dtype)) for dtype in dtypes})
    if op == "broadcast" and len(widths) == 1 and widths[0].isdecimal():
        return (num * int(widths[0]),)
    return (num, *widths)
