"""What `allranks why` concludes: one cause, its culprit, and the lines that show it; a row of its timeline. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from allranks.causes.cause import Cause
from allranks.facts.fact import Fact, FactKind, Place, Who
from allranks.model.finding import Confidence

_SUFFERED = frozenset((FactKind.WAITED, FactKind.PEER_LOST, FactKind.STORE_GONE, FactKind.LAUNCHER_KILL))
"""Facts of which `who` is a victim."""

_NO_NAME = re.compile(
    r"(?i)<.+>|[*x]+(?:\.[*x]+)*|host(?:[_-]?name)?|ip(?:[_-]addr(?:ess)?)?|localhost|n/?a|node|none|null|unknown"
)
"""What stands where a program knew no name, or a person hid it."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The culprit of a conclusion, as far as the logs say."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    interface: str | None = None
    things: tuple[str, ...] = ()
    """Any other culprit, in words: `GPU 0000:10:1c`, `address 127.0.1.1`, `local rank 3`, `process 4711`."""

    def __or__(self, other: Culprit) -> Culprit:
        return Culprit(
            nodes=tuple(dict.fromkeys(self.nodes + other.nodes)),
            ranks=tuple(sorted({*self.ranks, *other.ranks})),
            interface=self.interface or other.interface,
            things=tuple(dict.fromkeys(self.things + other.things)),
        )

    def __bool__(self) -> bool:
        return bool(self.nodes or self.ranks or self.interface or self.things)

    def words(self) -> str:
        """Return all of it in one line, each rank separately: `node03 rank 1 rank 2 GPU 0`."""
        ranks = [f"rank {rank}" for rank in self.ranks]
        return " ".join([*self.nodes, *filter(None, [self.interface]), *ranks, *self.things])


def is_suffered(fact: Fact) -> bool:
    """Whether it happened to its `who` because of another one."""
    return fact.kind in _SUFFERED


def describe(who: Who, *, with_process: bool = False) -> Culprit:
    """Return a process or machine as a culprit; with its pid if no rank is known, or `with_process`."""
    things = []
    if who.rank is None and who.local_rank is not None:
        things.append(f"local rank {who.local_rank}")
    if who.pid and (with_process or (who.rank is None and who.local_rank is None)):
        things.append(f"process {who.pid}")
    address = who.address or ""
    is_host = address[:1].isalpha() and "localhost" not in address and ":" not in address
    if address and not is_host:
        things.append(f"address {address}")
    names = (who.node, who.pod, address if is_host else None)  # a peer may be named as its host is
    nodes = dict.fromkeys(name for name in names if name and not _NO_NAME.fullmatch(name))
    return Culprit(nodes=tuple(nodes), ranks=() if who.rank is None else (who.rank,), things=tuple(things))


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One cause, and the evidence for it."""

    cause: Cause
    confidence: Confidence
    culprit: Culprit
    message: str
    evidence: tuple[Place, ...]
    """The lines that show it, the earliest first."""
    victims: frozenset[int] = frozenset()
    signal: int | None = None
    """By which the culprit ended."""
    ask: str = ""
    """What would give more evidence: what to run, where to look."""
    is_failure: bool = True
    """Whether a line reports it; otherwise it is a guess, or the absence of failures."""
    is_consequence: bool = False
    """Whether another conclusion explains it."""
    notes: tuple[str, ...] = ()
    """What else is known: who else broke by itself, between whom it is undecided, what followed."""


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the timeline: a message of one or more ranks. `--json` prints it as it is."""

    time: str
    """Of the first of them: with the day if there are several, relative if there are none, empty if unknown."""
    who: str
    """The ranks; the nodes if there are no ranks, or with those of a single node."""
    text: str
    cause: str | None
    """Id and name of the cause; None if the line shows none by itself."""
    source: str
    """`path:line` of the first of them."""
    lines: int
    is_culprit: bool = False
