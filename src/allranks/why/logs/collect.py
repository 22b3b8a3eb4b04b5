"""From sources to what they say: every source goes once through the matcher, and the lines that hit become events.

    logs = collect(sources, list_patterns(all_causes()))

Memory is bounded whatever the size: of one kind of event only the first and last few of a source are kept, and of a
source's other lines the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from allranks.why.logs.events import Event, Logs, Pattern, Tail, read_events
from allranks.why.logs.line import read_line
from allranks.why.logs.match import Matcher
from allranks.why.logs.read import Chunk, ReadError, ReadProblem, read_chunks
from allranks.why.logs.sources import Source
from allranks.why.logs.unwrap import MAX_BYTES, unwrap

KEEP_FIRST = 4000
KEEP_LAST = 400
"""Events of one kind that are kept of one source: a traceback's frames are some 30, and each rank may have one."""
KEEP_ALL = 200_000
"""Events that are kept of all sources: some 200 MB."""
TAIL_BYTES = 8192
"""What is kept of a source's end, where there are few of them."""
ALL_TAILS_BYTES = 4 << 20
"""Of thousands of sources each keeps less, but a line or two at least: reading a line again costs 10 us."""
LEAST_TAIL_BYTES = 1024


def collect(
    sources: Sequence[Source],
    patterns: Sequence[Pattern],
    *,
    matcher: Matcher | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    problems: list[ReadProblem] | None = None,
) -> Logs:
    """Read all sources.

    Args:
        sources: in the order in which they are shown.
        patterns: what is looked for.
        matcher: of these patterns, where there is one already.
        on_progress: called with the number of bytes just read.
        problems: gets what could not be read to its end; a source that cannot be read at all is one, too.
    """
    matcher = matcher or Matcher([pattern.scan for pattern in patterns])
    events: list[Event] = []
    tails: list[Tail] = []
    dropped = 0
    tail_bytes = max(LEAST_TAIL_BYTES, min(TAIL_BYTES, ALL_TAILS_BYTES // max(1, len(sources))))
    for source in sources:
        kept = _Kept(KEEP_FIRST, KEEP_LAST if len(events) < KEEP_ALL else 0)
        end = _End(source, tail_bytes)
        try:
            for chunk in read_chunks(source, problems=problems):
                on_progress(len(chunk.data))
                end.add(chunk)
                for hit in matcher.scan(chunk):
                    line = read_line(hit.raw, source, hit.number)
                    for event in read_events(line, [patterns[index] for index in hit.patterns]):
                        kept.add(event)
        except ReadError as exc:
            if problems is not None:
                problems.append(ReadProblem(source, str(exc)))
        if (small := end.whole()) is not None:
            for event in _unwrapped(small, source, patterns, matcher):
                kept.improve(event)
        events += kept.in_order()
        dropped += kept.dropped
        tails.append(end.tail())
    return Logs(tuple(events), tuple(tails), dropped)


def _unwrapped(data: bytes, source: Source, patterns: Sequence[Pattern], matcher: Matcher) -> list[Event]:
    """Return what a small log says when the lines that a terminal cut are joined."""
    found = unwrap(data)
    if found is None:
        return []
    joined, numbers = found
    events = []
    for hit in matcher.scan(Chunk(b"\n".join(joined), 1, 0)):
        line = read_line(hit.raw, source, numbers[hit.number - 1])
        events += read_events(line, [patterns[index] for index in hit.patterns])
    return events


class _Kept:
    """The first and the last events of each kind of one source."""

    def __init__(self, first: int, last: int) -> None:
        self._limit, self._last = first, last
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._first: list[tuple[int, Event]] = []
        self._latest: dict[str, deque[tuple[int, Event]]] = {}
        self._count = 0
        self._joined: set[str] = set()
        self.dropped = 0

    def add(self, event: Event) -> None:
        self._count += 1
        self._counts[event.kind] += 1
        if self._counts[event.kind] <= self._limit:
            self._first.append((self._count, event))
            return
        latest = self._latest.setdefault(event.kind, deque(maxlen=self._last))
        self.dropped += len(latest) == self._last
        latest.append((self._count, event))

    def improve(self, joined: Event) -> None:
        """Take what a line says when its parts are joined: all where none of its kind is known, else what is more."""
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

    def in_order(self) -> list[Event]:
        pairs = [*self._first, *(pair for latest in self._latest.values() for pair in latest)]
        return [event for _, event in sorted(pairs, key=lambda pair: (pair[1].line.number, pair[0]))]


class _End:
    """The last bytes of a source."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._size = size
        self._data = b""
        self._first_line = 1
        self._start: bytes | None = b""

    def whole(self) -> bytes | None:
        """Return all of it, where it is short."""
        return self._start

    def add(self, chunk: Chunk) -> None:
        if self._start is not None:
            is_short = len(self._start) + len(chunk.data) <= MAX_BYTES
            self._start = self._start + chunk.data if is_short else None
        cut = len(chunk.data) - self._size
        if cut >= 0 or not self._data:
            self._data, self._first_line = chunk.data[max(0, cut) :], chunk.number_at(max(0, cut))
            return
        self._data += chunk.data
        cut = max(0, len(self._data) - self._size)
        self._first_line += self._data.count(b"\n", 0, cut)
        self._data = self._data[cut:]

    def tail(self) -> Tail:
        return Tail(self._source, self._data, self._first_line)
