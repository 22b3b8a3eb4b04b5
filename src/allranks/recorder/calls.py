"""What a rank's flight recorder holds: the calls of its process groups, and how far each came. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allranks.model.beat import CallSeen, show_call


class Call(CallSeen, frozen=True, kw_only=True):
    """One operation of one rank: what a beat tells of it, and what only a dump has."""

    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    is_p2p: bool = False
    number: int = 0
    """Of its entry in the dump, from 1."""

    @property
    def created_s(self) -> float | None:
        """Since the epoch, by its node's clock; None: not known."""
        return self.created_ns / 1e9 if self.created_ns else None

    def __str__(self) -> str:
        return show_call(self.op, self.sizes or self.output_sizes, self.dtypes or self.output_dtypes)


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank's recorder holds, or a beat of it."""

    rank: int
    calls: tuple[Call, ...]
    """In their order."""
    enqueued: Mapping[str, int] = field(default_factory=dict)
    """By the name of the group, the last number called; -1 where the backend does not tell. Only asked where the group
    has no calls: sends and receives count into it."""
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Global ranks of each group in the group's order, where the recorder knows them (Gloo's does not)."""
    descs: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True
    """No call is missing at its beginning."""
    taken_s: float | None = None
    """When it was taken, by the clock of its node."""
    source: str = ""
    """The file it came from."""
    node: str | None = None
