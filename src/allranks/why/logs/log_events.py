"""What the lines that matter mean: who, when, what. Pure.

    logs.of(Trait.ONLY_WAITS)        lines that show causes; their signs say how much they prove
    logs.of("frame")                 a mark: lines that only the readings of whole logs use

Clocks of nodes differ, and many lines have no time. Events of one source are in the order of their lines; events of
different sources are compared by time only if both have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import msgspec

from allranks.causes.book import all_marks
from allranks.causes.cause import Cause, Sign, Trait
from allranks.facts.fact import NOBODY, Who
from allranks.model.fact_kind import FactKind
from allranks.model.finding import Confidence
from allranks.why.logs.line import Line
from allranks.why.logs.printed import HEAD, KIND, Printed, scan_pattern
from allranks.why.logs.read import ReadProblem
from allranks.why.logs.sources import Source

_LOSSES = frozenset((FactKind.WAITED, FactKind.PEER_LOST, FactKind.STORE_GONE, FactKind.ENDED, FactKind.LAUNCHER_KILL))
_PEOPLE = frozenset(("rank", "node", "local_rank", "pid"))
MAX_DIGITS = 18
"""A longer number of a line is garbage."""


class LogEvent(msgspec.Struct, frozen=True, gc=False):
    """One line with a meaning."""

    kind: str
    """The name of its cause or mark."""
    line: Line
    values: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The named groups of its pattern that matched."""
    cause: Cause | None = None
    sign: Sign | None = None

    @property
    def states(self) -> FactKind | None:
        """Which fact its line states; None: none, or it shows no cause."""
        return None if self.sign is None else self.sign.fact

    @property
    def is_loss(self) -> bool:
        """Whether its line only tells what somebody suffered, or how a process ended."""
        return self.states in _LOSSES

    @property
    def who(self) -> Who:
        """The process or machine that its groups name."""
        if _PEOPLE.isdisjoint(self.values):
            return NOBODY
        node = self.values["node"].strip().rstrip(".,") if "node" in self.values else None
        return Who(self.number("rank"), node, self.number("local_rank"), self.number("pid"))

    @property
    def traits(self) -> frozenset[Trait]:
        """What its cause is; empty for a mark."""
        return frozenset() if self.cause is None else self.cause.traits

    def number(self, group: str) -> int | None:
        """Return a group as a number; None if it is missing or not a number."""
        text = self.values.get(group)
        return int(text) if text and len(text) <= MAX_DIGITS and text.removeprefix("-").isdecimal() else None


class Tail(msgspec.Struct, frozen=True, gc=False):
    """The end of one source."""

    source: Source
    lines: tuple[Line, ...]
    """Its last lines that are not empty; of a progress bar, the last state. The first may be cut."""
    num_lines: int
    """Size of the whole source."""


@dataclass(frozen=True)
class Logs:
    """Everything that was read from a job's logs."""

    events: tuple[LogEvent, ...]
    """By source, then by line."""
    tails: tuple[Tail, ...]
    dropped: int = 0
    """Number of matching lines that were not kept."""
    printed: tuple[Printed, ...] = ()
    """Findings that allranks itself printed into the logs. Their lines are no events: they quote other lines."""
    problems: tuple[ReadProblem, ...] = ()
    """Sources that could not be read completely, or not at all."""
    num_bytes: int = 0
    """What was read, unpacked."""

    def of(self, *kinds: str) -> Iterator[LogEvent]:
        """Return the events of these kinds, and of the causes with these traits, in their order."""
        asked = frozenset(kinds)
        there = [kind for kind, events in self._by_kind.items() if kind in asked or events[0].traits & asked]
        if len(there) < 2:
            return iter(self._by_kind[there[0]] if there else ())
        return (event for event in self.events if event.kind in there)

    @cached_property
    def _by_kind(self) -> dict[str, list[LogEvent]]:
        """Cached: each reading asks for a few kinds, of up to 200,000 events."""
        found: dict[str, list[LogEvent]] = {}
        for event in self.events:
            found.setdefault(event.kind, []).append(event)
        return found


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern to search for: a sign of a cause, or a mark."""

    scan: str
    exact: str
    kind: str
    cause: Cause | None = None
    sign: Sign | None = None


def list_patterns(causes: Iterable[Cause]) -> tuple[Pattern, ...]:
    """Return all patterns: the signs of these causes, all marks, and the findings that allranks prints."""
    causes = tuple(causes)
    signs = [
        Pattern(sign.pattern, sign.pattern, cause.name, cause, sign)
        for cause in causes
        for sign in cause.signs
        if "log" in sign.where
    ]
    return (
        *signs,
        *(Pattern(mark.scan or mark.match, mark.match, mark.name) for mark in all_marks()),
        Pattern(scan_pattern(causes), HEAD, KIND),
    )


def read_events(line: Line, patterns: Sequence[Pattern]) -> list[LogEvent]:
    """Return the events of a line, for the patterns that may match it; one per cause, from the strongest sign."""
    events: dict[str, LogEvent] = {}
    for pattern in patterns:
        values = _find_values(pattern.exact, line.text)
        if values is None:
            continue
        event = LogEvent(pattern.kind, line, values, pattern.cause, pattern.sign)
        before = events.get(pattern.kind)
        if before is None or _strength(event) < _strength(before):
            events[pattern.kind] = event
    return list(events.values())


def _strength(event: LogEvent) -> tuple[int, int]:
    """Return how little a line proves by this sign: a sure fact first, a sign without a fact last."""
    sign = event.sign
    doubt = 0 if sign is None else len(Confidence) if sign.fact is None else sign.confidence.doubt
    return doubt, -len(event.values)


@lru_cache(maxsize=2048)
def _find_values(pattern: str, text: str) -> Mapping[str, str] | None:
    """Return the named groups that have a text; None: it does not match. Cached: thousands of ranks say the same."""
    match = _compile(pattern).search(text)
    return None if match is None else {name: text for name, text in match.groupdict().items() if text}


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Compiled on first use: of a thousand patterns, a log needs a few dozen."""
    return re.compile(pattern)
