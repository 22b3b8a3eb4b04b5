"""The events of some sources: each source is read once through the matcher, and the matching lines become events.

Memory is bounded for any size: of one kind of event only the first and last few of a source are kept, and of all other
lines only the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allranks.why.logs.line import Line, read_line, segments
from allranks.why.logs.log_events import LogEvent, Logs, Pattern, Tail, read_events
from allranks.why.logs.match import Matcher
from allranks.why.logs.printed import KIND, Printed, PrintedReports
from allranks.why.logs.read import Chunk, ReadError, ReadProblem, read_chunks
from allranks.why.logs.sources import Source
from allranks.why.logs.unwrap import MAX_BYTES, unwrap

KEEP_FIRST = 4000
KEEP_LAST = 400
"""Events of one kind that are kept per source: a traceback has about 30 frames, and each rank may have one."""
_KNOWN = 64
"""Number of parsed lines that are kept for reuse at a source's end."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Sources that are read one after the other, and how much of them is kept."""

    sources: tuple[Source, ...]
    keep_events: int
    """After this number of events, only the first of each kind is kept of further sources."""
    tail_bytes: int
    """Number of lines kept from each source's end."""


def read_part(
    patterns: Sequence[Pattern], matcher: Matcher, part: LogPart, on_progress: Callable[[int], None]
) -> tuple[Logs, list[ReadProblem]]:
    """Return the events of a part, and its sources that could not be read completely, or not at all.

    Args:
        patterns: the patterns to search for.
        matcher: a matcher of these patterns; it is reset.
        part: what to read.
        on_progress: called with the number of bytes just read.
    """
    matcher.forget()
    events: list[LogEvent] = []
    tails: list[Tail] = []
    problems: list[ReadProblem] = []
    printed: list[Printed] = []
    dropped = 0
    for source in part.sources:
        kept = _Kept(KEEP_FIRST, KEEP_LAST if len(events) < part.keep_events else 0)
        end = _End(source, part.tail_bytes)
        reports = PrintedReports()
        try:
            for chunk in read_chunks(source, problems=problems):
                on_progress(len(chunk.data))
                end.add(chunk)
                reports.add(chunk)
                for hit in matcher.scan(chunk):
                    line = read_line(hit.raw, source, hit.number)
                    end.know(hit.raw, line)
                    for event in read_events(line, [patterns[index] for index in hit.patterns]):
                        if event.kind == KIND:
                            reports.begin(line, hit.raw, chunk)
                        else:
                            kept.add(event)
        except ReadError as exc:
            problems.append(ReadProblem(source, str(exc)))
        if (small := end.whole()) is not None:
            for event in _unwrapped(small, source, patterns, matcher):
                kept.improve(event)
        own = reports.finish()
        printed += own
        events += [event for event in kept.in_order() if not any(mark.covers(event.line) for mark in own)]
        dropped += kept.dropped
        tails.append(end.tail())
    return Logs(tuple(events), tuple(tails), dropped, tuple(printed)), problems


def _unwrapped(data: bytes, source: Source, patterns: Sequence[Pattern], matcher: Matcher) -> list[LogEvent]:
    """Return the events of a small log after joining lines that a terminal cut."""
    found = unwrap(data)
    if found is None:
        return []
    joined, numbers = found
    events = []
    for hit in matcher.scan(Chunk(b"\n".join(joined), 1, 0)):
        line = read_line(hit.raw, source, numbers[hit.number - 1])
        events += read_events(line, [patterns[index] for index in hit.patterns])
    return [event for event in events if event.kind != KIND]


class _Kept:
    """The first and the last events of each kind of one source."""

    def __init__(self, first: int, last: int) -> None:
        self._limit, self._last = first, last
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._first: list[tuple[int, LogEvent]] = []
        self._latest: dict[str, deque[tuple[int, LogEvent]]] = {}
        self._count = 0
        self._joined: set[str] = set()
        self.dropped = 0

    def add(self, event: LogEvent) -> None:
        self._count += 1
        self._counts[event.kind] += 1
        if self._counts[event.kind] <= self._limit:
            self._first.append((self._count, event))
            return
        latest = self._latest.setdefault(event.kind, deque(maxlen=self._last))
        self.dropped += len(latest) == self._last
        latest.append((self._count, event))

    def improve(self, joined: LogEvent) -> None:
        """Take the events of a joined line: all if none of their kind is known, else the more complete ones."""
        if joined.kind not in self._joined and joined.kind not in self._counts:
            self._joined.add(joined.kind)
        if joined.kind in self._joined:
            self.add(joined)
            return
        for index, (count, event) in enumerate(self._first):
            if event.kind == joined.kind and event.line.number == joined.line.number:
                if len(event.values) < len(joined.values):
                    self._first[index] = (count, joined)
                return

    def in_order(self) -> list[LogEvent]:
        pairs = [*self._first, *(pair for latest in self._latest.values() for pair in latest)]
        return [event for _, event in sorted(pairs, key=lambda pair: (pair[1].line.number, pair[0]))]


class _End:
    """The last lines of a source."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._size = size
        self._data = b""
        self._first_line = 1
        self._is_whole = True
        self._start: bytes | None = b""
        self._known: deque[tuple[bytes, Line]] = deque(maxlen=_KNOWN)

    def whole(self) -> bytes | None:
        """Return all of it, if it is short."""
        return self._start

    def know(self, raw: bytes, line: Line) -> None:
        """Keep a parsed line: most lines that matter are near the end."""
        self._known.append((raw, line))

    def add(self, chunk: Chunk) -> None:
        if self._start is not None:
            is_short = len(self._start) + len(chunk.data) <= MAX_BYTES
            self._start = self._start + chunk.data if is_short else None
        cut = len(chunk.data) - self._size
        if cut >= 0 or not self._data:
            self._is_whole &= cut <= 0 and not self._data
            self._data, self._first_line = chunk.data[max(0, cut) :], chunk.number_at(max(0, cut))
            return
        self._data += chunk.data
        cut = max(0, len(self._data) - self._size)
        self._is_whole &= cut == 0
        self._first_line += self._data.count(b"\n", 0, cut)
        self._data = self._data[cut:]

    def tail(self) -> Tail:
        known = {(line.number, raw): line for raw, line in self._known}
        lines = []
        for number, raw in enumerate(self._data.split(b"\n"), start=self._first_line):
            states = list(segments(raw))
            if states and states[-1].strip():
                lines.append(known.get((number, states[-1])) or read_line(states[-1], self._source, number))
        ends_open = bool(self._data) and not self._data.endswith(b"\n")
        num_lines = self._first_line - 1 + self._data.count(b"\n") + ends_open
        return Tail(self._source, tuple(lines), num_lines, self._is_whole)
