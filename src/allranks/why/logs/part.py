"""The events of some sources: each source is read once through the matcher, and the matching lines become events.

Memory is bounded for any size: of one kind of event only the first and last few of a source are kept, and of all other
lines only the end.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from allranks.causes.book import all_marks
from allranks.why.logs.line import Line, read_line, segments
from allranks.why.logs.log_events import LogEvent, Logs, Pattern, Tail, read_events
from allranks.why.logs.match import Hit, Matcher
from allranks.why.logs.pasted import MAX_WRAPPED_BYTES, unwrap
from allranks.why.logs.printed import KIND, Printed, PrintedReports
from allranks.why.logs.quoted import QuotedCode, is_code
from allranks.why.logs.read import Chunk, ReadProblem, read_chunks
from allranks.why.logs.sources import Source

KEEP_FIRST = 4000
KEEP_LAST = 400
"""Events of one kind that are kept per source: a traceback has about 30 frames, and each rank may have one."""


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

    def read_hits(source: Source, chunk: Chunk, quoted: QuotedCode) -> Iterator[tuple[LogEvent, int]]:
        for hit in matcher.scan(chunk):
            line = read_line(hit.raw, source, hit.number)
            for event in _read_evidence(line, hit, chunk, patterns, quoted):
                yield event, hit.begin

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
        quoted = QuotedCode()
        small = b""
        for chunk in read_chunks(source, problems=problems):
            on_progress(len(chunk.data))
            small = chunk.data if not chunk.offset and len(chunk.data) <= MAX_WRAPPED_BYTES else b""
            end.add(chunk)
            reports.add(chunk)
            quoted.begin()
            for event, place in read_hits(source, chunk, quoted):
                if event.kind == KIND:
                    reports.begin(event.line, place, chunk)
                else:
                    kept.add(event)
        if small and (joined := unwrap(small)) != small:  # they only add: lines may have one length by chance
            for event, _ in read_hits(source, Chunk(joined, 1, 0), QuotedCode()):
                if event.kind != KIND:
                    kept.improve(event)
        own = reports.finish()
        printed += own
        events += [event for event in kept.in_order() if not any(mark.covers(event.line) for mark in own)]
        dropped += kept.dropped
        tails.append(end.tail())
    return Logs(tuple(events), tuple(tails), dropped, tuple(printed)), problems


def _read_evidence(
    line: Line, hit: Hit, chunk: Chunk, patterns: Sequence[Pattern], quoted: QuotedCode
) -> list[LogEvent]:
    """Return the events of a line; code that is only quoted shows no cause, and below a frame it shows nothing."""
    events = read_events(line, [patterns[index] for index in hit.patterns])
    if not events:
        return events
    if 'File "' in line.text and any(event.kind == "frame" for event in events):
        quoted.note(line, hit)
        events = [event for event in events if event.sign is None]  # the words of a path show no cause
        if (raised := quoted.end(line, hit, chunk)) and not _exception().search(raised[0].text):
            return [*events, LogEvent("exception", *raised)]
    elif "Traceback (" in line.text:
        quoted.open(line)
    elif quoted.covers(line, hit, chunk):
        return []
    elif events[0].sign is not None and is_code(line.text):  # signs stand before marks
        return [event for event in events if event.sign is None]
    return events


@cache
def _exception() -> re.Pattern[str]:
    """Return the mark of an exception, without which one is known by its traceback only."""
    return re.compile(next(mark.match for mark in all_marks() if mark.name == "exception"))


class _Kept:
    """The first and the last events of each kind of one source."""

    def __init__(self, first: int, last: int) -> None:
        self._limit, self._last = first, last
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._first: list[tuple[int, LogEvent]] = []
        self._latest: dict[str, deque[tuple[int, LogEvent]]] = {}
        self._count = 0
        self._joined: set[str] = set()
        """Kinds that only joined lines show."""
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
        """Take an event of a joined line, if none of its kind is known, or if it is more complete than its line's."""
        if joined.kind not in self._counts:
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

    def add(self, chunk: Chunk) -> None:
        before = b"" if len(chunk.data) >= self._size else self._data
        data = before + chunk.data
        cut = max(0, len(data) - self._size)
        self._is_whole &= cut == 0 and before == self._data
        last_line = chunk.first_line + chunk.num_newlines
        self._data = data[cut:]
        self._first_line = last_line - self._data.count(b"\n")

    def tail(self) -> Tail:
        lines = []
        for number, raw in enumerate(self._data.split(b"\n"), start=self._first_line):
            states = list(segments(raw))
            if states and states[-1].strip():
                lines.append(read_line(states[-1], self._source, number))
        ends_open = bool(self._data) and not self._data.endswith(b"\n")
        num_lines = self._first_line - 1 + self._data.count(b"\n") + ends_open
        return Tail(self._source, tuple(lines), num_lines, self._is_whole)
