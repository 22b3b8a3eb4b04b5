"""From sources to events: each source is read once through the matcher; large ones are read in parts, in parallel.

    logs = collect(sources, list_patterns(all_causes()), max_workers=8)

The parts depend on the sources alone, so the result is the same for any number of processes. Memory is bounded for any
size: of one kind of event only the first and last few of a source are kept, and of all other lines only the end.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import msgspec

from allranks.host.signals import die_with_parent
from allranks.why.logs.line import Line, read_line
from allranks.why.logs.log_events import LogEvent, Logs, Pattern, Tail, read_events
from allranks.why.logs.match import Hit, Matcher
from allranks.why.logs.printed import KIND, MAX_KEPT, Printed, read_printed
from allranks.why.logs.quoted import QuotedCode, is_code, read_below
from allranks.why.logs.read import Chunk, ReadProblem, read_chunks
from allranks.why.logs.sources import Source

PART_BYTES = 16 << 20
"""Minimum size of a part, if there is more than one."""
MAX_WORKERS = 8
"""Each process uses about 25 MiB."""
KEEP_FIRST = 4000
KEEP_LAST = 400
"""Events of one kind that are kept per source: a traceback has about 30 frames, and each rank may have one."""
TAIL_BYTES = 8192
"""Lines kept from the end of a source, if there are few sources."""
ALL_TAILS_BYTES = 2 << 20
"""With thousands of sources fewer are kept, but at least one or two: reading a line costs 10 us."""
LEAST_TAIL_BYTES = 512
_Progress = Callable[[int], None]
_Part = Sequence[Source]
"""Sources that one process reads, one after the other."""


def collect(
    sources: Sequence[Source],
    patterns: Sequence[Pattern],
    *,
    matcher: Matcher | None = None,
    on_progress: _Progress = lambda _: None,
    max_workers: int = 1,
) -> Logs:
    """Read all sources.

    Args:
        matcher: a matcher of these patterns, if there already is one.
        on_progress: called with the number of bytes just read.
        max_workers: processes are forked, so more than one needs a process with a single thread.
    """
    matcher = matcher or Matcher([pattern.scan for pattern in patterns])
    tail_bytes = max(LEAST_TAIL_BYTES, min(TAIL_BYTES, ALL_TAILS_BYTES // max(1, len(sources))))
    read = partial(read_part, patterns, matcher, tail_bytes)
    parts = cut(sources)
    workers = min(max_workers, len(parts), MAX_WORKERS)
    if workers > 1:
        read_logs = list(_read_side_by_side(parts, read, workers, on_progress))
    else:
        read_logs = [read(part, on_progress) for part in parts]
    return _join(read_logs)


def _join(parts: Sequence[Logs]) -> Logs:
    return Logs(
        events=tuple(event for logs in parts for event in logs.events),
        tails=tuple(tail for logs in parts for tail in logs.tails),
        dropped=sum(logs.dropped for logs in parts),
        printed=tuple(printed for logs in parts for printed in logs.printed),
        problems=tuple(problem for logs in parts for problem in logs.problems),
        num_bytes=sum(logs.num_bytes for logs in parts),
    )


def cut(sources: Sequence[Source]) -> list[_Part]:
    """Return the sources in parts, in their order; the last are the smallest, so that all processes end together."""
    left = sum(source.size for source in sources)
    parts: list[list[Source]] = []
    end = left  # of the last part: the number of bytes behind it
    for source in sources:
        if not parts or left <= end:
            parts.append([])
            end = left - max(PART_BYTES, left // MAX_WORKERS // 2)
        parts[-1].append(source)
        left -= source.size
    return [*parts]


def _read_side_by_side(
    parts: Sequence[_Part], read: Callable[[_Part, _Progress], Logs], workers: int, on_progress: _Progress
) -> Iterator[Logs]:
    """Yield what all parts say, read by child processes; the parts of a killed process are read here."""
    import multiprocessing  # only here: most logs are small, and these take a moment
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    context = multiprocessing.get_context("fork")
    given = (die_with_parent(signal.SIGKILL), read)
    with ProcessPoolExecutor(workers, context, _begin, given) as pool:
        futures = [pool.submit(_read_there, part) for part in parts]
        for part, future in zip(parts, futures, strict=True):
            try:
                logs = future.result()
                on_progress(logs.num_bytes)
            except BrokenProcessPool:
                logs = read(part, on_progress)
            yield logs


_read_in_child: Callable[[_Part, _Progress], Logs]
"""In a reader process: what reads a part, inherited by fork."""


def _begin(end_with_parent: Callable[[], None], read: Callable[[_Part, _Progress], Logs]) -> None:
    """Executed first in a reader process."""
    global _read_in_child
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does with it: the pool ends its processes so
    _read_in_child = read


def _read_there(part: _Part) -> Logs:
    return _read_in_child(part, lambda _: None)


# --- One part ------------------------------------------------------------------------------------------------------


def read_part(
    patterns: Sequence[Pattern], matcher: Matcher, tail_bytes: int, part: _Part, on_progress: _Progress
) -> Logs:
    """Return what the sources of a part say; `matcher`, of these patterns, is reset."""
    matcher.forget()
    return _join([_read_source(source, patterns, matcher, tail_bytes, on_progress) for source in part])


def _read_source(
    source: Source, patterns: Sequence[Pattern], matcher: Matcher, tail_bytes: int, on_progress: _Progress
) -> Logs:
    kept = _Kept()
    printed: deque[Printed] = deque(maxlen=MAX_KEPT)
    problems: list[ReadProblem] = []
    end, size, last_line = b"", 0, 1
    for chunk in read_chunks(source, problems=problems):
        on_progress(len(chunk.data))
        size += len(chunk.data)
        end = (end + chunk.data[-tail_bytes:])[-tail_bytes:]
        for event, place in _read_chunk(chunk, source, patterns, matcher):
            if event.kind != KIND:
                kept.add(event)
            elif report := read_printed(event.line, chunk.data, place):
                printed.append(report)
        last_line = chunk.number_at(len(chunk.data))
    events = (event for event in kept.in_order() if not any(report.covers(event.line) for report in printed))
    tail = _read_tail(source, end, last_line)
    return Logs(tuple(events), (tail,), kept.dropped, tuple(printed), tuple(problems), size)


def _read_chunk(
    chunk: Chunk, source: Source, patterns: Sequence[Pattern], matcher: Matcher
) -> Iterator[tuple[LogEvent, int]]:
    """Yield the events of a chunk, each with the place of its line."""
    quoted = QuotedCode()
    for hit in matcher.scan(chunk):
        line = read_line(hit.raw, source, hit.number)
        for event in _read_evidence(line, hit, chunk, patterns, quoted):
            yield event, hit.begin


def _read_evidence(
    line: Line, hit: Hit, chunk: Chunk, patterns: Sequence[Pattern], quoted: QuotedCode
) -> list[LogEvent]:
    """Return the events of a line; code that is only quoted shows no cause, and below a frame it shows nothing."""
    events = read_events(line, [patterns[index] for index in hit.patterns])
    if not events:
        return events
    if any(event.kind == "frame" for event in events):
        events = [event for event in events if event.sign is None]  # the words of a path show no cause
        if raised := quoted.end(line, hit, chunk):
            events.append(raised)
    elif "Traceback (" in line.text:
        quoted.begin(line)
    elif quoted.covers(line, hit, chunk):
        return []
    elif is_code(line.text):
        return [event for event in events if event.sign is None]
    elif events[-1].kind == "exception" and (below := read_below(line, hit, chunk)):
        text = f"{events[-1].values.get('text', '')} {below}".strip()
        events[-1] = msgspec.structs.replace(events[-1], values={**events[-1].values, "text": text})
    return events


class _Kept:
    """The first and the last events of each kind of one source."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: list[LogEvent] = []
        self._latest: dict[str, deque[LogEvent]] = {}
        self.dropped = 0

    def add(self, event: LogEvent) -> None:
        self._counts[event.kind] += 1
        if self._counts[event.kind] <= KEEP_FIRST:
            self._first.append(event)
            return
        latest = self._latest.setdefault(event.kind, deque(maxlen=KEEP_LAST))
        self.dropped += len(latest) == KEEP_LAST
        latest.append(event)

    def in_order(self) -> list[LogEvent]:
        return sorted(chain(self._first, *self._latest.values()), key=lambda event: event.line.number)


def _read_tail(source: Source, end: bytes, last_line: int) -> Tail:
    """Return the lines of a source's last bytes, of which the last newline ends the line before `last_line`."""
    rows = end.split(b"\n")
    lines = []
    for number, raw in enumerate(rows, start=last_line + 1 - len(rows)):
        state = raw.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar, the last one
        if state.strip():
            lines.append(read_line(state, source, number))
    return Tail(source, tuple(lines), last_line - (rows[-1] == b""))
