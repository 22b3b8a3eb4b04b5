"""A fact: who did or suffered what, when, and who says so. Plain data, for dead jobs and running ones.

    Fact(FactKind.ENDED, Who(rank=72, node="gpu-b17"), said=Said.LAUNCHER, signal=9, cause="dead-rank", ...)

The engine (solve.py) reads kinds, people, times and who said it; the cause is a label that it hands on. A line states
the fact that its sign in the book of causes names (`fact = "peer_lost"`); readings of whole logs state others.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from allranks.model.fact_kind import FactKind as FactKind
from allranks.model.fact_kind import Said as Said
from allranks.model.finding import Confidence


class Same(Enum):
    """Whether two descriptions mean one process."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Who(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A process, or a machine where neither rank, local rank nor pid is known; as far as a line tells."""

    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    address: str | None = None
    """Of its data interface, as peers name it."""
    pod: str | None = None

    def __bool__(self) -> bool:
        return self != NOBODY

    def __or__(self, other: Who) -> Who:
        """Return this description with what the other one knows and this one does not."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Who(*[mine if mine is not None else its for mine, its in pairs])

    @property
    def is_process(self) -> bool:
        """Whether it means one process, and no machine."""
        return (self.rank, self.local_rank, self.pid) != (None, None, None)

    @property
    def is_node(self) -> bool:
        """Whether it means a whole machine."""
        return not self.is_process and bool(self)

    def compare(self, other: Who) -> Same:
        """Whether both are one process (or one machine). What only one of them knows tells nothing."""
        if self.rank is not None and other.rank is not None:
            return Same.YES if self.rank == other.rank else Same.NO
        machine = self.compare_machines(other)
        if machine is Same.NO:
            return Same.NO
        for mine, its in ((self.pid, other.pid), (self.local_rank, other.local_rank)):
            if mine is not None and its is not None and (mine != its or machine is Same.YES):
                return Same.YES if mine == its else Same.NO  # other numbers are others, wherever they are
        return Same.YES if self.is_node and other.is_node and machine is Same.YES else Same.UNKNOWN

    def compare_machines(self, other: Who) -> Same:
        """Whether both are on one machine."""
        for mine, its in ((self.node, other.node), (self.pod, other.pod), (self.address, other.address)):
            if mine is not None and its is not None:
                return Same.YES if mine == its else Same.NO
        return Same.UNKNOWN


NOBODY = Who()
START = 0
"""Before the first collective."""


class When(msgspec.Struct, frozen=True, gc=False):
    """An interval on a clock, in seconds; two intervals of one clock that do not overlap have an order."""

    earliest_s: float | None = None
    latest_s: float | None = None
    clock: str = ""
    """Times of different clocks cannot be compared; empty: nothing is known."""

    def is_before(self, other: When) -> bool:
        """Whether it certainly ended before the other began."""
        return other.after_s(self) > 0.0

    def after_s(self, other: When) -> float:
        """Seconds by which it certainly began after the other ended; 0: it may have been before."""
        if not self.clock or self.clock != other.clock or self.earliest_s is None or other.latest_s is None:
            return 0.0
        return max(0.0, self.earliest_s - other.latest_s)


NEVER_SAID = When()
CALENDAR = "time"
"""Name of the clock of times with a date and a year."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """The line that states a fact."""

    source: str
    """Its file as shown to the user, or a name of what else told it."""
    line: int
    """From 1; 0: no line."""
    text: str

    @property
    def at(self) -> tuple[str, int]:
        """Where it stands, as a key."""
        return self.source, self.line


NOWHERE = Place("", 0, "")


class Fact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One fact. Equal ends that several lines tell are united before solving (identity)."""

    kind: FactKind
    who: Who = NOBODY
    when: When = NEVER_SAID
    said: Said = Said.SELF
    places: tuple[Place, ...] = ()
    """The lines that state it, the first one first."""
    cause: str = ""
    """Name of the cause, a label: `host-oom-kill`."""
    confidence: Confidence = Confidence.CERTAIN
    """How sure its lines make us of the cause, if it is the first."""
    attempt: int = 0
    """Start of the job that it belongs to, from 0."""
    speaker: Who = NOBODY
    """Who wrote the line; of what others report, not `who`."""
    peer: Who = NOBODY
    group: str | None = None
    seq: int | None = None
    """Number of a collective in its group, from 1; START: of who is missing where all ranks meet."""
    op: str | None = None
    signal: int | None = None
    """That ended it; also where a line gives it as an exit code (-9, 137)."""
    code: int | None = None
    alternatives: tuple[str, ...] = ()
    """Other causes that these lines may mean, by name."""
    is_fatal: bool = False
    """Its process certainly failed by it, however unsure its cause is: an exception that nobody caught."""
    is_caught: bool = False
    """Its program caught it, as the frames of an exception tell: it went on, unless it ended soon."""
    is_overcome: bool = False
    """Its line says that its process goes on after this error, which is no failure then, nor the reason of one."""
    is_generic: bool = False
    """It only says that something failed here, as any exception does; a line that says what failed is better."""
    is_first_observed: bool = False
    """Its launcher says that it saw this one first."""
    is_of_job: bool = False
    """The line names this job: SLURM's by its number, the kernel's by its cgroup."""
    told: str = ""
    """The message for people."""
    ask: str = ""
    """What would tell more: what to run, where to look."""
    things: tuple[str, ...] = ()
    """What else is at fault, in words: `GPU 0000:10:1c`, `port 29500`, a path."""
    interface: str | None = None

    @property
    def place(self) -> Place:
        """The first line that states it."""
        return self.places[0] if self.places else NOWHERE
