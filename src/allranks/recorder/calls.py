"""What a rank's flight recorder holds: the calls of its process groups, and how far each came. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of one rank."""

    group: str
    """Name of the process group; the same on all its ranks."""
    seq: int
    """Its number in the group; sends and receives are counted apart."""
    op: str
    """`all_reduce`, without the backend."""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    is_done: bool = False
    peer: int | None = None
    """Of a send or a receive: the other side's rank within the group."""
    is_p2p: bool = False
    place: str = ""
    """Where the user's code called it: `train.py:12 in step`."""
    created_s: float | None = None
    """Since the epoch, by its node's clock."""
    number: int = 0
    """Of its entry in the dump, from 1."""

    def __str__(self) -> str:
        """`all_reduce [8] Float`."""
        sizes = self.input_sizes or self.output_sizes
        dtypes = self.input_dtypes or self.output_dtypes
        shown = " ".join(str(list(size)) for size in sizes[:3]) + (" ..." if len(sizes) > 3 else "")
        return " ".join(filter(None, (self.op, shown, " ".join(dict.fromkeys(dtypes)))))


@dataclass(frozen=True, slots=True)
class Status:
    """The last numbers of one rank in one group; -1 where the backend does not tell."""

    enqueued: int = -1
    started: int = -1
    completed: int = -1


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank's recorder holds, or a beat of it."""

    rank: int
    calls: tuple[Call, ...]
    """In their order."""
    status: Mapping[str, Status] = field(default_factory=dict)
    """By the name of the group. Only asked where it has no calls: sends and receives count into it."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each group in the group's order, where the recorder knows them (Gloo's does not)."""
    descs: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True
    """No call is missing at its beginning."""
    taken_s: float | None = None
    """When it was taken, by the clock of its node."""
    source: str = ""
    """The file it came from."""
    node: str | None = None
